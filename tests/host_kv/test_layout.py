"""Pages made by torch against pages written by the CPU kernels, byte for byte."""

from __future__ import annotations

import pytest
import torch

from cpu_kernels.attention import HostPool
from sglang_neo.host_kv import layout

DTYPES = ("float32", "float16", "bfloat16", "int8")
HEADS = 2


def tokens_of(count: int, dim: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of ``count`` tokens, of very different sizes from token to token, some of them all zeros."""
    random = torch.Generator().manual_seed(seed)
    size = 10.0 ** torch.randint(-3, 3, (2, count, HEADS, 1), generator=random)
    size[:, 3::7] = 0.0
    k, v = (torch.randn(2, count, HEADS, dim, generator=random) * size).to(dtype)
    return k, v


def written_by_the_kernels(
    k: torch.Tensor, v: torch.Tensor, dtype: str, page_tokens: int
) -> tuple[torch.Tensor, HostPool]:
    tokens, heads, dim = k.shape
    pages = layout.page_count(tokens, page_tokens)
    memory = torch.zeros(HostPool.bytes_needed(1, pages, heads, dim, dtype, page_tokens), dtype=torch.uint8)
    pool = HostPool(memory, 1, pages, heads, dim, dtype, page_tokens)
    pool.write(0, torch.arange(tokens), k, v)
    return memory.view(pages, heads, -1), pool


def source_dtype(dtype: str) -> torch.dtype:
    return torch.bfloat16 if dtype == "int8" else layout.element_dtype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_tokens", [16, 32, 64, 128])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_pack_writes_what_the_kernels_write(dtype: str, page_tokens: int, dim: int) -> None:
    for tokens in {1, 2, 3, page_tokens - 1, page_tokens, page_tokens + 1, 2 * page_tokens + 5}:
        k, v = tokens_of(tokens, dim, source_dtype(dtype), seed=tokens)
        want, _ = written_by_the_kernels(k, v, dtype, page_tokens)
        got = layout.pack_pages(k, v, dtype, page_tokens)
        assert got.shape == want.shape
        assert torch.equal(got, want), f"{tokens} tokens"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_tokens", [16, 32, 64, 128])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_unpack_reads_what_the_kernels_read(dtype: str, page_tokens: int, dim: int) -> None:
    for tokens in (1, page_tokens - 1, page_tokens, page_tokens + 3):
        k, v = tokens_of(tokens, dim, source_dtype(dtype), seed=tokens)
        pages, pool = written_by_the_kernels(k, v, dtype, page_tokens)
        for out in (torch.float32, torch.bfloat16, torch.float16):
            want_k, want_v = torch.empty_like(k, dtype=out), torch.empty_like(v, dtype=out)
            pool.read(0, torch.arange(tokens), want_k, want_v)
            got_k, got_v = layout.unpack_pages(pages, tokens, dtype, page_tokens, dim, out)
            assert torch.equal(got_k, want_k)
            assert torch.equal(got_v, want_v)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_floats_come_back_bit_for_bit(dtype: str) -> None:
    k, v = tokens_of(100, 80, layout.element_dtype(dtype))
    k[5, 0, 3], v[6, 1, 2] = float("nan"), float("inf")
    pages = layout.pack_pages(k, v, dtype, 64)
    got_k, got_v = layout.unpack_pages(pages, 100, dtype, 64, 80)
    bits = torch.int32 if dtype == "float32" else torch.int16
    assert torch.equal(got_k.view(bits), k.view(bits))
    assert torch.equal(got_v.view(bits), v.view(bits))


@pytest.mark.parametrize("given", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_types_are_converted_as_the_kernels_do(given: str, dtype: str) -> None:
    k, v = tokens_of(70, 64, layout.element_dtype(given))
    want, _ = written_by_the_kernels(k, v, dtype, 64)
    assert torch.equal(layout.pack_pages(k, v, dtype, 64), want)


def test_int8_is_within_half_a_step_and_hits_ties_like_the_kernels() -> None:
    steps = torch.arange(-127, 128).repeat(2)[: 2 * 64].float() + 0.5
    k = torch.cat((steps.view(1, 2, 64), torch.full((1, 2, 64), 127.0)), -1)  # scale 1: every value is a tie
    want, _ = written_by_the_kernels(k, k, "int8", 16)
    got = layout.pack_pages(k, k, "int8", 16)
    assert torch.equal(got, want)
    back, _ = layout.unpack_pages(got, 1, "int8", 16, 128)
    assert (back - k).abs().max() <= 0.5


def test_int8_of_what_is_no_number() -> None:
    k, v = tokens_of(8, 64, torch.float32)
    k[0, 0, 5], k[1, 0, 5], k[2, 1, 5], k[4, 0] = float("nan"), float("inf"), -float("inf"), float("nan")
    v[5] = 1e-42  # a denormal, whose inverse is infinite
    v[6, 0, ::2] = 0.0
    want, _ = written_by_the_kernels(k, v, "int8", 16)
    assert torch.equal(layout.pack_pages(k, v, "int8", 16), want)


def test_strided_tokens() -> None:
    both = torch.randn(40, 2, HEADS, 64).bfloat16()
    k, v = both[:, 0], both[:, 1]
    want = layout.pack_pages(k.contiguous(), v.contiguous(), "bfloat16", 16)
    assert torch.equal(layout.pack_pages(k, v, "bfloat16", 16), want)


def test_no_tokens() -> None:
    empty = torch.empty(0, HEADS, 64)
    pages = layout.pack_pages(empty, empty, "int8", 64)
    assert pages.shape == (0, HEADS, layout.page_bytes("int8", 64, 64))
    k, v = layout.unpack_pages(pages, 0, "int8", 64, 64)
    assert k.shape == v.shape == (0, HEADS, 64)


def test_what_does_not_fit_is_refused() -> None:
    k = torch.zeros(4, HEADS, 64)
    with pytest.raises(ValueError, match="int4"):
        layout.pack_pages(k, k, "int4", 64)
    with pytest.raises(ValueError, match="kv_heads"):
        layout.pack_pages(k, k[:3], "float32", 64)
    pages = layout.pack_pages(k, k, "float32", 16)
    with pytest.raises(ValueError, match="do not hold 17"):
        layout.unpack_pages(pages, 17, "float32", 16, 64)
    with pytest.raises(ValueError, match="head_dim 80"):
        layout.unpack_pages(pages, 4, "float32", 16, 80)
