"""Between tokens in device slots and pages in a staging buffer: gathered, converted, laid out; and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sglang_neo.host_kv import layout
from sglang_neo.host_kv.pool import HostKVGeometry


class Packing(Protocol):
    """For one set of device buffers. Every call enqueues work in the current stream and returns."""

    #: Device memory that a call takes while it runs, as a multiple of the pages that it fills or reads.
    memory_factor: int

    def gather(self, layers: range, slots: torch.Tensor, valid: int, staged: torch.Tensor) -> None:
        """Packs tokens into pages.

        Args:
            layers: which of the device buffers.
            slots: [pages * page_tokens] int64 on the device.
            valid: tokens; after them, the last page gets zeros.
            staged: [layers, pages, kv_heads, page_bytes] uint8, contiguous, on the device.
        """

    def scatter(self, layers: range, staged: torch.Tensor, slots: torch.Tensor) -> None:
        """Unpacks the first ``len(slots)`` tokens of pages. Arguments as those of ``gather``."""


class TorchPacking:
    """By torch's operations, on any device: the reference for ``TritonPacking``.

    Args:
        geometry: of the host pool.
        k, v: per layer [slots, kv_heads, head_dim] of one float type of two bytes or more, on the device.
    """

    def __init__(self, geometry: HostKVGeometry, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> None:
        self.geometry, self.dtype = geometry, k[0].dtype
        self._converts = layout.element_dtype(geometry.dtype) != self.dtype
        # Converting works in fp32, with several intermediate results.
        self.memory_factor = 4 if self._converts else 1
        self._k, self._v = list(k), list(v)
        # Rows are whole multiples of 32 bytes: where only bytes move, eight at a time.
        self._k64 = [x.view(torch.int64) for x in k]
        self._v64 = [x.view(torch.int64) for x in v]

    def gather(self, layers: range, slots: torch.Tensor, valid: int, staged: torch.Tensor) -> None:
        geometry = self.geometry
        page_tokens = geometry.page_tokens
        parts = layout.page_parts(staged, geometry.dtype, page_tokens, geometry.head_dim)
        if self._converts:
            shape = (len(layers), len(slots), geometry.kv_heads, geometry.head_dim)
            k = torch.empty(shape, dtype=self.dtype, device=slots.device)
            v = torch.empty_like(k)
            for row, layer in enumerate(layers):
                torch.index_select(self._k[layer], 0, slots, out=k[row])
                torch.index_select(self._v[layer], 0, slots, out=v[row])
            k[:, valid:].zero_()
            v[:, valid:].zero_()
            layout.store_tokens(parts, k.view(parts.k.shape), v.view(parts.k.shape))
            return
        keys, k_slots = self._keys64(staged), slots.view(-1, page_tokens)
        # Values are interleaved two bytes at a time: gathered in whole rows first, in one go for all layers after.
        values = torch.empty(len(layers), len(slots), *self._v64[0].shape[1:], dtype=torch.int64, device=slots.device)
        for row, layer in enumerate(layers):
            torch.ops.aten.index.Tensor_out(self._k64[layer], [k_slots], out=keys[row])
            torch.index_select(self._v64[layer], 0, slots, out=values[row])
        parts.v.copy_(values.view(self.dtype).view(parts.v.shape))
        if valid < len(slots):
            parts.zero_after(valid - (len(slots) - page_tokens))

    def scatter(self, layers: range, staged: torch.Tensor, slots: torch.Tensor) -> None:
        geometry = self.geometry
        parts = layout.page_parts(staged, geometry.dtype, geometry.page_tokens, geometry.head_dim)
        if self._converts:
            k = torch.empty(parts.k.shape, dtype=self.dtype, device=slots.device)
            v = torch.empty_like(k)
            layout.load_tokens(parts, k, v)
            k64 = k.view(torch.int64)
        else:
            k64 = self._keys64(staged).contiguous()
            v = parts.v.contiguous()
        k64 = k64.view(len(layers), -1, *k64.shape[-2:])
        # Flat first: contiguous() may leave any stride to a dimension of size one, which another type refuses.
        v64 = v.view(-1).view(torch.int64).view(k64.shape)
        for row, layer in enumerate(layers):
            self._k64[layer].index_copy_(0, slots, k64[row, : len(slots)])
            self._v64[layer].index_copy_(0, slots, v64[row, : len(slots)])

    def _keys64(self, staged: torch.Tensor) -> torch.Tensor:
        """The keys of pages without scales, eight bytes at a time: [layers, pages, T, kv_heads, row_bytes / 8]."""
        half = staged.shape[-1] // 2
        tokens = self.geometry.page_tokens
        return staged[..., :half].view(torch.int64).unflatten(-1, (tokens, -1)).transpose(-2, -3)


def fits_one_launch(geometry: HostKVGeometry, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> bool:
    """Whether the buffers and pages are such as ``triton_packing.py`` takes: equal strides in all layers, elements of a
    head side by side, ``page_tokens`` a power of two."""
    equal = len({x.stride() for x in (*k, *v)}) == 1
    return equal and k[0].stride(2) == 1 and geometry.page_tokens.bit_count() == 1


def packing_for(geometry: HostKVGeometry, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> Packing:
    """The fastest for buffers of this kind: on CUDA one launch, unless the layers' buffers differ in their strides."""
    if k[0].is_cuda and fits_one_launch(geometry, k, v):
        from sglang_neo.host_kv.triton_packing import TritonPacking

        return TritonPacking(geometry, k, v)
    return TorchPacking(geometry, k, v)
