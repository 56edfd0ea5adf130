"""Decode batches to measure: which rows there are, keys and values for them, and what their attention must be."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cpu_kernels.attention import HostPool
from cpu_kernels.probe import Memory

PAGE_TOKENS = 64
#: The memory of a data set repeats so many pages; rows take them in random order.
PATTERN_PAGES = 32
#: Lengths for "ragged" when no file is given: log-normal, as the lengths of conversations are.
RAGGED_ROWS, RAGGED_MEDIAN, RAGGED_SIGMA, RAGGED_MAX = 64, 800, 0.8, 8192


@dataclass(frozen=True)
class Shape:
    """Heads of one layer."""

    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @staticmethod
    def parse(text: str) -> Shape:
        """From "q_heads,kv_heads,head_dim"; ValueError if it is none or cannot be."""
        try:
            q, kv, dim = (int(part) for part in text.split(","))
        except ValueError:
            raise ValueError(f"shape must be q_heads,kv_heads,head_dim, not {text!r}") from None
        if min(q, kv, dim) < 1 or q % kv or q // kv > 16 or dim % 16 or dim > 256:
            raise ValueError(
                f"shape {text}: q_heads must be 1 to 16 times kv_heads, head_dim a multiple of 16 up to 256"
            )
        return Shape(q, kv, dim)


@dataclass(frozen=True)
class Case:
    """Rows of one batch.

    ``shared``: the rows' tokens are the same pages, and read once for all of them.
    """

    name: str
    lengths: tuple[int, ...]
    shared: bool = False

    @property
    def tokens(self) -> int:
        """That the rows attend to, in one layer."""
        return sum(self.lengths)


def ragged(lengths: Sequence[int] | None = None, rows: int = RAGGED_ROWS) -> Case:
    """``rows`` lengths spread evenly over the sorted given ones, or over the log-normal default, in random order."""
    rng = np.random.default_rng(0)
    if lengths is None:
        sample = np.exp(rng.normal(np.log(RAGGED_MEDIAN), RAGGED_SIGMA, 4096))
        values = np.clip(sample, 1, RAGGED_MAX).astype(int)
    else:
        values = np.asarray(lengths, int)
    picked = np.sort(values)[(np.arange(rows) * 2 + 1) * len(values) // (2 * rows)]
    return Case("ragged", tuple(int(n) for n in rng.permutation(picked)))


def parse_case(text: str, lengths: Sequence[int] | None = None) -> Case:
    """From "64x1024" (rows x tokens), "shared:64x4096", "copies:64x4096" or "ragged"; ValueError otherwise."""
    if text == "ragged":
        return ragged(lengths)
    match = re.fullmatch(r"(?:(shared|copies):)?(\d+)x(\d+)", text)
    if not match or not (rows := int(match[2])) or not (tokens := int(match[3])):
        raise ValueError(f"unknown case {text!r}: ROWSxTOKENS, shared:ROWSxTOKENS, copies:ROWSxTOKENS or ragged")
    return Case(text, (tokens,) * rows, match[1] == "shared")


def read_lengths(path: str | Path) -> list[int]:
    """Row lengths from a file.

    A JSON list of numbers, or of objects whose "prompt", "ContextTokens" or "length" counts; or a CSV file with one of
    these columns (or one number a line).

    Raises:
        ValueError: it is none of that; one line that names the file and the place.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    names = ("length", "prompt", "ContextTokens")
    found: list[object]
    if text.lstrip()[:1] in ("[", "{"):
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not JSON: {error}") from None
        if not isinstance(data, list):
            raise ValueError(f"{path}: a JSON list is needed")
        found = [next((x[n] for n in names if n in x), None) if isinstance(x, dict) else x for x in data]
    else:
        table = list(csv.reader(text.splitlines()))
        column = 0
        if table and table[0] and not table[0][0].strip().isdigit():
            header = [cell.strip() for cell in table.pop(0)]
            column = next((header.index(n) for n in names if n in header), -1)
            if column < 0:
                raise ValueError(f"{path}: none of the columns {', '.join(names)} is in its first line")
        found = [row[column] if len(row) > column else None for row in table if row]
    lengths = []
    for i, value in enumerate(found):
        try:
            if isinstance(value, (float, bool)):
                raise ValueError
            number = int(value)  # type: ignore[call-overload]
            if not 1 <= number < 2**31:
                raise ValueError
        except (TypeError, ValueError):
            raise ValueError(f"{path}: entry {i + 1}: a length of at least 1 is needed, not {value!r}") from None
        lengths.append(number)
    if not lengths:
        raise ValueError(f"{path}: no lengths in it")
    return lengths


def to_bf16(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def encode(x: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    """Values as an array of the element type, uint16 for bfloat16."""
    if dtype == "bfloat16":
        return to_bf16(x)
    return x.astype(np.float16 if dtype == "float16" else np.float32)


def decode(x: NDArray[np.generic], dtype: str) -> NDArray[np.float64]:
    """The inverse."""
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


class Data:
    """Memory full of valid pages of one element type, seen as pools of any number of layers.

    Page number g of the memory, counted over all layers, is a copy of pattern page g % PATTERN_PAGES, so what any row
    of any case attends to is known without reading it back.

    Args:
        memory: its first ``bytes`` are filled here; one element type at a time.
        dtype: of the pool.
        threads: that fill the memory.
    """

    def __init__(self, memory: Memory, bytes: int, shape: Shape, dtype: str, threads: int) -> None:
        self.memory, self.shape, self.dtype = memory, shape, dtype
        self.bytes = min(bytes, memory.bytes) // 4096 * 4096
        self.q_dtype = "float32" if dtype == "int8" else dtype
        self.page_bytes = HostPool.bytes_needed(1, 1, shape.kv_heads, shape.head_dim, dtype, PAGE_TOKENS)
        self.pages = self.bytes // self.page_bytes
        tokens = PATTERN_PAGES * PAGE_TOKENS
        rng = np.random.default_rng(1)
        k, v = (
            encode(rng.standard_normal((tokens, shape.kv_heads, shape.head_dim), np.float32), self.q_dtype)
            for _ in range(2)
        )
        pattern = np.zeros(PATTERN_PAGES * self.page_bytes + 64, np.uint8)
        pattern = pattern[-pattern.ctypes.data % 64 :][: PATTERN_PAGES * self.page_bytes]
        pool = HostPool(pattern, 1, PATTERN_PAGES, shape.kv_heads, shape.head_dim, dtype, PAGE_TOKENS)
        pool.write(0, np.arange(tokens), k, v, self.q_dtype)
        memory.fill(pattern.data, threads, self.bytes)
        exact = [decode(x, self.q_dtype) for x in (k, v)]
        if dtype == "int8":  # attention is exact about what int8 keeps; that it keeps enough is seen here
            pool.read(0, np.arange(tokens), k, v, isa="scalar")
            kept = [decode(x, self.q_dtype) for x in (k, v)]
            for was, now in zip(exact, kept, strict=True):
                step = np.abs(was).max(-1, keepdims=True) / 127
                if not (np.abs(was - now) <= 0.51 * step + 1e-6).all():
                    raise WrongAnswer("int8 pages do not hold what was written to them")
            exact = kept
        self.k, self.v = exact  # [pattern tokens, kv_heads, head_dim]

    def view(self, pages: int) -> HostPool:
        """A pool of as many layers of ``pages`` pages as there is memory for."""
        s = self.shape
        layers = self.pages // pages
        return HostPool(self.memory.address, layers, pages, s.kv_heads, s.head_dim, self.dtype, PAGE_TOKENS)

    def reference(
        self, q: NDArray[np.generic], lengths: Sequence[int], tables: Sequence[NDArray[np.int32]], first_page: int
    ) -> NDArray[np.float64]:
        """Outputs [rows, q_heads, head_dim] in float64; ``first_page``: of the layer, counted over all layers."""
        s = self.shape
        group = s.q_heads // s.kv_heads
        counts = np.zeros((len(lengths), PATTERN_PAGES, PAGE_TOKENS))
        for row, (length, table) in enumerate(zip(lengths, tables, strict=True)):
            at = (first_page + table.astype(np.int64)) % PATTERN_PAGES
            whole, rest = divmod(length, PAGE_TOKENS)
            np.add.at(counts[row], at[:whole], 1)
            if rest:
                counts[row, at[whole], :rest] += 1
        weights = np.repeat(counts.reshape(len(lengths), -1), group, axis=0)  # [rows * group, pattern tokens]
        queries = decode(q, self.q_dtype).reshape(len(lengths), s.kv_heads, group, s.head_dim)
        out = np.empty_like(queries)
        for head in range(s.kv_heads):
            scores = queries[:, head].reshape(-1, s.head_dim) @ self.k[:, head].T * s.head_dim**-0.5
            p = np.exp(scores - scores.max(1, keepdims=True)) * weights
            out[:, head] = (p @ self.v[:, head] / p.sum(1, keepdims=True)).reshape(len(lengths), group, -1)
        return out.reshape(len(lengths), s.q_heads, s.head_dim)


class WrongAnswer(Exception):
    """A result is not what a float64 reference says."""


def random_tables(case: Case, pages: int, seed: int = 2) -> list[NDArray[np.int32]]:
    """Page ids per row in random order out of [0, pages)."""
    order = np.random.default_rng(seed).permutation(pages).astype(np.int32)
    if case.shared:
        return [order[: -(-n // PAGE_TOKENS)] for n in case.lengths]
    tables, at = [], 0
    for n in case.lengths:
        count = -(-n // PAGE_TOKENS)
        tables.append(order[at : at + count])
        at += count
    return tables


def case_pages(case: Case) -> int:
    """Pages per layer that the rows take."""
    if case.shared:
        return -(-max(case.lengths, default=0) // PAGE_TOKENS)
    return sum(-(-n // PAGE_TOKENS) for n in case.lengths)
