"""Host memory: aligned, zero, pinned piece by piece, and gone when nobody needs it any more."""

from __future__ import annotations

import functools
import gc
import os
from pathlib import Path

import pytest
import torch

from sglang_neo.host_kv import memory
from sglang_neo.host_kv.cudart import CudaError
from sglang_neo.host_kv.memory import HUGE_PAGE, HostMemory, HostMemoryError, largest_host_memory

SIZE = 6 * HUGE_PAGE


class Registrar:
    """Pins nothing, but knows what is pinned; refuses pieces larger than ``most`` and more than ``room`` bytes."""

    def __init__(self, most: int = 1 << 60, room: int = 1 << 60) -> None:
        self.pinned: dict[int, int] = {}
        self.most, self.room = most, room

    def register(self, address: int, bytes: int) -> None:
        if bytes > self.most or sum(self.pinned.values()) + bytes > self.room:
            raise CudaError("pinning failed: out of memory")
        assert address not in self.pinned
        self.pinned[address] = bytes

    def unregister(self, address: int) -> None:
        del self.pinned[address]


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(x, 16) for x in line.split()[0].split("-"))
        if begin <= address < end:
            return True
    return False


@pytest.mark.parametrize("threads", [1, 3, 50])
def test_memory_is_aligned_zero_and_writable(threads: int) -> None:
    got = HostMemory(SIZE - 5, pin=False, threads=threads)
    assert got.bytes == SIZE
    assert got.address % HUGE_PAGE == 0
    assert got.tensor.dtype == torch.uint8
    assert got.tensor.shape == (SIZE,)
    assert got.tensor.data_ptr() == got.address
    assert not got.tensor.any()
    got.tensor[-1] = 7
    assert got.tensor[SIZE - 1] == 7
    assert not got.pinned
    assert got.piece_ends == [SIZE]


def test_memory_is_there_before_it_is_used() -> None:
    """Touched while it is made: later writes must not fault pages in."""
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    got = HostMemory(64 << 20, pin=False, threads=2)
    now = int(Path("/proc/self/statm").read_text().split()[1])
    assert (now - resident) * os.sysconf("SC_PAGE_SIZE") > 60 << 20
    got.close()


def test_touched_from_given_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = sorted(os.sched_getaffinity(0))
    before, seen, touch = os.sched_getaffinity(0), set(), memory.ctypes.memset

    def memset(address: int, value: int, count: int) -> None:
        seen.add((address, count, tuple(os.sched_getaffinity(0))))
        touch(address, value, count)

    monkeypatch.setattr(memory.ctypes, "memset", memset)
    got = HostMemory(SIZE, pin=False, cores=[ours[0], ours[-1]])
    half = SIZE // 2
    assert seen == {(got.address, half, (ours[0],)), (got.address + half, half, (ours[-1],))}
    assert os.sched_getaffinity(0) == before


def test_close_gives_the_memory_back_once_no_tensor_needs_it() -> None:
    got = HostMemory(SIZE, pin=False)
    address = got.address + SIZE // 2
    view = got.tensor[5:10]
    got.close()
    got.close()
    gc.collect()
    view.fill_(3)  # still there
    assert is_mapped(address)
    with pytest.raises(RuntimeError, match="closed"):
        _ = got.tensor
    with pytest.raises(RuntimeError, match="closed"):
        _ = got.address
    del view
    gc.collect()
    assert not is_mapped(address)


def test_memory_nobody_closes_is_given_back_too() -> None:
    registrar = Registrar()
    got = HostMemory(SIZE, pin=True, registrar=registrar)
    address = got.address + SIZE // 2
    del got
    gc.collect()
    assert not registrar.pinned
    assert not is_mapped(address)


def test_a_forked_child_leaves_it_alone() -> None:
    registrar = Registrar()
    got = HostMemory(SIZE, pin=True, registrar=registrar)
    child = os.fork()
    if child == 0:
        got.close()
        gc.collect()
        os._exit(0 if registrar.pinned else 1)
    assert os.waitpid(child, 0)[1] == 0
    got.tensor.fill_(1)


def test_pinned_in_pieces() -> None:
    registrar = Registrar()
    got = HostMemory(SIZE, pin=True, registrar=registrar, pin_chunk=4 * HUGE_PAGE)
    assert registrar.pinned == {got.address: 4 * HUGE_PAGE, got.address + 4 * HUGE_PAGE: 2 * HUGE_PAGE}
    assert got.pinned
    assert got.piece_ends == [4 * HUGE_PAGE, SIZE]
    got.close()
    assert not registrar.pinned
    assert not got.pinned


def test_smaller_pieces_where_large_ones_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MIN_PIN_CHUNK", HUGE_PAGE)
    registrar = Registrar(most=2 * HUGE_PAGE)
    got = HostMemory(5 * HUGE_PAGE, pin=True, registrar=registrar)
    assert got.piece_ends == [2 * HUGE_PAGE, 4 * HUGE_PAGE, 5 * HUGE_PAGE]
    assert list(registrar.pinned.values()) == [2 * HUGE_PAGE, 2 * HUGE_PAGE, HUGE_PAGE]


def test_a_failure_to_pin_leaves_nothing_behind() -> None:
    registrar = Registrar(room=4 * HUGE_PAGE)
    with pytest.raises(HostMemoryError, match=r"0\.01 GB of host memory.*out of memory.*lower --neo-host-kv-size"):
        HostMemory(SIZE, pin=True, registrar=registrar, pin_chunk=2 * HUGE_PAGE, available=1 << 40)
    assert not registrar.pinned


def test_more_than_there_is_is_refused_before_it_is_touched() -> None:
    with pytest.raises(HostMemoryError, match=r"0\.01 GB .*asked for, 0\.00 GB available; lower --neo-host-kv-size"):
        HostMemory(SIZE, pin=False, available=1000)
    with pytest.raises(HostMemoryError, match="refused by the system"):
        HostMemory(1 << 60, pin=False, available=1 << 62)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_pinning_needs_cuda() -> None:
    with pytest.raises(HostMemoryError, match="there is no CUDA device"):
        HostMemory(SIZE, pin=True)


@pytest.mark.parametrize("given", [dict(bytes=0), dict(threads=0), dict(cores=[])])
def test_nothing_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        HostMemory(**{"bytes": SIZE, "pin": False, **given})  # type: ignore[arg-type]


def test_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    HostMemory(SIZE, pin=True, registrar=Registrar(), progress=lines.append)
    assert not lines
    monkeypatch.setattr(memory, "SHOW_PROGRESS_FROM", 0)
    HostMemory(SIZE, pin=True, registrar=Registrar(), progress=lines.append, pin_chunk=2 * HUGE_PAGE)
    assert [line.split(".")[0] for line in lines[:1] + lines[-1:]] == [
        "Allocating 0",
        "Host KV memory is allocated",
    ]
    assert len(lines) == 4, lines
    assert "0.0 of 0.0 GB ready" in lines[1]


class TestLargest:
    def test_halves_until_it_works(self) -> None:
        lines: list[str] = []
        make = functools.partial(HostMemory, pin=False, available=3 * HUGE_PAGE)
        got = largest_host_memory(8 * HUGE_PAGE, HUGE_PAGE, make, lines.append)
        assert got.bytes == 2 * HUGE_PAGE
        assert len(lines) == 2
        assert "Trying 0.01 GB" in lines[0]

    def test_the_minimum_is_tried_last(self) -> None:
        sizes = []

        def make(size: int) -> HostMemory:
            sizes.append(size)
            raise HostMemoryError(f"no {size}")

        with pytest.raises(HostMemoryError, match="no 3000"):
            largest_host_memory(10_000, 3000, make, lambda line: None)
        assert sizes == [10_000, 5000, 3000]

    def test_a_minimum_above_the_wish_is_refused(self) -> None:
        with pytest.raises(ValueError):
            largest_host_memory(1, 2, lambda size: HostMemory(size, pin=False))
