"""How much host memory there is, inside and outside a control group, and how much of it the pool takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_neo.host_kv import limits
from sglang_neo.host_kv.limits import GB, GIB, host_pool_bytes


def group_v2(folder: Path, limit: object, usage: int = 0, **stat: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))


def group_v1(folder: Path, limit: object, usage: int = 0, **stat: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (folder / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))


def test_no_control_group(tmp_path: Path) -> None:
    assert limits.cgroup_limit(tmp_path) is None
    assert limits.cgroup_available(tmp_path) is None


def test_version_2(tmp_path: Path) -> None:
    group_v2(tmp_path, 8 * GIB)
    assert limits.cgroup_limit(tmp_path) == 8 * GIB
    group_v2(tmp_path, "max")
    assert limits.cgroup_limit(tmp_path) is None


def test_version_1(tmp_path: Path) -> None:
    group_v1(tmp_path / "memory", 4 * GIB)
    assert limits.cgroup_limit(tmp_path) == 4 * GIB


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    """A group's parents bind it too, and so does version 1 beside version 2."""
    member = tmp_path / "self"
    member.write_text("7:cpu,memory:/b\n3:cpuset:/elsewhere\n0::/a/c\n")
    root = tmp_path / "root"
    group_v2(root / "a" / "c", 9000)
    assert limits.cgroup_limit(root, member) == 9000
    group_v2(root / "a", 8000)
    assert limits.cgroup_limit(root, member) == 8000
    group_v1(root / "memory" / "b", 7000)
    assert limits.cgroup_limit(root, member) == 7000
    group_v2(root / "elsewhere", 10)
    group_v1(root / "memory" / "elsewhere", 10)
    assert limits.cgroup_limit(root, member) == 7000


def test_page_cache_counts_as_free(tmp_path: Path) -> None:
    group_v2(tmp_path, 1000, usage=700, active_file=100, inactive_file=50, file=400)
    assert limits.cgroup_available(tmp_path) == 450
    group_v2(tmp_path, "max", usage=700)
    assert limits.cgroup_available(tmp_path) is None
    group_v1(tmp_path / "memory", 1000, usage=900, total_active_file=5, total_inactive_file=6, active_file=500)
    assert limits.cgroup_available(tmp_path) == 111


def test_a_full_group_has_nothing(tmp_path: Path) -> None:
    group_v2(tmp_path, 1000, usage=1200)
    assert limits.cgroup_available(tmp_path) == 0


@pytest.mark.parametrize("limit", [None, 1000, 2**63 - 4096])
def test_the_smaller_of_machine_and_group(monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    """Version 1 says "unlimited" with a number near 2**63."""
    monkeypatch.setattr(limits, "cgroup_limit", lambda: limit)
    monkeypatch.setattr(limits, "cgroup_available", lambda: limit)
    total = psutil.virtual_memory().total
    assert limits.host_memory_limit() == (1000 if limit == 1000 else total)
    assert (limits.available_host_memory() == 1000) == (limit == 1000)


def test_this_machine() -> None:
    assert 0 < limits.host_memory_limit() <= psutil.virtual_memory().total
    assert 0 < limits.available_host_memory() <= psutil.virtual_memory().total


def size(**given: Any) -> limits.HostPoolSize:
    usual = dict(size_gb=None, ratio=None, available=100 * GIB, gpu_pool_bytes=50 * GIB, ranks=1, page_bytes=1000)
    return host_pool_bytes(**{**usual, **given})


def test_size_is_for_the_machine() -> None:
    assert size(size_gb=64).bytes == 64 * GB
    assert size(size_gb=64, ranks=4).bytes == 16 * GB
    assert "shared by 4 ranks" in size(size_gb=64, ranks=4).why


def test_ratio_is_of_each_gpus_pool() -> None:
    assert size(ratio=1.5, ranks=2).bytes == 75 * GIB
    assert "--neo-host-kv-ratio 1.5" in size(ratio=1.5).why


def test_default_is_half_of_what_is_free_after_the_reserve() -> None:
    assert size().bytes == 45 * GIB
    assert size(ranks=2).bytes == 22.5 * GIB
    assert size(available=25 * GIB).bytes == 7.5 * GIB  # the reserve is 10 GiB down to here


def test_default_is_at_most_eight_gpu_pools() -> None:
    got = size(gpu_pool_bytes=GIB)
    assert got.bytes == 8 * GIB
    assert "8 x the GPU pool of 1.07 GB" in got.why


@pytest.mark.parametrize("gib", [1, 8, 12, 20])
def test_small_machines_keep_a_pool(gib: int) -> None:
    """The reserve is 40 % there, so 30 % of what is free remains for the pool."""
    assert size(available=gib * GIB).bytes == pytest.approx(0.3 * gib * GIB, rel=1e-6)


@pytest.mark.parametrize("given", [{"size_gb": 1e-9}, {"ratio": 1e-9, "gpu_pool_bytes": 1}, {"available": 0}])
def test_never_less_than_a_page(given: dict[str, Any]) -> None:
    got = size(page_bytes=5000, **given)
    assert got.bytes == 5000
    assert got.why.startswith("one page: ")


def test_numbers_without_meaning_are_refused() -> None:
    with pytest.raises(ValueError):
        size(ranks=0)
    with pytest.raises(ValueError):
        size(page_bytes=0)
