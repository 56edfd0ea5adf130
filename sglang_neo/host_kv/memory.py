"""One piece of host memory: in huge pages, touched by the threads that decide where it lies, pinned for CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from sglang_neo.host_kv.cudart import CudaError, cuda_runtime
from sglang_neo.host_kv.limits import GB, available_host_memory

logger = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20
#: Memory is pinned in pieces of this size, with a line in the log after each of them. Not all at once: drivers from 580
#: on fail at 512 GiB, and others at times below that. Not in small pieces: no copy may touch two of them.
PIN_CHUNK = 16 << 30
#: Where pinning a piece fails, smaller ones are tried down to this size.
MIN_PIN_CHUNK = 1 << 30
#: Progress is shown for more memory than this.
SHOW_PROGRESS_FROM = 4 * GB

_FLAGS = "lower --neo-host-kv-size or --neo-host-kv-ratio"


class HostMemoryError(RuntimeError):
    """Host memory could not be had, or not be pinned. The message says how much, of what, and what to do."""


class Registrar(Protocol):
    """Pins memory. Both functions raise CudaError."""

    def register(self, address: int, bytes: int) -> None: ...
    def unregister(self, address: int) -> None: ...


class _Libc:
    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._mmap = self._library["mmap"]
        self._mmap.restype = ctypes.c_void_p
        self._mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        self.munmap = self._library["munmap"]
        self.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self.madvise = self._library["madvise"]
        self.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def map(self, bytes: int) -> int:
        """The address of new anonymous memory. Raises OSError."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = self._mmap(None, bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if address is None or address == ctypes.c_void_p(-1).value:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return int(address)


class _Mapping:
    """Anonymous memory, unmapped when nobody refers to this object any more; tensors over it do."""

    def __init__(self, bytes: int) -> None:
        libc = _Libc()
        begin = libc.map(bytes + HUGE_PAGE)
        self.address = -(-begin // HUGE_PAGE) * HUGE_PAGE
        # A forked child gets no copy of it. Otherwise a write of ours after a fork would go to a new page, and the GPU
        # would go on using the old one. So the child must not unmap either: something else may lie there.
        libc.madvise(begin, bytes + HUGE_PAGE, getattr(mmap, "MADV_DONTFORK", 10))
        libc.madvise(self.address, bytes, getattr(mmap, "MADV_HUGEPAGE", 14))
        unmap = weakref.finalize(self, _unmap, os.getpid(), libc, begin, bytes + HUGE_PAGE)
        unmap.atexit = False  # the end of the process does it, and tensors may be alive until then


def _unmap(process: int, libc: _Libc, begin: int, bytes: int) -> None:
    if os.getpid() == process:
        libc.munmap(begin, bytes)


def _unpin(process: int, registrar: Registrar, addresses: list[int]) -> None:
    if os.getpid() != process:
        return
    while addresses:
        with contextlib.suppress(CudaError):  # at the end of the process, or on a broken device: nothing to be done
            registrar.unregister(addresses.pop())


class HostMemory:
    """Host memory for a KV pool.

    Anonymous memory aligned to 2 MiB, in huge pages where the system gives them, all zero. It is touched, in parallel,
    while it is made: with ``cores``, by a thread on each of them, so that on a machine with several NUMA nodes every
    node holds a part. It then counts as used, which a control group or the machine may not grant: see ``available``.

    Args:
        bytes: rounded up to whole huge pages.
        pin: register it with CUDA, for copies at full speed that do not block the caller.
        threads: that touch it.
        cores: CPUs to touch it from, instead of ``threads``.
        progress: called with a line of text now and then if there is much memory; default: the log.
        available: bytes that may be taken; default: what is free now on this machine and in its control group.
        registrar: pins; default: the CUDA runtime.
        pin_chunk: bytes that are pinned at a time.

    Raises:
        HostMemoryError: there is not so much memory, or it cannot be pinned. Nothing is left behind.
        ValueError: no bytes or no threads.
    """

    def __init__(
        self,
        bytes: int,
        *,
        pin: bool,
        threads: int = 1,
        cores: Sequence[int] | None = None,
        progress: Callable[[str], None] | None = None,
        available: int | None = None,
        registrar: Registrar | None = None,
        pin_chunk: int = PIN_CHUNK,
    ) -> None:
        if bytes < 1 or (threads < 1 if cores is None else not cores):
            raise ValueError(f"at least one byte and one thread are needed, got {bytes} and {cores or threads}")
        self.bytes = -(-bytes // HUGE_PAGE) * HUGE_PAGE
        self._mapping: _Mapping | None = None
        self._tensor: torch.Tensor | None = None
        self._ends: list[int] = []
        self._unpin: weakref.finalize[..., HostMemory] | None = None
        free = available_host_memory() if available is None else available
        asked = f"{self.bytes / GB:.2f} GB of host memory for KV cache"
        if self.bytes > free:
            raise HostMemoryError(f"{asked} asked for, {free / GB:.2f} GB available; {_FLAGS}")
        if pin and registrar is None:
            if not torch.cuda.is_available():
                raise HostMemoryError(f"{asked} cannot be pinned: there is no CUDA device")
            torch.cuda.current_stream()  # CUDA must be initialised
            try:
                registrar = cuda_runtime()
            except RuntimeError as error:
                raise HostMemoryError(f"{asked} cannot be pinned: {error}") from error
        try:
            self._mapping = _Mapping(self.bytes)
        except OSError as error:
            raise HostMemoryError(
                f"{asked} refused by the system ({error}), {free / GB:.2f} GB available; {_FLAGS}"
            ) from error
        buffer = (ctypes.c_ubyte * self.bytes).from_address(self._mapping.address)
        buffer.mapping = self._mapping  # type: ignore[attr-defined] # the tensor keeps the buffer, and so the memory
        self._tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        pinned: list[int] = []
        if pin and registrar is not None:
            self._unpin = weakref.finalize(self, _unpin, os.getpid(), registrar, pinned)
            self._unpin.atexit = False  # memory and device go with the process
        try:
            self._fill(registrar if pin else None, pinned, pin_chunk, threads, cores, progress)
        except CudaError as error:
            self.close()
            raise HostMemoryError(f"{asked} is there ({free / GB:.2f} GB available), but {error}; {_FLAGS}") from error
        except BaseException:
            self.close()
            raise

    @property
    def tensor(self) -> torch.Tensor:
        """All of it as uint8 [bytes]. Keeps the memory (not its pinning) alive beyond ``close``."""
        if self._tensor is None:
            raise RuntimeError("this host memory is closed")
        return self._tensor

    @property
    def address(self) -> int:
        """Of its first byte; a multiple of 2 MiB."""
        if self._mapping is None:
            raise RuntimeError("this host memory is closed")
        return self._mapping.address

    @property
    def pinned(self) -> bool:
        """Whether it is registered with CUDA."""
        return bool(self._ends)

    @property
    def piece_ends(self) -> list[int]:
        """Offsets at which the pieces end that were pinned one by one, in order: no copy may reach across one, CUDA
        refuses it. ``[bytes]`` if it is not pinned."""
        return list(self._ends) or [self.bytes]

    def close(self) -> None:
        """Unpins it and gives it back once no tensor refers to it. No copy may be under way. Can be called again.

        To be called before the process ends: pinned memory that the kernel has to unpin holds up the end of a process
        for seconds.
        """
        if self._unpin is not None:
            self._unpin()
        self._ends = []
        self._tensor = self._mapping = None

    def _fill(
        self,
        registrar: Registrar | None,
        pinned: list[int],
        pin_chunk: int,
        threads: int,
        cores: Sequence[int] | None,
        progress: Callable[[str], None] | None,
    ) -> None:
        """Touches and pins, piece by piece."""
        say = logger.info if progress is None else progress
        show = self.bytes > SHOW_PROGRESS_FROM
        if show:
            say(f"Allocating {self.bytes / GB:.2f} GB of host memory for KV cache{', pinned' if registrar else ''}.")
        begin = time.perf_counter()
        touching = pinning = 0.0
        done, chunk = 0, max(pin_chunk // HUGE_PAGE, 1) * HUGE_PAGE
        with ThreadPoolExecutor(max_workers=len(cores) if cores else threads) as pool:
            while done < self.bytes:
                size = min(chunk, self.bytes - done)
                start = time.perf_counter()
                _touch(pool, self.address + done, size, threads, cores)
                touching += time.perf_counter() - start
                if registrar is not None:
                    start = time.perf_counter()
                    size = chunk = _register(registrar, self.address + done, size)
                    pinned.append(self.address + done)
                    self._ends.append(done + size)
                    pinning += time.perf_counter() - start
                done += size
                if show and done < self.bytes:
                    say(
                        f"Host KV memory: {done / GB:.1f} of {self.bytes / GB:.1f} GB ready, "
                        f"{time.perf_counter() - begin:.0f} s so far."
                    )
        if show:
            say(
                f"Host KV memory is allocated. size: {self.bytes / GB:.2f} GB, "
                f"touched in {touching:.1f} s, pinned in {pinning:.1f} s."
            )


def _touch(pool: ThreadPoolExecutor, address: int, bytes: int, threads: int, cores: Sequence[int] | None) -> None:
    count = len(cores) if cores else threads
    share = -(-bytes // HUGE_PAGE // count) * HUGE_PAGE

    def touch(index: int) -> None:
        begin, end = min(index * share, bytes), min((index + 1) * share, bytes)
        if cores:
            with contextlib.suppress(OSError):  # a core that is not ours: then from anywhere
                os.sched_setaffinity(0, {cores[index]})  # of this thread
        ctypes.memset(address + begin, 0, end - begin)  # without the GIL

    list(pool.map(touch, range(count)))


def _register(registrar: Registrar, address: int, bytes: int) -> int:
    """Pins ``bytes`` from there on, or fewer if that fails, and returns how many. Raises CudaError."""
    while True:
        try:
            registrar.register(address, bytes)
            return bytes
        except CudaError as error:
            if bytes <= MIN_PIN_CHUNK:
                raise
            logger.warning("%s; trying half of it at a time", error)
            bytes = max(bytes // 2 // HUGE_PAGE * HUGE_PAGE, MIN_PIN_CHUNK)


def largest_host_memory(
    bytes: int, minimum: int, make: Callable[[int], HostMemory], log: Callable[[str], None] = logger.warning
) -> HostMemory:
    """``make(bytes)``, or half of it as often as that fails, never less than ``minimum``; says so in the log.

    Args:
        make: makes the memory, for example ``functools.partial(HostMemory, pin=True, threads=8)``.

    Raises:
        HostMemoryError: not even the minimum could be had. ValueError: the minimum is more than ``bytes``.
    """
    if minimum > bytes:
        raise ValueError(f"the minimum of {minimum} bytes is more than the {bytes} asked for")
    size = bytes
    while True:
        try:
            return make(size)
        except HostMemoryError as error:
            if size == minimum:
                raise
            size = max(size // 2, minimum)
            log(f"{error}. Trying {size / GB:.2f} GB.")
