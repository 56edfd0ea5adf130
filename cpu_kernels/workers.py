"""Worker threads, jobs for them, and the hand-off service between a device and them.

    pool = WorkerPool.on_claimed_cores(reserve=2)
    pool.run(Job(items, run_address, context_address))                   # blocking; or plan.job(...)

    service = HandoffService(pool, timeout_s=10)
    flags = Handoffs()                                                   # once per graph of the device
    for layer in range(layers):
        flags.add(None, ready[layer], done[layer], header[layer], layer=layer)
    jobs = plan.jobs(range(layers), q, out, k=k, v=v)                    # once per step, from its Plan
    service.submit(Step(epoch=1, number=1, handoffs=flags.with_jobs(jobs)))  # then launch the step on the device
    service.outcome(1), service.lag(), service.completed_epoch()

The pool and the service know nothing of attention; a job is any object with the ``address`` of a ``cpu_kernels::Job``.
The protocol with the device and what happens when something goes wrong are described in ``src/handoff.hpp``. None of it
survives a fork: in the child every call but ``close`` raises RuntimeError, and a new pool has to be made there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cpu_kernels import _workers
from cpu_kernels._workers import FakeDevice, HandoffMemory, Handoffs, Job, JobFailed, device_wait, device_write
from cpu_kernels.cores import claim_cores

__all__ = [
    "FakeDevice",
    "Fault",
    "HandoffMemory",
    "HandoffService",
    "HandoffSpan",
    "HandoffStatus",
    "Handoffs",
    "Job",
    "JobFailed",
    "Step",
    "WorkerCounters",
    "WorkerPool",
    "WorkerSpan",
    "device_wait",
    "device_write",
]


@dataclass(frozen=True)
class WorkerCounters:
    """One worker's account since the pool began; ``busy_ns + wait_ns == age_ns`` at the moment of reading.

    The items, bytes and tokens of a job are counted before the job counts as finished. The last of a pool's counters
    belongs to callers of ``run`` that took part; its waiting is not counted.
    """

    core: int  # -1: not pinned
    age_ns: int
    busy_ns: int
    wait_ns: int
    sleeps: int
    items: int
    bytes: int
    tokens: int


@dataclass(frozen=True)
class WorkerSpan:
    """What one worker did for one job. Times are those of ``time.monotonic_ns``."""

    worker: int
    items: int
    job: int  # its number in the pool
    begin_ns: int
    end_ns: int


@dataclass(frozen=True)
class HandoffSpan:
    """One hand-off. Times are those of ``time.monotonic_ns``."""

    epoch: int
    job: int  # see WorkerSpan; a hand-off with nothing to do has none
    layer: int
    lane: int
    seen_ns: int
    done_ns: int


class WorkerPool(_workers.WorkerPool):
    """Persistent native threads that run the items of jobs.

    Args:
        threads: how many.
        cores: one per thread to pin it to; empty: not pinned.
        spin_us: how long an idle worker spins before it sleeps, microseconds.
        claim: what holds the cores; released when the pool is closed.

    Raises:
        ValueError: threads out of range, not as many cores as threads.
        RuntimeError: a thread cannot be started or pinned.
    """

    @classmethod
    def on_claimed_cores(
        cls,
        threads: int | None = None,
        *,
        reserve: int = 1,
        node: int | None = None,
        cpus: Iterable[int] | None = None,
        spin_us: float = 200.0,
    ) -> WorkerPool:
        """A pool pinned to cores that no other server has; arguments and errors are those of ``claim_cores``."""
        claim = claim_cores(threads, reserve=reserve, node=node, cpus=cpus)
        return cls(len(claim.cores), claim.cores, spin_us, claim)

    def counters(self) -> list[WorkerCounters]:
        """One per thread, then that of participating callers."""
        return [WorkerCounters(*self.counters_of(worker)) for worker in range(self.worker_slots)]

    def stop_trace(self) -> list[WorkerSpan]:
        """What the workers did since ``start_trace(spans_per_worker)``, worker by worker; what did not fit is lost."""
        return [WorkerSpan(*span) for span in self.spans()]

    def close(self, timeout_s: float = 1.0) -> bool:
        """Lets running items finish, drops the rest, ends the threads.

        Returns:
            Whether all threads ended in time. One that did not is abandoned and keeps its core.

        Raises:
            RuntimeError: a hand-off service still uses the pool.
        """
        clean = super().close(timeout_s)
        if clean and self.claim is not None:
            self.claim.release()
        return clean


@dataclass(frozen=True)
class Step:
    """What the workers have to know of one step; not changed after it was submitted.

    ``epoch`` is greater than that of the step before and names the step's resources: nothing that its jobs point to may
    go before ``completed_epoch()`` has reached it. ``keepalive`` is held until then.
    """

    epoch: int
    number: int  # uint32 that the device writes into the outbox headers
    handoffs: Handoffs
    overlap: int = 2  # hand-off i begins only when i - overlap has ended; they may share a workspace
    keepalive: Any = None
    deferred: bool = False  # the device takes the answers in its next step of this kind; for ``HandoffStatus.awaited``


@dataclass(frozen=True)
class Fault:
    """Why a service is poisoned."""

    reason: str  # device_timeout, workers_timeout, step_mismatch, bad_flag, job_failed, closed
    epoch: int
    number: int
    index: int  # of the hand-off in the step
    layer: int
    lane: int
    message: str


@dataclass(frozen=True)
class HandoffStatus:
    """The service at one moment; the counters below the line run since it began. Times in nanoseconds."""

    closed: bool
    fault: Fault | None  # the first since the last reset
    submitted_epoch: int
    completed_epoch: int
    steps: int  # submitted and not complete
    in_flight: int  # hand-offs taken and not answered
    lag: int  # hand-offs given and not answered
    device_through: bool  # after a fault: the device is known to be past the poisoned steps
    # ---
    submitted_steps: int
    complete_steps: int
    poisoned_steps: int
    handoffs: int  # answered by a job that succeeded
    answer_ns: int  # from ready seen to done written, their sum
    max_answer_ns: int
    device_wait_ns: int  # steps were running and nothing was given
    step_wait_ns: int  # of that, until the first hand-off of a step
    #: Deferred order: answers for which the device may have waited, and for how long at most (see src/handoff.hpp).
    awaited: int
    awaited_ns: int
    #: Of ``answer_ns``: from the first worker's running out of work to the last one's being done. And of ``handoffs``:
    #: those for which it was more than half, because a worker was held up, by another process as a rule.
    tail_ns: int
    held_up: int


# Steps whose memory a stuck worker may still use after its service was closed.
_abandoned: list[Step] = []


class HandoffService:
    """Takes hand-offs from the device, has the pool work on them, answers.

    Args:
        pool: has at most one service at a time; blocking calls of ``pool.run`` may be mixed in.
        timeout_s: bound of every wait on either side. Longer than anything the device may do between a ``submit`` and
            that step's first hand-off.

    Raises:
        RuntimeError: the pool has a service already, or is closed.
    """

    def __init__(self, pool: WorkerPool, timeout_s: float = 10.0) -> None:
        self._service = _workers.Service(pool, timeout_s)
        self._held: deque[Step] = deque()  # ascending epochs; what C++ only has addresses of
        self.pool = pool
        # At the latest when the interpreter ends: native threads must not outlive the memory of a step.
        self._finalizer = weakref.finalize(self, _close, self._service, self._held, 0.0)

    def submit(self, step: Step) -> None:
        """Hands a step to the workers; call it before the step is launched on the device, and launch only then.

        Raises:
            ValueError: malformed (an epoch that is not above the last, a bad flag address, overlap below 1, ...).
            RuntimeError: the service is poisoned or closed, the pool lost a worker, or this is a forked child.
        """
        self._service.submit(step.epoch, step.number, step.handoffs, step.overlap, step.deferred)
        self._held.append(step)
        self._let_go()

    def lag(self) -> int:
        """Hand-offs that the device has given and the workers have not answered."""
        return self._service.lag()

    def completed_epoch(self) -> int:
        """Every step up to this epoch is over, complete or poisoned: no worker uses what it names any more."""
        return self._let_go()

    def wait_epoch(self, epoch: int, timeout_s: float) -> bool:
        """Whether ``completed_epoch()`` reached ``epoch`` in time; waits without the GIL."""
        return self._service.wait_epoch(epoch, timeout_s)

    def outcome(self, epoch: int) -> str:
        """``pending``, ``complete``, ``poisoned``, or ``unknown``. Ask before publishing anything of a step."""
        return self._service.outcome(epoch)

    def status(self) -> HandoffStatus:
        values = self._service.status()
        fault = values.pop("fault")
        return HandoffStatus(fault=None if fault is None else Fault(**fault), **values)

    def reset(self, timeout_s: float = 1.0) -> None:
        """After a fault and once the device is idle: lowers the flags of the poisoned steps, takes steps again.

        Nothing happens to a healthy service. Deferred order begins with raised done flags: raise them again.

        Raises:
            TimeoutError: a job is still running; its worker may be lost for good.
            RuntimeError: the service is closed.
        """
        if not self._service.reset(timeout_s):
            raise TimeoutError(f"a job of a poisoned step is still running after {timeout_s} s")
        self._let_go()

    def close(self, grace_s: float = 1.0) -> bool:
        """Ends the service; harmless to repeat. Steps that are not complete are poisoned, and the device is let through
        for up to ``grace_s`` seconds.

        Returns:
            Whether no job is running any more. If one is, what its step holds is kept for ever.
        """
        clean = _close(self._service, self._held, grace_s)
        self._finalizer.detach()
        return clean

    def start_trace(self, handoffs: int) -> None:
        """Keeps the hand-offs that are answered from now on, up to so many."""
        self._service.start_trace(handoffs)

    def stop_trace(self) -> list[HandoffSpan]:
        """The hand-offs answered since ``start_trace``, in the order of their answers."""
        return [HandoffSpan(*span) for span in self._service.spans()]

    def measure_round_trips(self, steps: int = 100, jobs: Iterable[_workers.NativeJob | int] = (1,) * 80) -> list[int]:
        """Nanoseconds from raising ready to seeing done, with the calling thread as the device.

        Args:
            steps: how many, each with one hand-off per job.
            jobs: the hand-offs' jobs; a number: of items that do nothing.

        Raises:
            RuntimeError: the service refuses steps, or was poisoned meanwhile; it is closed then.
        """
        first = self._service.status()["submitted_epoch"] + 1
        return self._service.measure_round_trips(first, steps, jobs)

    def _let_go(self) -> int:
        epoch = self._service.completed_epoch()
        # Flags of poisoned steps are in use until the reset.
        if self._held and self._held[0].epoch <= epoch and self._service.status()["fault"] is None:
            while self._held and self._held[0].epoch <= epoch:
                self._held.popleft()
        return epoch


def _close(service: _workers.Service, held: deque[Step], grace_s: float) -> bool:
    clean = service.close(grace_s)
    if not clean:
        _abandoned.extend(held)
    held.clear()
    return clean


def percentile(times: Sequence[int], fraction: float) -> int:
    """The value below which ``fraction`` of ``times`` lie."""
    return sorted(times)[min(len(times) - 1, int(fraction * len(times)))]


def _attention_jobs(case: str, shape: str, layers: int, threads: int) -> tuple[Sequence[_workers.NativeJob], str]:
    """One job per layer for bf16 rows with a new token each, and whose kernels will run; ValueError for bad input."""
    from cpu_kernels.attention import HostPool, Plan  # here, and below: they are no part of what the pool knows
    from cpu_kernels.probe import Memory

    try:
        rows, tokens = map(int, case.split("x"))
        q_heads, kv_heads, head_dim = map(int, shape.split(","))
    except ValueError:
        raise ValueError(f"ROWSxTOKENS and Q_HEADS,KV_HEADS,HEAD_DIM are needed, got {case} and {shape}") from None
    pages = -(-tokens // 64)
    memory = Memory(HostPool.bytes_needed(layers, rows * pages, kv_heads, head_dim))
    pool = HostPool(memory.address, layers, rows * pages, kv_heads, head_dim)
    tables = [range(row * pages, (row + 1) * pages) for row in range(rows)]
    plan = Plan(pool, [tokens] * rows, tables, q_heads, threads=threads)
    width = (q_heads + 2 * kv_heads) * head_dim * 2
    boxes = Memory(layers * rows * (width + q_heads * head_dim * 2))

    def packed(first: int, heads: int) -> tuple[object, ...]:
        strides = (rows * width, width, head_dim * 2, 2)
        return boxes.address + first * head_dim * 2, (layers, rows, heads, head_dim), strides, "bfloat16"

    out = (boxes.address + layers * rows * width, (layers, rows, q_heads, head_dim), None, "bfloat16")
    k, v = packed(q_heads, kv_heads), packed(q_heads + kv_heads, kv_heads)
    jobs = plan.jobs(range(layers), packed(0, q_heads), out, k=k, v=v)
    jobs.keep = (jobs.keep, memory, boxes)
    return [jobs[layer] for layer in range(layers)], plan.isa


def main() -> int:
    """``python -m cpu_kernels.workers``: the hand-off's round trip on this machine, workers spinning."""
    parser = argparse.ArgumentParser(prog="python -m cpu_kernels.workers", description=main.__doc__)
    parser.add_argument("--threads", type=int, help="worker threads; default: all cores that may be claimed")
    parser.add_argument("--reserve", type=int, default=1, help="cores left unclaimed, one of which plays the device")
    parser.add_argument("--items", type=int, default=1, help="items of each (empty) job")
    parser.add_argument("--attention", metavar="ROWSxTOKENS", help="attention over bf16 rows in place of empty jobs")
    parser.add_argument("--shape", default="64,8,128", metavar="Q_HEADS,KV_HEADS,HEAD_DIM", help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=80, help="hand-offs of a step; default: %(default)s")
    parser.add_argument("--steps", type=int, default=200, help="default: %(default)s")
    args = parser.parse_args()
    usable = os.sched_getaffinity(0)
    try:
        pool = WorkerPool.on_claimed_cores(args.threads, reserve=args.reserve)
        service = HandoffService(pool)
        if rest := usable - set(pool.cores):
            os.sched_setaffinity(0, rest)
        what: dict[str, object] = {"items": args.items}
        jobs: Sequence[_workers.NativeJob | int] = [args.items] * args.layers
        if args.attention is not None:
            jobs, isa = _attention_jobs(args.attention, args.shape, args.layers, pool.threads)
            what = {"attention": args.attention, "shape": args.shape, "isa": isa}
        service.measure_round_trips(20, jobs)
        before = service.status()
        times = service.measure_round_trips(args.steps, jobs)
        after = service.status()
    except (RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        os.sched_setaffinity(0, usable)
    row = {f"p{round(100 * f)}_ns": percentile(times, f) for f in (0.5, 0.9, 0.99, 1.0)}
    row["tail_ns"] = (after.tail_ns - before.tail_ns) // max(1, len(times))  # mean
    row["held_up"] = after.held_up - before.held_up
    print(json.dumps({"round_trip": "ready to done", "threads": pool.threads, **what, **row}))
    service.close()
    pool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
