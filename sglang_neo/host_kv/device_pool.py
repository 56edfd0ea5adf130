"""SGLang's device KV pool as the host pool sees it. The one place here that knows SGLang's pool (0.5.17)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_neo.host_kv.pool import HostKVGeometry, UnsupportedKV

_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@dataclass(frozen=True)
class DeviceKV:
    """K and V of every layer, token by token."""

    k: Sequence[torch.Tensor]  # per layer [slots, kv_heads, head_dim]
    v: Sequence[torch.Tensor]
    dtype: torch.dtype
    device: torch.device

    def geometry(self, dtype: str = "auto", page_tokens: int = 64) -> HostKVGeometry:
        """Of a host pool for these, with elements of type ``dtype`` (auto: the same).

        Raises UnsupportedKV for what the CPU kernels lack.
        """
        _, heads, dim = self.k[0].shape
        name = _NAMES[self.dtype] if dtype == "auto" else dtype
        return HostKVGeometry(len(self.k), heads, dim, name, page_tokens, v_head_dim=self.v[0].shape[-1])

    @property
    def bytes(self) -> int:
        """Of all layers."""
        return sum(x.numel() * x.element_size() for x in (*self.k, *self.v))


def device_kv(pool: Any) -> DeviceKV:
    """The keys and values of ``pool``, an SGLang KV pool.

    SGLang keeps types that it cannot index (8-bit floats) under another one, ``store_dtype``; the pool's ``dtype`` is
    what the elements are. Other layouts than [slot, head, dim], quantised pools and pools of other attention
    (MLA, sliding windows) are told apart by what MHATokenToKVPool says of itself.

    Raises:
        UnsupportedKV: it is not a plain pool of 16-bit or fp32 keys and values.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    if type(pool) is not MHATokenToKVPool:
        raise UnsupportedKV(f"the CPU has no attention for SGLang's {type(pool).__name__}")
    if pool.kv_cache_layout != "nhd":
        raise UnsupportedKV(f"the CPU has no attention for the KV layout {pool.kv_cache_layout!r} (only nhd)")
    if pool.is_quantized_kv_cache or pool.dtype not in _NAMES:
        raise UnsupportedKV(f"the CPU has no attention for a GPU KV cache of {pool.dtype}")
    k, v = ([x.view(pool.dtype) for x in buffers] for buffers in (pool.k_buffer, pool.v_buffer))
    return DeviceKV(k, v, pool.dtype, k[0].device)
