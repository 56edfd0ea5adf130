"""Workers, hand-off and plans in C++ under AddressSanitizer and UndefinedBehaviorSanitizer.

``make sanitize`` adds the kernels, which take minutes to compile with sanitizers, and ThreadSanitizer.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)  # nearly all of it is compiling; objects are kept in build/sanitize
@pytest.mark.parametrize("name", ["test_workers", "test_plan"])
def test_the_cpp_tests_are_clean(name: str) -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("needs a C++ compiler")
    done = subprocess.run(
        ["bash", "cpu_kernels/sanitize.sh", "asan"],
        cwd=ROOT,
        env={**os.environ, "TESTS": name},
        capture_output=True,
        text=True,
        timeout=890,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert f"asan: {name}" in done.stdout
