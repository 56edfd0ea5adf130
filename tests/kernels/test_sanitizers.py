"""The C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer, and NEON where a compiler for it is installed.

``make sanitize`` adds ThreadSanitizer; ``ISAS="scalar avx2 amx_shim" make sanitize`` more instruction sets.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from cpu_kernels.isa import features, isas

ROOT = Path(__file__).parents[2]
ARM = "aarch64-linux-gnu-g++"


def cpp_tests(kind: str, **environment: str) -> str:
    done = subprocess.run(
        ["bash", "cpu_kernels/sanitize.sh", kind],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=890,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(900)  # nearly all of it is compiling; objects are kept in build/
def test_the_cpp_tests_are_clean() -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("needs a C++ compiler")
    missing = {isa.name: isa.missing(features()) for isa in isas()}
    isa = "scalar" if missing["avx2"] else "avx2"
    out = cpp_tests("asan", ISAS=isa)
    for name in ("test_workers", "test_plan", "test_kernels"):
        assert f"asan: {name}" in out
    assert f"{isa}: ok" in out


@pytest.mark.timeout(900)
def test_neon() -> None:
    """Built, and tested where an emulator is installed. On an Arm machine all other tests do more."""
    if platform.machine() == "aarch64":
        pytest.skip("this machine runs NEON itself")
    if shutil.which(ARM) is None:
        pytest.skip(f"needs {ARM} (Debian: g++-aarch64-linux-gnu)")
    emulator = shutil.which("qemu-aarch64")
    how = {"ISAS": "neon", "CXX": ARM, "LDFLAGS": "-static", "RUN": emulator or "true"}
    out = cpp_tests("plain", TESTS="test_kernels", BUILD_DIR=str(ROOT / "build/neon"), **how)
    assert "plain: test_kernels" in out
    assert emulator is None or "neon: ok" in out
