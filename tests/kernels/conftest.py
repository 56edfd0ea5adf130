"""Tests of the kernels mean the built-in tuning, not what was measured on the machine that runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="package")
def no_calibration() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPU_KERNELS_CALIBRATION", "off")
        yield
