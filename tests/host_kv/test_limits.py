"""How much host memory there is, inside and outside a control group."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from sglang_neo.host_kv import limits


def v2(root: Path, text: str) -> None:
    (root / "memory.max").write_text(text)


def v1(root: Path, text: str) -> None:
    (root / "memory").mkdir()
    (root / "memory" / "memory.limit_in_bytes").write_text(text)


def test_no_control_group(tmp_path: Path) -> None:
    assert limits.cgroup_limit(tmp_path) is None


def test_version_2(tmp_path: Path) -> None:
    v2(tmp_path, "8589934592\n")
    assert limits.cgroup_limit(tmp_path) == 8 * 2**30
    v2(tmp_path, "max\n")
    assert limits.cgroup_limit(tmp_path) is None


def test_version_1(tmp_path: Path) -> None:
    v1(tmp_path, "4294967296\n")
    assert limits.cgroup_limit(tmp_path) == 4 * 2**30


def test_version_2_goes_before_version_1(tmp_path: Path) -> None:
    v1(tmp_path, "1000\n")
    v2(tmp_path, "2000\n")
    assert limits.cgroup_limit(tmp_path) == 2000


@pytest.mark.parametrize("limit", [None, 1000, 2**63 - 4096])
def test_the_smaller_of_machine_and_group(monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    """Version 1 says "unlimited" with a number near 2**63."""
    monkeypatch.setattr(limits, "cgroup_limit", lambda: limit)
    total = psutil.virtual_memory().total
    assert limits.host_memory_limit() == (1000 if limit == 1000 else total)


def test_this_machine() -> None:
    assert 0 < limits.host_memory_limit() <= psutil.virtual_memory().total
