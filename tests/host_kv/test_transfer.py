"""Tokens between device slots and host pages: the right bytes in the right place, in whatever order the queues run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_neo.host_kv import layout
from sglang_neo.host_kv.memory import HostMemory
from sglang_neo.host_kv.pool import HostKVGeometry, HostKVPool
from sglang_neo.host_kv.streams import device_for
from sglang_neo.host_kv.transfer import KVTransfer, Run, chunks, copies_of_run, page_runs
from tests.harness.queues import ShuffledDevice

DTYPES = ("float32", "float16", "bfloat16", "int8")
LAYERS, HEADS, DIM, TOKENS = 3, 2, 32, 16
SLOTS, PAGES = 200, 12


def device_dtype(dtype: str) -> torch.dtype:
    return torch.bfloat16 if dtype == "int8" else layout.element_dtype(dtype)


class Setup:
    """Random device buffers, a host pool full of 0xEE and a KVTransfer between them."""

    def __init__(
        self,
        dtype: str = "bfloat16",
        device: Any = None,
        on_device: torch.dtype | None = None,
        heads: int = HEADS,
        **options: Any,
    ):
        self.geometry = HostKVGeometry(LAYERS, heads, DIM, dtype, TOKENS)
        memory = torch.full((PAGES * self.geometry.bytes_per_page,), 0xEE, dtype=torch.uint8)
        self.pool = HostKVPool(self.geometry, PAGES, memory)
        shape, kind = (SLOTS, heads, DIM), on_device or device_dtype(dtype)
        self.k = [torch.randn(shape).to(kind) for _ in range(LAYERS)]
        self.v = [torch.randn(shape).to(kind) for _ in range(LAYERS)]
        self.transfer = KVTransfer(self.pool, self.k, self.v, device, **options)

    def packed(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """What the host pages of these slots must hold."""
        return layout.pack_pages(self.k[layer][slots], self.v[layer][slots], self.geometry.dtype, TOKENS)


def page_unit(dtype: str) -> int:
    return HEADS * layout.page_bytes(dtype, TOKENS, DIM)


def some_slots(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))[:count]


#: Staging in pages of a layer: part of a layer, one layer and a bit, everything.
STAGINGS = (1, 2, 7, 1000)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize(
    ("count", "pages"), [(1, [5]), (15, [0]), (16, [11]), (17, [4, 5]), (77, [2, 3, 9, 8, 10]), (80, [3, 4, 5, 6, 7])]
)
@pytest.mark.parametrize("background", [False, True])
def test_there_and_back(dtype: str, staging: int, count: int, pages: list[int], background: bool) -> None:
    share = 4 if dtype == "int8" else 1
    s = Setup(dtype, staging_bytes=2 * share * staging * page_unit(dtype), buffers=2)
    slots = some_slots(count)
    before = s.pool.pages_tensor.clone()
    there = s.transfer.to_host(slots, pages, background=background)
    assert there.done()
    assert there.bytes == len(pages) * s.geometry.bytes_per_page
    for layer in range(LAYERS):
        assert torch.equal(s.pool.pages_tensor[layer, pages], s.packed(layer, slots))
        k = torch.empty(count, HEADS, DIM, dtype=torch.float32)
        v = torch.empty_like(k)
        places = [pages[i // TOKENS] * TOKENS + i % TOKENS for i in range(count)]
        s.pool.kernel_pool.read(layer, places, k, v)
        step = 0.51 / 127 if dtype == "int8" else 0.0
        for got, source in ((k, s.k), (v, s.v)):
            want = source[layer][slots].float()
            assert ((got - want).abs() <= step * want.abs().amax(-1, keepdim=True)).all()
    others = [page for page in range(PAGES) if page not in pages]
    assert torch.equal(s.pool.pages_tensor[:, others], before[:, others])

    old_k, old_v = ([x.clone() for x in buffers] for buffers in (s.k, s.v))
    to = some_slots(count, seed=1)
    back = s.transfer.to_device(pages, to, background=background)
    back.wait()
    back.synchronize()
    untouched = torch.ones(SLOTS, dtype=torch.bool)
    untouched[to] = False
    for layer in range(LAYERS):
        want_k, want_v = layout.unpack_pages(
            s.pool.pages_tensor[layer, pages], count, dtype, TOKENS, DIM, device_dtype(dtype)
        )
        assert torch.equal(s.k[layer][to], want_k)
        assert torch.equal(s.v[layer][to], want_v)
        assert torch.equal(s.k[layer][untouched], old_k[layer][untouched])
        assert torch.equal(s.v[layer][untouched], old_v[layer][untouched])
        if dtype != "int8":
            assert torch.equal(want_k, old_k[layer][slots])
            assert torch.equal(want_v, old_v[layer][slots])


def test_another_float_type_on_the_host() -> None:
    s = Setup("float16", on_device=torch.float32)
    slots = some_slots(20)
    s.transfer.to_host(slots, [1, 7])
    assert torch.equal(s.pool.pages_tensor[2, [1, 7]], s.packed(2, slots))
    want = s.k[2][slots].half().float()
    s.transfer.to_device([1, 7], slots)
    assert torch.equal(s.k[2][slots], want)


def test_some_layers_only() -> None:
    s = Setup()
    before, slots = s.pool.pages_tensor.clone(), some_slots(20)
    got = s.transfer.to_host(slots, [1, 2], layers=range(1, 2))
    assert got.bytes == 2 * page_unit("bfloat16")
    assert torch.equal(s.pool.pages_tensor[1, 1:3], s.packed(1, slots))
    assert torch.equal(s.pool.pages_tensor[[0, 2]], before[[0, 2]])
    old = [x.clone() for x in s.k]
    s.transfer.to_device([1, 2], some_slots(20, seed=1), layers=range(1, 2))
    assert [torch.equal(x, y) for x, y in zip(s.k, old, strict=True)] == [True, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pages", [[3], [4, 9]])
def test_one_head_and_one_layer_at_a_time(dtype: str, pages: list[int]) -> None:
    """As in a tensor-parallel rank with one head. PyTorch looks at no stride of a dimension of size one."""
    s = Setup(dtype, heads=1)
    slots, to = some_slots(len(pages) * TOKENS - 3), some_slots(len(pages) * TOKENS - 3, seed=1)
    for layer in range(LAYERS):
        s.transfer.to_host(slots, pages, layers=range(layer, layer + 1))
        assert torch.equal(s.pool.pages_tensor[layer, pages], s.packed(layer, slots))
        want = layout.unpack_pages(
            s.pool.pages_tensor[layer, pages], len(slots), dtype, TOKENS, DIM, device_dtype(dtype)
        )
        s.transfer.to_device(pages, to, layers=range(layer, layer + 1))
        assert torch.equal(s.k[layer][to], want[0]) and torch.equal(s.v[layer][to], want[1])


def test_no_tokens() -> None:
    s = Setup()
    before = s.pool.pages_tensor.clone()
    none = torch.empty(0, dtype=torch.int64)
    for transfer in (s.transfer.to_host(none, []), s.transfer.to_device([], none)):
        assert transfer.done()
        assert transfer.bytes == 0
    assert torch.equal(s.pool.pages_tensor, before)


def test_strided_slots() -> None:
    s = Setup()
    slots = torch.stack((some_slots(20), some_slots(20, seed=1)), 1)[:, 1]
    s.transfer.to_host(slots, [3, 4])
    assert torch.equal(s.pool.pages_tensor[0, 3:5], s.packed(0, slots))
    slots = torch.stack((some_slots(32), some_slots(32, seed=1)), 1)[:, 1]
    s.transfer.to_host(slots, [3, 4])
    assert torch.equal(s.pool.pages_tensor[0, 3:5], s.packed(0, slots))


def test_wrong_calls_are_refused() -> None:
    s = Setup()
    slots = some_slots(20)
    with pytest.raises(ValueError, match="20 tokens fill 2 host pages, got 1"):
        s.transfer.to_host(slots, [1])
    with pytest.raises(ValueError, match="named twice"):
        s.transfer.to_host(slots, [1, 1])
    with pytest.raises(IndexError, match="not all among the 12"):
        s.transfer.to_host(slots, [1, 12])
    with pytest.raises(IndexError, match="not all among the 12"):
        s.transfer.to_device([-1, 1], slots)
    with pytest.raises(ValueError, match="int64"):
        s.transfer.to_host(slots.int(), [1, 2])
    with pytest.raises(IndexError, match="layers"):
        s.transfer.to_host(slots, [1, 2], layers=range(2, 4))


def test_buffers_that_do_not_fit_are_refused() -> None:
    s = Setup()
    with pytest.raises(ValueError, match="3 layers, the device pool 2 of K, 3 of V"):
        KVTransfer(s.pool, s.k[:2], s.v)
    with pytest.raises(ValueError, match="one float type"):
        KVTransfer(s.pool, s.k, [x.float() for x in s.v])
    with pytest.raises(ValueError, match="one float type"):
        KVTransfer(s.pool, [x[:, :1] for x in s.k], s.v)
    with pytest.raises(ValueError, match=f"staging needs {4 * page_unit('bfloat16')} bytes"):
        KVTransfer(s.pool, s.k, s.v, staging_bytes=4 * page_unit("bfloat16") - 1, buffers=4)
    with pytest.raises(ValueError, match="not with meta"):
        device_for(torch.device("meta"))


# How copies are cut


@given(st.lists(st.integers(0, 30), unique=True, max_size=20))
def test_runs_are_the_pages_in_order(pages: list[int]) -> None:
    runs = page_runs(pages)
    assert [page for run in runs for page in range(run.page, run.page + run.pages)] == pages
    assert [run.offset for run in runs] == [sum(r.pages for r in runs[:i]) for i in range(len(runs))]
    assert all(a.page + a.pages != b.page for a, b in itertools.pairwise(runs))


@given(st.integers(0, 5), st.integers(1, 9), st.integers(1, 20), st.integers(1, 40))
def test_chunks_cover_everything_once(first: int, layers: int, pages: int, capacity: int) -> None:
    seen = []
    for chunk in chunks(range(first, first + layers), pages, capacity):
        part = [
            (layer, page)
            for layer in range(chunk.first_layer, chunk.end_layer)
            for page in range(chunk.first_page, chunk.end_page)
        ]
        assert 0 < len(part) <= capacity
        seen += part
    assert sorted(seen) == [(first + layer, page) for layer in range(layers) for page in range(pages)]


@given(
    data=st.data(),
    unit=st.integers(1, 5),
    pages=st.integers(1, 8),
    first=st.integers(0, 3),
    layers=st.integers(1, 5),
    max_pitch=st.sampled_from([0, 12, 1 << 31]),
)
def test_copies_move_every_byte_once_and_cross_no_piece(
    data: st.DataObject, unit: int, pages: int, first: int, layers: int, max_pitch: int
) -> None:
    host_pages = data.draw(st.integers(pages, 12))
    page = data.draw(st.integers(0, host_pages - pages))
    index = data.draw(st.integers(0, 3))
    size = (first + layers) * host_pages * unit
    ends = sorted({*data.draw(st.lists(st.integers(1, size), max_size=5)), size})
    stage_pitch, host_pitch = (index + pages + 1) * unit, host_pages * unit
    pairs = []
    copies = list(
        copies_of_run(
            Run(index, page, pages), range(first, first + layers), unit, stage_pitch, host_pitch, ends, max_pitch
        )
    )
    for rows in copies:
        assert rows.rows == 1 or host_pitch <= max_pitch
        last = rows.host + (rows.rows - 1) * host_pitch + rows.width
        assert not any(rows.host < end < last for end in ends)
        for row in range(rows.rows):
            for byte in range(rows.width):
                pairs.append((rows.stage + row * stage_pitch + byte, rows.host + row * host_pitch + byte))
    assert pairs == [
        (row * stage_pitch + index * unit + byte, (first + row) * host_pitch + page * unit + byte)
        for row in range(layers)
        for byte in range(pages * unit)
    ]
    if len(ends) == 1 and host_pitch <= max_pitch:
        assert len(copies) == 1


@pytest.mark.parametrize("max_pitch", [0, 1 << 31])
def test_memory_pinned_in_pieces(max_pitch: int) -> None:
    """Pieces end in the middle of pages here."""

    class Cut(HostMemory):
        @property
        def piece_ends(self) -> list[int]:
            return [*range(1000, self.bytes, 1000), self.bytes]

    s = Setup()
    pool = HostKVPool(s.geometry, PAGES, Cut(s.pool.bytes, pin=False))
    assert pool.piece_ends[-1] == pool.bytes
    transfer, slots, pages = KVTransfer(pool, s.k, s.v, max_pitch=max_pitch), some_slots(77), [2, 3, 4, 8, 10]
    transfer.to_host(slots, pages)
    for layer in range(LAYERS):
        assert torch.equal(pool.pages_tensor[layer, pages], s.packed(layer, slots))


# Order: queues that run as late, and in as strange an order, as the marks allow


def use_at_random(seed: int, heeds_waits: bool, background: bool) -> list[str]:
    """Moves tokens about and overwrites slots as soon as the rules allow; returns what went wrong.

    The reference does at once what the queues do in their time.
    """
    device = ShuffledDevice(seed, heeds_waits)
    torch.manual_seed(seed)
    s = Setup("bfloat16", device, staging_bytes=3 * 4 * page_unit("bfloat16"), buffers=3)
    kv = {"k": [x.clone() for x in s.k], "v": [x.clone() for x in s.v]}
    host: dict[int, list[torch.Tensor]] = {}  # page -> per layer the packed page
    held = torch.zeros(SLOTS, dtype=torch.bool)  # by transfers in the background

    def overwrite(slots: torch.Tensor, value: float) -> None:
        def work() -> None:
            for x in (*s.k, *s.v):
                x[slots] = value

        device.main.run(work)
        for x in (*kv["k"], *kv["v"]):
            x[slots] = value

    started: list[tuple[Any, torch.Tensor]] = []
    for _ in range(12):
        for transfer, slots in started:
            if transfer.done():
                held[slots] = False
        started = [entry for entry in started if not entry[0].done()]
        free = (~held).nonzero().squeeze(1)
        if background:  # work in the current stream just before: the transfer must come after it
            overwrite(free[torch.randperm(len(free))[:40]], device.random.random())
        count = min(device.random.randint(1, 5 * TOKENS), len(free))
        if count:
            slots, needed = free[torch.randperm(len(free))[:count]], layout.page_count(count, TOKENS)
            if device.random.random() < 0.5 or len(host) < needed:
                pages = device.random.sample(range(PAGES), needed)
                transfer = s.transfer.to_host(slots, pages, background=background)
                packed = [
                    layout.pack_pages(k[slots], v[slots], "bfloat16", TOKENS)
                    for k, v in zip(kv["k"], kv["v"], strict=True)
                ]
                for i, page in enumerate(pages):
                    host[page] = [layer[i] for layer in packed]
            else:
                pages = device.random.sample(sorted(host), needed)
                transfer = s.transfer.to_device(pages, slots, background=background)
                for layer in range(LAYERS):
                    stacked = torch.stack([host[page][layer] for page in pages])
                    kv["k"][layer][slots], kv["v"][layer][slots] = layout.unpack_pages(
                        stacked, count, "bfloat16", TOKENS, DIM
                    )
            if background:
                held[slots] = True
                started.append((transfer, slots))
            elif device.random.random() < 0.7:
                overwrite(slots, device.random.random())
        device.some_steps()
    s.transfer.synchronize()
    while device.step():
        pass
    assert all(queue.number == len(queue.entries) for queue in device.queues), "deadlock"
    wrong = []
    for layer in range(LAYERS):
        for name, buffers in (("k", s.k), ("v", s.v)):
            if not torch.equal(buffers[layer], kv[name][layer]):
                wrong.append(f"{name} of layer {layer}")
        for page in host:
            if not torch.equal(s.pool.pages_tensor[layer, page], host[page][layer]):
                wrong.append(f"page {page} of layer {layer}")
    return wrong


@pytest.mark.parametrize("background", [False, True])
def test_any_order_that_the_marks_allow_gives_the_same(background: bool) -> None:
    for seed in range(25):
        assert use_at_random(seed, True, background) == [], f"seed {seed}"


def test_without_the_marks_it_goes_wrong() -> None:
    """The test above would see a missing wait."""
    wrong = 0
    for seed in range(10):
        wrong += bool(use_at_random(seed, False, False)) + bool(use_at_random(seed, False, True))
    assert wrong >= 15


def test_a_transfer_is_done_when_its_copy_is() -> None:
    device = ShuffledDevice(0)
    s = Setup("bfloat16", device)
    transfer = s.transfer.to_host(some_slots(20), [1, 2])
    before = s.pool.pages_tensor.clone()
    assert not transfer.done()
    assert torch.equal(s.pool.pages_tensor, before)
    transfer.synchronize()
    assert transfer.done()
    assert torch.equal(s.pool.pages_tensor[0, 1:3], s.packed(0, some_slots(20)))


def test_the_current_stream_can_wait_for_a_transfer() -> None:
    for seed in range(10):
        device = ShuffledDevice(seed)
        s = Setup("bfloat16", device)
        slots, to, seen = some_slots(20), some_slots(20, seed=1), []
        s.transfer.to_host(slots, [1, 2], background=True)
        s.transfer.to_device([1, 2], to, background=True).wait()

        def look(s: Setup = s, to: torch.Tensor = to, seen: list[torch.Tensor] = seen) -> None:
            seen.append(s.k[2][to].clone())

        want = s.k[2][slots].clone()
        device.main.run(look)
        while device.step():
            pass
        assert torch.equal(seen[0], want)


def waits_for(pages: Sequence[int], *others: Sequence[int]) -> list[bool]:
    """Of transfers to the host under way, which a transfer of ``pages`` to the device waits for."""
    device = ShuffledDevice(0)
    s = Setup("bfloat16", device)
    marks = [s.transfer.to_host(some_slots(len(p) * TOKENS), p)._mark for p in others]
    s.transfer.to_device(pages, some_slots(len(pages) * TOKENS))
    waited = set(map(id, device.queues[2].waits.values()))
    return [id(mark) in waited for mark in marks]


def test_only_transfers_of_the_same_pages_wait_for_each_other() -> None:
    assert waits_for([3, 4], [4], [5, 6], [0, 3]) == [True, False, True]
