"""Decode attention over keys and values in host memory.

A pool describes where keys and values lie, a plan says once per step which worker reads which tokens, and running the
plan for a layer computes the attention of every row. Arrays are anything with the buffer protocol or a data pointer,
see :func:`cpu_kernels.arrays.as_array`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from cpu_kernels import _native
from cpu_kernels.arrays import DTYPES, Array, as_array, check, dtype_name, int32s, int64s
from cpu_kernels.isa import choose_isa

PAGE_TOKENS = (16, 32, 64, 128)
_HINTS = ("none", "t0", "t1", "t2", "nta")


@dataclass(frozen=True)
class Tuning:
    """What calibration may change; every field has a value that works anywhere."""

    prefetch_hint: str = "t1"  # none, t0, t1, t2 or nta
    prefetch_tiles: int = 1  # 1 or 2: tiles of 64 tokens ahead
    min_split_tokens: int = 32  # no KV split is shorter
    min_thread_tokens: int = 16  # tokens x KV heads below which one more thread does not pay
    last_round_tokens: int = 384  # tokens x KV heads left for each thread when the rest is divided evenly
    prefix_min_rows: int = 2  # a prefix that fewer rows share is read per row
    prefix_piece_kib: int = 512  # KV of a head that stays in a core's cache while several passes read it
    held_tiles: int = 2  # 1 to 4: tiles of 64 tokens whose values AMX adds at a time where many queries share them
    dot_min_queries: int = 8  # queries per KV head from which bf16 dot products replace fp32 FMA
    tile_min_queries: int = 4  # queries per KV head from which matrix tiles are used
    accurate_int8: bool = True  # 16-bit queries and weights against int8 KV; False: 8-bit where that is faster

    def __post_init__(self) -> None:
        if self.prefetch_hint not in _HINTS:
            raise ValueError(f"prefetch_hint must be one of {', '.join(_HINTS)}, not {self.prefetch_hint!r}")
        if self.prefetch_tiles not in (1, 2):
            raise ValueError(f"prefetch_tiles must be 1 or 2, not {self.prefetch_tiles}")
        if self.held_tiles not in (1, 2, 3, 4):
            raise ValueError(f"held_tiles must be 1 to 4, not {self.held_tiles}")
        positive = ("min_split_tokens", "min_thread_tokens", "last_round_tokens", "prefix_min_rows", "prefix_piece_kib")
        for name in positive:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    def native(self) -> dict[str, int]:
        """The fields as integers, for C++."""
        return {k: int(v) for k, v in asdict(self).items() if k != "prefetch_hint"} | {
            "prefetch_hint": _HINTS.index(self.prefetch_hint)
        }


class _Pool:
    """What paged and token-major pools have in common."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    native: _native.Pool

    def _geometry(self, layers: int, kv_heads: int, head_dim: int) -> None:
        if layers < 1 or kv_heads < 1:
            raise ValueError(f"layers and kv_heads must be at least 1, got {layers} and {kv_heads}")
        if head_dim % 16 or not 16 <= head_dim <= 256:
            raise ValueError(f"head_dim must be a multiple of 16 from 16 to 256, not {head_dim}")

    def _rows(self, count: int, k: Any, v: Any, dtype: Any, writable: bool) -> tuple[str, list[int], list[Array]]:
        name = dtype_name(dtype) if dtype is not None else None
        strides, arrays = [], []
        for label, data in (("k", k), ("v", v)):
            given = as_array(data, writable)
            if name is None:
                name = dtype_name(given.dtype) if given.dtype in DTYPES else "bfloat16"
            if name == "int8":
                raise ValueError("rows of k and v cannot be int8; the pool quantises what is appended")
            got = check(given, label, (count, self.kv_heads, self.head_dim), name, writable=writable)
            arrays.append(got)
            strides += [got.address, got.strides[0], got.strides[1]]
        assert name is not None
        return name, strides, arrays

    def write(self, layer: int, places: Any, k: Any, v: Any, dtype: Any = None, isa: str | None = None) -> None:
        """Writes tokens, quantising or converting them to the pool's element type.

        Args:
            layer: index of the layer.
            places: [tokens] where each token goes: page * page_tokens + offset, or a slot id.
            k, v: [tokens, kv_heads, head_dim], last dimension contiguous.
            dtype: of k and v; default: what they say, bfloat16 for 16-bit integers.

        Raises:
            IndexError: a layer or place outside the pool. ValueError: shape, element type or strides do not fit.
        """
        at = int64s(places, "places")
        name, rows, _keep = self._rows(len(at), k, v, dtype, False)
        self.native.write(choose_isa(isa).name, layer, at, DTYPES[name][0], *rows)

    def read(self, layer: int, places: Any, k: Any, v: Any, dtype: Any = None, isa: str | None = None) -> None:
        """The inverse of write: fills k and v."""
        at = int64s(places, "places")
        name, rows, _keep = self._rows(len(at), k, v, dtype, True)
        self.native.read(choose_isa(isa).name, layer, at, DTYPES[name][0], *rows)


class HostPool(_Pool):
    """Pages of keys and values of all layers in one piece of host memory.

    A page holds ``page_tokens`` tokens of one KV head of one layer: K as [token][dim], then V with the values of 1
    (fp32), 2 (16-bit) or 4 (int8) tokens interleaved. int8 pages carry an fp32 scale per token for K and for V.
    Page (layer, page, head) starts ((layer * pages + page) * kv_heads + head) * page_bytes from the base.

    Args:
        buffer: writable contiguous memory of at least ``bytes_needed`` bytes, as anything with the buffer protocol or a
            data pointer, or as an address; 64-byte aligned for speed, 4-byte aligned at least. It must outlive the
            pool if it is an address. Its contents need no initialisation: tokens that no row covers are never used.
        pages: pages per layer.
        head_dim: a multiple of 16 up to 256.
        dtype: float32, float16, bfloat16 or int8.
        page_tokens: 16, 32, 64 or 128.
    """

    def __init__(
        self,
        buffer: Any,
        layers: int,
        pages: int,
        kv_heads: int,
        head_dim: int,
        dtype: Any = "bfloat16",
        page_tokens: int = 64,
    ) -> None:
        self._geometry(layers, kv_heads, head_dim)
        if pages < 0 or pages >= 2**31:
            raise ValueError(f"pages must be from 0 to 2**31 - 1, not {pages}")
        self.layers, self.pages, self.kv_heads, self.head_dim = layers, pages, kv_heads, head_dim
        self.dtype, self.page_tokens = dtype_name(dtype), page_tokens
        needed = self.bytes_needed(layers, pages, kv_heads, head_dim, dtype, page_tokens)
        self.page_bytes = needed // max(1, layers * pages * kv_heads)
        if isinstance(buffer, int):
            address = buffer
        else:
            array_ = as_array(buffer, writable=True)
            size = array_.itemsize * math.prod(array_.shape)
            if size < needed:
                raise ValueError(f"the pool needs {needed} bytes, the buffer has {size}")
            expected = array_.itemsize
            for n, stride in zip(reversed(array_.shape), reversed(array_.strides), strict=True):
                if n > 1 and stride != expected:
                    raise ValueError("the buffer must be contiguous")
                expected *= n
            address = array_.address
        if needed and (address == 0 or address % 4):
            raise ValueError("the buffer must be aligned to 4 bytes at least (64 for speed)")
        self.address = address
        self.buffer = buffer
        self.native = _native.Pool.paged(address, layers, pages, kv_heads, head_dim, DTYPES[self.dtype][0], page_tokens)

    @staticmethod
    def bytes_needed(
        layers: int, pages: int, kv_heads: int, head_dim: int, dtype: Any = "bfloat16", page_tokens: int = 64
    ) -> int:
        """The size of a pool in bytes."""
        if page_tokens not in PAGE_TOKENS:
            raise ValueError(f"page_tokens must be one of {PAGE_TOKENS}, not {page_tokens}")
        page = _native.page_offsets(DTYPES[dtype_name(dtype)][0], page_tokens, head_dim)[3]
        return layers * pages * kv_heads * page

    def append(self, layer: int, page_tables: PageTables, positions: Any, k: Any, v: Any, dtype: Any = None) -> None:
        """Writes one token per row.

        Args:
            page_tables: the rows' pages, see Plan.
            positions: [rows] the position of the new token in each row.
            k, v: [rows, kv_heads, head_dim].
        """
        begin, ids = _table(page_tables)
        at = int32s(positions, "positions")
        if len(begin) != len(at) + 1:
            raise ValueError(f"positions: {len(begin) - 1} rows, got {len(at)}")
        places = array("q")
        for row, position in enumerate(at):
            index = begin[row] + position // self.page_tokens
            if position < 0 or index >= begin[row + 1]:
                raise IndexError(f"row {row}: position {position} is outside its {begin[row + 1] - begin[row]} pages")
            places.append(ids[index] * self.page_tokens + position % self.page_tokens)
        self.write(layer, places, k, v, dtype)

    def copy_pages(self, source: Any, target: Any, layers: tuple[int, int] | None = None) -> None:
        """Copies pages ``source[i]`` to ``target[i]``, all heads, in layers [first, end) (default: all)."""
        first, end = layers if layers is not None else (0, self.layers)
        self.native.copy(first, end, int32s(source, "source"), int32s(target, "target"))


class SlotPool(_Pool):
    """SGLang's token-major buffers: per layer K and V as [slot, kv_heads, head_dim].

    Args:
        k, v: one array per layer, all of one shape and with the same strides; the last two dimensions contiguous.
        dtype: of the arrays; default: what they say, bfloat16 for 16-bit integers. Not int8.
    """

    def __init__(self, k: Sequence[Any], v: Sequence[Any], dtype: Any = None) -> None:
        if len(k) != len(v) or not k:
            raise ValueError(f"as many layers of k as of v are needed, at least one; got {len(k)} and {len(v)}")
        first = as_array(k[0], writable=True)
        if len(first.shape) != 3:
            raise ValueError(f"k: three dimensions are needed, got {len(first.shape)}")
        self.layers = len(k)
        self.pages, self.kv_heads, self.head_dim = first.shape
        self.page_tokens = 1
        self._geometry(self.layers, self.kv_heads, self.head_dim)
        if dtype is None:
            dtype = first.dtype if first.dtype in DTYPES else "bfloat16"
        self.dtype = dtype_name(dtype)
        if self.dtype == "int8":
            raise ValueError("a token-major pool cannot be int8: it has no scales")
        ks = [check(a, "k", first.shape, self.dtype, inner=2, writable=True) for a in k]
        vs = [check(a, "v", first.shape, self.dtype, inner=2, writable=True) for a in v]
        for label, arrays in (("k", ks), ("v", vs)):
            if len({a.strides[0] for a in arrays}) != 1:
                raise ValueError(f"{label}: all layers must have the same strides")
        self.buffer = (ks, vs)
        self.native = _native.Pool.token_major(
            [a.address for a in ks],
            [a.address for a in vs],
            self.pages,
            self.kv_heads,
            self.head_dim,
            DTYPES[self.dtype][0],
            ks[0].strides[0],
            vs[0].strides[0],
        )


class NativeJob(Protocol):
    """What ``cpu_kernels.workers`` runs: ``address`` is that of a ``cpu_kernels::Job``, valid as long as the object."""

    @property
    def address(self) -> int: ...


class Workers(Protocol):
    """A pool of worker threads: ``cpu_kernels.workers.WorkerPool``."""

    def run(self, job: NativeJob) -> None:
        """Runs a job to its end."""


#: Page ids of all rows: (offsets [rows + 1], ids) as in a CSR matrix, or one sequence of ids per row.
PageTables = tuple[Any, Any] | Sequence[Iterable[int]]


def _table(tables: PageTables) -> tuple[Any, Any]:
    if isinstance(tables, tuple) and len(tables) == 2:
        return int64s(tables[0], "page table offsets"), int32s(tables[1], "page ids")
    offsets, ids = array("q", [0]), array("i")
    for row in tables:
        ids.extend(row)
        offsets.append(len(ids))
    return offsets, ids


class Plan:
    """Who reads what in one step; made once and run for every layer.

    Args:
        pool: HostPool or SlotPool.
        lengths: [rows] tokens of each row, the newest included; 0 gives an output of zeros.
        page_tables: (offsets, page ids) or a sequence of page ids per row; slot ids for a SlotPool. Only the pages of
            tokens that are attended to must be valid.
        q_heads: query heads, 1 to 16 per KV head.
        scale: of the scores; default head_dim ** -0.5.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); 0: they do not.
        window: attend to the last ``window`` tokens of each row only; 0: to all.
        threads: how many workers the work is cut for, and the most that may run it.
        q_dtype: element type of queries and outputs; default: the pool's, float32 for an int8 pool.
        prefix_groups: runs of tokens whose pages several rows share, as (rows, end) for tokens [0, end) or
            (rows, begin, end). They are read once for all of them.
        isa: name of the instruction set; default: see choose_isa.
        tuning: default: what was measured on this machine (python -m cpu_kernels.calibration), else Tuning().

    Raises:
        ValueError: something does not fit; the message names the row.
    """

    def __init__(
        self,
        pool: HostPool | SlotPool,
        lengths: Any,
        page_tables: PageTables,
        q_heads: int,
        *,
        scale: float | None = None,
        soft_cap: float = 0.0,
        window: int = 0,
        threads: int = 1,
        q_dtype: Any = None,
        prefix_groups: Sequence[tuple[Any, ...]] | None = None,
        isa: str | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        self.pool = pool
        self.q_heads = q_heads
        self.isa = choose_isa(isa).name
        self.q_dtype = dtype_name(q_dtype) if q_dtype is not None else pool.dtype
        if self.q_dtype == "int8":
            if q_dtype is not None:
                raise ValueError("q_dtype cannot be int8")
            self.q_dtype = "float32"
        scale = pool.head_dim**-0.5 if scale is None else float(scale)
        if not (math.isfinite(scale) and scale > 0):
            raise ValueError(f"scale must be positive and finite, not {scale}")
        if not (math.isfinite(soft_cap) and soft_cap >= 0):
            raise ValueError(f"soft_cap must be finite and not negative, not {soft_cap}")
        row_lengths = int32s(lengths, "lengths")
        self.rows = len(row_lengths)
        begin, ids = _table(page_tables)
        groups, group_rows = array("i"), array("i")
        for group in prefix_groups or ():
            members, first, end = group if len(group) == 3 else (group[0], 0, group[1])
            groups.extend((first, end, len(group_rows), len(group_rows) + len(members)))
            group_rows.extend(members)
        if tuning is None:
            from cpu_kernels.tuning_files import load  # here, because that module needs Tuning

            tuning = load(self.isa) or Tuning()
        table = memoryview(groups).cast("B").cast("i", (len(groups) // 4, 4)) if groups else _NO_GROUPS
        self.native = _native.PlanHandle(
            pool.native,
            self.isa,
            row_lengths,
            ids,
            begin,
            q_heads,
            DTYPES[self.q_dtype][0],
            scale,
            soft_cap,
            window,
            threads,
            table,
            group_rows,
            tuning.native(),
        )
        self.threads = threads

    @property
    def bytes(self) -> int:
        """Bytes of keys and values that one layer's run reads."""
        return self.native.cost[0]

    @property
    def ran(self) -> set[str]:
        """The instruction sets whose kernels have in fact run for this plan."""
        return self.native.ran()

    def job(self, layer: int, q: Any, out: Any, lse: Any = None, k: Any = None, v: Any = None) -> _native.PlanJob:
        """The layer's run as a job for a pool of workers.

        It keeps the plan and the arrays alive; keep it until it ended. One job of a plan runs at a time; another is
        refused (RuntimeError) meanwhile.

        Args:
            layer: index of the layer.
            q: [rows, q_heads, head_dim] in q_dtype, the last two dimensions contiguous.
            out: likewise; written.
            lse: [rows, q_heads] float32, last dimension contiguous; the natural log-sum-exp of the scaled scores,
                -inf for an empty row. None: not wanted.
            k, v: [rows, kv_heads, head_dim] in q_dtype: the newest token of every row, appended to the pool at position
                length - 1 before it is read. None: it is there already.

        Raises:
            IndexError: a layer outside the pool. ValueError, TypeError: an array does not fit.
        """
        return self._jobs((layer,), q, out, lse, k, v, each=False)[0]

    def jobs(
        self, layers: Sequence[int], q: Any, out: Any, lse: Any = None, k: Any = None, v: Any = None
    ) -> _native.PlanJobs:
        """The runs of several layers, made in one go: what the hand-offs of a step refer to.

        ``jobs.address(i)`` and ``jobs[i].address`` is the ``cpu_kernels::Job`` of ``layers[i]``.

        Args:
            layers: indices of layers.
            Others: as for job, with a dimension of len(layers) before the others, of any stride. So q, k and v may be
                views of one packed outbox: ``(address, shape, strides in bytes, element type)``, see
                :func:`cpu_kernels.arrays.as_array`.
        """
        return self._jobs(layers, q, out, lse, k, v, each=True)

    def _jobs(
        self, layers: Sequence[int], q: Any, out: Any, lse: Any, k: Any, v: Any, *, each: bool
    ) -> _native.PlanJobs:
        if (k is None) != (v is None):
            raise ValueError("k and v are given together or not at all")
        outer = (len(layers),) if each else ()
        kept: list[Array] = []

        def place(data: Any, name: str, *shape: int, dtype: str = "", **options: Any) -> tuple[int, int, int]:
            """Address, bytes from layer to layer, bytes from row to row."""
            if data is None:
                return 0, 0, 0
            array_ = check(data, name, (*outer, self.rows, *shape), dtype or self.q_dtype, **options)
            kept.append(array_)
            return array_.address, array_.strides[0] if each else 0, array_.strides[len(outer)]

        heads, new, dim = self.q_heads, self.pool.kv_heads, self.pool.head_dim
        jobs = self.native.jobs(
            int32s(layers, "layers"),
            place(q, "q", heads, dim, inner=2),
            place(out, "out", heads, dim, inner=2, writable=True),
            place(lse, "lse", heads, dtype="float32", writable=True),
            place(k, "k", new, dim, inner=2),
            place(v, "v", new, dim, inner=2),
        )
        jobs.keep = kept
        return jobs

    def run(
        self,
        layer: int,
        q: Any,
        out: Any,
        lse: Any = None,
        *,
        k: Any = None,
        v: Any = None,
        workers: Workers | int | None = None,
    ) -> None:
        """Computes the attention of one layer and returns when it is done.

        Args:
            workers: None: the calling thread does all; a number: so many threads, made for this call; else a
                ``cpu_kernels.workers.WorkerPool`` of at most the plan's threads (the calling thread helps if the plan
                has one more than the pool).
            Others: see job.
        """
        job = self.job(layer, q, out, lse, k, v)
        if workers is None:
            job.run(1)
        elif isinstance(workers, int):
            if not 1 <= workers <= self.threads:
                raise ValueError(f"workers must be from 1 to the plan's {self.threads} threads, not {workers}")
            job.run(workers)
        else:
            workers.run(job)


_NO_GROUPS = memoryview(bytes(16)).cast("i", (1, 4))[:0]
