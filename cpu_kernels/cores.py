"""Which cores the worker threads run on, claimed so that two servers of one host do not take the same ones.

A claim is an exclusive ``flock`` on one small file per core, so it ends with the process, however that ends. The files
lie in one directory for the whole host, ``/tmp/cpu_kernels-cores``; servers that see different file systems, as
containers do, must be given a common one by ``CPU_KERNELS_RUNTIME_DIR`` if they share cores.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import sys
import time
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

#: Environment variable that names the directory of the lock files.
RUNTIME_DIR_ENV = "CPU_KERNELS_RUNTIME_DIR"
# Not XDG_RUNTIME_DIR and not TMPDIR: servers of different users, or started differently, must meet in one place.
DEFAULT_RUNTIME_DIR = "/tmp/cpu_kernels-cores"


class NotEnoughCores(RuntimeError):
    """Fewer cores are free than were asked for; the message says who has them and what to do."""


@dataclass(frozen=True)
class Core:
    """One logical CPU."""

    cpu: int
    node: int  # NUMA node
    siblings: tuple[int, ...]  # logical CPUs of the same physical core, this one included, ascending


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """``"0-3,8"`` -> ``(0, 1, 2, 3, 8)``, the form the kernel uses."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """``(0, 1, 2, 3, 8)`` -> ``"0-3,8"``."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def topology(cpus: Iterable[int], sysfs: str = "/sys/devices/system") -> tuple[Core, ...]:
    """The cores of ``cpus``, ascending. What sysfs does not tell counts as one node and one thread per core."""
    node_of: dict[int, int] = {}
    for path in Path(sysfs).glob("node/node*/cpulist"):
        if match := re.fullmatch(r"node(\d+)", path.parent.name):
            with contextlib.suppress(OSError, ValueError):
                node_of.update(dict.fromkeys(parse_cpu_list(path.read_text()), int(match[1])))
    cores = []
    for cpu in sorted(cpus):
        siblings: tuple[int, ...] = (cpu,)
        with contextlib.suppress(OSError, ValueError):
            siblings = parse_cpu_list(Path(sysfs, f"cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        cores.append(Core(cpu, node_of.get(cpu, 0), siblings))
    return tuple(cores)


def preference(cores: Sequence[Core], node: int | None = None) -> list[int]:
    """The CPUs in the order in which workers should get them.

    NUMA node ``node`` first (default: the lowest), then the others; in a node one thread of every physical core before
    any second one, which shares its load ports; from the highest down, because the lowest cores are where the kernel
    and everybody else start.
    """

    def key(core: Core) -> tuple[bool, int, int, int]:
        return core.node != node, core.node, sorted(core.siblings).index(core.cpu), -core.cpu

    return [core.cpu for core in sorted(cores, key=key)]


def cpu_quota(cgroup_root: str = "/sys/fs/cgroup", self_cgroup: str = "/proc/self/cgroup") -> float | None:
    """How many CPUs' worth of time the cgroup grants, or None if it does not say: spinning beyond it is throttled."""

    def read(path: Path) -> str | None:
        try:
            return path.read_text().strip()
        except OSError:
            return None

    limits: list[float] = []
    relative = "/"
    for line in (read(Path(self_cgroup)) or "").splitlines():
        if line.startswith("0::"):
            relative = line[3:]
    folder = Path(cgroup_root + relative)
    for level in (folder, *folder.parents):
        fields = (read(level / "cpu.max") or "").split()
        if len(fields) == 2 and fields[0] != "max":
            limits.append(int(fields[0]) / int(fields[1]))
        if level == Path(cgroup_root):
            break
    quota, period = read(Path(cgroup_root, "cpu/cpu.cfs_quota_us")), read(Path(cgroup_root, "cpu/cpu.cfs_period_us"))
    if quota and period and int(quota) > 0:
        limits.append(int(quota) / int(period))
    return min(limits, default=None)


class CoreClaim:
    """Cores that this process holds. Ends with ``release()``, with the process, or at the end of a ``with`` block.

    A forked child does not share the claim: the parent keeps it.
    """

    def __init__(self, files: dict[int, int]) -> None:
        self._files = files  # core -> open lock file; owner
        _live.add(self)

    @property
    def cores(self) -> tuple[int, ...]:
        """The claimed cores, in order of preference; none after ``release()``."""
        return tuple(self._files)

    def release(self) -> None:
        while self._files:
            _, file = self._files.popitem()
            os.close(file)

    def __enter__(self) -> CoreClaim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.release()


_live: weakref.WeakSet[CoreClaim] = weakref.WeakSet()


def _let_go_in_child() -> None:
    # The lock belongs to the open file, which parent and child share until one of them closes it; only closing, not
    # unlocking, leaves it to the parent.
    for claim in list(_live):
        claim.release()


os.register_at_fork(after_in_child=_let_go_in_child)


def runtime_dir() -> Path:
    """The directory of the lock files, made if need be.

    Raises:
        RuntimeError: it is not a directory that this process may use.
    """
    path = Path(os.environ.get(RUNTIME_DIR_ENV) or DEFAULT_RUNTIME_DIR)
    try:
        try:
            path.mkdir(parents=True)
            path.chmod(0o1777)  # for servers of other users; nobody removes another's files
        except FileExistsError:
            pass
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise NotADirectoryError(f"{path} is not a directory")
    except OSError as error:
        raise RuntimeError(f"cannot use {path} for the lock files of cores ({error}); set {RUNTIME_DIR_ENV}") from error
    return path


def _open_lock(path: Path) -> int:
    """The lock file, writable where possible; a claim by another user may be readable only, which is enough to lock."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    for extra in (os.O_RDWR, os.O_RDONLY):
        with contextlib.suppress(FileNotFoundError, PermissionError):
            return os.open(path, flags | extra)
    try:
        file = os.open(path, flags | os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:  # somebody was faster
        return os.open(path, flags | os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fchmod(file, 0o666)
    return file


def _try_claim(directory: Path, cpu: int) -> tuple[int | None, str]:
    """The locked file, or None and who holds it."""
    file = _open_lock(directory / f"core-{cpu}.lock")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(OSError):
            holder = os.pread(file, 200, 0).decode(errors="replace").strip()
        os.close(file)
        return None, holder or "unknown"
    with contextlib.suppress(OSError):  # information for people only
        os.ftruncate(file, 0)
        os.pwrite(file, f"pid {os.getpid()} ({Path(sys.argv[0]).name or 'python'})\n".encode(), 0)
    return file, ""


def _take_turn(directory: Path, timeout_s: float = 10.0) -> int:
    """A lock that one process at a time holds while it claims: every free core is locked for a moment in order to count
    them, and of two servers that start together each would find the other's."""
    file = _open_lock(directory / "claim.lock")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(file)
                raise RuntimeError(
                    f"another process has been claiming cores for {timeout_s} s; see {directory}/claim.lock"
                ) from None
            time.sleep(0.005)


def claimed_cores() -> dict[int, int]:
    """Which cores are claimed at the moment, of all of this host's servers, and the process id of who claimed each.

    Raises:
        RuntimeError: the directory of the lock files cannot be used.
    """
    directory, owners = runtime_dir(), {}
    turn = _take_turn(directory)
    try:
        for path in directory.glob("core-*.lock"):
            with contextlib.suppress(OSError), open(path) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    if match := re.match(r"pid (\d+)", file.read(200)):
                        owners[int(path.stem.removeprefix("core-"))] = int(match[1])
    finally:
        os.close(turn)
    return owners


def keep_off(cores: Collection[int], pids: Iterable[int]) -> int:
    """Takes ``cores`` out of the affinity of every thread of these processes, and so of the threads that they start.

    A thread with no other core, as a worker that is pinned to one of them, stays as it is; so does one that ends
    meanwhile or belongs to somebody else.

    Returns:
        How many threads' affinity changed.
    """
    changed = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):
                    before = os.sched_getaffinity(int(task))
                    rest = before.difference(cores)
                    if rest and rest != before:
                        os.sched_setaffinity(int(task), rest)
                        changed += 1
    return changed


def claim_cores(
    count: int | None = None, *, reserve: int = 1, node: int | None = None, cpus: Iterable[int] | None = None
) -> CoreClaim:
    """Claims cores for worker threads.

    Args:
        count: how many; default: all that may be claimed.
        reserve: how many of the usable cores must stay unclaimed for the server itself (Python, CUDA driver,
            networking). Servers of one host share what they leave unclaimed.
        node: NUMA node to begin with, usually the GPU's.
        cpus: usable ones; default: those of this process's affinity mask (which a cgroup's cpuset narrows).

    No more of them are usable than the cgroup's CPU quota.

    Raises:
        ValueError: count below 1, reserve below 0.
        NotEnoughCores: fewer than ``count`` (or none at all) can be claimed. Nothing is claimed then.
        RuntimeError: the directory of the lock files cannot be used.
    """
    if count is not None and count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if reserve < 0:
        raise ValueError(f"reserve must not be negative, got {reserve}")
    usable = os.sched_getaffinity(0) if cpus is None else set(cpus)
    quota = cpu_quota()
    granted = len(usable) if quota is None else min(len(usable), int(quota))
    directory = runtime_dir()
    files: dict[int, int] = {}
    holders: dict[str, list[int]] = {}
    turn = _take_turn(directory)
    try:
        for cpu in preference(topology(usable), node):
            file, holder = _try_claim(directory, cpu)
            if file is None:
                holders.setdefault(holder, []).append(cpu)
            else:
                files[cpu] = file
        free = min(len(files), granted) - reserve
        if free < (count or 1):
            taken = "".join(f", {format_cpu_list(cpus)} claimed by {who}" for who, cpus in sorted(holders.items()))
            limit = "" if quota is None else f", the cgroup grants {quota:g} CPUs"
            raise NotEnoughCores(
                f"{count or 1} core{'s' if (count or 1) > 1 else ''} for workers asked for, {max(free, 0)} can be had: "
                f"this process may use {len(usable)} ({format_cpu_list(usable)}){limit}{taken}, and {reserve} "
                f"stay{'s' if reserve == 1 else ''} free for the server. Ask for fewer, reserve fewer, stop the other "
                f"server, or widen the affinity (taskset, the cgroup's cpuset or quota). Lock files: {directory}"
            )
        kept = dict(list(files.items())[: free if count is None else count])
        for cpu in list(files):
            if cpu not in kept:
                os.close(files.pop(cpu))
        return CoreClaim(files)
    except BaseException:
        for file in files.values():
            os.close(file)
        raise
    finally:
        os.close(turn)
