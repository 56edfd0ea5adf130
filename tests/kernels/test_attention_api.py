"""What the attention API refuses, and moving tokens into and out of pools."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from cpu_kernels.arrays import as_array, check, int32s
from cpu_kernels.attention import HostPool, Plan, SlotPool, Tuning
from tests.kernels import reference as ref

DIM, HEADS, PAGES = 64, 2, 5


@pytest.fixture
def pool() -> HostPool:
    return HostPool(np.zeros(HostPool.bytes_needed(2, PAGES, HEADS, DIM), np.uint8), 2, PAGES, HEADS, DIM)


def plan(pool: Any, lengths: Any = (70, 3), tables: Any = ((0, 1), (2,)), q_heads: int = 8, **options: Any) -> Plan:
    return Plan(pool, list(lengths), [list(t) for t in tables], q_heads, tuning=Tuning(), **options)


def arrays(rows: int = 2, q_heads: int = 8) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((rows, q_heads, DIM), np.uint16), np.zeros((rows, q_heads, DIM), np.uint16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(lengths=(70,), tables=((0, 1), (2,))), "table offsets"),
        (dict(lengths=(200, 3)), "row 0: 200 tokens need 4 page ids, the table has 2"),
        (dict(lengths=(-1, 3)), "row 0: negative length"),
        (dict(tables=((0, 5), (2,))), "row 0: page id 5 is outside the pool of 5"),
        (dict(tables=((0, 1), (-1,))), "row 1: page id -1 is outside"),
        (dict(q_heads=7), "multiple of the 2 KV heads"),
        (dict(q_heads=0), "multiple of the 2 KV heads"),
        (dict(q_heads=34), "at most 16"),
        (dict(threads=0), "threads must be at least 1"),
        (dict(window=-1), "window must not be negative"),
        (dict(scale=0.0), "scale must be positive"),
        (dict(scale=float("nan")), "scale must be positive"),
        (dict(soft_cap=-1.0), "soft_cap"),
        (dict(q_dtype="int8"), "q_dtype cannot be int8"),
        (dict(q_dtype="float64"), "unknown element type"),
        (dict(isa="mmx"), "unknown instruction set"),
        (dict(prefix_groups=[([0, 1], 3)]), "row 1: its page ids differ from those of row 0"),
        (dict(prefix_groups=[([0, 1], 64)]), "row 1: shorter than the shared run"),
        (dict(prefix_groups=[([0, 2], 3)]), "row 2 is not in the batch"),
        (dict(prefix_groups=[([0, 1], -1)]), "bad token range"),
        (dict(prefix_groups=[([0, 1], 1, 3)]), "must begin at a page"),
        (dict(tables=((0, 1), (0,)), prefix_groups=[([0, 0], 3)]), "listed twice"),
        (dict(tables=((0, 1), (0,)), prefix_groups=[([0, 1], 3), ([0, 1], 2)]), "overlap"),
    ],
)
def test_plans_refuse(pool: HostPool, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(pool, **options)


def test_table_offsets_are_checked(pool: HostPool) -> None:
    ids = array("i", [0, 1, 2])
    for offsets in ([0, 2], [0, 2, 4], [0, 3, 2], [-1, 2, 3], [0, 2, 2**40]):
        with pytest.raises(ValueError, match="table"):
            Plan(pool, [1, 1], (offsets, ids), 8, tuning=Tuning())
    with pytest.raises(ValueError, match="integers"):
        Plan(pool, [1.5], [[0]], 8, tuning=Tuning())
    with pytest.raises(ValueError, match="integers"):
        Plan(pool, np.ones(2, np.float32), [[0], [0]], 8, tuning=Tuning())


def test_pages_outside_the_window_need_not_exist(pool: HostPool) -> None:
    plan(pool, lengths=(200, 3), tables=((-1, 99, 1, 0), (2,)), window=72)
    with pytest.raises(ValueError, match="page id 99"):
        plan(pool, lengths=(200, 3), tables=((-1, 99, 1, 0), (2,)), window=73)


def test_runs_refuse(pool: HostPool) -> None:
    p = plan(pool)
    q, out = arrays()
    p.run(1, q, out, np.zeros((2, 8), np.float32))
    for layer in (-1, 2):
        with pytest.raises(IndexError, match=r"layer -?\d is outside the pool of 2"):
            p.run(layer, q, out)
    read_only = out.copy()
    read_only.flags.writeable = False
    bad: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        ((q[:1], out), {}, ValueError, "q: shape must be 2x8x64, got 1x8x64"),
        ((q, out[:, :4]), {}, ValueError, "out: shape"),
        ((q.astype(np.float32), out), {}, ValueError, "q: elements must be bfloat16, got float32"),
        ((q, out.view(np.float16)), {}, ValueError, "out: elements must be bfloat16"),
        ((q.transpose(0, 2, 1).copy().transpose(0, 2, 1), out), {}, ValueError, "q: the last 2 dimension"),
        ((q, read_only), {}, (ValueError, BufferError), "(?i)read-only|not writable|not writeable"),
        (([[1.0]], out), {}, TypeError, "buffer|bytes-like"),
        ((q, out, np.zeros((2, 8))), {}, ValueError, "lse: elements must be float32"),
        ((q, out, np.zeros((8, 2), np.float32).T), {}, ValueError, "lse: the last"),
        ((q, out), dict(k=q[:, :2]), ValueError, "together"),
        ((q, out), dict(k=q[:, :3], v=q[:, :2]), ValueError, "k: shape must be 2x2x64"),
        ((q, out), dict(workers=0), ValueError, "workers must be from 1"),
        ((q, out), dict(workers=2), ValueError, "workers must be from 1 to the plan's 1"),
    ]
    for args, options, kind, message in bad:
        with pytest.raises(kind, match=message):
            p.run(0, *args, **options)
    odd = np.zeros(q.nbytes + 1, np.uint8)[1:].view(np.uint16).reshape(q.shape)
    with pytest.raises(ValueError, match="multiples of the element size"):
        p.run(0, odd, out)


def test_new_tokens_need_a_place(pool: HostPool) -> None:
    q, out = arrays()
    new = np.zeros((2, HEADS, DIM), np.uint16)
    with pytest.raises(ValueError, match="no place for a new k, v"):
        plan(pool, lengths=(0, 3)).run(0, q, out, k=new, v=new)
    shared = plan(pool, lengths=(70, 64), tables=((0, 1), (0,)), prefix_groups=[([0, 1], 64)])
    with pytest.raises(ValueError, match="no place for a new k, v"):
        shared.run(0, q, out, k=new, v=new)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(head_dim=72), "head_dim must be a multiple of 16"),
        (dict(head_dim=272), "head_dim"),
        (dict(page_tokens=48), "page_tokens must be one of"),
        (dict(layers=0), "at least 1"),
        (dict(kv_heads=0), "at least 1"),
        (dict(pages=-1), "pages"),
        (dict(dtype="float64"), "unknown element type"),
        (dict(pages=6), "the pool needs 98304 bytes, the buffer has 81920"),
    ],
)
def test_pools_refuse(options: dict[str, Any], message: str) -> None:
    shape = dict(layers=1, pages=5, kv_heads=1, head_dim=64, dtype="bfloat16", page_tokens=64)
    buffer = np.zeros(HostPool.bytes_needed(1, 5, 1, 64), np.uint8)
    HostPool(buffer, **shape)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        HostPool(buffer, **(shape | options))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="aligned"):
        HostPool(buffer.ctypes.data + 2, **shape)  # type: ignore[arg-type]
    with pytest.raises((ValueError, BufferError)):
        HostPool(bytes(buffer.nbytes), **shape)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous"):
        HostPool(np.zeros(4 * buffer.nbytes, np.uint8)[::2], **shape)  # type: ignore[arg-type]


def test_slot_pools_refuse() -> None:
    k = np.zeros((10, 2, 64), np.uint16)
    SlotPool([k], [k.copy()])
    for ks, vs, message in (
        ([], [], "at least one"),
        ([k], [k, k], "as many layers"),
        ([k], [k[:5]], "v: shape must be 10x2x64"),
        ([k, k[:, :, :]], [k, np.zeros((20, 2, 64), np.uint16)[::2]], "same strides"),
        ([k[:, :, ::2]], [k], "head_dim|contiguous"),
        ([k[0]], [k[0]], "three dimensions"),
    ):
        with pytest.raises(ValueError, match=message):
            SlotPool(ks, vs)
    with pytest.raises(ValueError, match="no scales"):
        SlotPool([k.view(np.int8)], [k.view(np.int8)])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("given", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("page_tokens", [16, 64])
def test_tokens_come_back(dtype: str, given: str, page_tokens: int) -> None:
    rng = np.random.default_rng(1)
    shape = (1, 6, 3, 80)
    size = HostPool.bytes_needed(*shape, dtype, page_tokens)
    pool = HostPool(ref.aligned(size, 0, 0xFF), *shape, dtype, page_tokens)
    places = rng.permutation(6 * page_tokens)[:50].astype(np.int64)
    places[10:40] = np.arange(30)  # a run that crosses pages of 16
    places = np.unique(places)
    k, v = (ref.encode(rng.standard_normal((len(places), 3, 80)).astype(np.float32), given) for _ in range(2))
    pool.write(0, places, k, v, given)
    got = [np.empty((len(places), 3, 80), np.float32) for _ in range(2)]
    pool.read(0, places, *got)
    # int8: half a step of 1/127 of the row's largest; else the coarser of the two types.
    bound = {"int8": 0.5 / 127, "bfloat16": 2**-8, "float16": 2**-11, "float32": 0}[dtype]
    for want, back in zip((k, v), got, strict=True):
        exact = ref.decode(want, given)
        limit = bound * (np.abs(exact).max(axis=2, keepdims=True) if dtype == "int8" else np.abs(exact))
        assert (np.abs(back - exact) <= limit * 1.01 + 1e-7).all()


def test_int8_extremes() -> None:
    pool = HostPool(np.zeros(HostPool.bytes_needed(1, 1, 1, 16, "int8"), np.uint8), 1, 1, 1, 16, "int8")
    rows = np.zeros((4, 1, 16), np.float32)
    rows[1] = 1e30
    rows[2, 0, :2] = (3.0, -3.0)
    rows[3, 0, 0] = np.nan
    pool.write(0, range(4), rows, rows)
    k, v = np.empty_like(rows), np.empty_like(rows)
    pool.read(0, range(4), k, v)
    np.testing.assert_array_equal(k[0], 0)
    np.testing.assert_allclose(k[:3], rows[:3], rtol=1e-6)
    np.testing.assert_array_equal(k[:3], v[:3])


def test_write_and_copy_refuse(pool: HostPool) -> None:
    k = np.zeros((2, HEADS, DIM), np.uint16)
    for places in ([0, PAGES * 64], [-1, 0]):
        with pytest.raises(IndexError, match="outside the pool"):
            pool.write(0, places, k, k)
    with pytest.raises(IndexError, match="layer 2"):
        pool.write(2, [0, 1], k, k)
    with pytest.raises(ValueError, match="k: shape"):
        pool.write(0, [0], k, k)
    with pytest.raises(ValueError, match="int8"):
        pool.write(0, [0, 1], k, k, "int8")
    with pytest.raises(IndexError, match="page 5"):
        pool.copy_pages([0], [5])
    with pytest.raises(ValueError, match="1 pages to copy from, 2"):
        pool.copy_pages([0], [1, 2])
    with pytest.raises(IndexError, match="position 128"):
        pool.append(0, [[0, 1]], [128], k[:1], k[:1])


def test_append_and_copy() -> None:
    rng = np.random.default_rng(2)
    pool = HostPool(np.zeros(HostPool.bytes_needed(2, PAGES, HEADS, DIM), np.uint8), 2, PAGES, HEADS, DIM)
    k, v = (rng.integers(0, 2**15, (2, HEADS, DIM)).astype(np.uint16) for _ in range(2))
    pool.append(1, [[3, 1], [2]], [65, 63], k, v)
    pool.copy_pages([1], [4])
    back = [np.empty_like(k) for _ in range(2)]
    pool.read(1, [4 * 64 + 1, 2 * 64 + 63], *back)
    np.testing.assert_array_equal(back[0], k)
    np.testing.assert_array_equal(back[1], v)
    pool.copy_pages([0], [4], (1, 2))
    pool.read(1, [4 * 64 + 1, 2 * 64 + 63], *back)
    np.testing.assert_array_equal(back[0][0], 0)


def test_arrays_of_any_origin() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros((2, 3, 4), dtype=torch.bfloat16)
    seen = as_array(tensor)
    assert (seen.address, seen.shape, seen.strides, seen.dtype) == (
        tensor.data_ptr(),
        (2, 3, 4),
        (24, 8, 2),
        "bfloat16",
    )
    again = as_array((tensor.data_ptr(), (2, 3, 4), None, torch.bfloat16))
    assert again.strides == seen.strides
    check(array("f", [1, 2]), "x", (2,), "float32")
    assert list(int32s([1, 2], "x")) == [1, 2]
    assert list(int32s(torch.tensor([1, 2]), "x")) == [1, 2]
    with pytest.raises(TypeError, match="host memory"):
        as_array(torch.zeros(1, device="meta"))
    with pytest.raises(ValueError, match="null address"):
        check((0, (2,), None, "float32"), "x", (2,), "float32")


def test_torch_tensors_as_queries(pool: HostPool) -> None:
    torch = pytest.importorskip("torch")
    q = torch.zeros((2, 8, DIM), dtype=torch.bfloat16)
    out = torch.ones_like(q)
    plan(pool).run(0, q, out)
    assert not out.any()


def test_tuning_refuses() -> None:
    for options in (dict(prefetch_hint="t9"), dict(prefetch_tiles=3), dict(min_split_tokens=0)):
        with pytest.raises(ValueError, match="must be"):
            Tuning(**options)  # type: ignore[arg-type]
