"""The device's side of the hand-off's flags: writing and waiting in stream order.

The protocol stands in ``cpu_kernels/src/handoff.hpp``. On CUDA these are stream memory operations of the driver API
(cuStreamWriteValue32, cuStreamWaitValue32), so the host is not involved and graphs can hold them; on the CPU device
they happen at once. Where CUDA lacks them the host waits for the stream instead, layer by layer.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch

from cpu_kernels.workers import device_wait, device_write

logger = logging.getLogger(__name__)


class HandoffTimeout(RuntimeError):
    """The CPU did not answer a hand-off in time."""


class FlagStream(Protocol):
    """Addresses are those of 32-bit words in host memory, pinned on CUDA."""

    #: Whether writes and waits can be captured in a CUDA graph.
    capturable: bool

    def write(self, address: int, value: int) -> None: ...
    def wait(self, address: int, value: int) -> None: ...


class CpuFlagStream:
    """For the CPU device, where the calling thread is the stream."""

    capturable = False

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s

    def write(self, address: int, value: int) -> None:
        device_write(address, value)

    def wait(self, address: int, value: int) -> None:
        if not device_wait(address, value, self._timeout_s):
            raise HandoffTimeout(f"the CPU workers have not answered a hand-off within {self._timeout_s:g} s")


class SynchronousFlagStream(CpuFlagStream):
    """For a CUDA device without stream memory operations: the calling thread keeps up with the current stream."""

    def write(self, address: int, value: int) -> None:
        torch.cuda.current_stream().synchronize()
        super().write(address, value)


class CudaFlagStream:
    """Stream memory operations on the current CUDA stream. The workers' watchdog ends a wait, see HandoffService.

    Raises RuntimeError on construction where the driver or the device lacks them.
    """

    capturable = True

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise RuntimeError(f"the package cuda-bindings is missing ({error})") from None
        self._driver: Any = driver
        self._equal = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
        self._try()

    def write(self, address: int, value: int) -> None:
        self._check(self._driver.cuStreamWriteValue32(torch.cuda.current_stream().cuda_stream, address, value, 0))

    def wait(self, address: int, value: int) -> None:
        self._check(
            self._driver.cuStreamWaitValue32(torch.cuda.current_stream().cuda_stream, address, value, self._equal)
        )

    def _try(self) -> None:
        """What a driver says about itself is one thing."""
        word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.write(word.data_ptr(), 1)
        self.wait(word.data_ptr(), 1)
        torch.cuda.current_stream().synchronize()
        if int(word) != 1:
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
