"""The packing of packing.py in one triton kernel each way, for CUDA. Imported only there.

What torch does in dozens of launches per group of layers, with intermediate results in fp32 where pages are int8, is
one launch here: a program per page, head and layer. Bit for bit the same pages.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sglang_neo.host_kv import layout
from sglang_neo.host_kv.packing import fits_one_launch
from sglang_neo.host_kv.pool import HostKVGeometry

_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8,
}


@triton.jit
def _address(staged, PAGE_BYTES: tl.constexpr):
    """Where this program's page begins: grid (pages, heads, layers)."""
    page, head, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    index = (layer * tl.num_programs(0) + page).to(tl.int64) * tl.num_programs(1) + head
    return staged + index * PAGE_BYTES


@triton.jit
def _quantise(x):
    """See layout.quantise: steps as float32, scales."""
    x = x.to(tl.float32)
    size = tl.where(x == x, tl.abs(x), 0.0)
    top = tl.max(size, axis=1)
    inverse = tl.where(top > 0, tl.div_rn(tl.full(top.shape, 127.0, tl.float32), top), 0.0)
    steps = x * inverse[:, None]
    steps = tl.where(steps == steps, tl.minimum(tl.maximum(steps, -127.0), 127.0), 0.0)
    # 1.5 * 2^23: of what is added to it only whole numbers remain, rounded half to even.
    steps = (steps + 12582912.0) - 12582912.0
    return steps, tl.div_rn(top, tl.full(top.shape, 127.0, tl.float32))


# Not specialised: these numbers change from call to call, and compiling again takes a second.
@triton.jit(do_not_specialize=["valid", "first_layer"])
def _gather(
    k_table, v_table, slots, staged, valid, slot_stride, head_stride, first_layer,
    T: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, PAGE_BYTES: tl.constexpr,
    TYPE: tl.constexpr, ELEMENT: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    head, layer = tl.program_id(1), first_layer + tl.program_id(2)
    k = tl.load(k_table + layer).to(tl.pointer_type(TYPE))
    v = tl.load(v_table + layer).to(tl.pointer_type(TYPE))
    t = tl.arange(0, T)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    token = tl.program_id(0) * T + t
    source = tl.load(slots + token) * slot_stride + head * head_stride + d
    there = (token < valid) & (d < D)
    k_tile = tl.load(k + source, mask=there, other=0.0)
    v_tile = tl.load(v + source, mask=there, other=0.0)
    page = _address(staged, PAGE_BYTES)
    k_page = page.to(tl.pointer_type(ELEMENT), bitcast=True)
    v_page = (page + PAGE_BYTES // 2).to(tl.pointer_type(ELEMENT), bitcast=True)
    k_at = t * D + d
    v_at = (t // GROUP) * (D * GROUP) + d * GROUP + t % GROUP
    if INT8:
        k_steps, k_scale = _quantise(k_tile)
        v_steps, v_scale = _quantise(v_tile)
        tl.store(k_page + k_at, k_steps.to(tl.int8), mask=d < D)
        tl.store(v_page + v_at, v_steps.to(tl.int8), mask=d < D)
        scales = tl.arange(0, T)
        tl.store((page + T * D).to(tl.pointer_type(tl.float32), bitcast=True) + scales, k_scale)
        tl.store((page + PAGE_BYTES // 2 + T * D).to(tl.pointer_type(tl.float32), bitcast=True) + scales, v_scale)
    else:
        tl.store(k_page + k_at, k_tile.to(ELEMENT), mask=d < D)
        tl.store(v_page + v_at, v_tile.to(ELEMENT), mask=d < D)


@triton.jit(do_not_specialize=["count", "first_layer"])
def _scatter(
    k_table, v_table, slots, staged, count, slot_stride, head_stride, first_layer,
    T: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, PAGE_BYTES: tl.constexpr,
    TYPE: tl.constexpr, ELEMENT: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    head, layer = tl.program_id(1), first_layer + tl.program_id(2)
    k = tl.load(k_table + layer).to(tl.pointer_type(TYPE))
    v = tl.load(v_table + layer).to(tl.pointer_type(TYPE))
    t = tl.arange(0, T)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    token = tl.program_id(0) * T + t
    page = _address(staged, PAGE_BYTES)
    k_page = page.to(tl.pointer_type(ELEMENT), bitcast=True)
    v_page = (page + PAGE_BYTES // 2).to(tl.pointer_type(ELEMENT), bitcast=True)
    k_tile = tl.load(k_page + t * D + d, mask=d < D, other=0)
    v_tile = tl.load(v_page + (t // GROUP) * (D * GROUP) + d * GROUP + t % GROUP, mask=d < D, other=0)
    if INT8:
        scales = tl.arange(0, T)
        k_scale = tl.load((page + T * D).to(tl.pointer_type(tl.float32), bitcast=True) + scales)
        v_scale = tl.load((page + PAGE_BYTES // 2 + T * D).to(tl.pointer_type(tl.float32), bitcast=True) + scales)
        k_tile = k_tile.to(tl.float32) * k_scale[:, None]
        v_tile = v_tile.to(tl.float32) * v_scale[:, None]
    target = tl.load(slots + token, mask=token < count, other=0) * slot_stride + head * head_stride + d
    there = (token < count) & (d < D)
    tl.store(k + target, k_tile.to(TYPE), mask=there)
    tl.store(v + target, v_tile.to(TYPE), mask=there)


class TritonPacking:
    """See ``packing.Packing``. Raises ValueError unless ``packing.fits_one_launch``."""

    memory_factor = 1

    def __init__(self, geometry: HostKVGeometry, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> None:
        if not fits_one_launch(geometry, k, v):
            strides = sorted({x.stride() for x in (*k, *v)})
            raise ValueError(
                "the layers' buffers must have equal strides, the last of them 1, and pages a power of two of tokens; "
                f"got {strides} and {geometry.page_tokens}"
            )
        self.geometry = geometry
        self._keep = (list(k), list(v))  # the tables hold their addresses
        self._k, self._v = (
            torch.tensor([x.data_ptr() for x in buffers], dtype=torch.int64, device=k[0].device) for buffers in (k, v)
        )
        self._strides = k[0].stride()[:2]
        self._constants = {
            "T": geometry.page_tokens,
            "D": geometry.head_dim,
            "WIDTH": triton.next_power_of_2(geometry.head_dim),
            "GROUP": layout.value_group(geometry.dtype),
            "PAGE_BYTES": geometry.page_bytes,
            "TYPE": _TYPES[k[0].dtype],
            "ELEMENT": _TYPES[layout.element_dtype(geometry.dtype)],
            "INT8": geometry.dtype == "int8",
        }

        # Compiled now, not while the first request waits.
        nothing = torch.zeros(geometry.page_tokens, dtype=torch.int64, device=k[0].device)
        scratch = torch.empty(1, 1, geometry.kv_heads, geometry.page_bytes, dtype=torch.uint8, device=k[0].device)
        self.gather(range(1), nothing, 0, scratch)
        self.scatter(range(1), scratch, nothing[:0])

    def gather(self, layers: range, slots: torch.Tensor, valid: int, staged: torch.Tensor) -> None:
        grid = (staged.shape[1], staged.shape[2], len(layers))
        _gather[grid](self._k, self._v, slots, staged, valid, *self._strides, layers.start, **self._constants)

    def scatter(self, layers: range, staged: torch.Tensor, slots: torch.Tensor) -> None:
        grid = (staged.shape[1], staged.shape[2], len(layers))
        slots = slots.contiguous()
        _scatter[grid](self._k, self._v, slots, staged, len(slots), *self._strides, layers.start, **self._constants)
