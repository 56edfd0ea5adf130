"""How much host memory this process may use, and how much of it the host KV pool takes.

The machine's memory, or less if its control group says so; for what is free, page cache counts as free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

GB = 10**9
GIB = 2**30

#: What the default size of the pool leaves alone, unless memory is scarce.
RESERVE_BYTES = 10 * GIB
#: The part of free memory that the reserve never exceeds: with 20 GB free a reserve of 10 GiB would leave nothing worth
#: having, and hybrid serving would be off on small machines without a word.
RESERVE_FRACTION = 0.4
#: The default pool is at most this many times the GPU's.
MAX_GPU_POOLS = 8

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class _Files:
    """Where a version of control groups keeps its numbers, relative to a group's folder."""

    limit: str
    usage: str
    cache: tuple[str, ...]  # lines of memory.stat: file pages that the kernel can drop


_V2 = _Files("memory.max", "memory.current", ("active_file", "inactive_file"))
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))


def _groups(root: Path, membership: Path) -> Iterator[tuple[Path, _Files]]:
    """The folders of this process's memory control groups, the root's included: inside a container the group's own
    files stand at ``root``; outside, in the folder that ``membership`` names, and those above it bind too."""
    lines = (_read(membership) or "").splitlines()
    for base, files, is_ours in (
        (root, _V2, lambda controllers: controllers == ""),
        (root / "memory", _V1, lambda controllers: "memory" in controllers.split(",")),
    ):
        relative = "/"
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if is_ours(controllers):
                relative = path
        folder = base / relative.lstrip("/")
        for level in (folder, *folder.parents):
            yield level, files
            if level == base:
                break


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _limit(group: Path, files: _Files) -> int | None:
    text = _read(group / files.limit)
    return int(text) if text and text.isdigit() else None


def cgroup_limit(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """The memory limit of this process's control group in bytes, or None if it has none.

    Version 1 says "unlimited" with a number near 2**63, which ``host_memory_limit`` caps.
    """
    limits = (_limit(group, files) for group, files in _groups(root, membership))
    return min((limit for limit in limits if limit is not None), default=None)


def cgroup_available(root: Path = _ROOT, membership: Path = _MEMBERSHIP) -> int | None:
    """Bytes that this process's control group still grants (limit - usage + page cache), or None without a limit."""
    room = []
    for group, files in _groups(root, membership):
        limit, usage = _limit(group, files), _read(group / files.usage)
        if limit is None or not usage:
            continue
        stat = dict(line.split(maxsplit=1) for line in (_read(group / "memory.stat") or "").splitlines() if " " in line)
        cache = sum(int(stat.get(name, 0)) for name in files.cache)
        room.append(max(0, limit - max(0, int(usage) - cache)))
    return min(room, default=None)


def host_memory_limit() -> int:
    """Bytes of host memory that this process can ever have."""
    total: int = psutil.virtual_memory().total
    limit = cgroup_limit()
    return total if limit is None else min(total, limit)


def available_host_memory() -> int:
    """Bytes of host memory that can still be had now, page cache included."""
    available: int = psutil.virtual_memory().available
    room = cgroup_available()
    return available if room is None else min(available, room)


@dataclass(frozen=True)
class HostPoolSize:
    """A size in bytes and, for the log, where it comes from."""

    bytes: int
    why: str


def host_pool_bytes(
    *,
    size_gb: float | None,
    ratio: float | None,
    available: int,
    gpu_pool_bytes: int,
    ranks: int,
    page_bytes: int,
) -> HostPoolSize:
    """How large the host KV pool of one rank should be.

    Args:
        size_gb: ``--neo-host-kv-size``, in GB (10^9 bytes) for the whole machine; shared equally by its ranks.
        ratio: ``--neo-host-kv-ratio``, times the GPU's pool.
        available: bytes free on the whole machine (``available_host_memory``), before any rank has taken its share:
            all ranks must use one and the same number.
        gpu_pool_bytes: KV pool of this rank's GPU.
        ranks: of this machine: tp_size * dp_size.
        page_bytes: of one page in all layers; the least a pool can have.

    Returns:
        The size asked for; without either flag, half of what is free after a reserve of min(10 GiB, 40 % of it), split
        over the ranks, at most 8 GPU pools. Never less than one page. Whether there is so much memory is not checked.

    Raises:
        ValueError: numbers that mean nothing.
    """
    if ranks < 1 or page_bytes < 1:
        raise ValueError(f"ranks and page_bytes must be at least 1, got {ranks} and {page_bytes}")
    shared = f", shared by {ranks} ranks" if ranks > 1 else ""
    if size_gb is not None:
        wanted, why = int(size_gb * GB) // ranks, f"--neo-host-kv-size {size_gb:g} GB{shared}"
    elif ratio is not None:
        wanted = int(ratio * gpu_pool_bytes)
        why = f"--neo-host-kv-ratio {ratio:g} x the GPU pool of {gpu_pool_bytes / GB:.2f} GB"
    else:
        reserve = min(RESERVE_BYTES, int(RESERVE_FRACTION * available))
        wanted = (available - reserve) // 2 // ranks
        why = (
            f"half of the {available / GB:.1f} GB free on this machine after a reserve of {reserve / GB:.1f} GB{shared}"
        )
        if wanted > MAX_GPU_POOLS * gpu_pool_bytes:
            wanted = MAX_GPU_POOLS * gpu_pool_bytes
            why = f"{MAX_GPU_POOLS} x the GPU pool of {gpu_pool_bytes / GB:.2f} GB, which is less than {why}"
    if wanted < page_bytes:
        return HostPoolSize(page_bytes, f"one page: {why} would be {wanted} bytes, less than a page's {page_bytes}")
    return HostPoolSize(wanted, why)


def staging_tokens(*, asked: int | None, context: int, host_tokens: int) -> int:
    """Tokens that the device's staging region for prompts holds (``hybrid/prefill.py``).

    Args:
        asked: ``--neo-host-prompt-tokens``.
        context: longest request of the model.
        host_tokens: of the host pool, or a number that it does not exceed.
    """
    return min(context if asked is None else asked, context, host_tokens)


def most_host_tokens(
    *, size_gb: float | None, ratio: float | None, gpu_pool_bytes: int, ranks: int, token_bytes: int
) -> int:
    """A bound on the host pool's tokens, the same in all ranks, from before either pool exists.

    Args:
        gpu_pool_bytes: at most.
        token_bytes: of a token in all layers of a rank, as the host keeps it.
        size_gb, ratio, ranks: see ``host_pool_bytes``.
    """
    if size_gb is not None:
        return int(size_gb * GB) // ranks // token_bytes
    return int((MAX_GPU_POOLS if ratio is None else ratio) * gpu_pool_bytes) // token_bytes
