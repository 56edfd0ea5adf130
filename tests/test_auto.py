"""Mode auto: the planner chooses before each step; tokens exact against plain SGLang, nothing lost."""

from __future__ import annotations

import json
import logging
import math
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_neo import explain
from sglang_neo import scheduler as scheduler_module
from sglang_neo.planning.correction import Measured
from sglang_neo.planning.costs import Corrections
from sglang_neo.planning.guard import Guard, GuardRules
from sglang_neo.planning.placement import Rules
from sglang_neo.planning.tables import CpuAttention, Curve, Surface, Tables
from sglang_neo.profiling.trial import TrialError
from tests.harness.exact import assert_exact
from tests.harness.graphs import capture_decode_steps
from tests.harness.inprocess import InProcessScheduler, Request
from tests.harness.models import ARCHITECTURES
from tests.harness.traffic import RandomMoves, random_options, random_prompt, random_requests, tokens
from tests.test_prefill_lane import Seen, arrivals
from tests.test_recovery import Stall, crowd

Tiny = Callable[..., Path]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)

#: Of the tiny models.
LAYERS = 3


def profile(linear: float, device_row: float, cpu_row: float) -> Tables:
    """Of a machine on which nothing but this takes time, in ms: a pass through the weights, and attention of a row in
    all layers, on the device and on the CPU."""
    flat = Surface((1,), (0,), ((0.0,),))

    def rows(each: float) -> Surface:
        return Surface((0, 100), (0,), ((0.0,), (each / 10,)))

    return Tables(
        layers=LAYERS,
        linear=Curve((1,), (linear / 1e3,)),
        prefill_attention=flat,
        device_attention=rows(device_row),
        cpu_attention=CpuAttention((1,), (rows(cpu_row / LAYERS),), (flat,)),
        handoff=Curve((1,), (1e-9,)),
        slot_handoff=Curve((1,), (1e-9,)),
        to_host=Curve((1,), (1e-6,)),
        to_device=Curve((1,), (1e-6,)),
        step_overhead=0.0,
        eager_overhead=0.0,
        lane_overhead=0.0,
        host_bandwidth=1e10,
        host_bandwidth_copying=1e10,
        host_token_bytes=1000,
    )


#: Machines on which one mode is the best with a few rows on either side.
PROFILES: Mapping[str, Tables] = {
    "gpu_only": profile(linear=1, device_row=0.001, cpu_row=30),
    "sync": profile(linear=1, device_row=0.001, cpu_row=0.001),
    "pipelined": profile(linear=0.05, device_row=1, cpu_row=1),
    "deferred": profile(linear=1, device_row=0.001, cpu_row=1),
}


class Restless(RandomMoves):
    """Another machine every few steps, and rows moved at random. What was learnt is forgotten, for it is of none."""

    def __init__(self, seed: int, rate: float, every: int = 4):
        super().__init__(seed, rate)
        self._draw, self._every = random.Random(seed), every
        self._next: list[str] = []

    def __call__(self, scheduler: Any, step: int) -> None:
        super().__call__(scheduler, step)
        planner = scheduler.planner
        planner.memory = replace(planner.memory, corrections=Corrections(), guard=Guard(), regret=1e9)
        if step % self._every == 0:
            self._next = self._next or self._draw.sample(list(PROFILES), len(PROFILES))
            planner.tables = PROFILES[self._next.pop()]


def random_moves(mode: Mapping[str, Any], seed: int, rate: float) -> RandomMoves:
    """For a scheduler with these arguments. One in mode auto must not measure its machine (``no_profiling``)."""
    return Restless(seed, rate) if mode.get("neo_mode") == "auto" else RandomMoves(seed, rate)


@pytest.fixture(autouse=True)
def no_profiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "tables_for", lambda runner, anew: PROFILES["sync"])


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=[] if arch == "llama" else pytest.mark.slow) for arch in ARCHITECTURES]
)
def test_exact_while_modes_change(tiny: Tiny, alone: Any, arch: str) -> None:
    """From any mode to any other, with rows in mid-layer, with and without overlap scheduling."""
    requests = random_requests(seed=3, count=10, shortest_answer=30)
    i = list(ARCHITECTURES).index(arch)
    options: dict[str, Any] = {
        "page_size": (1, 64)[i % 2],
        "neo_deferred_slots": 1 + i % 3,
        "disable_overlap_schedule": i % 3 == 1,
        "neo_check_integrity": True,
        "neo_mode": "auto",
    }
    moves = Restless(seed=i, rate=0.1)
    with InProcessScheduler("neo", tiny(arch), **options) as scheduler:
        got = scheduler.run(requests, moves)
        state = scheduler.scheduler.neo_state()
    steps = state["steps_total"]
    assert all(steps[mode] > 3 for mode in ("gpu_only", "sync", "pipelined", "deferred")), steps
    assert state["planner"]["counters"]["changes"] > 5, state["planner"]["counters"]
    assert_exact(alone(arch, requests), tokens(got))


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("pays", "metered"), [(True, False), (False, False), (True, True)])
def test_host_rows_decode_beside_prefills_where_that_pays(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool, pays: bool, metered: bool
) -> None:
    """With a CPU that takes next to nothing they do; not with one that has no time for a row beside a prefill, nor at
    one that the meter counts."""
    requests = arrivals(seed=1)
    options = {"max_total_tokens": 256, "max_running_requests": 20, "chunked_prefill_size": 64, "neo_mode": "auto"}
    more = {"disable_overlap_schedule": not overlap, "neo_check_integrity": True}
    held_up: list[int] = []  # host rows beside each prefill to the host for which device rows wait
    with InProcessScheduler("neo", tiny("llama"), **options, **more) as scheduler:
        planner = scheduler.scheduler.planner
        planner.limits = replace(planner.limits, modes=("gpu_only", "pipelined"))
        if not metered:
            planner.limits = replace(planner.limits, max_slowdown=math.inf)
        planner.tables = PROFILES["sync"] if pays else profile(linear=1, device_row=0.001, cpu_row=2)

        def on_step(s: Any, step: int) -> None:
            s.token_manager.audit()
            planner.memory = replace(planner.memory, corrections=Corrections(), guard=Guard())

        prefilling = planner.prefilling

        def watched(batch: Any, running: Any) -> None:
            prefilling(batch, running)
            made = batch.neo_planned.plan
            if made.prefill_to == "host" and made.held_up:
                held_up.append(made.lane_b)

        monkeypatch.setattr(planner, "prefilling", watched)
        seen = Seen(monkeypatch, scheduler.scheduler)
        got = scheduler.run(requests, on_step)
        steps = scheduler.scheduler.neo_metrics.counters.steps
    assert steps["pipelined_prefill"] == sum(seen.beside.values()), (steps, seen.beside)
    assert (seen.beside["device"] > 0) == (sum(seen.beside.values()) > 5) == pays, (steps, seen.beside)
    assert bool(held_up) == pays and any(held_up) == (pays and not metered), held_up
    assert_exact(alone("llama", requests), tokens(got))


#: More of them: NEO_TEST_SEEDS=100 pytest tests/test_auto.py -k random_workloads
SEEDS = range(int(os.environ.get("NEO_TEST_SEEDS", "1")))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_workloads(tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A device pool that is too small at times: prompts go to the host as the planner says, and rows come and go. Every
    other one from a stand-in for CUDA graphs, which has a set for each way of handing over."""
    rng = random.Random(seed)
    requests = random_requests(seed=100 + seed, count=rng.randrange(8, 15))
    moves = Restless(seed, rate=rng.choice([0.0, 0.02, 0.1]), every=rng.choice([1, 5, 20]))
    arch = rng.choice(list(ARCHITECTURES))
    options = random_options(rng, seed, pools=[384, 512, 1024]) | {
        "max_running_requests": 16,
        "neo_deferred_slots": rng.randrange(0, 4),
        "neo_check_integrity": True,
        "neo_mode": "auto",
    }
    print(f"seed {seed}: {arch}, {options}, moves at a rate of {moves.rate}")
    with InProcessScheduler("neo", tiny(arch), **options) as scheduler:
        backend = None
        if seed % 2 == 0:
            runner = scheduler.scheduler.tp_worker.model_runner
            backend = capture_decode_steps(runner, [1, 2, 4, 6, 8, 12, 16], monkeypatch)
        got = scheduler.run(requests, moves)
        steps = scheduler.scheduler.neo_metrics.counters.steps
    assert moves.host_steps > 0
    if backend is not None:
        labels = [key.variant_label for key in backend.replays]
        replayed = {label: labels.count(label) for label in ("host-rows", "slot-rows")}
        assert replayed == {"host-rows": steps["sync"], "slot-rows": steps["deferred"]}, (replayed, steps)
    assert_exact(alone(arch, requests), tokens(got))


def test_a_prompt_that_only_the_host_can_hold(tiny: Tiny, alone: Any) -> None:
    """It is served there although no mode pays, and the others are not held up."""
    rng = random.Random(11)
    requests = [Request("long", random_prompt(rng, 330), 12)]
    requests += [Request(f"r{i}", random_prompt(rng, 50), 40, arrive=i) for i in range(6)]
    options: dict[str, Any] = {"max_total_tokens": 256, "max_running_requests": 16, "neo_mode": "auto"}
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        scheduler.scheduler.planner.tables = PROFILES["gpu_only"]
        got = scheduler.run(requests, lambda s, step: s.token_manager.audit())
    assert got["long"].finish == "length" and len(got["long"].tokens) == 12
    assert_exact(alone("llama", requests), tokens(got))


def test_a_machine_that_cannot_be_measured(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said, and the server does without a planner."""

    def tables_for(runner: Any, anew: bool) -> Any:
        raise TrialError("the CPU workers do not answer")

    monkeypatch.setattr(scheduler_module, "tables_for", tables_for)
    requests = random_requests(seed=3)
    with InProcessScheduler("neo", tiny("llama"), max_total_tokens=256, neo_mode="auto") as scheduler:
        got = scheduler.run(requests, lambda s, step: s.token_manager.audit())
        state = scheduler.scheduler.neo_state()
    assert "could not be measured" in caplog.text and "the CPU workers do not answer" in caplog.text
    assert (state["active_mode"], state["planner"]) == ("sync", None)
    assert state["steps_total"]["sync"] > 5, state
    assert_exact(alone("llama", requests), tokens(got))


def test_workers_that_stop_while_modes_change(tiny: Tiny, alone: Any) -> None:
    """What fails is a step of any kind; all kinds work again afterwards."""
    requests = crowd(seed=1)
    stall, moves = Stall(after=8, times=2), Restless(seed=1, rate=0.05)

    def on_step(scheduler: Any, step: int) -> None:
        stall(scheduler, step)
        moves(scheduler, step)

    options: dict[str, Any] = {
        "max_total_tokens": 512,
        "max_running_requests": 16,
        "neo_watchdog_timeout": 0.8,
        "neo_deferred_slots": 2,
        "neo_mode": "auto",
    }
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        scheduler.scheduler.placement.rules = Rules(pause_steps=4)
        got = scheduler.run(requests, on_step)
        recovery = scheduler.scheduler.recovery
    assert recovery.failed_steps >= 2 and recovery.restarted_reqs >= 2
    assert_exact(alone("llama", requests), tokens(got))


def test_tokens_half_done_must_be_forgotten(tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows that change from deferred steps to others in mid-layer, and keep the token's place."""

    def careless(deferral: Any) -> None:
        deferral._attention.wait_launched()
        for rider in (*deferral._cohorts.mid_token(), *deferral._cohorts.boundary()):
            rider.row.mid_token = False
        deferral._changed |= deferral._cohorts.discard(lambda rider: True)

    monkeypatch.setattr("sglang_neo.deferral.Deferral.land", careless)
    requests = random_requests(seed=3, count=10, shortest_answer=30)
    options: dict[str, Any] = {"neo_deferred_slots": 2, "neo_mode": "auto"}
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler, pytest.raises(AssertionError):
        got = scheduler.run(requests, Restless(seed=2, rate=0.1))
        assert_exact(alone("llama", requests), tokens(got))


class LateCpu:
    """``on_step``: from one step to another the CPU's answers seem to come late, by the clock alone; counts the decode
    steps with the CPU. bench/burned_cores.py does it with real processes."""

    def __init__(self, begin: int, end: int, monkeypatch: pytest.MonkeyPatch):
        self._begin, self._end, self._late = begin, end, False
        self.by_step: list[int] = []

        def measured(span: Any, before: Any) -> Measured:
            worked = span._after != span._before
            wait = 0.02 if worked and self._late else 0.0
            return Measured(1e-3 + wait, wait, 1e-6 * worked)

        monkeypatch.setattr("sglang_neo.model_runner.StepSpan.measured", measured)

    def __call__(self, scheduler: Any, step: int) -> None:
        steps = scheduler.neo_metrics.counters.steps
        self.by_step.append(sum(steps.values()) - steps["gpu_only"])
        self._late = self._begin <= step < self._end


def test_a_late_cpu_gets_no_work_until_it_is_in_time(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(4)
    requests = [Request(f"r{i:02}", random_prompt(rng, 60), 110) for i in range(6)]
    late = LateCpu(50, 80, monkeypatch)
    options: dict[str, Any] = {"max_total_tokens": 400, "max_running_requests": 16, "neo_mode": "auto"}
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler, caplog.at_level(logging.INFO):
        planner = scheduler.scheduler.planner
        planner.limits = replace(planner.limits, modes=("gpu_only", "sync"), guard=GuardRules(pause_steps=12))
        got = scheduler.run(requests, late)
    by_step = late.by_step
    assert by_step[50] - by_step[40] >= 5, "the CPU took part"
    assert by_step[80] - by_step[50] <= 10, "it still got work"
    assert by_step[-1] - by_step[80] >= 20, "it gets work again"
    assert planner.counters.pauses >= 1
    lines = [record.message for record in caplog.records if "sglang_neo planner" in record.message]
    assert any("the CPU gets no work for 12 steps" in line for line in lines)
    assert any("the CPU is given work again" in line for line in lines)
    assert_exact(alone("llama", requests), tokens(got))


def test_the_server_says_what_it_goes_by(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Any] = []

    def look(scheduler: Any, step: int) -> None:
        if step == 30:
            seen.append(json.loads(json.dumps(scheduler.neo_state()["planner"])))

    requests = crowd(seed=2)
    options: dict[str, Any] = {"max_total_tokens": 512, "max_running_requests": 16, "neo_mode": "auto"}
    with InProcessScheduler("neo", tiny("llama"), neo_deferred_slots=2, **options) as scheduler:
        scheduler.run(requests, look)
    [planner] = seen
    assert planner["device_rows"] and planner["host_rows"]
    text = "\n".join(explain.explain_server(planner))
    assert f"{len(planner['host_rows'])} host rows" in text and "-> " in text and "N_g/N_c" in text
    idle = explain.explain_server({**planner, "device_rows": [], "host_rows": []})
    assert "nothing to compare" in idle[-1]
