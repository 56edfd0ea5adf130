"""The calls into the CUDA runtime, made to a small library that does on the CPU what they should."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_neo.host_kv.cudart import DEVICE_TO_HOST, HOST_TO_DEVICE, CudaError, CudaRuntime, cuda_runtime
from sglang_neo.host_kv.streams import CudaDevice

SOURCE = r"""
#include <stddef.h>
#include <string.h>
static int last;
int kind_seen; void *stream_seen; int copies;
static int answer(int code) { return last = code; }
int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *stream) {
  kind_seen = kind; stream_seen = stream; copies++;
  memcpy(to, from, n);
  return 0;
}
int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                      int kind, void *stream) {
  if (width > to_pitch || width > from_pitch) return answer(12);
  kind_seen = kind; stream_seen = stream; copies++;
  for (size_t i = 0; i < height; i++) memcpy((char *)to + i * to_pitch, (const char *)from + i * from_pitch, width);
  return 0;
}
int cudaHostRegister(void *p, size_t n, unsigned flags) { return flags != 1 ? answer(1) : n > 4096 ? answer(2) : 0; }
int cudaHostUnregister(void *p) { return p ? 0 : answer(1); }
int cudaGetLastError(void) { int code = last; last = 0; return code; }
const char *cudaGetErrorString(int code) { return code == 2 ? "out of memory" : "invalid"; }
"""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> CudaRuntime:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("cudart")
    (folder / "fake.c").write_text(SOURCE)
    library = folder / "libfake.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "fake.c"], check=True)
    return CudaRuntime(str(library))


def seen(runtime: CudaRuntime, name: str, kind: Any) -> Any:
    return kind.in_dll(runtime.library, name).value


def test_copies(runtime: CudaRuntime) -> None:
    source = torch.arange(64, dtype=torch.uint8)
    target = torch.zeros(64, dtype=torch.uint8)
    runtime.copy(target.data_ptr() + 2, source.data_ptr() + 5, 7, DEVICE_TO_HOST, 99)
    assert target.tolist() == [0, 0, 5, 6, 7, 8, 9, 10, 11] + [0] * 55
    assert seen(runtime, "kind_seen", ctypes.c_int) == 2  # cudaMemcpyDeviceToHost
    assert seen(runtime, "stream_seen", ctypes.c_void_p) == 99
    target.zero_()
    runtime.copy_2d(target.data_ptr(), 4, source.data_ptr(), 16, 3, 4, HOST_TO_DEVICE, 0)
    assert target[:16].tolist() == [0, 1, 2, 0, 16, 17, 18, 0, 32, 33, 34, 0, 48, 49, 50, 0]
    assert seen(runtime, "kind_seen", ctypes.c_int) == 1


def test_errors_are_raised_and_cleared(runtime: CudaRuntime) -> None:
    runtime.register(1 << 12, 4096)
    runtime.unregister(1 << 12)
    with pytest.raises(CudaError, match=r"pinning 0.00 GB of host memory failed: out of memory \(CUDA error 2\)"):
        runtime.register(1 << 12, 4097)
    assert runtime.library.cudaGetLastError() == 0
    with pytest.raises(CudaError, match="unpinning"):
        runtime.unregister(0)
    with pytest.raises(CudaError, match="a copy of 2 x 9 bytes failed"):
        runtime.copy_2d(0, 8, 0, 16, 9, 2, HOST_TO_DEVICE, 0)


@pytest.mark.parametrize("native", [True, False])
def test_rows_on_a_cuda_device(runtime: CudaRuntime, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CudaDevice with the fake library, and without one; tensors stay on the CPU."""

    class Stream:
        cuda_stream = 7

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    device = CudaDevice(torch.device("cpu"))
    device.runtime = runtime if native else None
    source = torch.arange(100, dtype=torch.uint8)
    target = torch.zeros(40, dtype=torch.uint8)
    device.copy_rows(target, 1, 10, source[4:], 2, 30, 5, 3)
    assert target.view(4, 10)[:3, 1:6].tolist() == [[n + i for i in range(5)] for n in (6, 36, 66)]
    assert int((target != 0).sum()) == 15
    target.zero_()
    device.copy_rows(target, 3, 10, source, 2, 30, 5, 1)
    assert target[3:8].tolist() == [2, 3, 4, 5, 6]
    assert int((target != 0).sum()) == 5


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has CUDA")
def test_without_cuda_there_is_no_runtime() -> None:
    assert "libcudart" not in Path("/proc/self/maps").read_text()
    with pytest.raises(RuntimeError, match="libcudart"):
        cuda_runtime()
