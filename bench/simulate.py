"""A server simulated by discrete events around the real planner: ``python -m bench.simulate --help``.

The planner here is the one of the server (sglang_neo/planning); what is simulated is the scheduler around it and the
machine under it. The machine is not the one that the planner's tables describe: each of its times is off by a factor of
its own (up to 20 %), every step has noise, the CPU drifts, and at times other tenants slow it down. What the planner
knows of that is what the server would measure: what each step took.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import heapq
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import exp, pi, sin, sqrt
from pathlib import Path
from typing import Any

from bench.machines import MACHINES, MODELS, host_tokens, tables
from sglang_neo.planning import planner
from sglang_neo.planning.correction import Measured
from sglang_neo.planning.costs import Corrections, Costs, Mode, Rows, lanes_wait
from sglang_neo.planning.inequalities import ROW_TOKENS, usual_slots
from sglang_neo.planning.planner import Limits, Memory, Place, Prompt, State, StepPlan, after_step, plan
from sglang_neo.planning.tables import Tables

TRACES = Path(__file__).parent / "traces"

#: Of the simulator, beside this file.
GRID_SOURCES = ("simulate.py", "machines.py")

#: SGLang 0.5.17's reservation for the output to come: at first this part of it, after so many decode steps this one.
RESERVED_AT_FIRST, RESERVED_LATER, RESERVED_STEPS = 0.7, 0.098, 600

#: Waiting prompts that the planner is shown.
SHOWN = 64

#: Requests that run at once at most.
MOST_ROWS = 1024


# -- load --------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    """One request, and what became of it. Times in seconds."""

    arrival: float
    prompt: int
    output: int
    best_effort: bool = False
    produced: int = 0
    prefilled: int = 0  # tokens of the prompt (and of output before a retraction) that are in a pool
    place: Place | None = None
    served: int = 0  # step in which it last got a token
    first_token: float | None = None
    finished: float | None = None
    host_tokens: int = 0  # output tokens decoded from host memory
    retractions: int = 0
    in_flight: bool = False  # between two layers of a deferred step
    kv: int = 0  # tokens in its pool while it decodes: all but the newest

    @property
    def to_prefill(self) -> int:
        return self.prompt + self.produced - self.prefilled

    @property
    def tpot(self) -> float | None:
        if self.finished is None or self.first_token is None or self.output < 2:
            return None
        return (self.finished - self.first_token) / (self.output - 1)


def backlog(count: int, prompt: int, output: int, **more: Any) -> list[Request]:
    """All there from the start."""
    return [Request(0.0, prompt, output, **more) for _ in range(count)]


def poisson(count: int, rate: float, prompt: int, output: int, seed: int, **more: Any) -> list[Request]:
    draw = random.Random(seed)
    now, requests = 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        requests.append(Request(now, prompt, output, **more))
    return requests


def trace(name: str, count: int, speed: float = 1.0) -> list[Request]:
    """The first requests of a file of bench/traces, ``speed`` times as fast."""
    with (TRACES / f"{name}.csv").open() as file:
        rows = [row for row, _ in zip(csv.DictReader(file), range(count), strict=False)]
    return [
        Request(float(row.get("seconds", 0)) / speed, int(row["prompt_tokens"]), max(1, int(row["output_tokens"])))
        for row in rows
    ]


# -- machine -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Perturbation:
    """How the simulated machine differs from the planner's tables.

    Attributes:
        off: each table is off by a factor of its own, at most 1 + off either way.
        device_noise, cpu_noise: standard deviation of the logarithm of a step's time.
        drift: amplitude of the CPU's slow change; its period is ``drift_period`` seconds.
        bursts: other tenants on the CPU: how many a second, how long (seconds), and how much slower it is then.
        slow: intervals (start, end, factor) in which the CPU is slower, besides.
    """

    off: float = 0.2
    device_noise: float = 0.02
    cpu_noise: float = 0.08
    drift: float = 0.1
    drift_period: float = 40.0
    bursts: tuple[float, float, float] = (0.01, 1.0, 4.0)
    slow: tuple[tuple[float, float, float], ...] = ()


NONE = Perturbation(0, 0, 0, 0, 1, (0, 0, 1))


class TrueMachine:
    """What steps really take.

    Args:
        tables: the planner's, or those of a machine that was profiled wrongly.
        slots: that every deferred step has.
    """

    def __init__(self, tables: Tables, threads: int, perturbation: Perturbation, seed: int, slots: int):
        self._draw = random.Random(seed)
        self._perturbation = perturbation

        def factor() -> float:
            return (1 + perturbation.off) ** self._draw.uniform(-1, 1)

        self.factors = Corrections(factor(), factor(), factor(), factor(), factor())
        self._costs = Costs(tables, threads, self.factors)
        self._layers, self._slots = tables.layers, slots
        self._cpu_done = 0.0  # when the CPU has done what was handed over, in deferred mode
        self._per_handoff = 0.0
        self._burst_end = self._next_burst = 0.0
        self._plan_burst(0.0)

    def _plan_burst(self, now: float) -> None:
        rate = self._perturbation.bursts[0]
        self._next_burst = now + (self._draw.expovariate(rate) if rate else float("inf"))

    def cpu_slowdown(self, now: float) -> float:
        p = self._perturbation
        while now >= self._next_burst:
            self._burst_end = self._next_burst + p.bursts[1]
            self._plan_burst(self._burst_end)
        factor = 1 + p.drift * sin(2 * pi * now / p.drift_period)
        if now < self._burst_end:
            factor *= p.bursts[2]
        for start, end, slower in p.slow:
            if start <= now < end:
                factor *= slower
        return factor * exp(self._draw.gauss(0, p.cpu_noise))

    def lag(self, now: float) -> int:
        """Hand-offs that the CPU is behind."""
        return int((self._cpu_done - now) / self._per_handoff) if self._cpu_done > now and self._per_handoff else 0

    def run(self, step: StepPlan, now: float, device: Rows, lane_a: Rows, lane_b: Rows, past: float) -> Measured:
        """Seconds of a step that starts now. ``lane_b``: in deferred mode the rows of the mean cohort."""
        costs, noise = self._costs, exp(self._draw.gauss(0, self._perturbation.device_noise))
        slower = self.cpu_slowdown(now)
        if step.prefill:
            cost = costs.prefill(sum(step.prefill), past, lane_b)
            copies = costs.load_back(sum(step.prefill)) if step.prefill_to == "host" else 0.0
            device_seconds = max(cost.device, copies) * noise  # KV leaves layer by layer, behind the computing
            cpu = cost.cpu * slower
            wait = max(0.0, cpu - cost.prefill * noise)
            return Measured(device_seconds + wait, wait, cpu)
        if step.mode == "deferred":
            cost = costs.deferred(device, self._slots, lane_b)
            device_seconds = cost.device * noise
            # The last layers want what the step before handed over; this step's hand-offs are worked on meanwhile.
            wait = max(0.0, self._cpu_done - (now + device_seconds))
            cpu = cost.cpu * slower
            self._cpu_done = max(self._cpu_done, now) + cpu
            self._per_handoff = cpu / self._layers
            return Measured(device_seconds + wait, wait, cpu)
        if step.mode == "pipelined":
            cost = costs.pipelined(device, lane_a, lane_b)
            linear_a = costs.linear(device.count + lane_a.count) * noise
            linear_b = costs.linear(lane_b.count) * noise
            attention = cost.attention * noise
            a, b = (self._layers * costs.cpu_layer(lane) * slower for lane in (lane_a, lane_b))
            wait = lanes_wait(linear_a, linear_b, attention, a, b)
            return Measured(cost.device * noise + wait, wait, a + b)
        if step.mode == "sync":
            cost = costs.sync(device, lane_a)
            cpu = cost.cpu * slower
            return Measured(cost.device * noise + cpu, cpu, cpu)
        return Measured(costs.gpu_only(device).device * noise)


# -- server ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Of one run. Output tokens per second: ``throughput`` from the first arrival to the last token, ``loaded`` from
    when a third of the requests has arrived until the last has (the same for a backlog). Short runs distort both: the
    first has an end in which few requests are left, and in the second there may be more at the end that was prefilled
    and not yet decoded than at the beginning."""

    throughput: float
    loaded: float
    seconds: float
    requests: int
    host_share: float  # of the output tokens
    retractions: int
    steps: dict[str, int]
    ttft_p50: float
    ttft_p99: float
    device_tpot_p99: float  # of requests that never decoded from host memory
    host_tpot_p99: float
    error: float  # mean of |predicted / measured - 1| of decode and prefill steps
    changes: tuple[str, ...] = field(default=(), compare=False)


def _quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0


class Server:
    """SGLang's scheduler as far as it matters here, with the planner in it."""

    def __init__(
        self,
        requests: Iterable[Request],
        known: Tables,
        limits: Limits,
        device_pool: int,
        host_pool: int,
        perturbation: Perturbation = NONE,
        seed: int = 0,
        most_rows: int = MOST_ROWS,
        truth: Tables | None = None,
    ):
        self.requests = list(requests)
        self._tables, self._limits = known, limits
        self._device_pool, self._host_pool = device_pool, host_pool
        self._most_rows = most_rows
        self.machine = TrueMachine(truth or known, limits.threads, perturbation, seed, limits.max_slots)
        self.memory = Memory()
        self._waiting: deque[Request] = deque()
        self._device: list[Request] = []
        self._host: list[Request] = []
        self._cohorts: deque[list[Request]] = deque([] for _ in range(known.layers + 1))
        self._flying = self._flying_tokens = 0  # rows in the cohorts, and their KV
        self._reserved = RESERVED_AT_FIRST
        self._now = 0.0
        self.step = 0
        self._steps: dict[str, int] = {}
        self._errors: list[float] = []
        self._lines: list[str] = []
        arrivals = sorted([request.arrival for request in self.requests]) or [0.0]
        self._loaded_from, self._last_arrival = arrivals[len(arrivals) // 3], arrivals[-1]
        self._loaded_tokens = 0

    # -- events ------------------------------------------------------------------------------------------------

    def run(self, until: float = float("inf")) -> Outcome:
        """Serves all requests (or until a time), and says how it went."""
        arrivals = [(request.arrival, index) for index, request in enumerate(self.requests)]
        heapq.heapify(arrivals)
        while (arrivals or self._waiting or self._device or self._host) and self._now < until:
            while arrivals and arrivals[0][0] <= self._now:
                self._waiting.append(self.requests[heapq.heappop(arrivals)[1]])
            if not (self._waiting or self._device or self._host):
                self._now = arrivals[0][0]
                continue
            self._one_step()
        return self._outcome()

    def _one_step(self) -> None:
        self._make_sure_of_room()
        step = plan(self._state(), self._limits, self._tables, self.memory)
        if not step.prefill and not step.device_rows and not step.host_rows and not step.to_device:
            # Nobody can do anything: as SGLang does, take in the first whatever was reserved for others.
            self._reserved = 0.0
            if not self._device and not self._host and self._waiting:
                step = self._forced_prefill(step)
        self.step += 1
        self._steps[step.mode] = self._steps.get(step.mode, 0) + 1
        leaving = [self._device[i] for i in step.to_host]
        returning = [self._host[i] for i in step.to_device]
        copied = sum(request.kv for request in (*leaving, *returning))
        self._move(leaving, returning)
        if step.prefill:
            measured = self._prefill(step)
        else:
            step, measured = self._decode(step, set(map(id, (*leaving, *returning))))
        self._now += self._tables.to_host.at(copied) if copied else 0.0
        if measured.seconds > 0 and not copied:
            self._errors.append(abs(step.cost.seconds / measured.seconds - 1))
        self.memory, lines = after_step(self.memory, step, measured, self._limits)
        self._lines += [f"{self._now:.2f} s: {line}" for line in lines]

    # -- state -------------------------------------------------------------------------------------------------

    def _growth(self, requests: Iterable[Request]) -> int:
        """Tokens reserved for the output to come of these requests."""
        return int(self._reserved * sum([request.output - request.produced for request in requests]))

    @staticmethod
    def _pages(tokens: int) -> int:
        return -(-tokens // 64) * 64

    def _begun(self) -> list[Request]:
        """Prompts of which a part is in a pool: one for the host, and one for the device that has overtaken it."""
        begun: list[Request] = []
        for request in self._waiting:
            if not request.place:
                break
            begun.append(request)
        return begun

    def _device_used(self) -> int:
        used = sum([begun.prompt + begun.produced for begun in self._begun() if begun.place == "device"])
        return used + sum([request.kv for request in self._device])

    def _host_used(self) -> int:
        used = sum([self._pages(begun.prompt + begun.produced) for begun in self._begun() if begun.place == "host"])
        return used + sum([self._pages(request.kv + 1) for request in self._host])

    def _state(self) -> State:
        waiting: list[Prompt] = []
        room_for = self._most_rows - len(self._device) - len(self._host)
        for request in self._waiting:
            if len(waiting) >= min(SHOWN, room_for):
                break
            tokens = request.to_prefill
            room = request.prompt + request.produced + self._growth((request,))
            output = request.output - request.produced
            waiting.append(Prompt(tokens, request.prefilled, room, request.best_effort, request.place, output=output))
        in_flight = self.memory.mode == "deferred"
        if not in_flight:
            self._host.sort(key=lambda request: request.served)
        return State(
            device_rows=tuple(request.kv for request in self._device),
            host_rows=tuple(request.kv for request in self._host),
            waiting=tuple(waiting),
            device_free=self._device_pool - self._device_used(),
            host_free=self._host_pool - self._host_used(),
            device_left=tuple(request.output - request.produced for request in self._device),
            device_reserved=self._growth(self._device),
            host_reserved=self._growth(self._host),
            best_effort_host_rows=sum(request.best_effort for request in self._host),
            cpu_lag=self.machine.lag(self._now),
        )

    def _make_sure_of_room(self) -> None:
        """Retraction: SGLang throws the newest rows' KV away when a pool cannot grow. With host memory, rows move."""
        host = len(self._limits.modes) > 1 and self._host_pool - self._host_used() >= 64 * (len(self._device) + 1)
        while len(self._device) > 1 and not host and self._device_pool - self._device_used() < len(self._device):
            self._retract(self._device.pop())
        while self._host and self._host_pool - self._host_used() < 0:
            self._retract(max(self._host, key=lambda request: request.arrival))

    def _retract(self, request: Request) -> None:
        self._forget(request)
        request.prefilled, request.place = 0, None
        request.retractions += 1
        self._waiting.insert(len(self._begun()), request)
        rows = [*self._device, *self._host]
        if rows:
            part = sum(row.produced + 20 for row in rows) / sum(row.output for row in rows)
            self._reserved = min(max(self._reserved, part), 1.0)

    def _forget(self, request: Request) -> None:
        self._land(request)
        if request in self._host:
            self._host.remove(request)

    def _land(self, request: Request) -> None:
        """Out of the cohorts: a partial token is thrown away."""
        if request.in_flight:
            request.in_flight = False
            self._flying -= 1
            self._flying_tokens -= request.kv

    # -- what a step does --------------------------------------------------------------------------------------

    def _land_for_lanes(self, step: StepPlan) -> None:
        """gpu_only steps and prefills leave rows between two layers where they are; lanes take them only whole."""
        if self._flying and (step.lane_a or step.lane_b):
            for cohort in self._cohorts:
                for request in cohort:
                    self._land(request)
                cohort.clear()

    def _move(self, leaving: Sequence[Request], returning: Sequence[Request]) -> None:
        for request in leaving:
            self._device.remove(request)
            request.place = "host"
            self._host.append(request)
        for request in returning:
            self._forget(request)
            request.place = "device"
            self._device.append(request)
        if returning:
            self._device.sort(key=lambda request: request.arrival)

    def _forced_prefill(self, step: StepPlan) -> StepPlan:
        tokens = min(self._waiting[0].to_prefill, self._limits.prefill_tokens)
        cost = Costs(self._tables, self._limits.threads).prefill(tokens, self._waiting[0].prefilled)
        return replace(step, prefill=(tokens,), prefill_to="device", cost=cost)

    def _prefill(self, step: StepPlan) -> Measured:
        self._land_for_lanes(step)
        lane = self._host[: step.lane_b]
        lane_b = Rows(len(lane), sum(request.kv for request in lane))
        prompts = list(self._waiting)[step.overtaken : step.overtaken + len(step.prefill)]
        past = sum(request.prefilled for request in prompts)
        measured = self.machine.run(step, self._now, Rows(), Rows(), lane_b, past)
        self._now += measured.seconds
        done = []
        for request, tokens in zip(prompts, step.prefill, strict=True):
            request.place = step.prefill_to
            request.prefilled += tokens
            if request.to_prefill == 0:
                done.append(request)
        for request in done:
            self._waiting.remove(request)
            request.served = self.step
            (self._device if request.place == "device" else self._host).append(request)
        self._give_token(done, "device")
        self._give_token(lane, "host")
        return measured

    def _decode(self, step: StepPlan, moved: set[int]) -> tuple[StepPlan, Measured]:
        """The step as it ran, by which its time is to be judged, and what it took."""
        device = [request for request in self._device if id(request) not in moved]
        host = [request for request in self._host if id(request) not in moved]
        rows = Rows(len(device), sum([request.kv for request in device]))
        self._land_for_lanes(step)
        if step.mode == "deferred":
            step, measured, served = self._decode_deferred(step, rows, host)
        else:
            lane_b, lane_a = host[: step.lane_b], host[step.lane_b : step.lane_b + step.lane_a]
            served = [*lane_a, *lane_b]
            measured = self.machine.run(
                step,
                self._now,
                rows,
                Rows(len(lane_a), sum(request.kv for request in lane_a)),
                Rows(len(lane_b), sum(request.kv for request in lane_b)),
                0,
            )
        self._now += measured.seconds
        self._give_token(device, "device")
        self._give_token(served, "host")
        step_down = (RESERVED_AT_FIRST - RESERVED_LATER) / RESERVED_STEPS
        self._reserved = max(RESERVED_LATER, self._reserved - step_down)
        return step, measured

    def _decode_deferred(
        self, step: StepPlan, device: Rows, host: list[Request]
    ) -> tuple[StepPlan, Measured, list[Request]]:
        """One cohort comes to its token and enters again, with new rows if it has room; all others go on a layer."""
        arriving = [request for request in self._cohorts[0] if request.in_flight]
        for request in arriving:
            self._land(request)
        cohort = [request for request in arriving if request.produced + 1 < request.output]
        for request in host:
            if len(cohort) >= step.slots:
                break
            if not request.in_flight and request not in arriving:
                cohort.append(request)
        for request in cohort:
            request.in_flight = True
            self._flying += 1
            self._flying_tokens += request.kv
        self._cohorts[0] = cohort
        self._cohorts.rotate(-1)
        places = len(self._cohorts)
        mean = Rows(self._flying / places, self._flying_tokens / places)
        costs = Costs(self._tables, self._limits.threads, self.memory.corrections)
        cost = costs.deferred(device, self._limits.max_slots, mean)
        ran = replace(step, cost=cost, tokens=device.count + mean.count)
        return ran, self.machine.run(step, self._now, device, Rows(), mean, 0), arriving

    def _give_token(self, requests: Iterable[Request], place: Place) -> None:
        for request in requests:
            request.kv = request.prompt + request.produced
            self._flying_tokens += request.in_flight
            request.produced += 1
            self._loaded_tokens += self._loaded_from < self._now <= self._last_arrival
            request.served = self.step
            if place == "host":
                request.host_tokens += 1
            if request.first_token is None:
                request.first_token = self._now
            if request.produced >= request.output:
                request.finished = self._now
                if request in self._device:
                    self._device.remove(request)
                else:
                    self._forget(request)

    def _outcome(self) -> Outcome:
        done = [request for request in self.requests if request.finished is not None]
        tokens = sum(request.produced for request in self.requests)
        start = min((request.arrival for request in self.requests), default=0.0)
        seconds = self._now - start
        ttft = [r.first_token - r.arrival for r in self.requests if r.first_token is not None]
        device = [r.tpot for r in done if r.tpot is not None and not r.host_tokens]
        host = [r.tpot for r in done if r.tpot is not None and r.host_tokens]
        throughput = tokens / seconds if seconds else 0.0
        arriving = self._last_arrival - self._loaded_from
        return Outcome(
            throughput=throughput,
            loaded=self._loaded_tokens / arriving if arriving else throughput,
            seconds=seconds,
            requests=len(done),
            host_share=sum(r.host_tokens for r in self.requests) / max(tokens, 1),
            retractions=sum(r.retractions for r in self.requests),
            steps=dict(sorted(self._steps.items())),
            ttft_p50=_quantile(ttft, 0.5),
            ttft_p99=_quantile(ttft, 0.99),
            device_tpot_p99=_quantile(device, 0.99),
            host_tpot_p99=_quantile(host, 0.99),
            error=statistics.fmean(self._errors) if self._errors else 0.0,
            changes=tuple(self._lines),
        )


# -- grid --------------------------------------------------------------------------------------------------------------

FIXED: dict[str, tuple[Mode, ...]] = {
    "gpu_only": ("gpu_only",),
    "sync": ("gpu_only", "sync"),
    "pipelined": ("gpu_only", "pipelined"),
    "deferred": ("gpu_only", "deferred"),
}
AUTO: tuple[Mode, ...] = ("gpu_only", "sync", "pipelined", "deferred")


@dataclass(frozen=True)
class Point:
    machine: str
    model: str
    prompt: int
    output: int
    load: float  # of what gpu_only sustains
    kv: str
    device_rows: float  # of prompt + output tokens that fit the device's pool
    seed: int


#: Rows of prompt + output tokens that the device's pool holds.
KV_BUDGETS = {"starved": 4.0, "short": 16.0, "ample": 64.0}


def grid(machine: str, model: str, small: bool) -> Iterator[Point]:
    prompts, outputs, loads = (128, 512, 1024, 4096), (32, 128, 512, 1024), (0.3, 0.8, 1.2, 2.0)
    if small:
        prompts, outputs, loads = (128, 4096), (32, 256), (0.3, 2.0)  # type: ignore[assignment]
    seed = 0
    for prompt in prompts:
        for output in outputs:
            for load in loads:
                for kv, rows in KV_BUDGETS.items():
                    seed += 1
                    yield Point(machine, model, prompt, output, load, kv, rows, seed)


def limits_of(known: Tables, threads: int, host_pool: int, modes: tuple[Mode, ...], **more: Any) -> Limits:
    """As a server has them that is not told how many slots (``sglang_neo.hybrid.slots``); without deferred mode where
    there is none."""
    costs, rows = Costs(known, threads), 8
    row = known.layers * costs.cpu_layer(Rows(rows, rows * ROW_TOKENS)) / rows
    slots = usual_slots(costs.linear(1), row, known.layers, MOST_ROWS, host_pool / ROW_TOKENS, Limits.host_page)
    modes = tuple(mode for mode in modes if mode != "deferred" or slots)
    return Limits(threads, modes, max_slots=slots, **more)


def run_point(point: Point, requests: float, perturbation: Perturbation, repeats: int = 1) -> dict[str, Any]:
    """All fixed modes and auto on one point: the same requests, the same machine.

    Two runs whose plans differ in one step are soon as different as two runs with other requests, by some percent. So a
    point is run again, with other requests on another machine, until it is known on which side of ``AIM`` it lies.

    Args:
        repeats: at most.
    """
    runs: list[dict[str, Outcome]] = []
    while not runs or (len(runs) < repeats and not _settled(runs)):
        runs.append(_outcomes(replace(point, seed=point.seed + 1000 * len(runs)), requests, perturbation))

    def mean(name: str, of: str) -> float:
        return statistics.fmean([getattr(outcomes[name], of) for outcomes in runs])

    best = _best(runs)
    whole = mean("auto", "throughput") / max(mean(name, "throughput") for name in FIXED)
    loaded = mean("auto", "loaded") / max(mean(name, "loaded") for name in FIXED)
    alone = [mean("auto", of) / mean("gpu_only", of) for of in ("throughput", "loaded")]
    steps: dict[str, int] = {}
    for outcomes in runs:
        for mode, count in outcomes["auto"].steps.items():
            steps[mode] = steps.get(mode, 0) + count
    return {
        **asdict(point),
        "runs": len(runs),
        "best": best,
        "tokens_per_second": {name: round(mean(name, "throughput"), 2) for name in (*FIXED, "auto")},
        "tokens_per_second_loaded": {name: round(mean(name, "loaded"), 2) for name in (*FIXED, "auto")},
        "auto_over_best_throughput": round(whole, 4),
        "auto_over_best_loaded": round(loaded, 4),
        # What a run is too short for shows in one of the two; a mode that is worse shows in both.
        "auto_over_best": round(max(whole, loaded), 4),
        "standard_error": None if len(runs) == 1 else round(_standard_error(_ratios(runs, best)), 4),
        "auto_over_gpu_only": round(max(alone), 4),
        "auto_over_gpu_only_throughput": round(alone[0], 4),
        "auto_steps": dict(sorted(steps.items())),
        "host_share": round(mean("auto", "host_share"), 3),
        "error": round(mean("auto", "error"), 4),
    }


#: Of what the best fixed mode gives.
AIM = 0.98

#: A point counts as settled if all modes are so near to each other; or after so many runs, if its mean is further from
#: ``AIM`` than so many standard errors.
ALIKE, LEAST_RUNS, STANDARD_ERRORS = 0.005, 3, 2.0


def _outcomes(point: Point, requests: float, perturbation: Perturbation) -> dict[str, Outcome]:
    machine, model = MACHINES[point.machine], MODELS[point.model]
    known = tables(machine, model)
    pool = int(point.device_rows * (point.prompt + point.output))
    host = host_tokens(machine, model)

    def serve(modes: tuple[Mode, ...], load: list[Request]) -> Outcome:
        limits = limits_of(known, machine.threads, host, modes, max_host_tpot=None)
        return Server(load, known, limits, pool, host, perturbation, point.seed).run()

    count = int(requests * point.device_rows) + 64
    capacity = serve(AUTO[:1], backlog(int(4 * point.device_rows), point.prompt, point.output))
    rate = point.load * capacity.throughput / point.output
    return {
        name: serve(modes, poisson(count, rate, point.prompt, point.output, point.seed))
        for name, modes in {**FIXED, "auto": AUTO}.items()
    }


def _best(runs: Sequence[dict[str, Outcome]]) -> str:
    """The fixed mode that is fastest on average."""
    return max(FIXED, key=lambda name: statistics.fmean([outcomes[name].throughput for outcomes in runs]))


def _ratios(runs: Sequence[dict[str, Outcome]], best: str) -> list[float]:
    return [outcomes["auto"].throughput / outcomes[best].throughput for outcomes in runs]


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / sqrt(len(values))


def _settled(runs: Sequence[dict[str, Outcome]]) -> bool:
    rates = [outcome.throughput for outcome in runs[-1].values()]
    if len(runs) == 1 and min(rates) > (1 - ALIKE) * max(rates):
        return True
    if len(runs) < LEAST_RUNS:
        return False
    ratios = _ratios(runs, _best(runs))
    return abs(statistics.fmean(ratios) - AIM) > STANDARD_ERRORS * _standard_error(ratios)


def grid_key(requests: float, repeats: int = 1) -> str:
    """What results of grid points hang on besides the point: the planner, the simulator, and how long runs are."""
    files = [*sorted(Path(planner.__file__).parent.glob("*.py")), *map(Path(__file__).with_name, GRID_SOURCES)]
    digest = hashlib.sha256(f"{requests} {repeats}".encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def kept_points(path: Path, key: str) -> list[dict[str, Any]]:
    """The points of a file of ``run_grid``, one JSON object a line after the key; begins the file if there is none.
    Raises ValueError if it is of another planner."""
    if not path.exists():
        path.write_text(json.dumps({"key": key}) + "\n")
        return []
    head, *lines = path.read_text().splitlines()
    if json.loads(head)["key"] != key:
        raise ValueError(f"{path} is of another planner or simulator, or of other runs: begin a new file")
    return [json.loads(line) for line in lines]


def run_grid(args: argparse.Namespace) -> dict[str, Any]:
    points = list(grid(args.machine, args.model, args.small))
    random.Random(0).shuffle(points)  # a run that is cut short has seen a bit of everything
    results = kept_points(args.keep, grid_key(args.requests, args.repeats)) if args.keep else []
    done = {result["seed"] for result in results}
    left = [point for point in points if point.seed not in done]
    end = time.monotonic() + args.time_limit if args.time_limit else float("inf")
    work = partial(run_point, requests=args.requests, perturbation=Perturbation(), repeats=args.repeats)
    with multiprocessing.Pool(args.processes) as pool, args.keep.open("a") if args.keep else nullcontext() as kept:
        for result in pool.imap_unordered(work, left):
            results.append(result)
            if kept is not None:
                print(json.dumps(result), file=kept, flush=True)
            print(f"\r{len(results)} of {len(points)} points", end="", file=sys.stderr)
            if time.monotonic() > end:
                pool.terminate()
                break
    print(file=sys.stderr)
    results.sort(key=lambda result: int(result["seed"]))
    return {"points": len(points), "requests": args.requests, "repeats": args.repeats, "grid": results}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.simulate", description=__doc__.split("\n")[0])
    parser.add_argument("--grid", action="store_true", help="auto against every fixed mode over the grid")
    parser.add_argument("--calibration", action="store_true", help="what was measured on an H200, and the prediction")
    parser.add_argument("--published", action="store_true", help="the gains that NEO and APEX report, and ours")
    parser.add_argument("--small", action="store_true", help="a few points of it")
    parser.add_argument("--machine", choices=MACHINES, default="H200")
    parser.add_argument("--model", choices=MODELS, default="Llama-3.1-70B, 20 layers")
    parser.add_argument("--requests", type=float, default=8, help="per row of the device's pool, and 64 (default 8)")
    parser.add_argument(
        "--repeats", type=int, default=6, help="runs of a point at most, until it is settled (default 6)"
    )
    parser.add_argument("--time-limit", type=float, help="seconds after which the grid ends with what it has")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--keep", metavar="FILE", type=Path, help="points as they are done; those in it are not run again"
    )
    parser.add_argument("--json", metavar="FILE", help="where the result goes; - is the standard output")
    args = parser.parse_args()
    from bench import evidence  # which builds on this module

    result: dict[str, Any] = {}
    if args.calibration:
        result |= evidence.calibration() | evidence.held_out()
    if args.published:
        result |= evidence.published()
    if args.grid:
        result |= run_grid(args)
    text = json.dumps(result, indent=1)
    if args.json == "-":
        print(text)
    elif args.json:
        Path(args.json).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
