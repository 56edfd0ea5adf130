"""Work in order, on CUDA streams or at once on the CPU, behind one small interface that tests can shuffle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from sglang_neo.host_kv.cudart import DEVICE_TO_HOST, HOST_TO_DEVICE, CudaRuntime, cuda_runtime


class Mark(Protocol):
    """A point in a queue."""

    def done(self) -> bool:
        """Whether everything before it is over. Does not wait."""

    def synchronize(self) -> None:
        """Waits, on the calling thread, until it is."""

    def wait(self, stream: Any) -> None:
        """Makes a torch stream (None: the current one) wait for it."""


class Queue(Protocol):
    """Work that is done one after the other; a CUDA stream."""

    def run(self, work: Callable[[], None]) -> None:
        """Enqueues the torch operations that ``work`` calls."""

    def record(self) -> Mark:
        """A mark after everything enqueued so far."""

    def wait(self, mark: Any) -> None:
        """What is enqueued from now on begins after the mark, one of the same device's."""


class Device(Protocol):
    """Where the device pool lies."""

    def current(self) -> Queue:
        """The queue into which torch operations of this thread go."""

    def queue(self) -> Queue:
        """A new one."""

    def copy_rows(
        self,
        target: torch.Tensor,
        target_start: int,
        target_pitch: int,
        source: torch.Tensor,
        source_start: int,
        source_pitch: int,
        width: int,
        rows: int,
    ) -> None:
        """Copies ``rows`` pieces of ``width`` bytes, each ``pitch`` bytes after the last, between uint8 [bytes]
        tensors, one on the host and one on the device. To be called in ``Queue.run``."""


class _Over:
    """The mark of everything on the CPU: over as soon as it is called."""

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, stream: Any) -> None:
        pass


class _AtOnce:
    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Mark:
        return _Over()

    def wait(self, mark: Any) -> None:
        pass


class CpuDevice:
    """Everything happens in the call."""

    def current(self) -> Queue:
        return _AtOnce()

    def queue(self) -> Queue:
        return _AtOnce()

    def copy_rows(
        self,
        target: torch.Tensor,
        target_start: int,
        target_pitch: int,
        source: torch.Tensor,
        source_start: int,
        source_pitch: int,
        width: int,
        rows: int,
    ) -> None:
        shape = (rows, width)
        to = target.as_strided(shape, (target_pitch, 1), target.storage_offset() + target_start)
        to.copy_(source.as_strided(shape, (source_pitch, 1), source.storage_offset() + source_start))


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        (torch.cuda.current_stream() if stream is None else stream).wait_event(self.event)


class _CudaQueue:
    def __init__(self, stream: torch.cuda.Stream, is_current: bool) -> None:
        self.stream, self.is_current = stream, is_current

    def run(self, work: Callable[[], None]) -> None:
        if self.is_current:
            work()
            return
        with torch.cuda.stream(self.stream):
            work()

    def record(self) -> _CudaMark:
        return _CudaMark(self.stream)

    def wait(self, mark: _CudaMark) -> None:
        self.stream.wait_event(mark.event)


class CudaDevice:
    """A CUDA device. Host memory that is not pinned works, but its copies make the caller wait."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.runtime: CudaRuntime | None
        try:
            self.runtime = cuda_runtime()
        except RuntimeError:
            self.runtime = None  # CUDA linked into torch: torch's own copies, one by one

    def current(self) -> Queue:
        return _CudaQueue(torch.cuda.current_stream(self.device), True)

    def queue(self) -> Queue:
        return _CudaQueue(torch.cuda.Stream(self.device), False)

    def copy_rows(
        self,
        target: torch.Tensor,
        target_start: int,
        target_pitch: int,
        source: torch.Tensor,
        source_start: int,
        source_pitch: int,
        width: int,
        rows: int,
    ) -> None:
        if self.runtime is None:
            for row in range(rows):
                to, start = target_start + row * target_pitch, source_start + row * source_pitch
                target[to : to + width].copy_(source[start : start + width], non_blocking=True)
            return
        kind = DEVICE_TO_HOST if source.is_cuda else HOST_TO_DEVICE
        stream = torch.cuda.current_stream(self.device).cuda_stream
        to, start = target.data_ptr() + target_start, source.data_ptr() + source_start
        if rows == 1:
            self.runtime.copy(to, start, width, kind, stream)
        else:
            self.runtime.copy_2d(to, target_pitch, start, source_pitch, width, rows, kind, stream)


def device_for(device: torch.device) -> Device:
    """The Device of a torch device. Raises ValueError for other kinds than cpu and cuda."""
    if device.type == "cpu":
        return CpuDevice()
    if device.type == "cuda":
        return CudaDevice(device)
    raise ValueError(f"host KV works with cpu and cuda devices, not with {device}")
