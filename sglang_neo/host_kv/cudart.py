"""The few functions of the CUDA runtime that torch does not offer, called in the library that torch has loaded."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

DEVICE_TO_HOST, HOST_TO_DEVICE = 2, 1  # hostToDevice and deviceToHost of enum cudaMemcpyKind


class CudaError(RuntimeError):
    """A call of the CUDA runtime failed."""


class CudaRuntime:
    """libcudart through ctypes, which lets go of the GIL during calls. Use ``cuda_runtime()``.

    Args:
        path: of the library.
    """

    def __init__(self, path: str) -> None:
        self.library = library = ctypes.CDLL(path)
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

        def function(name: str, *arguments: type) -> ctypes._NamedFuncPointer:
            found = library[name]
            found.restype, found.argtypes = number, arguments
            return found

        self._copy = function("cudaMemcpyAsync", pointer, pointer, size, number, pointer)
        self._copy_2d = function("cudaMemcpy2DAsync", pointer, size, pointer, size, size, size, number, pointer)
        self._register = function("cudaHostRegister", pointer, size, ctypes.c_uint)
        self._unregister = function("cudaHostUnregister", pointer)
        self._last_error = function("cudaGetLastError")
        self._error_string = library["cudaGetErrorString"]
        self._error_string.restype, self._error_string.argtypes = ctypes.c_char_p, (number,)

    def copy(self, target: int, source: int, bytes: int, kind: int, stream: int) -> None:
        """cudaMemcpyAsync; addresses, ``kind`` DEVICE_TO_HOST or HOST_TO_DEVICE, a stream's handle."""
        self._check(self._copy(target, source, bytes, kind, stream), f"a copy of {bytes} bytes")

    def copy_2d(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        rows: int,
        kind: int,
        stream: int,
    ) -> None:
        """cudaMemcpy2DAsync: ``rows`` pieces of ``width`` bytes, each ``pitch`` bytes (below 2**31) after the last."""
        code = self._copy_2d(target, target_pitch, source, source_pitch, width, rows, kind, stream)
        self._check(code, f"a copy of {rows} x {width} bytes")

    def register(self, address: int, bytes: int) -> None:
        """Pins memory, for all devices (cudaHostRegisterPortable)."""
        self._check(self._register(address, bytes, 1), f"pinning {bytes / 1e9:.2f} GB of host memory")

    def unregister(self, address: int) -> None:
        """Undoes ``register`` of the memory that begins there."""
        self._check(self._unregister(address), "unpinning host memory")

    def _check(self, code: int, what: str) -> None:
        if code:
            text = self._error_string(code).decode()
            self._last_error()  # or the next kernel that torch launches reports it as its own
            raise CudaError(f"{what} failed: {text} (CUDA error {code})")


@functools.cache
def cuda_runtime() -> CudaRuntime:
    """The runtime library of this process, which torch has loaded.

    Raises RuntimeError if there is none: torch without CUDA, or CUDA linked into it.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line[line.find("/") :] if "/" in line else ""
        name = os.path.basename(path)
        # TileLang maps a library libcudart_stub.so, which lacks most functions.
        if name.startswith("libcudart") and ".so" in name and "stub" not in name:
            return CudaRuntime(path)
    raise RuntimeError("torch has loaded no CUDA runtime library (libcudart)")
