"""The host pool: pages of keys and values of all layers, for the CPU kernels and for copies."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cpu_kernels.attention import PAGE_TOKENS, HostPool
from sglang_neo.host_kv import layout
from sglang_neo.host_kv.memory import HostMemory


class UnsupportedKV(ValueError):
    """The CPU kernels have no attention over keys and values like these: serve them from the GPU only."""


@dataclass(frozen=True)
class HostKVGeometry:
    """What the keys and values of one rank look like in host memory.

    Args:
        layers: with attention, of this rank.
        kv_heads: of this rank.
        head_dim: of keys and of values; a multiple of 16 up to 256.
        dtype: bfloat16, float16, float32, or int8 with a scale per token and head.
        page_tokens: tokens of a page: 16, 32, 64 or 128.
        v_head_dim: of values, for models where it is another; there is no kernel for that.

    Raises:
        UnsupportedKV: the CPU kernels lack it. ValueError: no layers or heads.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    page_tokens: int = 64
    v_head_dim: int | None = None

    def __post_init__(self) -> None:
        if self.layers < 1 or self.kv_heads < 1:
            raise ValueError(f"layers and kv_heads must be at least 1, got {self.layers} and {self.kv_heads}")
        lacking = None
        if self.v_head_dim not in (None, self.head_dim):
            lacking = f"values of head_dim {self.v_head_dim} beside keys of {self.head_dim}"
        elif self.head_dim % 16 or not 16 <= self.head_dim <= 256:
            lacking = f"head_dim {self.head_dim} (only multiples of 16 up to 256)"
        elif self.dtype not in layout.ELEMENT_DTYPES:
            lacking = f"a KV cache of {self.dtype} (only {', '.join(layout.ELEMENT_DTYPES)})"
        elif self.page_tokens not in PAGE_TOKENS:
            lacking = f"pages of {self.page_tokens} tokens (only {', '.join(map(str, PAGE_TOKENS))})"
        if lacking:
            raise UnsupportedKV(f"the CPU has no attention for {lacking}")

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of one head of one layer."""
        return layout.page_bytes(self.dtype, self.page_tokens, self.head_dim)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of a page of all heads and layers: what one page of the allocator costs."""
        return self.layers * self.kv_heads * self.page_bytes

    def pages_for_bytes(self, bytes: int) -> int:
        """Whole pages in a budget of ``bytes``; at most the 2**31 - 1 that the kernels can count."""
        return min(bytes // self.bytes_per_page, 2**31 - 1)

    def pages_for_tokens(self, tokens: int) -> int:
        """Pages that a row of ``tokens`` tokens needs."""
        return layout.page_count(tokens, self.page_tokens)


class HostKVPool:
    """Keys and values of one rank in host memory.

    Args:
        geometry: of the keys and values.
        pages: how many.
        memory: of at least ``pages * geometry.bytes_per_page`` bytes: a HostMemory, or a contiguous CPU tensor.

    Raises:
        ValueError: the memory is too small.

    Attributes:
        kernel_pool: what ``cpu_kernels.attention.Plan`` takes; keeps the memory alive.
        pages_tensor: uint8 [layers, pages, kv_heads, page_bytes] over the memory.
    """

    def __init__(self, geometry: HostKVGeometry, pages: int, memory: HostMemory | torch.Tensor) -> None:
        self.geometry = geometry
        self.pages = pages
        self.memory = memory
        whole = memory.tensor if isinstance(memory, HostMemory) else memory.view(torch.uint8).view(-1)
        self.bytes = pages * geometry.bytes_per_page
        if whole.numel() < self.bytes:
            raise ValueError(f"{pages} pages of host KV need {self.bytes} bytes, the memory has {whole.numel()}")
        used = whole[: self.bytes]
        self.kernel_pool = HostPool(
            used, geometry.layers, pages, geometry.kv_heads, geometry.head_dim, geometry.dtype, geometry.page_tokens
        )
        self.pages_tensor = used.view(geometry.layers, pages, geometry.kv_heads, geometry.page_bytes)

    @property
    def piece_ends(self) -> list[int]:
        """Byte offsets that no copy may reach across (HostMemory.piece_ends), the pool's end among them."""
        ends = self.memory.piece_ends if isinstance(self.memory, HostMemory) else []
        return [end for end in ends if end < self.bytes] + [self.bytes]
