"""Every instruction set of this machine against float64, on shapes around vector width and page size."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpu_kernels import _native, choose_isa, features, isas, tuning_files
from cpu_kernels import attention as attention_module
from cpu_kernels.attention import HostPool, Plan, Tuning
from cpu_kernels.isa import Isa
from tests.kernels import reference as ref

#: Largest error of an output as a fraction of the largest output, by element type of queries and outputs: fp32
#: arithmetic plus the rounding of the output (2^-11, 2^-8).
BOUNDS = {"float32": 3e-6, "float16": 6e-4, "bfloat16": 4.5e-3}
#: The same where weights, and queries of another type, are rounded to bfloat16 too.
BF16_ARITHMETIC = 8e-3
#: int8 pools, against attention over what the pool holds: queries and weights are rounded to 16 bits.
INT8 = 2e-4
LSE = 2e-5
INT8_LSE = 5e-4
#: The same with 8-bit arithmetic: outputs, and log-sum-exp (whose error is that of the scores).
INT8_FAST, INT8_FAST_LSE = 2e-2, 5e-2

ALL_ISAS = [isa.name for isa in isas()]
LENGTHS = [0, 1, 2, 15, 17, 63, 64, 65, 130, 257]
TUNING = Tuning()


def unavailable(isa: str) -> str:
    """Why this machine or build cannot run the instruction set, or ""."""
    if not _native.has_kernels(isa):
        return f"this build has no kernels for {isa}"
    missing = {i.name: i for i in isas()}[isa].missing(features())
    return f"this machine lacks {', '.join(missing)}" if missing else ""


def each_isa() -> Any:
    marks = [pytest.param(isa, marks=pytest.mark.skipif(bool(why := unavailable(isa)), reason=why)) for isa in ALL_ISAS]
    return pytest.mark.parametrize("isa", marks)


def verify(
    isa: str,
    case: ref.Case,
    q_heads: int,
    q_dtype: str,
    rng: np.random.Generator,
    workers: Any = None,
    bound: float | None = None,
    **options: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """Runs a plan and compares with float64."""
    head_dim = case.pool.head_dim
    q = ref.random_queries(rng, len(case.lengths), q_heads, head_dim, q_dtype)
    options.setdefault("tuning", TUNING)
    plan = Plan(case.pool, case.lengths, case.tables, q_heads, q_dtype=q_dtype, isa=isa, **options)
    out, lse = ref.run_plan(plan, q, workers=workers)
    scale = options.get("scale") or head_dim**-0.5
    want, want_lse = ref.attention(
        ref.decode(q, q_dtype),
        case.keys,
        case.values,
        scale,
        options.get("soft_cap", 0.0),
        options.get("window", 0),
    )
    what = f"{isa} {case.pool.dtype} {q_dtype} heads {q_heads}/{case.pool.kv_heads} dim {head_dim} {options}"
    if len(case.lengths):
        assert plan.ran == {isa}, what
    bf16_arithmetic = case.pool.dtype == "bfloat16" and isa in ("avx512_bf16", "amx", "amx_shim")
    if bound is None:
        bound = BOUNDS[q_dtype]
        if bf16_arithmetic:
            bound = max(bound, BF16_ARITHMETIC)
        if case.pool.dtype == "int8":
            bound = max(bound, INT8 if options["tuning"].accurate_int8 else INT8_FAST)
    assert ref.error(out, q_dtype, want) < bound, what
    empty = np.isinf(want_lse)
    assert (np.isinf(lse) == empty).all() and (lse[empty] < 0).all(), what
    lse_bound = LSE
    if case.pool.dtype == "int8":
        lse_bound = INT8_LSE if options["tuning"].accurate_int8 else INT8_FAST_LSE
    if bf16_arithmetic and q_dtype != "bfloat16":
        lse_bound = BF16_ARITHMETIC
    assert np.abs(lse[~empty] - want_lse[~empty]).max(initial=0) < lse_bound, what
    return out, lse


@each_isa()
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_against_float64(isa: str, dtype: str, head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    q_dtype = "float32" if dtype == "int8" else dtype
    for page_tokens, ratios in ((64, (1, 2, 3, 4, 5, 7, 8, 16)), (16, (4, 8)), (32, (6,)), (128, (4,))):
        case = ref.make_case(rng, LENGTHS, 2, head_dim, dtype, page_tokens)
        for ratio in ratios:
            verify(isa, case, 2 * ratio, q_dtype, rng)


@each_isa()
@pytest.mark.parametrize("head_dim", [16, 80, 96, 128, 256])
def test_8_bit_arithmetic(isa: str, head_dim: int) -> None:
    """Where the instruction set has it; else 16-bit arithmetic runs."""
    rng = np.random.default_rng(head_dim)
    tuning = Tuning(accurate_int8=False)
    case = ref.make_case(rng, LENGTHS, 2, head_dim, "int8")
    for ratio in (1, 2, 4, 7, 8):
        verify(isa, case, 2 * ratio, "float32", rng, tuning=tuning, window=97)
        fast, accurate = (
            verify(isa, case, 2 * ratio, "float32", np.random.default_rng(ratio), tuning=Tuning(accurate_int8=exact))[0]
            for exact in (False, True)
        )
        assert (fast != accurate).any() == (isa in tuning_files.BYTE_ISAS)


@each_isa()
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_token_major_slots(isa: str, dtype: str) -> None:
    rng = np.random.default_rng(5)
    for head_dim, ratio in ((64, 1), (80, 4), (96, 3), (128, 8), (256, 2)):
        case = ref.make_case(rng, LENGTHS, 2, head_dim, dtype, slots=True)
        verify(isa, case, 2 * ratio, dtype, rng)
        verify(isa, case, 2 * ratio, dtype, rng, window=21, threads=3, workers=3)


@each_isa()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_scale_soft_cap_and_window(isa: str, dtype: str) -> None:
    rng = np.random.default_rng(6)
    case = ref.make_case(rng, LENGTHS, 2, 64, dtype)
    q_dtype = "float32" if dtype == "int8" else dtype
    # The cap's derivative is at most 1, but near it the whole score counts: errors grow with the cap.
    for options in (
        dict(scale=0.3),
        dict(soft_cap=3.0),
        dict(soft_cap=50.0, scale=1.0, bound=1e-2),
        *(dict(window=w) for w in (1, 2, 15, 16, 63, 64, 65, 100, 1000)),
        dict(window=37, soft_cap=4.0, threads=2, workers=2, tuning=Tuning(min_split_tokens=1)),
    ):
        verify(isa, case, 8, q_dtype, rng, **options)


@each_isa()
def test_query_type_differs_from_the_pools(isa: str) -> None:
    rng = np.random.default_rng(7)
    for dtype in ("float32", "float16", "bfloat16", "int8"):
        case = ref.make_case(rng, [70, 3], 2, 64, dtype)
        for q_dtype in ("float32", "float16", "bfloat16"):
            verify(isa, case, 8, q_dtype, rng)


@each_isa()
@pytest.mark.parametrize("tuning", [Tuning(prefetch_hint="none"), Tuning(prefetch_hint="nta", prefetch_tiles=2)])
def test_prefetch_changes_nothing(isa: str, tuning: Tuning) -> None:
    case = ref.make_case(np.random.default_rng(8), LENGTHS, 2, 128)
    results = [verify(isa, case, 8, "bfloat16", np.random.default_rng(9), tuning=t) for t in (TUNING, tuning)]
    np.testing.assert_array_equal(results[0][0], results[1][0])


@each_isa()
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_splits_and_merges(isa: str, threads: int) -> None:
    rng = np.random.default_rng(10)
    case = ref.make_case(rng, [1000, 3, 0, 129, 700], 2, 64)
    tuning = Tuning(min_split_tokens=64, last_round_tokens=8, min_thread_tokens=1)
    verify(isa, case, 8, "bfloat16", rng, threads=threads, workers=threads, tuning=tuning)
    one = ref.make_case(rng, [6400], 1, 64)  # more partial results of one row than one merge takes
    tuning = Tuning(min_split_tokens=1, last_round_tokens=1)
    assert Plan(one.pool, one.lengths, one.tables, 1, threads=50, isa=isa, tuning=tuning).native.partials > 64
    verify(isa, one, 1, "bfloat16", rng, threads=50, workers=3, tuning=tuning)


@each_isa()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("threads", [1, 3])
def test_shared_prefix(isa: str, dtype: str, threads: int) -> None:
    rng = np.random.default_rng(11)
    lengths = [200, 192, 350, 260, 0, 300, 193, 500, 201, 400]
    case = ref.make_case(rng, lengths, 2, 64, dtype, shared=192)
    q_dtype = "float32" if dtype == "int8" else dtype
    rows = [0, 1, 2, 3, 5, 6, 7, 8, 9]
    tuning = Tuning(min_split_tokens=64)
    for ratio in (1, 3, 8, 16):
        for groups in ([(rows, 192)], [(rows, 0, 128), (rows[3:], 128, 192)], [([0, 1], 64), ([2, 3], 64)]):
            verify(
                isa,
                case,
                2 * ratio,
                q_dtype,
                rng,
                prefix_groups=groups,
                threads=threads,
                workers=threads,
                tuning=tuning,
            )
        verify(isa, case, 2 * ratio, q_dtype, rng, prefix_groups=[(rows, 192)], window=300, threads=threads)
    # Several passes, in pieces of one tile.
    pieces = Tuning(min_split_tokens=64, prefix_piece_kib=1)
    verify(isa, case, 32, q_dtype, rng, prefix_groups=[(rows, 192)], threads=threads, tuning=pieces)


@each_isa()
@pytest.mark.parametrize("prefetch_tiles", [1, 2])
def test_a_prefix_shared_by_many(isa: str, prefetch_tiles: int) -> None:
    """More queries than one segment takes: several segments, each of several passes."""
    rng = np.random.default_rng(15)
    case = ref.make_case(rng, [321 + 7 * i for i in range(70)], 1, 64, "bfloat16", shared=320)
    tuning = Tuning(min_split_tokens=64, prefix_piece_kib=16, prefetch_tiles=prefetch_tiles)
    for threads in (1, 3):
        verify(isa, case, 8, "bfloat16", rng, prefix_groups=[(range(70), 320)], threads=threads, tuning=tuning)


@each_isa()
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_misaligned_memory(isa: str, dtype: str) -> None:
    """Pools, queries and outputs need no more alignment than their elements (int8 pools: 4 bytes, for the scales)."""
    rng = np.random.default_rng(12)
    q_dtype = "float32" if dtype == "int8" else dtype
    case = ref.make_case(rng, [70, 128, 5], 2, 80, dtype, offset=4)
    q = ref.random_queries(rng, 3, 8, 80, q_dtype)
    size = q.dtype.itemsize
    row = 8 * 80 + 7
    places = [ref.aligned(3 * row * size, size, 0xFF).view(q.dtype) for _ in range(2)]
    views = [np.lib.stride_tricks.as_strided(p, (3, 8, 80), (row * size, 80 * size, size)) for p in places]
    views[0][...] = q
    plan = Plan(case.pool, case.lengths, case.tables, 8, q_dtype=q_dtype, isa=isa, tuning=TUNING)
    plan.run(0, views[0], views[1])
    want, _ = ref.attention(ref.decode(q, q_dtype), case.keys, case.values, 80**-0.5)
    bound = max(BOUNDS[q_dtype], INT8 if dtype == "int8" else BF16_ARITHMETIC if dtype == "bfloat16" else 0)
    assert ref.error(np.array(views[1]), q_dtype, want) < bound


@each_isa()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("slots", [False, True])
def test_new_tokens_are_appended_first(isa: str, dtype: str, slots: bool) -> None:
    if slots and dtype == "int8":
        pytest.skip("token-major pools have no scales")
    rng = np.random.default_rng(13)
    lengths = [1, 64, 65, 130]
    case = ref.make_case(rng, lengths, 2, 64, dtype, slots=slots, layers=2, layer=1)
    q_dtype = "float32" if dtype == "int8" else dtype
    k, v = (ref.random_queries(rng, 4, 2, 64, q_dtype) for _ in range(2))
    q = ref.random_queries(rng, 4, 8, 64, q_dtype)
    out = np.empty_like(q)
    options: dict[str, Any] = dict(threads=2, isa=isa, q_dtype=q_dtype, tuning=Tuning(min_split_tokens=1))
    plan = Plan(case.pool, case.lengths, case.tables, 8, **options)
    plan.run(1, q, out, k=k, v=v, workers=2)
    for row in range(4):
        case.keys[row][-1], case.values[row][-1] = ref.decode(k[row], q_dtype), ref.decode(v[row], q_dtype)
    want, _ = ref.attention(ref.decode(q, q_dtype), case.keys, case.values, 64**-0.5)
    # The reference has the new token before it was quantised.
    bound = 0.02 if dtype == "int8" else max(BOUNDS[q_dtype], BF16_ARITHMETIC if dtype == "bfloat16" else 0)
    assert ref.error(out, q_dtype, want) < bound


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_shapes(data: st.DataObject) -> None:
    """All instruction sets agree with float64, and so with each other, on random shapes."""
    dtype = data.draw(st.sampled_from(["float32", "float16", "bfloat16", "int8"]))
    slots = dtype != "int8" and data.draw(st.booleans())
    head_dim = data.draw(st.integers(1, 16)) * 16
    kv_heads, ratio = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 16))
    lengths = data.draw(st.lists(st.integers(0, 300), min_size=0, max_size=6))
    page_tokens = data.draw(st.sampled_from([16, 32, 64, 128]))
    seed = data.draw(st.integers(0, 2**31))
    threads = data.draw(st.integers(1, 4))
    options = dict(
        window=data.draw(st.sampled_from([0, 0, 1, 33, 200])),
        soft_cap=data.draw(st.sampled_from([0.0, 0.0, 10.0])),
        threads=threads,
        tuning=Tuning(min_split_tokens=data.draw(st.sampled_from([1, 64, 256])), dot_min_queries=1, tile_min_queries=1),
    )
    rng = np.random.default_rng(seed)
    case = ref.make_case(rng, lengths, kv_heads, head_dim, dtype, page_tokens, slots)
    for isa in ALL_ISAS:
        if not unavailable(isa):
            verify(
                isa,
                case,
                kv_heads * ratio,
                "float32" if dtype == "int8" else dtype,
                np.random.default_rng(seed),
                workers=threads,
                **options,
            )


def test_tile_arithmetic_in_software(monkeypatch: pytest.MonkeyPatch) -> None:
    """The AMX kernels' algorithm, with tiles in software where the machine has none."""
    if not _native.has_kernels("amx_shim") or unavailable("avx2"):
        pytest.skip("needs AVX2")
    monkeypatch.setattr(attention_module, "choose_isa", lambda name=None: Isa(name or "amx_shim", "", ()))
    rng = np.random.default_rng(14)
    for head_dim, page_tokens in ((64, 64), (80, 16), (96, 32), (128, 64), (256, 128), (48, 16)):
        case = ref.make_case(rng, [*LENGTHS, 96, 300], 2, head_dim, "bfloat16", page_tokens)
        for ratio in (1, 4, 7, 8, 16):
            verify("amx_shim", case, 2 * ratio, "bfloat16", rng)
        verify("amx_shim", case, 8, "bfloat16", rng, window=37, soft_cap=5.0)
        case = ref.make_case(rng, [*LENGTHS, 300], 2, head_dim, "int8", page_tokens)
        for ratio in (3, 8, 9):
            verify("amx_shim", case, 2 * ratio, "float32", rng, window=37 if ratio == 3 else 0)
        verify("amx_shim", case, 16, "float16", rng, soft_cap=5.0)
        verify("amx_shim", case, 32, "float32", rng, bound=INT8_FAST, tuning=Tuning(accurate_int8=False))
    for dtype, q_dtype in (("bfloat16", "bfloat16"), ("int8", "float32")):
        case = ref.make_case(rng, [300, 400, 200, 250, 260], 2, 128, dtype, shared=192)
        for ratio in (1, 3, 8, 16):
            verify("amx_shim", case, 2 * ratio, q_dtype, rng, prefix_groups=[(range(5), 192)], threads=2, workers=2)
    # Scores so far apart that the maximum to which weights refer must be raised now and then.
    case = ref.make_case(rng, [300, 400, 200, 250, 260], 2, 128, "bfloat16", shared=192)
    verify("amx_shim", case, 32, "bfloat16", rng, prefix_groups=[(range(5), 192)], scale=1.0)
    # Weights of several tiles, which such a rise finds waiting; blocks that are whole and one that is not.
    for head_dim, rows, page_tokens in ((128, 13, 64), (80, 18, 64), (64, 6, 16)):
        case = ref.make_case(rng, [650 + 9 * i for i in range(rows)], 1, head_dim, "bfloat16", page_tokens, shared=640)
        for tiles in (1, 2, 3, 4):
            for scale in (1.0, head_dim**-0.5):
                tuning = Tuning(held_tiles=tiles, prefix_piece_kib=100, min_split_tokens=32)
                groups: dict[str, Any] = dict(prefix_groups=[(range(rows), 640)], tuning=tuning)
                for heads in (5, 8):
                    verify("amx_shim", case, heads, "bfloat16", rng, scale=scale, threads=2, workers=2, **groups)
        verify("amx_shim", case, 8, "bfloat16", rng, soft_cap=5.0, window=300, **groups)


@each_isa()
def test_the_forced_instruction_set_runs(isa: str) -> None:
    """In a process of its own, by the environment variable; the kernels themselves say which ones ran."""
    code = (
        "import numpy as np\n"
        "from cpu_kernels.attention import HostPool, Plan, Tuning\n"
        "pool = HostPool(np.zeros(HostPool.bytes_needed(1, 1, 1, 64), np.uint8), 1, 1, 1, 64)\n"
        "plan = Plan(pool, [5], [[0]], 16, tuning=Tuning())\n"
        "q = np.zeros((1, 16, 64), np.uint16)\n"
        "assert plan.ran == set()\n"
        "plan.run(0, q, q.copy())\n"
        "print(*plan.ran)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "CPU_KERNELS_ISA": isa},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [isa]


def test_every_instruction_set_of_the_machine_has_kernels() -> None:
    assert _native.has_kernels(choose_isa(None, features()).name)
    assert not _native.has_kernels("mmx")
    with pytest.raises(ValueError, match="unknown instruction set"):
        Plan(HostPool(0, 1, 0, 1, 64), [], [], 1, isa="mmx")
