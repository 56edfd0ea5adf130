"""How fast this machine reads memory, and memory to read: what the measuring tools stand on."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from cpu_kernels import _probe
from cpu_kernels.cores import preference, topology
from cpu_kernels.isa import features
from cpu_kernels.workers import WorkerPool

HUGE_PAGE = 2 << 20


class Memory:
    """Anonymous memory in huge pages where the system gives them, all of it touched.

    Args:
        bytes: rounded up to whole huge pages.
        pattern: bytes-like, repeated all over it (default: a pattern of small numbers in any element type).
        threads: that fill it, and so decide which NUMA node each part lies on.
    """

    def __init__(self, bytes: int, pattern: bytes | bytearray | memoryview | None = None, threads: int = 1) -> None:
        self.bytes = -(-bytes // HUGE_PAGE) * HUGE_PAGE
        self._map = mmap.mmap(-1, self.bytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a system without them
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = (ctypes.c_char * len(self._map)).from_buffer(self._map)
        begin = ctypes.addressof(self._view)
        self.address = -(-begin // HUGE_PAGE) * HUGE_PAGE
        self.fill(pattern if pattern is not None else b"\x11\x3c\x09\x3d" * 1024, threads)

    def fill(self, pattern: bytes | bytearray | memoryview, threads: int = 1, bytes: int | None = None) -> None:
        """Copies of the pattern all over the first ``bytes`` (default: all)."""
        source = (ctypes.c_char * len(pattern)).from_buffer_copy(pattern)
        size = self.bytes if bytes is None else min(bytes, self.bytes)
        _probe.fill(self.address, size, ctypes.addressof(source), len(pattern), threads)

    def view(self, offset: int = 0, bytes: int | None = None) -> memoryview:
        start = self.address - ctypes.addressof(self._view) + offset
        size = self.bytes - offset if bytes is None else bytes
        return memoryview(self._map)[start : start + size]


class TimedJob(Protocol):
    """A ``cpu_kernels::Job`` with the means to run it; PlanJob and ReadJob are such."""

    @property
    def address(self) -> int: ...
    def run(self, threads: int) -> None: ...


class Threads:
    """Runs jobs on ``count`` threads, the calling one among them.

    Args:
        count: how many.
        pool: of count - 1 persistent workers; None: threads are made for every call.
        core: that the calling thread is pinned to while it runs jobs; None: not pinned.
    """

    def __init__(self, count: int, pool: WorkerPool | None = None, core: int | None = None) -> None:
        self.count, self.pool, self.core = count, pool, core

    def seconds(self, *jobs: TimedJob) -> float:
        """Runs them one after the other and says how long it took."""
        with _pinned(self.core):
            begin = time.perf_counter()
            for job in jobs:
                if self.pool is None:
                    job.run(self.count)
                else:
                    self.pool.run(job)
            return time.perf_counter() - begin


@contextlib.contextmanager
def _pinned(core: int | None) -> Iterator[None]:
    """The calling thread on one core, and only meanwhile: threads that it makes later (PyTorch's) inherit the mask."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def worker_threads() -> Iterator[Callable[[int], Threads]]:
    """Gives a function that makes Threads of any number; they end with the context.

    Every thread is pinned to a core of its own, of different physical cores as far as there are some; nothing is pinned
    if there are more threads than cores. The cores are not claimed: a server that starts meanwhile must get its own.
    Pools of persistent workers are made as they are first asked for and shared from then on. Idle workers of one would
    disturb the measurement of another, so all but the last one used are asleep.
    """
    cores = preference(topology(os.sched_getaffinity(0)))
    pools: dict[int, WorkerPool] = {}

    def make(count: int) -> Threads:
        enough = count <= len(cores)
        if count > 1 and count not in pools:
            pools[count] = WorkerPool(count - 1, cores[1:count] if enough else ())
        return Threads(count, pools.get(count), cores[0] if enough else None)

    try:
        yield make
    finally:
        for pool in pools.values():
            pool.close()


class ReadProbe:
    """Reads on through a piece of memory with the fastest loop for the given threads.

    Every pass takes up where the one before ended, so that what it reads is not in a cache.

    Args:
        memory: to read.
        threads: that read.
        pass_bytes: of one pass; no more than the memory.
    """

    def __init__(self, memory: Memory, threads: Threads, pass_bytes: int) -> None:
        present = features()
        self.memory, self.threads = memory, threads
        self.pass_bytes = max(HUGE_PAGE, min(pass_bytes, memory.bytes) // HUGE_PAGE * HUGE_PAGE)
        self._at = 0
        usable = [
            (i, name) for i, (name, feature) in enumerate(_probe.variants()) if not feature or present.get(feature)
        ]
        #: GB/s (decimal) of each loop, the best of five passes: other processes only ever make a pass slower.
        self.tried: dict[str, float] = {name: 0.0 for _, name in usable}
        for _ in range(5):
            for i, name in usable:
                self.variant = i
                self.tried[name] = max(self.tried[name], self.gb_per_s())
        fastest = max(self.tried.values())
        # The first within 3 %: the widest loads, several streams.
        self.variant, self.name = next((i, name) for i, name in usable if self.tried[name] > 0.97 * fastest)

    def gb_per_s(self) -> float:
        """One pass; decimal gigabytes per second."""
        if self._at + self.pass_bytes > self.memory.bytes:
            self._at = 0
        job = _probe.ReadJob(self.variant, self.memory.address + self._at, self.pass_bytes)
        self._at += self.pass_bytes
        return job.bytes / self.threads.seconds(job) / 1e9
