"""Decode attention in float64, and pools filled for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpu_kernels.attention import HostPool, SlotPool


def to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to nearest even bfloat16, as uint16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def encode(x: np.ndarray, dtype: str) -> np.ndarray:
    """Values as an array of the element type (uint16 for bfloat16)."""
    if dtype == "bfloat16":
        return to_bf16(x)
    return np.asarray(x, np.float16 if dtype == "float16" else np.float32)


def decode(x: np.ndarray, dtype: str) -> np.ndarray:
    """The inverse, as float64."""
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def attention(
    q: np.ndarray,
    keys: Sequence[np.ndarray],
    values: Sequence[np.ndarray],
    scale: float,
    soft_cap: float = 0.0,
    window: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [rows, q_heads, dim] and natural log-sum-exps [rows, q_heads] in float64.

    Args:
        q: [rows, q_heads, dim].
        keys, values: per row [tokens, kv_heads, dim].
    """
    rows, heads, _ = q.shape
    out, lse = np.zeros(q.shape), np.full((rows, heads), -np.inf)
    for row in range(rows):
        k, v = keys[row].astype(np.float64), values[row].astype(np.float64)
        if window > 0:
            k, v = k[-window:], v[-window:]
        if len(k) == 0:
            continue
        group = heads // k.shape[1]
        scores = np.einsum("hd,thd->ht", q[row].astype(np.float64), np.repeat(k, group, axis=1)) * scale
        if soft_cap > 0:
            scores = soft_cap * np.tanh(scores / soft_cap)
        top = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=1, keepdims=True)
        out[row] = np.einsum("ht,thd->hd", weights / total, np.repeat(v, group, axis=1))
        lse[row] = (top + np.log(total))[:, 0]
    return out, lse


def aligned(size: int, offset: int = 0, fill: int = 0) -> np.ndarray:
    """``size`` bytes that begin ``offset`` bytes after a multiple of 64."""
    raw = np.full(size + 64 + offset, fill, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + size]


@dataclass
class Case:
    """A pool with rows of tokens in it, and what they were before they went in (as far as the pool's type keeps it)."""

    pool: HostPool | SlotPool
    lengths: np.ndarray
    tables: list[np.ndarray]
    keys: list[np.ndarray]  # float64, per row [tokens, kv_heads, dim]
    values: list[np.ndarray]


def make_case(
    rng: np.random.Generator,
    lengths: Sequence[int],
    kv_heads: int,
    head_dim: int,
    dtype: str = "bfloat16",
    page_tokens: int = 64,
    slots: bool = False,
    layers: int = 1,
    layer: int = 0,
    offset: int = 0,
    shared: int = 0,
    isa: str = "scalar",
) -> Case:
    """Rows of random tokens in random pages (slots) of a pool whose every other byte makes a NaN.

    Args:
        shared: the first so many tokens of every row are the same ones, in the same pages.
        isa: whose kernels write the tokens.
    """
    per_id = 1 if slots else page_tokens
    counts = [-(-n // per_id) for n in lengths]
    shared_ids = -(-shared // per_id) if shared else 0
    spare = 3
    total = sum(max(0, c - shared_ids) for c in counts) + shared_ids + spare
    ids = rng.permutation(total).astype(np.int32)
    prefix, used = ids[:shared_ids], shared_ids
    tables = []
    for count in counts:
        own = max(0, count - shared_ids)
        tables.append(np.concatenate([prefix[: min(count, shared_ids)], ids[used : used + own]]).astype(np.int32))
        used += own
    pool: HostPool | SlotPool
    if slots:
        kind = np.float32 if dtype == "float32" else np.uint16
        store = [
            aligned(total * kv_heads * head_dim * np.dtype(kind).itemsize, offset, 0xFF)
            .view(kind)
            .reshape(total, kv_heads, head_dim)
            for _ in range(2 * layers)
        ]
        pool = SlotPool(store[:layers], store[layers:], dtype)
    else:
        size = HostPool.bytes_needed(layers, total, kv_heads, head_dim, dtype, page_tokens)
        pool = HostPool(aligned(size, offset, 0xFF), layers, total, kv_heads, head_dim, dtype, page_tokens)
    keys, values = [], []
    first: tuple[np.ndarray, np.ndarray] | None = None
    given = dtype if dtype != "int8" else "float32"
    for n, table in zip(lengths, tables, strict=True):
        k, v = (rng.standard_normal((n, kv_heads, head_dim)).astype(np.float32) for _ in range(2))
        if shared:
            if first is not None:
                common = min(shared, n)
                k[:common], v[:common] = first[0][:common], first[1][:common]
            elif n >= shared:
                first = (k[:shared].copy(), v[:shared].copy())
        k, v = encode(k, given), encode(v, given)
        places = np.array([int(table[t // per_id]) * per_id + t % per_id for t in range(n)], np.int64)
        pool.write(layer, places, k, v, given, isa=isa)
        if dtype == "int8":  # what int8 keeps is what attention is exact about
            k, v = np.empty_like(k), np.empty_like(v)
            pool.read(layer, places, k, v, isa="scalar")
        keys.append(decode(k, given))
        values.append(decode(v, given))
    return Case(pool, np.array(lengths, np.int32), tables, keys, values)


def random_queries(rng: np.random.Generator, rows: int, q_heads: int, head_dim: int, dtype: str) -> np.ndarray:
    return encode(rng.standard_normal((rows, q_heads, head_dim)).astype(np.float32), dtype)


def error(got: np.ndarray, dtype: str, want: np.ndarray) -> float:
    """The largest error, as a fraction of the largest value."""
    if want.size == 0:
        return 0.0
    return float(np.abs(decode(got, dtype) - want).max() / max(1e-30, np.abs(want).max()))


def run_plan(plan: Any, q: np.ndarray, layer: int = 0, workers: Any = None) -> tuple[np.ndarray, np.ndarray]:
    out = np.full_like(q, 0xFF if q.dtype == np.uint16 else np.nan)
    lse = np.full(q.shape[:2], np.nan, np.float32)
    plan.run(layer, q, out, lse, workers=workers)
    return out, lse
