"""The device's side of the hand-off's flags: raised and taken in stream order.

The protocol stands in ``cpu_kernels/src/handoff.hpp``. On CUDA these are stream memory operations of the driver API
(cuStreamWriteValue32, cuStreamBatchMemOp), so the host is not involved and graphs can hold them; on the CPU device
they happen at once. Where CUDA lacks them the host waits for the stream instead, layer by layer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from cpu_kernels.workers import device_wait, device_write

logger = logging.getLogger(__name__)


class HandoffTimeout(RuntimeError):
    """The CPU did not answer a hand-off in time."""


class FlagStream(Protocol):
    """Addresses are those of 32-bit words in host memory, pinned on CUDA."""

    #: Whether flags can be raised and taken in a CUDA graph.
    capturable: bool
    #: Seconds that the host has waited for flags, where it does.
    waited: float

    def raise_flag(self, address: int) -> None:
        """Writes 1 when the device has done what is on the current stream; what comes after need not wait for it."""

    def take_flag(self, address: int) -> None:
        """Waits for 1, then writes 0."""

    def ahead(self, works: Sequence[Callable[[], None]]) -> Sequence[Callable[[], None]]:
        """Lets each of ``works`` enqueue something, in their order, behind what is on the current stream now.

        Returns:
            For each of them what to call, in this order, before the first use of what it does: later work on the
            current stream comes behind it, and none before that call. Where there is no stream for it, it is done then.
        """

    def beside(self, work: Callable[[], None]) -> None:
        """Lets ``work`` enqueue something behind what is on the current stream now, which goes on without it."""

    def join(self) -> None:
        """At the end of a step that had flags raised or work beside it: what comes now on the current stream waits for
        them. (For work ahead of it, every call of what ``ahead`` returned has seen to that.)"""


class CpuFlagStream:
    """For the CPU device, where the calling thread is the stream."""

    capturable = False

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self.waited = 0.0

    def raise_flag(self, address: int) -> None:
        device_write(address, 1)

    def take_flag(self, address: int) -> None:
        begin = time.perf_counter()
        answered = device_wait(address, 1, self._timeout_s)
        self.waited += time.perf_counter() - begin
        if not answered:
            raise HandoffTimeout(f"the CPU workers have not answered a hand-off within {self._timeout_s:g} s")
        device_write(address, 0)

    def ahead(self, works: Sequence[Callable[[], None]]) -> Sequence[Callable[[], None]]:
        return works

    def beside(self, work: Callable[[], None]) -> None:
        work()

    def join(self) -> None:
        pass


class SynchronousFlagStream(CpuFlagStream):
    """For a CUDA device without stream memory operations: the calling thread keeps up with the current stream."""

    def raise_flag(self, address: int) -> None:
        torch.cuda.current_stream().synchronize()
        super().raise_flag(address)


class CudaFlagStream:
    """Stream memory operations. The workers' watchdog ends a wait, see HandoffService.

    An operation stops its stream for microseconds, between two kernels that would follow each other at once. So flags
    are raised on a stream beside the current one, and a wait and the write after it are one operation: a hand-off costs
    a captured step 9.6 us instead of 15.2 (one H200, 32 layers of 36 rows with 4 host rows, CPU work not counted).

    Raises RuntimeError on construction where the driver or the device lacks them.
    """

    capturable = True
    waited = 0.0

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise RuntimeError(f"the package cuda-bindings is missing ({error})") from None
        self._driver: Any = driver
        self._beside, self._ahead = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1)
        self._try()

    def raise_flag(self, address: int) -> None:
        current = torch.cuda.current_stream()
        if current != self._beside:
            self._beside.wait_stream(current)
        self._check(self._driver.cuStreamWriteValue32(self._beside.cuda_stream, address, 1, 0))

    def take_flag(self, address: int) -> None:
        driver = self._driver
        wait, write = driver.CUstreamBatchMemOpParams(), driver.CUstreamBatchMemOpParams()
        wait.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
        wait.waitValue.address = driver.CUdeviceptr(address)
        wait.waitValue.value = driver.cuuint32_t(1)
        wait.waitValue.flags = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
        write.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
        write.writeValue.address = driver.CUdeviceptr(address)
        write.writeValue.value = driver.cuuint32_t(0)
        stream = torch.cuda.current_stream().cuda_stream
        self._check(driver.cuStreamBatchMemOp(stream, 2, [wait, write], 0))

    def ahead(self, works: Sequence[Callable[[], None]]) -> Sequence[Callable[[], None]]:
        self._ahead.wait_stream(torch.cuda.current_stream())
        done = []
        with torch.cuda.stream(self._ahead):
            for work in works:
                work()
                done.append(torch.cuda.Event())
                done[-1].record()
        return [lambda event=event: torch.cuda.current_stream().wait_event(event) for event in done]  # type: ignore[misc]

    def beside(self, work: Callable[[], None]) -> None:
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            work()

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self._beside)

    def _try(self) -> None:
        """What a driver says about itself is one thing."""
        word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.raise_flag(word.data_ptr())
        self._beside.synchronize()
        raised = int(word)
        self.take_flag(word.data_ptr())
        torch.cuda.current_stream().synchronize()
        if (raised, int(word)) != (1, 0):
            raise RuntimeError("a CUDA stream memory operation had no effect")

    def _check(self, result: tuple[Any, ...]) -> None:
        if int(result[0]) != 0:
            raise RuntimeError(f"a CUDA stream memory operation failed: {result[0]}")


def flag_stream(device: str, timeout_s: float) -> FlagStream:
    """The kind that fits the device ("cpu" or "cuda")."""
    if not device.startswith("cuda"):
        return CpuFlagStream(timeout_s)
    try:
        return CudaFlagStream()
    except RuntimeError as missing:
        logger.warning(f"sglang_neo: steps with host rows wait on the host, layer by layer: {missing}")
        return SynchronousFlagStream(timeout_s)
