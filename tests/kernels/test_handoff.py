"""The hand-off service: its protocol under stress, and every way in which it can go wrong."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpu_kernels import workers
from cpu_kernels.workers import (
    FakeDevice,
    HandoffMemory,
    Handoffs,
    HandoffService,
    Job,
    Step,
    WorkerPool,
    device_wait,
    device_write,
    percentile,
)
from tests.kernels.test_workers import RUN, address, job, run_in_child

ORDERS = ["sync", "pipelined", "deferred"]
LONG = 60.0  # a wait that only a hang reaches
SHORT = 1.0  # a watchdog that is meant to fire; healthy steps have to beat it on a busy machine


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool(2, spin_us=20)
    yield pool
    assert pool.close(LONG)


@pytest.fixture
def service(pool: WorkerPool) -> Iterator[HandoffService]:
    service = HandoffService(pool, timeout_s=LONG)
    yield service
    assert service.close(LONG)


def drive(service: HandoffService, device: FakeDevice, first: int, count: int, overlap: int = 2) -> int:
    """Submits and launches steps as an engine does; the last one's number. Stops where the service refuses."""
    handoffs = device.handoffs()
    for number in range(first, first + count):
        try:
            service.submit(Step(number, number, handoffs, overlap))
        except RuntimeError:
            return number - 1
        device.launch()
    return first + count - 1


@pytest.mark.parametrize("order", ORDERS)
def test_stress(order: str, pool: WorkerPool, service: HandoffService) -> None:
    """10,000 steps over the three orders, with random pauses on both sides and two steps on the stream at any time."""
    steps, layers = 3400, 3
    device = FakeDevice(order, layers=layers, words=40, items=3, seed=7, max_delay_us=3)
    handoffs = device.handoffs()
    for number in range(1, steps + 1):
        service.submit(Step(number, number, handoffs, overlap=1 + number % 3))
        device.launch()
        assert 0 <= service.lag() <= len(handoffs)
        if number > 2:
            assert service.wait_epoch(number - 2, LONG)
    assert device.synchronize(LONG) and service.wait_epoch(steps, LONG)
    assert device.steps == steps
    assert device.wrong == 0
    assert device.checked == len(handoffs) * (steps - (order == "deferred"))
    status = service.status()
    assert status.fault is None
    assert (status.steps, status.in_flight, status.lag) == (0, 0, 0)
    assert status.completed_epoch == status.submitted_epoch == status.complete_steps == steps
    assert status.handoffs == len(handoffs) * steps
    assert 0 < status.max_answer_ns <= status.answer_ns
    assert 0 <= status.tail_ns < status.answer_ns and status.held_up < status.handoffs
    counters = pool.counters()
    assert sum(c.items for c in counters) == sum(c.tokens for c in counters) == 3 * status.handoffs
    assert sum(c.bytes for c in counters) == 8 * 40 * status.handoffs
    assert service.outcome(steps) == "complete" and service.outcome(steps + 1) == "unknown"


@pytest.mark.parametrize("slow", [None, 0, 1, 2])
def test_what_a_deferred_device_waits_for_is_counted(service: HandoffService, slow: int | None) -> None:
    """It takes the answers of one step in the next one; the one to hand-off ``slow`` comes late."""
    layers, late = 3, 0.2
    memory = HandoffMemory(layers, 64, 64)
    for i in range(layers):
        device_write(memory.done(i), 1)
    for number in range(1, 5):
        handoffs = Handoffs()
        for i in range(layers):
            pause = Job.spinning(1, late * 1e6) if (i, number) == (slow, 2) else None
            handoffs.add(pause, memory.ready(i), memory.done(i), layer=i)
        service.submit(Step(number, number, handoffs, deferred=True))
        for i in range(layers):
            assert device_wait(memory.done(i), 1, LONG)
            device_write(memory.done(i), 0)
            device_write(memory.ready(i), 1)
            end = time.monotonic() + (LONG if slow is None else 0.01)
            while service.lag() and time.monotonic() < end:
                time.sleep(0.0005)
    assert service.wait_epoch(4, LONG)
    status = service.status()
    if slow is None:  # the device came to each layer when all was answered
        assert (status.awaited, status.awaited_ns) == (0, 0)
    else:
        assert status.awaited >= 1 and late / 2 < status.awaited_ns / 1e9 < 2 * late + 1


def test_waits_between_steps_are_told_apart(service: HandoffService) -> None:
    layers, steps, between, within = 3, 4, 0.1, 0.04
    memory = HandoffMemory(layers, 64, 64)
    for number in range(1, steps + 1):
        handoffs = Handoffs()
        for i in range(layers):
            handoffs.add(None, memory.ready(i), memory.done(i), layer=i)
        service.submit(Step(number, number, handoffs))
        for i in range(layers):
            time.sleep(within if i else between)
            device_write(memory.ready(i), 1)
            assert device_wait(memory.done(i), 1, LONG)
            device_write(memory.done(i), 0)
    assert service.wait_epoch(steps, LONG)
    status = service.status()
    inside = status.device_wait_ns - status.step_wait_ns
    assert steps * between * 0.9e9 < status.step_wait_ns < steps * (between + LONG) * 1e9
    assert steps * (layers - 1) * within * 0.9e9 < inside < status.device_wait_ns


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("kind", "reason", "text"),
    [
        ("no_ready", "device_timeout", "the device did not raise ready within 1 s"),
        ("wrong_step", "step_mismatch", "the outbox header says step 6, the descriptor 5"),
        ("bad_flag", "bad_flag", "the ready flag is 7, not 0 or 1"),
        ("throw", "job_failed", "the job failed: fault on purpose"),
        ("stuck", "workers_timeout", "the workers did not finish the job within 1 s"),
    ],
)
def test_faults_poison_release_and_reset(pool: WorkerPool, order: str, kind: str, reason: str, text: str) -> None:
    service = HandoffService(pool, timeout_s=SHORT if reason.endswith("timeout") else LONG)
    device = FakeDevice(order, layers=4)
    device.fault(kind, 5, handoff=2)
    last = drive(service, device, 1, 8)
    assert device.synchronize(LONG), "the device must get through, whatever happens"
    status = service.status()
    assert status.fault is not None
    assert (status.fault.reason, status.fault.epoch, status.fault.number, status.fault.index) == (reason, 5, 5, 2)
    assert (status.fault.layer, status.fault.lane) == ((1, 0) if order == "pipelined" else (2, 0))
    assert status.fault.message == (f"step 5 (epoch 5), layer {status.fault.layer}, lane {status.fault.lane}: {text}")
    outcomes = [service.outcome(epoch) for epoch in range(1, last + 1)]
    assert outcomes == ["complete"] * 4 + ["poisoned"] * (last - 4)
    with pytest.raises(RuntimeError, match="poisoned and needs a reset: step 5"):
        service.submit(Step(100, 100, device.handoffs()))
    if kind == "stuck":
        assert service.completed_epoch() == 4, "a worker may still write what step 5 names"
        with pytest.raises(TimeoutError, match="still running"):
            service.reset(0.01)
        device.release_stuck()
    service.reset(LONG)
    assert service.completed_epoch() == last
    assert service.status().fault is None
    assert [service.outcome(epoch) for epoch in range(1, last + 1)] == outcomes, "what was said stays"
    device.restart()
    # The device's own count goes on with the steps that it was given.
    last = drive(service, device, last + 1, 3)
    assert device.synchronize(LONG) and service.wait_epoch(last, LONG)
    assert service.outcome(last) == "complete" and device.wrong == 0
    status = service.status()
    assert status.complete_steps + status.poisoned_steps == status.submitted_steps == last
    assert service.close(LONG)


def test_the_watchdog_fires_without_any_device(pool: WorkerPool) -> None:
    service = HandoffService(pool, timeout_s=0.05)
    memory = HandoffMemory(1, 0, 0)
    handoffs = Handoffs()
    handoffs.add(Job(0, 0), memory.ready(0), memory.done(0))
    service.submit(Step(1, 1, handoffs, keepalive=memory))
    assert device_wait(memory.done(0), 1, LONG), "whoever waits is let go"
    assert service.outcome(1) == "poisoned"
    assert service.wait_epoch(1, LONG)
    service.reset()
    assert not device_wait(memory.done(0), 1, 0.0), "reset lowers the flags"
    assert service.close()


def test_a_worker_that_ends_poisons() -> None:
    own = WorkerPool(2)
    service = HandoffService(own, timeout_s=LONG)
    device = FakeDevice("sync", layers=4)
    device.fault("exit", 2, 1)
    drive(service, device, 1, 3)
    assert device.synchronize(LONG)
    fault = service.status().fault
    assert fault is not None and fault.reason == "job_failed" and "ended inside the job" in fault.message
    service.reset(LONG)
    with pytest.raises(RuntimeError, match="make a new one"):
        service.submit(Step(50, 50, device.handoffs()))
    assert service.close() and own.close(LONG)


def one(memory: HandoffMemory, work: Job, *, header: bool = False) -> Handoffs:
    handoffs = Handoffs()
    for i in range(len(memory)):
        handoffs.add(work, memory.ready(i), memory.done(i), memory.header(i) if header else 0, layer=i)
    return handoffs


def test_flags_headers_and_boxes_follow_the_protocol(service: HandoffService) -> None:
    memory = HandoffMemory(2, 10, 6)
    seen: list[bytes] = []

    def work(item: int, worker: int) -> None:
        assert not device_wait(memory.ready(0), 1, 0.0), "ready is cleared before the job runs"
        assert not device_wait(memory.done(0), 1, 0.0), "done is raised after"
        seen.append(bytes(memory.outbox(0)))
        memory.inbox(0)[:] = b"answer"

    service.submit(Step(1, 77, one(memory, job(1, work), header=True)))
    memory.outbox(0)[:] = b"0123456789"
    device_write(memory.header(0), 77)
    device_write(memory.ready(0), 1)
    assert device_wait(memory.done(0), 1, LONG)
    assert seen == [b"0123456789"] and bytes(memory.inbox(0)) == b"answer"
    device_write(memory.done(0), 0)
    assert not device_wait(memory.done(1), 1, 0.0) and service.outcome(1) == "pending"
    device_write(memory.header(1), 77)
    device_write(memory.ready(1), 1)
    assert service.wait_epoch(1, LONG)
    assert len(seen) == 2 and service.status().handoffs == 2
    with pytest.raises(IndexError, match="hand-off 2 of 2"):
        memory.ready(2)


def test_lag_counts_what_was_given_and_not_answered(service: HandoffService) -> None:
    memory = HandoffMemory(5, 0, 0)
    leave = threading.Event()
    handoffs = one(memory, job(1, lambda item, worker: leave.wait(LONG) and None))
    assert service.lag() == 0
    # Two steps on the same flags, as in deferred order; each flag is counted once.
    service.submit(Step(1, 0, handoffs, overlap=1))
    service.submit(Step(2, 0, handoffs, overlap=1))
    assert service.lag() == 0
    for given in range(1, 6):
        device_write(memory.ready(given - 1), 1)
        assert service.lag() == given
    leave.set()
    assert service.wait_epoch(1, LONG)
    assert service.lag() == 0
    for i in range(5):
        device_write(memory.ready(i), 1)
    assert service.wait_epoch(2, LONG)


def test_overlap_bounds_what_runs_at_once(pool: WorkerPool, service: HandoffService) -> None:
    memory = HandoffMemory(6, 0, 0)
    running: list[int] = []
    most: list[int] = []
    guard = threading.Lock()

    def work(item: int, worker: int) -> None:
        with guard:
            running.append(item)
            most.append(len(running))
        time.sleep(0.001)
        with guard:
            running.pop()

    handoffs = one(memory, job(1, work))
    for epoch, overlap in enumerate((1, 2), start=1):
        most.clear()
        service.submit(Step(epoch, 0, handoffs, overlap))
        for i in range(6):
            device_write(memory.ready(i), 1)
        assert service.wait_epoch(epoch, LONG)
        assert len(most) == 6 and max(most) <= overlap


@pytest.mark.parametrize("overlap", [1, 4])
def test_a_worker_that_is_held_up(overlap: int, pool: WorkerPool, service: HandoffService) -> None:
    """It holds up its own hand-off; the other worker goes on, as far as the step allows, and the loss is counted."""
    memory, held_s, slow = HandoffMemory(8, 0, 0), 0.5, 1
    stuck, beside, leave = threading.Event(), threading.Event(), threading.Event()

    def work(item: int, worker: int) -> None:
        """Nothing: two items of every hand-off but one."""

    def held(item: int, worker: int) -> None:
        (beside if item else stuck).set()
        if item == 0:
            leave.wait(LONG)

    jobs = [job(2, held if i == slow else work) for i in range(len(memory))]
    handoffs = Handoffs()
    for i, of_layer in enumerate(jobs):
        handoffs.add(of_layer, memory.ready(i), memory.done(i), layer=i)
    service.submit(Step(1, 0, handoffs, overlap, keepalive=jobs))
    for i in range(len(memory)):
        device_write(memory.ready(i), 1)
    begin = time.monotonic()
    assert stuck.wait(LONG) and beside.wait(LONG)
    others = [i for i in range(slow + overlap) if i != slow]
    assert all(device_wait(memory.done(i), 1, LONG) for i in others)
    time.sleep(held_s)
    assert not any(device_wait(memory.done(i), 1, 0) for i in range(len(memory)) if i not in others)
    assert service.status().in_flight == 1
    leave.set()
    assert service.wait_epoch(1, LONG)
    took = time.monotonic() - begin
    status = service.status()
    assert (
        status.held_up >= 1 and held_s / 2 < status.tail_ns / 1e9 <= status.answer_ns / 1e9 < (1 + overlap) * took + 1
    )


def test_epochs_keep_what_steps_name(service: HandoffService) -> None:
    class Pages:
        pass

    memory = HandoffMemory(1, 0, 0)
    leave = threading.Event()
    pages = [Pages(), Pages()]
    alive = [weakref.ref(p) for p in pages]
    handoffs = one(memory, job(1, lambda item, worker: leave.wait(LONG) and None))
    service.submit(Step(1, 0, handoffs, keepalive=pages.pop(0)))
    service.submit(Step(2, 0, handoffs, keepalive=pages.pop(0)))
    device_write(memory.ready(0), 1)
    # The request of step 1 was aborted: nobody else holds its pages, and the worker is about to write them.
    gc.collect()
    assert service.completed_epoch() == 0 and all(ref() is not None for ref in alive)
    leave.set()
    assert service.wait_epoch(1, LONG) and service.completed_epoch() == 1
    gc.collect()
    assert alive[0]() is None and alive[1]() is not None
    device_write(memory.ready(0), 1)
    assert service.wait_epoch(2, LONG) and service.completed_epoch() == 2
    gc.collect()
    assert alive[1]() is None


def test_a_descriptor_is_copied(service: HandoffService) -> None:
    memory = HandoffMemory(1, 0, 0)
    ran: list[str] = []
    handoffs = one(memory, job(1, lambda item, worker: ran.append("first")))
    service.submit(Step(1, 0, handoffs))
    other = HandoffMemory(1, 0, 0)
    handoffs.add(job(1, lambda item, worker: ran.append("second")), other.ready(0), other.done(0))
    device_write(memory.ready(0), 1)
    assert service.wait_epoch(1, LONG)
    assert ran == ["first"]


def test_jobs_are_replaced_for_the_next_step(service: HandoffService) -> None:
    memory = HandoffMemory(3, 0, 0)
    contexts: list[int | None] = []
    run = RUN(lambda context, *_: contexts.append(context))
    handoffs = one(memory, Job(1, address(run), 5, keepalive=run))
    following = handoffs.with_jobs([Job(2, address(run), 10), None, Job(1, address(run), 30)])
    with pytest.raises(ValueError, match="2 jobs for 3 hand-offs"):
        handoffs.with_jobs([None, None])
    for epoch, step in enumerate((handoffs, following), start=1):
        service.submit(Step(epoch, 0, step, overlap=1))
        for i in range(3):
            device_write(memory.ready(i), 1)
        assert service.wait_epoch(epoch, LONG)
    assert contexts == [5, 5, 5, 10, 10, 30]


def test_malformed_steps_are_refused(service: HandoffService) -> None:
    memory = HandoffMemory(2, 0, 0)
    good = one(memory, Job(0, 0))
    service.submit(Step(5, 0, Handoffs()))
    assert service.completed_epoch() == 5, "a step without hand-offs is over at once"
    with pytest.raises(ValueError, match="epoch 5 is not above the last one, 5"):
        service.submit(Step(5, 0, good))
    with pytest.raises(ValueError, match="overlap"):
        service.submit(Step(6, 0, good, overlap=0))
    for ready, done, header in ((0, 4, 0), (6, 4, 0), (4, 8, 3)):
        bad = Handoffs()
        bad.add(Job(0, 0), ready, done, header)
        with pytest.raises(ValueError, match=r"multiples of 4|misaligned"):
            service.submit(Step(6, 0, bad))
    good.add(Job(0, 0), memory.ready(0), memory.done(0))
    with pytest.raises(ValueError, match="same flag"):
        service.submit(Step(6, 0, good))
    with pytest.raises(OverflowError):
        service.submit(Step(6, 2**32, Handoffs()))
    with pytest.raises(ValueError, match="multiple of 4"):
        device_write(2, 1)


def test_one_service_per_pool_and_the_pool_stays_while_it_is_used(pool: WorkerPool) -> None:
    service = HandoffService(pool, timeout_s=LONG)
    with pytest.raises(RuntimeError, match="already has a hand-off service"):
        HandoffService(pool)
    with pytest.raises(RuntimeError, match="close it first"):
        pool.close()
    assert service.close() and service.close()
    with pytest.raises(RuntimeError, match="the hand-off service is closed"):
        service.submit(Step(1, 0, Handoffs()))
    second = HandoffService(pool, timeout_s=LONG)
    assert second.close()


def test_blocking_calls_go_on_beside_a_service(pool: WorkerPool, service: HandoffService) -> None:
    device = FakeDevice("deferred", layers=3)
    handoffs = device.handoffs()
    done: list[int] = []
    for number in range(1, 101):
        service.submit(Step(number, number, handoffs))
        device.launch()
        pool.run(job(3, lambda item, worker: done.append(item)), participate=number % 2 == 0)
    assert service.wait_epoch(100, LONG) and device.synchronize(LONG)
    assert len(done) == 300 and device.wrong == 0


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("moment", ["idle", "submitted", "running", "poisoned", "complete"])
def test_close_in_every_state(order: str, moment: str) -> None:
    pool = WorkerPool(2)
    service = HandoffService(pool, timeout_s=SHORT if moment == "poisoned" else LONG)
    device = FakeDevice(order, layers=4, max_delay_us=50)
    device.fault("none", 1)  # the boxes of a step cut short are nobody's
    if moment == "submitted":
        service.submit(Step(1, 1, device.handoffs()))
    elif moment != "idle":
        if moment == "poisoned":
            device.fault("no_ready", 1, 2)
        drive(service, device, 1, 3)
    if moment == "complete":
        assert service.wait_epoch(3, LONG)
    if moment == "poisoned":
        while service.status().fault is None:
            time.sleep(0.001)
    assert service.close(0.01 if moment in ("submitted", "poisoned") else LONG)
    if moment == "running":
        assert service.status().completed_epoch == 3
    assert device.synchronize(LONG) or moment == "poisoned"
    assert pool.close(LONG)


def test_closing_beside_a_stuck_job_does_not_wait() -> None:
    own = WorkerPool(2)
    service = HandoffService(own, timeout_s=LONG)
    device = FakeDevice("sync")
    device.fault("stuck", 1, 0)
    drive(service, device, 1, 1)
    while service.status().in_flight == 0:
        time.sleep(0)
    assert not service.close(0.01)
    assert not own.close(0.01)
    device.release_stuck()


def test_a_dropped_service_lets_the_pool_go(pool: WorkerPool) -> None:
    service = HandoffService(pool, timeout_s=LONG)
    device = FakeDevice("sync")
    service.submit(Step(1, 1, device.handoffs()))
    del service
    gc.collect()
    assert HandoffService(pool).close()


def test_a_forked_child_is_told() -> None:
    pool = WorkerPool(1, spin_us=20)  # one: while it spins, the child wants a core too
    service = HandoffService(pool, timeout_s=LONG)
    device = FakeDevice("sync", layers=3)
    service.submit(Step(1, 1, device.handoffs()))  # workers are at it during the fork

    def child() -> None:
        for call in (service.lag, service.completed_epoch, service.status, lambda: service.outcome(1)):
            with pytest.raises(RuntimeError, match="forked after the hand-off service was made"):
                call()
        with pytest.raises(RuntimeError, match="forked"):
            service.submit(Step(2, 2, device.handoffs()))
        assert service.close() and pool.close()
        mine = WorkerPool(1)
        theirs = HandoffService(mine, timeout_s=LONG)
        other = FakeDevice("sync")
        drive(theirs, other, 1, 2)
        assert theirs.wait_epoch(2, LONG) and other.synchronize(LONG)
        assert theirs.close() and mine.close()

    assert run_in_child(child) == 0
    device.launch()
    assert service.wait_epoch(1, LONG) and device.synchronize(LONG)
    assert service.close(LONG) and pool.close(LONG)


def test_round_trips_are_measured(service: HandoffService) -> None:
    for items in (0, 1, 3):
        times = service.measure_round_trips(steps=3, jobs=[items] * 10)
        assert len(times) == 30 and all(t > 0 for t in times)
        assert percentile(times, 0) == min(times) and percentile(times, 1) == max(times)
    assert service.status().complete_steps == 9


def test_the_command_prints_one_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("CPU_KERNELS_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["workers", "--threads", "1", "--reserve", "0", "--steps", "2"])
    before = os.sched_getaffinity(0)
    assert workers.main() == 0
    row = json.loads(capsys.readouterr().out)
    assert row["threads"] == 1 and row["items"] == 1 and 0 < row["p50_ns"] <= row["p100_ns"]
    assert 0 <= row["tail_ns"] <= row["p100_ns"] and 0 <= row["held_up"] <= 2 * 80
    attention = ["--attention", "2x65", "--shape", "8,2,64", "--layers", "3"]
    monkeypatch.setattr("sys.argv", ["workers", "--threads", "1", "--reserve", "0", "--steps", "2", *attention])
    assert workers.main() == 0
    row = json.loads(capsys.readouterr().out)
    assert row["attention"] == "2x65" and 0 < row["p50_ns"] <= row["p100_ns"]
    assert 0 <= row["tail_ns"] <= row["p100_ns"]
    assert os.sched_getaffinity(0) == before
    monkeypatch.setattr("sys.argv", ["workers", "--threads", "100000"])
    assert workers.main() == 2
    assert "Ask for fewer" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["workers", "--threads", "1", "--reserve", "0", "--attention", "much"])
    assert workers.main() == 2
    assert "ROWSxTOKENS" in capsys.readouterr().err


def test_a_trace_has_every_hand_off() -> None:
    pool = WorkerPool(2)
    service = HandoffService(pool)
    try:
        service.start_trace(1000)
        pool.start_trace(1000)
        first = service.status().submitted_epoch + 1
        service.measure_round_trips(3, [1] * 4)
        handoffs, spans = service.stop_trace(), pool.stop_trace()
        assert [(h.epoch, h.layer) for h in handoffs] == [
            (first + step, layer) for step in range(3) for layer in range(4)
        ]
        assert all(h.seen_ns <= h.done_ns for h in handoffs)
        jobs = {h.job: h for h in handoffs}
        assert len(jobs) == 12 and {span.job for span in spans} == set(jobs)
        for span in spans:
            assert jobs[span.job].seen_ns <= span.begin_ns <= jobs[span.job].done_ns
        assert service.stop_trace() == []
        with pytest.raises(ValueError, match="handoffs"):
            service.start_trace(-1)
    finally:
        service.close()
        pool.close()
