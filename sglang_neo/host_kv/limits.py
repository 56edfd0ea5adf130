"""How much host memory this process may use: the machine's, or less if its control group says so."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP_FILES = (
    "memory.max",  # cgroup v2
    "memory/memory.limit_in_bytes",  # cgroup v1
)


def cgroup_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The memory limit of this process's control group in bytes, or None if it has none.

    Inside a container the group's own files stand at ``root``; outside, the root group has no limit file (v2), and
    v1 reports a number near 2**63, which ``host_memory_limit`` caps.
    """
    for name in _CGROUP_FILES:
        try:
            text = (root / name).read_text().strip()
        except OSError:
            continue
        return None if text == "max" else int(text)
    return None


def host_memory_limit() -> int:
    """Bytes of host memory that this process can ever have."""
    total: int = psutil.virtual_memory().total
    limit = cgroup_limit()
    return total if limit is None else min(total, limit)

def host_pool_bytes(*, size_gb, ratio, device_pool_bytes, ranks):
    if size_gb: return int(size_gb*1e9/ranks)
    return int((ratio or 8)*device_pool_bytes)
