"""Plans on worker pools and through the hand-off service, as a server runs them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cpu_kernels.arrays import as_array
from cpu_kernels.attention import HostPool, Plan, Tuning
from cpu_kernels.workers import (
    HandoffMemory,
    Handoffs,
    HandoffService,
    JobFailed,
    Step,
    WorkerPool,
    device_wait,
    device_write,
)
from tests.kernels import reference as ref

LONG = 60.0
TUNING = Tuning(min_split_tokens=64, min_thread_tokens=1, last_round_tokens=4)
BOUND = 8e-3  # of the largest output: bf16 arithmetic and output


@pytest.fixture
def workers() -> Iterator[WorkerPool]:
    pool = WorkerPool(2, spin_us=20)
    yield pool
    assert pool.close(LONG)


def batch(lengths: list[int], **options: Any) -> tuple[ref.Case, np.ndarray, np.ndarray]:
    """A case, queries for it, and what must come out."""
    rng = np.random.default_rng(3)
    case = ref.make_case(rng, lengths, 2, 64, **options)
    q = ref.random_queries(rng, len(lengths), 8, 64, "bfloat16")
    return case, q, ref.attention(ref.decode(q, "bfloat16"), case.keys, case.values, 64**-0.5)[0]


@pytest.mark.parametrize("threads", [2, 3, 8])
def test_a_plan_runs_on_a_pool(workers: WorkerPool, threads: int) -> None:
    case, q, want = batch([700, 0, 5, 64, 1000, 31])
    plan = Plan(case.pool, case.lengths, case.tables, 8, threads=threads, tuning=TUNING)
    for _ in range(20):
        out, _ = ref.run_plan(plan, q, workers=workers)
        assert ref.error(out, "bfloat16", want) < BOUND
    counters = workers.counters()
    assert sum(c.bytes for c in counters) == 20 * plan.bytes
    assert sum(c.tokens for c in counters) == 20 * 2 * sum(case.lengths)
    assert sum(c.items for c in counters) == 20 * plan.native.items
    if threads == workers.threads:
        assert counters[-1].items == 0, "a plan for two workers leaves no place for the caller"


def test_a_plan_for_fewer_workers_is_refused(workers: WorkerPool) -> None:
    case, q, _ = batch([100, 100])
    plan = Plan(case.pool, case.lengths, case.tables, 8, threads=1, tuning=TUNING)
    with pytest.raises(ValueError, match="made for 1 workers, the pool has 2"):
        ref.run_plan(plan, q, workers=workers)
    memory, service = HandoffMemory(1, 0, 0), HandoffService(workers)
    handoffs = Handoffs()
    handoffs.add(plan.job(0, q, np.empty_like(q)), memory.ready(0), memory.done(0))
    with pytest.raises(ValueError, match="made for 1 workers, the pool has 2"):
        service.submit(Step(1, 1, handoffs))
    assert service.close()


def test_a_run_that_was_cut_short_does_not_spoil_the_next() -> None:
    case, q, want = batch([3000, 2000, 2500])
    plan = Plan(case.pool, case.lengths, case.tables, 8, threads=3, isa="scalar", tuning=TUNING)
    cut = 0
    for attempt in range(200):
        pool = WorkerPool(2, spin_us=20)
        failures: list[BaseException] = []

        def call(pool: WorkerPool = pool, failures: list[BaseException] = failures) -> None:
            try:
                for _ in range(1000):
                    ref.run_plan(plan, q, workers=pool)
            except (JobFailed, RuntimeError) as error:
                failures.append(error)

        caller = threading.Thread(target=call)
        caller.start()
        while sum(c.items for c in pool.counters()) <= attempt % 7:
            pass
        assert pool.close(LONG)
        caller.join(LONG)
        cut += isinstance(failures[0], JobFailed)
        fresh = WorkerPool(2, spin_us=20)
        out, _ = ref.run_plan(plan, q, workers=fresh)
        assert fresh.close(LONG)
        assert ref.error(out, "bfloat16", want) < BOUND
        if cut == 3:
            break
    assert cut, "no run was cut short: the test shows nothing"


def test_two_runs_of_one_plan_at_a_time_are_refused(workers: WorkerPool) -> None:
    case, q, want = batch([20_000], layers=1)
    plan = Plan(
        case.pool, case.lengths, case.tables, 8, threads=2, isa="scalar", tuning=Tuning(min_split_tokens=1 << 20)
    )
    memory, service = HandoffMemory(2, 0, 0), HandoffService(workers, timeout_s=LONG)
    outs = [np.empty_like(q) for _ in range(2)]
    handoffs = Handoffs()
    for i, out in enumerate(outs):
        handoffs.add(plan.job(0, q, out), memory.ready(i), memory.done(i))
    service.submit(Step(1, 1, handoffs, overlap=2))
    for i in range(2):
        device_write(memory.ready(i), 1)
    assert service.wait_epoch(1, LONG) and service.outcome(1) == "poisoned"
    fault = service.status().fault
    assert fault is not None and "the plan is running" in fault.message
    service.reset(LONG)
    service.submit(Step(2, 2, handoffs, overlap=1))  # one after the other is fine
    for i in range(2):
        device_write(memory.ready(i), 1)
    assert service.wait_epoch(2, LONG) and service.outcome(2) == "complete"
    assert all(ref.error(out, "bfloat16", want) < BOUND for out in outs)
    assert service.close(LONG)


def test_jobs_of_several_layers_refuse() -> None:
    case, q, _ = batch([10, 20], layers=2)
    plan = Plan(case.pool, case.lengths, case.tables, 8, tuning=TUNING)
    both = np.stack([q, q])
    jobs = plan.jobs([1, 0], both, both.copy())
    assert len(jobs) == len(list(jobs)) == 2
    assert [job.address for job in jobs] == [jobs.address(0), jobs.address(1)]
    with pytest.raises(IndexError, match="job 2 of 2"):
        jobs.address(2)
    with pytest.raises(IndexError, match="layer 2 is outside the pool of 2"):
        plan.jobs([0, 2], both, both.copy())
    with pytest.raises(ValueError, match="q: shape must be 1x2x8x64, got 2x2x8x64"):
        plan.jobs([0], both, both.copy())
    handoffs = Handoffs()
    with pytest.raises(ValueError, match="2 jobs for 0 hand-offs"):
        handoffs.with_jobs(jobs)


# ---- a model's attention over steps and layers, through outbox and inbox

LAYERS, Q_HEADS, KV_HEADS, DIM, STEPS = 3, 8, 2, 64, 5
WIDTH = (Q_HEADS + 2 * KV_HEADS) * DIM  # of an outbox row: q, k, v


@dataclass
class Model:
    """Rows with their tokens in a host pool, all layers, and in float64 beside it."""

    lengths: list[int]
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(17))

    def __post_init__(self) -> None:
        most = -(-(max(self.lengths) + STEPS) // 64)
        self.tables = self.rng.permutation(most * len(self.lengths)).astype(np.int32).reshape(-1, most)
        size = HostPool.bytes_needed(LAYERS, self.tables.size, KV_HEADS, DIM)
        self.pool = HostPool(ref.aligned(size, 0, 0xFF), LAYERS, self.tables.size, KV_HEADS, DIM)
        self.kept: list[list[list[np.ndarray]]] = []  # [layer][row][k, v]
        for layer in range(LAYERS):
            rows = []
            for length, table in zip(self.lengths, self.tables, strict=True):
                k, v = (ref.random_queries(self.rng, length, KV_HEADS, DIM, "bfloat16") for _ in range(2))
                at = np.arange(length)
                self.pool.write(layer, table[at // 64].astype(np.int64) * 64 + at % 64, k, v, "bfloat16")
                rows.append([ref.decode(k, "bfloat16"), ref.decode(v, "bfloat16")])
            self.kept.append(rows)

    def plan(self, rows: range, step: int, threads: int) -> Plan:
        """Of step 1, 2, ...: every row is one token longer each time."""
        return Plan(
            self.pool,
            [self.lengths[r] + step for r in rows],
            [list(self.tables[r]) for r in rows],
            Q_HEADS,
            threads=threads,
            tuning=TUNING,
        )

    def attend(self, layer: int, rows: range, packed: np.ndarray) -> np.ndarray:
        """What the host must answer to an outbox; [rows, q_heads, dim]."""
        x = ref.decode(packed, "bfloat16").reshape(len(rows), -1, DIM)
        for i, row in enumerate(rows):
            kept = self.kept[layer][row]
            kept[0] = np.concatenate([kept[0], x[i : i + 1, Q_HEADS : Q_HEADS + KV_HEADS]])
            kept[1] = np.concatenate([kept[1], x[i : i + 1, Q_HEADS + KV_HEADS :]])
        keys, values = ([self.kept[layer][row][j] for row in rows] for j in range(2))
        return ref.attention(x[:, :Q_HEADS], keys, values, DIM**-0.5)[0]


class Lane:
    """Hand-offs of some of a model's rows, one per layer, on plain memory."""

    def __init__(self, model: Model, rows: range) -> None:
        self.model, self.rows = model, rows
        self.memory = HandoffMemory(LAYERS, len(rows) * WIDTH * 2, len(rows) * Q_HEADS * DIM * 2)
        boxes = [as_array(box) for i in range(LAYERS) for box in (self.memory.outbox(i), self.memory.inbox(i))]
        self.out_at, self.in_at = boxes[0].address, boxes[1].address
        self.stride = boxes[2].address - boxes[0].address
        self.expected: dict[int, np.ndarray] = {}

    def views(self) -> dict[str, Any]:
        """q, k, v and out of all layers as places in the boxes."""
        n = len(self.rows)

        def packed(first: int, heads: int) -> tuple[Any, ...]:
            shape, strides = (LAYERS, n, heads, DIM), (self.stride, WIDTH * 2, DIM * 2, 2)
            return self.out_at + first * DIM * 2, shape, strides, "bfloat16"

        out = (self.in_at, (LAYERS, n, Q_HEADS, DIM), (self.stride, Q_HEADS * DIM * 2, DIM * 2, 2), "bfloat16")
        return dict(q=packed(0, Q_HEADS), k=packed(Q_HEADS, KV_HEADS), v=packed(Q_HEADS + KV_HEADS, KV_HEADS), out=out)

    def layer_views(self, layer: int) -> dict[str, Any]:
        return {
            name: (address + layer * self.stride, shape[1:], strides[1:], dtype)
            for name, (address, shape, strides, dtype) in self.views().items()
        }

    def give(self, layer: int, number: int) -> None:
        packed = ref.encode(self.model.rng.standard_normal((len(self.rows), WIDTH)).astype(np.float32), "bfloat16")
        self.memory.outbox(layer)[:] = packed.tobytes()
        self.expected[layer] = self.model.attend(layer, self.rows, packed)
        device_write(self.memory.header(layer), number)
        device_write(self.memory.ready(layer), 1)

    def take(self, layer: int) -> None:
        assert device_wait(self.memory.done(layer), 1, LONG)
        device_write(self.memory.done(layer), 0)
        if layer in self.expected:
            got = np.frombuffer(bytes(self.memory.inbox(layer)), np.uint16).reshape(len(self.rows), Q_HEADS, DIM)
            assert ref.error(got, "bfloat16", self.expected[layer]) < BOUND


@pytest.mark.parametrize("order", ["sync", "pipelined", "deferred"])
def test_attention_through_the_handoff(workers: WorkerPool, order: str) -> None:
    model = Model([61, 0, 130, 300, 63])
    groups = [range(0, 2), range(2, 5)] if order == "pipelined" else [range(0, 5)]
    lanes = [Lane(model, rows) for rows in groups]
    flags = Handoffs()
    for layer in range(LAYERS):
        for i, lane in enumerate(lanes):
            m = lane.memory
            flags.add(None, m.ready(layer), m.done(layer), m.header(layer), layer=layer, lane=i)
            if order == "deferred":
                device_write(m.done(layer), 1)
    service = HandoffService(workers, timeout_s=LONG)
    for step in range(1, STEPS + 1):
        jobs: list[Any] = []
        if order == "deferred":  # layers of one step are in flight together: as cohorts have, each has its own plan
            for layer in range(LAYERS):
                plan = model.plan(lanes[0].rows, step, workers.threads)
                jobs.append(plan.job(layer, **lanes[0].layer_views(layer)))
        else:
            made = [model.plan(lane.rows, step, workers.threads).jobs(range(LAYERS), **lane.views()) for lane in lanes]
            jobs = [of_lane[layer] for layer in range(LAYERS) for of_lane in made]
        service.submit(Step(step, step, flags.with_jobs(jobs)))
        for layer in range(LAYERS):
            if order == "sync":
                lanes[0].give(layer, step)
                lanes[0].take(layer)
            elif order == "deferred":
                lanes[0].take(layer)
                lanes[0].give(layer, step)
            else:
                for lane in lanes:
                    if layer == 0:
                        lane.give(0, step)
                for lane in lanes:
                    lane.take(layer)
                    if layer + 1 < LAYERS:
                        lane.give(layer + 1, step)
    assert service.wait_epoch(STEPS, LONG) and service.outcome(STEPS) == "complete"
    if order == "deferred":
        for layer in range(LAYERS):
            lanes[0].take(layer)
    tokens = sum(len(model.kept[layer][row][0]) for layer in range(LAYERS) for row in range(5))
    assert tokens == LAYERS * (sum(model.lengths) + 5 * STEPS)
    assert service.status().handoffs == STEPS * len(flags)
    assert service.close(LONG)
