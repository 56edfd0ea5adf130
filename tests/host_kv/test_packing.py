"""Packing by triton, in its interpreter: byte for byte torch's pages, and back."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from typing import Any

import torch

from sglang_neo.host_kv.packing import TorchPacking
from sglang_neo.host_kv.pool import HostKVGeometry

LAYERS, SLOTS = 2, 90
#: Type on the device, type in host memory, page tokens, heads, head_dim, tokens.
CASES = [
    (torch.bfloat16, "bfloat16", 16, 2, 32, 40),
    (torch.float16, "float16", 32, 1, 48, 64),
    (torch.float32, "float32", 16, 3, 32, 33),
    (torch.bfloat16, "int8", 16, 2, 48, 37),
    (torch.float32, "int8", 32, 1, 64, 1),
    (torch.bfloat16, "float16", 16, 2, 32, 20),
]


def check_packing(
    make: Any, on_device: torch.dtype, kind: str, page_tokens: int, heads: int, dim: int, tokens: int
) -> None:
    random = torch.Generator().manual_seed(1)
    geometry = HostKVGeometry(LAYERS, heads, dim, kind, page_tokens)
    k, v = ([torch.randn(SLOTS, heads, dim, generator=random).to(on_device) for _ in range(LAYERS)] for _ in "kv")
    slots = torch.randperm(SLOTS, generator=random)[:tokens]
    for x, value in zip(k, (float("inf"), 0.0), strict=True):  # an infinite one, a row of zeros
        x[slots[0], 0, : 1 if value else dim] = value
    if kind == "int8":
        v[0][slots[-1], 0, 3] = float("nan")
    pages = geometry.pages_for_tokens(tokens)
    whole = torch.zeros(pages * page_tokens, dtype=torch.int64)
    whole[:tokens] = slots
    staged = torch.full((2, LAYERS, pages, heads, geometry.page_bytes), 0xEE, dtype=torch.uint8)
    # All layers, and one of them by itself.
    for layers in (range(LAYERS), range(1, 2)):
        for packing, out in zip((TorchPacking(geometry, k, v), make(geometry, k, v)), staged, strict=True):
            packing.gather(layers, whole, tokens, out[: len(layers)])
        assert torch.equal(staged[0], staged[1]), (kind, layers)
    for packing_of in (TorchPacking, make):
        back_k, back_v = ([torch.full_like(x, 9.0) for x in buffers] for buffers in (k, v))
        packing_of(geometry, back_k, back_v).scatter(range(LAYERS), pack_again(geometry, k, v, whole, tokens), slots)
        if packing_of is TorchPacking:
            expected = (back_k, back_v)
    for ours, theirs in zip(itertools.chain(back_k, back_v), itertools.chain(*expected), strict=True):
        a, b = ours.nan_to_num(nan=7.5), theirs.nan_to_num(nan=7.5)
        if kind == "int8" and on_device == torch.bfloat16:  # the interpreter cuts fp32 off where it should round
            assert ((a.view(torch.int16) - b.view(torch.int16)).abs() <= 1).all()
        else:
            assert torch.equal(a, b)


def pack_again(geometry: HostKVGeometry, k: Any, v: Any, whole: torch.Tensor, tokens: int) -> torch.Tensor:
    pages = len(whole) // geometry.page_tokens
    staged = torch.empty(LAYERS, pages, geometry.kv_heads, geometry.page_bytes, dtype=torch.uint8)
    TorchPacking(geometry, k, v).gather(range(LAYERS), whole, tokens, staged)
    return staged


def test_triton_kernels() -> None:
    """In a process of its own: triton decides at import whether it interprets."""
    script = """
        from sglang_neo.host_kv.triton_packing import TritonPacking
        from tests.host_kv.test_packing import CASES, check_packing
        for case in CASES:
            check_packing(TritonPacking, *case)
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=environment, timeout=300)
