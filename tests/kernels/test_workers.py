"""The worker pool from Python, and the claiming of cores."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpu_kernels import cores
from cpu_kernels.cores import Core, NotEnoughCores, claim_cores
from cpu_kernels.workers import Job, JobFailed, WorkerPool
from tests.harness.models import REPO_ROOT

RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
COST = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_int64 * 2))


def address(function: object) -> int:
    value = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert value is not None
    return value


def job(items: int, run: Callable[[int, int], None], tokens: int = 0) -> Job:
    """A job in Python: slow, and at the mercy of the GIL, which is what makes a good test of a native pool."""
    native = RUN(lambda _, item, worker, _next: run(item, worker))

    def cost(_: int, item: int, out: object) -> None:
        out.contents[0], out.contents[1] = 100 + item, tokens  # type: ignore[attr-defined]

    native_cost = COST(cost)
    return Job(items, address(native), cost=address(native_cost), keepalive=(native, native_cost))


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(3, spin_us=20)
    yield pool
    assert pool.close(60)


@pytest.mark.parametrize("participate", [False, True])
def test_every_item_runs_once_and_the_counters_add_up(pool: WorkerPool, participate: bool) -> None:
    seen: list[tuple[int, int]] = []
    for items in (0, 1, 2, 17):
        seen.clear()
        pool.run(job(items, lambda item, worker: seen.append((item, worker)), tokens=2), participate)
        assert sorted(item for item, _ in seen) == list(range(items))
        assert all(0 <= worker < pool.worker_slots for _, worker in seen)
        if not participate:
            assert all(worker < pool.threads for _, worker in seen)
    counters = pool.counters()
    assert len(counters) == pool.worker_slots == 4
    assert sum(c.items for c in counters) == 20
    assert sum(c.tokens for c in counters) == 40
    assert sum(c.bytes for c in counters) == 100 * 20 + 1 + sum(range(17))
    assert all(c.busy_ns + c.wait_ns == c.age_ns for c in counters)
    assert (counters[-1].items == 0) == (not participate)


def test_counters_can_be_read_while_a_job_runs(pool: WorkerPool) -> None:
    inside, leave = threading.Event(), threading.Event()

    def wait(item: int, worker: int) -> None:
        inside.set()
        leave.wait(60)

    caller = threading.Thread(target=lambda: pool.run(job(1, wait), participate=False))
    caller.start()
    assert inside.wait(60)
    first = max(c.busy_ns for c in pool.counters())
    time.sleep(0.002)
    assert max(c.busy_ns for c in pool.counters()) >= first + 1_000_000, "an item that runs counts as busy time"
    assert sum(c.items for c in pool.counters()) == 0
    leave.set()
    caller.join()
    assert sum(c.items for c in pool.counters()) == 1


def test_idle_workers_sleep_and_wake() -> None:
    pool = WorkerPool(2, spin_us=0)
    for _ in range(20):
        while pool.sleeping < 2:
            time.sleep(0)
        pool.run(job(4, lambda item, worker: None), participate=False)
    assert sum(c.sleeps for c in pool.counters()) >= 20
    assert pool.close()


def test_callers_from_several_threads(pool: WorkerPool) -> None:
    total = [0] * 4

    def call(index: int) -> None:
        done: list[int] = []
        work = job(5, lambda item, worker: done.append(item))
        for _ in range(50):
            pool.run(work, participate=index % 2 == 0)
        total[index] = len(done)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total == [250] * 4


def test_workers_are_pinned_to_their_cores() -> None:
    usable = sorted(os.sched_getaffinity(0))
    wanted = [usable[0], usable[-1], usable[0]]
    pool = WorkerPool(3, wanted)
    assert [c.core for c in pool.counters()] == [*wanted, -1]
    found: dict[int, set[int]] = {}
    barrier = threading.Barrier(3)  # so that each worker takes one item

    def look(item: int, worker: int) -> None:
        barrier.wait(60)
        found[worker] = os.sched_getaffinity(0)

    pool.run(job(3, look), participate=False)
    assert found == {worker: {core} for worker, core in enumerate(wanted)}
    assert os.sched_getaffinity(0) == set(usable), "the caller's own affinity is not touched"
    assert pool.close()


def test_workers_leave_signals_to_the_application(pool: WorkerPool) -> None:
    blocked: list[bool] = []
    pool.run(job(3, lambda item, worker: blocked.append(signal.SIGTERM in signal.pthread_sigmask(0, []))), False)
    assert blocked == [True] * 3
    assert signal.SIGTERM not in signal.pthread_sigmask(0, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "threads must be in"), ((5000,), "threads must be in"), ((2, [0]), "2 threads but 1 cores")],
)
def test_bad_arguments(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorkerPool(*arguments)


def test_bad_jobs_and_cores() -> None:
    with pytest.raises(ValueError, match="items must be in"):
        Job(-1, 1)
    with pytest.raises(ValueError, match="needs a function"):
        Job(1, 0)
    with pytest.raises(RuntimeError, match="cannot start worker 0 on core 50000"):
        WorkerPool(1, [50000])
    with pytest.raises(ValueError, match="not be negative"):
        WorkerPool(1, spin_us=-1)


def test_a_closed_pool_refuses(pool: WorkerPool) -> None:
    assert pool.refusal == ""
    assert pool.close()
    assert pool.close(), "closing twice is harmless"
    with pytest.raises(RuntimeError, match="the worker pool is closed"):
        pool.run(job(1, lambda item, worker: None))


def test_a_job_inside_a_job_is_refused(pool: WorkerPool) -> None:
    errors: list[str] = []

    def nested(item: int, worker: int) -> None:
        try:
            pool.run(job(1, lambda item, worker: None))
        except RuntimeError as error:
            errors.append(str(error))

    pool.run(job(1, nested), participate=False)
    assert errors == ["a job cannot run a job on the pool that runs it"]


def test_a_worker_that_ends_is_a_failure_and_no_hang() -> None:
    exit_thread = ctypes.CDLL(None).pthread_exit
    pool = WorkerPool(2)
    # pthread_exit as the job's function: its first argument is the context.
    with pytest.raises(JobFailed, match=r"worker \d ended inside the job"):
        pool.run(Job(5, address(exit_thread)), participate=False)
    with pytest.raises(RuntimeError, match="close this pool and make a new one"):
        pool.run(job(1, lambda item, worker: None))
    assert pool.close()


def test_a_stuck_worker_is_abandoned_not_waited_for() -> None:
    inside, leave = threading.Event(), threading.Event()

    def stuck(item: int, worker: int) -> None:
        inside.set()
        leave.wait(60)

    pool = WorkerPool(2)
    caller = threading.Thread(target=lambda: pool.run(job(1, stuck), participate=False))
    caller.start()
    assert inside.wait(60)
    assert not pool.close(0.01)
    leave.set()
    caller.join(60)
    assert not caller.is_alive()


def run_in_child(action: Callable[[], None]) -> int:
    """The exit code of a forked child that runs `action`; 0 if it did not raise."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_is_told_and_can_make_its_own_pool(pool: WorkerPool) -> None:
    def child() -> None:
        with pytest.raises(RuntimeError, match="forked after the worker pool was made"):
            pool.run(job(1, lambda item, worker: None))
        assert pool.close()
        mine = WorkerPool(2)
        done: list[int] = []
        mine.run(job(3, lambda item, worker: done.append(item)), participate=False)
        assert sorted(done) == [0, 1, 2]
        assert mine.close()

    assert run_in_child(child) == 0
    pool.run(job(1, lambda item, worker: None))  # the parent's is as it was


def test_dropping_a_pool_ends_its_threads() -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()
    pool = WorkerPool(4)
    assert threads() == before + 4
    del pool
    gc.collect()
    assert threads() == before


# ---- cores


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cores.RUNTIME_DIR_ENV, str(tmp_path / "cores"))
    monkeypatch.setattr(cores, "cpu_quota", lambda: None)
    return tmp_path / "cores"


@pytest.fixture
def eight(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process may use eight cores, says the operating system."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cores, "topology", lambda cpus: tuple(Core(cpu, 0, (cpu,)) for cpu in sorted(cpus)))


def other_server(count: int) -> subprocess.Popen[str]:
    """A process that claims `count` of the eight cores and keeps them until it is killed."""
    script = (
        "import os, sys, time\n"
        "os.sched_getaffinity = lambda pid: set(range(8))\n"
        "from cpu_kernels import cores\n"
        "cores.topology = lambda cpus: tuple(cores.Core(cpu, 0, (cpu,)) for cpu in sorted(cpus))\n"
        "cores.cpu_quota = lambda: None\n"
        f"claim = cores.claim_cores({count}, reserve=0)\n"
        "print(*claim.cores, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=REPO_ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    return process


@pytest.mark.usefixtures("eight")
def test_two_servers_take_different_cores_and_death_frees_them() -> None:
    other = other_server(3)
    try:
        assert other.stdout is not None
        theirs = {int(core) for core in other.stdout.readline().split()}
        assert len(theirs) == 3
        with claim_cores(reserve=1) as ours:
            assert len(ours.cores) == 4
            assert not theirs & set(ours.cores)
            with pytest.raises(NotEnoughCores) as refusal:
                claim_cores(2, reserve=0)
            assert f"pid {other.pid}" in str(refusal.value)
            assert f"pid {os.getpid()}" in str(refusal.value)
            assert "Ask for fewer" in str(refusal.value)
    finally:
        other.kill()
        other.wait()
    with claim_cores(8, reserve=0) as everything:
        assert sorted(everything.cores) == list(range(8))


@pytest.mark.usefixtures("eight")
def test_a_failed_claim_holds_nothing() -> None:
    with claim_cores(5, reserve=0):
        with pytest.raises(NotEnoughCores, match=r"4 cores for workers asked for, 1 can be had: .* 2 stay free"):
            claim_cores(4, reserve=2)
        with claim_cores(3, reserve=0) as rest:
            assert len(rest.cores) == 3


@pytest.mark.usefixtures("eight")
def test_a_forked_child_does_not_hold_the_claim() -> None:
    claim = claim_cores(8, reserve=0)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(ready[1], b"!" if claim.cores == () else b"?")
        os.read(go[0], 1)
        os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"!"
        with pytest.raises(NotEnoughCores):
            claim_cores(1, reserve=0)  # the child's copy being closed did not unlock ours
        claim.release()
        with claim_cores(8, reserve=0):
            pass  # although the child lives
    finally:
        os.write(go[1], b"!")
        os.waitpid(child, 0)
        for end in (*ready, *go):
            os.close(end)


@pytest.mark.usefixtures("eight")
def test_a_dropped_claim_is_released() -> None:
    claim = claim_cores(8, reserve=0)
    del claim
    gc.collect()
    claim_cores(8, reserve=0).release()


@pytest.mark.usefixtures("runtime")
def test_a_pool_on_claimed_cores_releases_them_when_closed() -> None:
    usable = os.sched_getaffinity(0)
    pool = WorkerPool.on_claimed_cores(1, reserve=0)
    assert set(pool.cores) <= usable and len(pool.cores) == 1
    with pytest.raises(NotEnoughCores):
        claim_cores(len(usable), reserve=0)
    assert pool.close()
    claim_cores(len(usable), reserve=0).release()


def test_bad_claims(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="count"):
        claim_cores(0)
    with pytest.raises(ValueError, match="reserve"):
        claim_cores(1, reserve=-1)
    runtime.write_text("a file")
    with pytest.raises(RuntimeError, match=f"cannot use .*set {cores.RUNTIME_DIR_ENV}"):
        claim_cores(1)


@pytest.mark.usefixtures("eight")
def test_the_quota_of_the_cgroup_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "cpu_quota", lambda: 3.5)
    with claim_cores(reserve=1) as claim:
        assert len(claim.cores) == 2
    with pytest.raises(NotEnoughCores, match=r"the cgroup grants 3\.5 CPUs"):
        claim_cores(3, reserve=1)


def test_quota_is_read_from_both_cgroup_versions(tmp_path: Path) -> None:
    assert cores.cpu_quota(str(tmp_path), str(tmp_path / "none")) is None
    (tmp_path / "self").write_text("0::/a/b\n")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    (tmp_path / "a" / "cpu.max").write_text("250000 100000\n")
    assert cores.cpu_quota(str(tmp_path), str(tmp_path / "self")) == 2.5
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("150000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cores.cpu_quota(str(tmp_path), str(tmp_path / "self")) == 1.5


def test_topology_and_order(tmp_path: Path) -> None:
    # Two nodes, four physical cores of two threads each: 0-3 and 4-7 are the first and second threads.
    for node, cpus in ((0, "0-1,4-5"), (1, "2-3,6-7")):
        (tmp_path / "node" / f"node{node}").mkdir(parents=True)
        (tmp_path / "node" / f"node{node}" / "cpulist").write_text(cpus + "\n")
    for cpu in range(8):
        (tmp_path / "cpu" / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    found = cores.topology(range(8), str(tmp_path))
    assert found[5] == Core(5, 0, (1, 5))
    assert cores.preference(found) == [1, 0, 5, 4, 3, 2, 7, 6]
    assert cores.preference(found, node=1) == [3, 2, 7, 6, 1, 0, 5, 4]
    assert cores.preference(found[:3], node=1) == [2, 1, 0], "only what the process may use"
    assert cores.topology([3], str(tmp_path / "none")) == (Core(3, 0, (3,)),)


@pytest.mark.parametrize("text", ["", "0", "0-3,8", "1,3,5-7"])
def test_cpu_lists(text: str) -> None:
    assert cores.format_cpu_list(cores.parse_cpu_list(text)) == text


def test_a_trace_has_what_every_worker_did(pool: WorkerPool) -> None:
    pool.run(job(5, lambda item, worker: None), participate=False)
    assert pool.stop_trace() == [], "nobody asked for it"
    begin = time.monotonic_ns()
    pool.start_trace(100)
    for items in (4, 9):
        pool.run(job(items, lambda item, worker: time.sleep(1e-3)), participate=False)
    end = time.monotonic_ns()
    spans = pool.stop_trace()
    assert sum(span.items for span in spans) == 13 and len({span.job for span in spans}) == 2
    assert all(begin <= span.begin_ns <= span.end_ns <= end for span in spans)
    busy = sum(counters.busy_ns for counters in pool.counters())
    assert sum(span.end_ns - span.begin_ns for span in spans) <= 1.5 * busy + 1e7
    pool.start_trace(1)
    for _ in range(3):
        pool.run(job(3, lambda item, worker: None), participate=False)
    assert len(pool.stop_trace()) <= pool.worker_slots, "no more than there was room for"
    with pytest.raises(ValueError, match="spans_per_worker"):
        pool.start_trace(-1)


@pytest.mark.usefixtures("eight")
def test_claimed_cores_are_known_by_their_owners() -> None:
    assert cores.claimed_cores() == {}
    other = other_server(3)
    try:
        assert other.stdout is not None
        theirs = {int(core) for core in other.stdout.readline().split()}
        with claim_cores(2, reserve=0) as ours:
            owners = cores.claimed_cores()
            assert owners == dict.fromkeys(theirs, other.pid) | dict.fromkeys(ours.cores, os.getpid())
        assert cores.claimed_cores() == dict.fromkeys(theirs, other.pid)  # looking has kept nobody from anything
    finally:
        other.kill()
        other.wait()
    assert cores.claimed_cores() == {}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_other_threads_keep_off_the_cores_of_workers() -> None:
    """Those that are there and those that they start; a worker that is pinned there stays."""
    mine, *others = sorted(os.sched_getaffinity(0))
    script = (
        "import os, sys, threading\n"
        "from cpu_kernels.workers import WorkerPool\n"
        f"pool = WorkerPool(1, [{mine}])\n"
        "waiting = threading.Thread(target=sys.stdin.readline)\n"
        "waiting.start()\n"
        "print(threading.get_native_id(), waiting.native_id, flush=True)\n"
        "waiting.join()\n"
        "masks = []\n"
        "late = threading.Thread(target=lambda: masks.append(os.sched_getaffinity(0)))\n"
        "late.start(); late.join()\n"
        "print(*masks[0], flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=REPO_ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdin is not None
    with process:
        known = [int(thread) for thread in process.stdout.readline().split()]
        tasks = {int(task) for task in os.listdir(f"/proc/{process.pid}/task")}
        assert cores.keep_off([mine], [process.pid, 2**22 + 1]) >= 2  # the second is no process
        for thread in known:
            assert os.sched_getaffinity(thread) == set(others)
        assert {mine} in [os.sched_getaffinity(task) for task in tasks]
        assert cores.keep_off([mine], [process.pid]) == 0
        assert cores.keep_off([mine, *others], [process.pid]) == 0  # never to nowhere
        process.stdin.write("\n")
        process.stdin.flush()
        assert {int(core) for core in process.stdout.readline().split()} == set(others)


@pytest.mark.usefixtures("eight")
def test_cores_to_choose_from() -> None:
    """Workers that are replaced take the cores of those before, whatever the calling thread may use by then."""
    with claim_cores(2, reserve=0, cpus=[3, 5, 6]) as claim:
        assert set(claim.cores) < {3, 5, 6}
    with pytest.raises(NotEnoughCores):
        claim_cores(4, reserve=0, cpus=[3, 5, 6])
