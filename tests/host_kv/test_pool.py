"""The host pool: sizes, what is refused, and one memory seen by the kernels and by torch."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from cpu_kernels.attention import HostPool, Plan
from sglang_neo.host_kv import layout
from sglang_neo.host_kv.memory import HostMemory
from sglang_neo.host_kv.pool import HostKVGeometry, HostKVPool, UnsupportedKV


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8"])
@pytest.mark.parametrize("page_tokens", [16, 32, 64, 128])
@pytest.mark.parametrize("dim", [16, 80, 128, 256])
def test_sizes_are_the_kernels(dtype: str, page_tokens: int, dim: int) -> None:
    geometry = HostKVGeometry(3, 5, dim, dtype, page_tokens)
    assert geometry.bytes_per_page == HostPool.bytes_needed(3, 1, 5, dim, dtype, page_tokens)


def test_budget_to_pages() -> None:
    geometry = HostKVGeometry(80, 8, 128, "bfloat16", 64)
    assert geometry.bytes_per_page == 80 * 8 * 2 * 64 * 128 * 2
    assert geometry.pages_for_bytes(10 * geometry.bytes_per_page - 1) == 9
    assert geometry.pages_for_bytes(geometry.bytes_per_page) == 1
    assert [geometry.pages_for_tokens(n) for n in (0, 1, 64, 65)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(head_dim=72), "head_dim 72"),
        (dict(head_dim=272), "head_dim 272"),
        (dict(head_dim=0), "head_dim 0"),
        (dict(head_dim=192, v_head_dim=128), "values of head_dim 128 beside keys of 192"),
        (dict(dtype="float8_e4m3fn"), "float8_e4m3fn"),
        (dict(page_tokens=48), "48 tokens"),
    ],
)
def test_what_the_kernels_lack_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedKV, match=message):
        HostKVGeometry(**{"layers": 2, "kv_heads": 2, "head_dim": 64, **given})


def test_nothing_is_no_geometry() -> None:
    with pytest.raises(ValueError):
        HostKVGeometry(0, 2, 64)


def test_too_little_memory_is_refused() -> None:
    geometry = HostKVGeometry(2, 2, 64)
    with pytest.raises(ValueError, match="3 pages of host KV need"):
        HostKVPool(geometry, 3, torch.zeros(3 * geometry.bytes_per_page - 1, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_pages_packed_here_are_attended_to_there(dtype: str) -> None:
    """A row put into the pool by torch gives the kernels' attention the right answer."""
    geometry = HostKVGeometry(2, 2, 64, dtype)
    pool = HostKVPool(geometry, 5, HostMemory(5 * geometry.bytes_per_page, pin=False))
    k, v = torch.randn(2, 100, 2, 64).bfloat16()
    pages = [3, 1]
    pool.pages_tensor[1, pages] = layout.pack_pages(k, v, dtype, 64)
    q, out = torch.randn(1, 4, 64), torch.empty(1, 4, 64)
    plan = Plan(pool.kernel_pool, [100], [pages], 4, q_dtype="float32")
    plan.run(1, q, out)
    kf, vf = (x.float().repeat_interleave(2, 1).transpose(0, 1) for x in (k, v))
    want = torch.softmax((kf @ q[0].unsqueeze(-1)).squeeze(-1) / 8, -1).unsqueeze(1) @ vf
    assert torch.allclose(out[0], want.squeeze(1), atol=0.02 if dtype == "int8" else 0.004)


def test_the_pool_keeps_its_memory() -> None:
    geometry = HostKVGeometry(1, 1, 16)
    pool = HostKVPool(geometry, 1, HostMemory(geometry.bytes_per_page, pin=False))
    kernel_pool, pages = pool.kernel_pool, pool.pages_tensor
    assert isinstance(pool.memory, HostMemory)
    pool.memory.close()
    del pool
    gc.collect()
    k = torch.ones(1, 1, 16)
    kernel_pool.write(0, [0], k, k)
    assert pages.count_nonzero() > 0
