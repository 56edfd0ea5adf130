"""The device's side of the hand-off's flags: writing and waiting in stream order.

The protocol stands in ``cpu_kernels/src/handoff.hpp``. On CUDA these are stream memory operations of the driver API
(cuStreamWriteValue32, cuStreamWaitValue32), so the host is not involved; on the CPU device they happen at once.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from cpu_kernels.workers import device_wait, device_write


class HandoffTimeout(RuntimeError):
    """The CPU did not answer a hand-off in time."""


class FlagStream(Protocol):
    """Addresses are those of 32-bit words in host memory, pinned on CUDA."""

    def write(self, address: int, value: int) -> None: ...
    def wait(self, address: int, value: int) -> None: ...


class CpuFlagStream:
    """For the CPU device, where the calling thread is the stream."""

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s

    def write(self, address: int, value: int) -> None:
        device_write(address, value)

    def wait(self, address: int, value: int) -> None:
        if not device_wait(address, value, self._timeout_s):
            raise HandoffTimeout(f"the CPU workers have not answered a hand-off within {self._timeout_s:g} s")


class CudaFlagStream:
    """Stream memory operations on the current CUDA stream. The workers' watchdog ends a wait, see HandoffService.

    Raises RuntimeError on construction where the driver or the device lacks them.
    """

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver  # type: ignore[import-not-found, unused-ignore]
        except ImportError as error:
            raise RuntimeError(f"the package cuda-bindings is missing ({error})") from None
        self._driver: Any = driver
        self._equal = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)

    def write(self, address: int, value: int) -> None:
        self._check(self._driver.cuStreamWriteValue32(torch.cuda.current_stream().cuda_stream, address, value, 0))

    def wait(self, address: int, value: int) -> None:
        self._check(
            self._driver.cuStreamWaitValue32(torch.cuda.current_stream().cuda_stream, address, value, self._equal)
        )

    def _check(self, result: tuple[Any, ...]) -> None:
        if int(result[0]) != 0:
            raise RuntimeError(f"a CUDA stream memory operation failed: {result[0]}")


def flag_stream(device: str, timeout_s: float) -> FlagStream:
    """The kind that fits the device ("cpu" or "cuda")."""
    return CudaFlagStream() if device.startswith("cuda") else CpuFlagStream(timeout_s)
