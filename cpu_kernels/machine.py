"""What this machine is: CPU name, caches, NUMA nodes, memory; read from /proc and /sys, nothing where they are not."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_CPU = Path("/sys/devices/system/cpu")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def _read(path: Path | str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except (OSError, ValueError):
        return None


def _cpuinfo() -> dict[str, str]:
    """The first processor's fields."""
    fields: dict[str, str] = {}
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        key, colon, value = line.partition(":")
        if not colon:
            break
        fields[key.strip()] = value.strip()
    return fields


def cpu_name() -> str:
    """As a person would say it; "unknown" at worst."""
    info = _cpuinfo()
    arm = " ".join(info[k] for k in ("CPU implementer", "CPU part") if k in info)
    return info.get("model name") or arm or platform.processor() or platform.machine() or "unknown"


def cpu_id() -> str:
    """Tells CPU models apart where names do not: virtual machines cut "model name" short."""
    info = _cpuinfo()
    numbers = [f"{k.lower()} {info[k]}" for k in ("cpu family", "model", "stepping", "CPU variant") if k in info]
    return ", ".join([platform.machine(), cpu_name(), *numbers])


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def cache_bytes(level: int) -> int:
    """Bytes of the data (or unified) caches of that level in the whole machine; 0 if the system does not say."""
    seen: dict[str, int] = {}
    for index in _CPU.glob("cpu[0-9]*/cache/index*"):
        if _read(index / "level") != str(level) or _read(index / "type") == "Instruction":
            continue
        size = _read(index / "size") or "0"
        bytes_ = int(size[:-1]) * _UNITS[size[-1]] if size[-1] in _UNITS else int(size)
        seen[_read(index / "shared_cpu_list") or str(index)] = bytes_
    return sum(seen.values())


def last_level_cache_bytes() -> int:
    """Bytes of the largest cache; 32 MiB if the system does not say."""
    return max((cache_bytes(level) for level in (2, 3, 4)), default=0) or 32 << 20


def numa_nodes() -> int:
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1


def available_memory() -> int:
    """Bytes that can still be allocated: what the system has, or less where a control group allows less."""
    available = 1 << 62
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
    group = Path("/sys/fs/cgroup")
    v2, v1 = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
    for folder, (limit, used) in ((group, v2), (group / "memory", v1)):
        allowed, taken = _read(folder / limit), _read(folder / used)
        if allowed and taken and allowed.isdigit():
            available = min(available, max(0, int(allowed) - int(taken)))
    return available


def total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def huge_pages() -> str:
    """How the system hands out transparent huge pages: "always", "madvise", "never", or "unknown"."""
    text = _read("/sys/kernel/mm/transparent_hugepage/enabled") or ""
    return text[text.find("[") + 1 : text.find("]")] if "[" in text else "unknown"
