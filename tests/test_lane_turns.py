"""Pipelined mode with more host rows than the CPU is given in a step: they take turns, and tokens stay exact."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_neo.batching import NeoScheduleBatch
from sglang_neo.hybrid.host_attention import CpuTimes
from sglang_neo.pipelining import Pipelining
from sglang_neo.planning.lanes import LaneLimits
from sglang_neo.planning.pace import Pace
from sglang_neo.planning.placement import Rules
from sglang_neo.recovery import LaunchedHostRows
from sglang_neo.token_manager import HostRow
from tests.harness.exact import assert_exact, first_difference
from tests.harness.graphs import capture_decode_steps
from tests.harness.inprocess import InProcessScheduler
from tests.harness.traffic import RandomMoves, random_requests, tokens
from tests.test_recovery import crowd

Tiny = Callable[..., Path]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)

OPTIONS: dict[str, Any] = {
    "neo_mode": "pipelined",
    "max_total_tokens": 300,
    "max_running_requests": 16,
    "neo_check_integrity": True,
}


class Turns:
    """Limits what rides; notes who did, and for how many steps the others waited."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int):
        self.longest = self.steps = 0
        limits = LaneLimits(decode=limit, per_prompt_token=1.0)
        monkeypatch.setattr(Pace, "limits", property(lambda pace: limits))
        own = Pipelining._riding

        def riding(pipelining: Pipelining, batch: Any, on_host: list[int], allowed: float) -> list[int]:
            chosen = own(pipelining, batch, on_host, allowed)
            rows: list[HostRow] = [batch.reqs[i].neo_host_row for i in chosen]
            assert len(rows) == 1 or allowed == float("inf") or sum(row.tokens for row in rows) <= allowed
            waits = [pipelining._step - batch.reqs[i].neo_host_row.turn for i in on_host]
            self.steps += len(chosen) < len(on_host)
            self.longest = max([self.longest, *waits])
            return chosen

        monkeypatch.setattr(Pipelining, "_riding", riding)


@pytest.mark.parametrize("overlap", [True, False])
def test_rows_take_turns(tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    requests = crowd(seed=5, count=12, answer=40)
    turns = Turns(monkeypatch, limit=200)
    with InProcessScheduler("neo", tiny("llama"), **OPTIONS, disable_overlap_schedule=not overlap) as scheduler:
        scheduler.scheduler.pipelining.measures = True
        got = scheduler.run(requests, RandomMoves(seed=6, rate=0.05))
        state = scheduler.scheduler.neo_state()
    assert turns.steps > 30 and state["lanes"]["waited_total"] > 60 and state["lanes"]["limit_tokens"] == 200, state
    assert state["steps_total"]["pipelined"] > 30, state["steps_total"]
    assert turns.longest <= 12, "somebody was passed over"
    assert_exact(alone("llama", requests), tokens(got))


def test_steps_of_a_part_run_from_graphs(tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = random_requests(seed=8, count=12)
    turns = Turns(monkeypatch, limit=200)
    with InProcessScheduler("neo", tiny("qwen2"), **OPTIONS) as scheduler:
        scheduler.scheduler.pipelining.measures = True
        backend = capture_decode_steps(scheduler.scheduler.tp_worker.model_runner, [1, 2, 4, 6, 8, 12, 16], monkeypatch)
        scheduler.scheduler.placement.rules = Rules(returns_per_step=0)
        got = scheduler.run(requests)
        counters = scheduler.scheduler.neo_metrics.counters
        steps, eager = counters.steps, counters.eager
    replayed = [key for key in backend.replays if (key.variant_label or "").startswith("lane-b-")]
    assert turns.steps > 5 and len(replayed) == steps["pipelined"] > 5, (turns.steps, steps)
    assert_exact(alone("qwen2", requests), tokens(got))
    assert eager == {"beside a prefill": steps["pipelined_prefill"]} and steps["pipelined_prefill"] > 0, eager


def test_steps_without_a_graph_are_counted_by_reason(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Graphs for four rows at most: more run eagerly, in one lane where there is none for two."""
    with (
        caplog.at_level(logging.INFO, logger="sglang_neo"),
        InProcessScheduler("neo", tiny("llama"), **OPTIONS | {"max_total_tokens": 1024}) as scheduler,
    ):
        capture_decode_steps(scheduler.scheduler.tp_worker.model_runner, [1, 2, 4], monkeypatch)
        requests = [replace(r, max_new_tokens=20 if i else 40) for i, r in enumerate(crowd(seed=7, count=9))]
        scheduler.run(requests, RandomMoves(seed=1, rate=0.2))
        state = scheduler.scheduler.neo_state()
    eager, steps = state["eager_steps_total"], state["steps_total"]
    assert eager["batch size"] > 5 and state["lanes"]["no_graph_total"] > 5, (eager, state["lanes"])
    assert sum(eager.values()) < sum(steps.values())
    told = [record.message for record in caplog.records if "without CUDA graphs" in record.message]
    assert sorted(line.rsplit(": ", 1)[1] for line in told) == sorted(eager), told
    assert sum("steps run in one lane" in record.message for record in caplog.records) == 1


def test_limits_are_measured(tiny: Tiny) -> None:
    with InProcessScheduler("neo", tiny("llama"), **OPTIONS) as scheduler:
        scheduler.scheduler.pipelining.measures = True
        scheduler.run(crowd(seed=7, count=10, answer=30))
        pace, limits = scheduler.scheduler.pipelining._pace, scheduler.scheduler.pipelining.limits
    assert 0 < limits.decode < 1e9, limits
    assert pace._cpu is not None and 0 < pace._cpu < 0.01


@pytest.mark.parametrize(("within", "bound"), [(0.0, True), (0.02, False)])
def test_the_wait_between_steps_says_nothing_of_the_device(
    monkeypatch: pytest.MonkeyPatch, within: float, bound: bool
) -> None:
    """Steps of 100 ms, of which the CPU waits 10 before the first hand-off, and ``within`` in the layers."""
    now, times = [0.0], [CpuTimes(0.0, 0.0)]
    attention: Any = SimpleNamespace(cpu_times=lambda: times[0])
    pipelining = Pipelining(None, attention, None)  # type: ignore[arg-type]
    monkeypatch.setattr("sglang_neo.pipelining.time.perf_counter", lambda: now[0])
    batch: Any = SimpleNamespace(reqs=[None] * 20)
    launched = LaunchedHostRows([], 1, None, mode="pipelined", tokens=8000)
    limits = []
    for _ in range(2 * Pace.WINDOW):
        pipelining.processed(batch, SimpleNamespace(neo_launched=launched))
        limits.append(pipelining._pace.limits.decode)
        now[0] += 0.1
        times[0] = replace(times[0], wait=times[0].wait + 0.01 + within, between=times[0].between + 0.01)
    assert (limits[-1] < 8000) == bound, limits[-1]
    if not bound:
        assert limits[-1] == pytest.approx(Pace.BUSY * 8000 * 0.09 / 0.07, rel=1e-3)


def test_rows_that_wait_keep_their_place(tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a step counts for rows that did not ride in it."""
    requests = crowd(seed=5, count=12, answer=40)
    Turns(monkeypatch, limit=200)
    own = NeoScheduleBatch.part_of

    def part_of(batch: NeoScheduleBatch, index: Any) -> NeoScheduleBatch:
        part = own(batch, index)
        waiting = [i for i in range(len(batch.reqs)) if i not in index]
        batch.seq_lens[waiting] += 1
        return part

    monkeypatch.setattr(NeoScheduleBatch, "part_of", part_of)
    with InProcessScheduler("neo", tiny("llama"), **OPTIONS) as scheduler:
        scheduler.scheduler.pipelining.measures = True
        scheduler.scheduler.placement.rules = Rules(returns_per_step=0)
        got = tokens(scheduler.run(requests))
    assert sum(first_difference(n, r, got[n]) is not None for n, r in alone("llama", requests).items()) >= 2
