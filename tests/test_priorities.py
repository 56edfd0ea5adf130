"""Priorities: best-effort requests go to the host first, ordinary ones come back first, no KV is thrown away."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.exact import assert_exact
from tests.harness.inprocess import InProcessScheduler, Request
from tests.harness.traffic import random_prompt, tokens
from tests.test_scenarios import in_modes

Tiny = Callable[..., Path]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)

PRIORITIES: dict[str, Any] = {
    "enable_priority_scheduling": True,
    "max_total_tokens": 512,
    "max_running_requests": 20,
}


class Shares:
    """``on_step``: by kind of request (the first letter of its name), the steps it spent in either pool."""

    def __init__(self) -> None:
        self.host: dict[str, int] = {}
        self.all: dict[str, int] = {}

    def __call__(self, scheduler: Any, step: int) -> None:
        scheduler.token_manager.audit()
        for req in scheduler.running_batch.reqs:
            kind = req.rid[0]
            self.all[kind] = self.all.get(kind, 0) + 1
            self.host[kind] = self.host.get(kind, 0) + (getattr(req, "neo_host_row", None) is not None)

    def on_host(self, kind: str) -> float:
        return self.host[kind] / self.all[kind]


@in_modes("deferred")
@pytest.mark.parametrize("low_first", [False, True])
def test_best_effort_requests_make_room(tiny: Tiny, alone: Any, mode: dict[str, Any], low_first: bool) -> None:
    """The device is full of them when ordinary ones arrive; SGLang would retract them.

    Their priorities are further apart than --priority-scheduling-preemption-threshold.
    """
    rng = random.Random(1)
    best_effort = [Request(f"b{i}", random_prompt(rng, 60), 50, priority=20 if low_first else -20) for i in range(8)]
    ordinary = [Request(f"o{i}", random_prompt(rng, 60), 50, arrive=10 + i, priority=0) for i in range(4)]
    requests, shares = best_effort + ordinary, Shares()
    options = {**PRIORITIES, **mode, "schedule_low_priority_values_first": low_first}
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        got = scheduler.run(requests, shares)
    assert sum(result.retractions for result in got.values()) == 0
    assert shares.on_host("o") < 0.1 < 0.3 < shares.on_host("b"), (shares.host, shares.all)
    assert_exact(alone("llama", requests), tokens(got))


def test_without_the_rule_they_are_retracted(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above."""
    from sglang_neo.placement import Placement

    monkeypatch.setattr(Placement, "before_admission", lambda self, batch: None)
    with pytest.raises(AssertionError):
        test_best_effort_requests_make_room(tiny, lambda *a: {}, {}, False)


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_it_changes_places_in_mode_auto_too(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    from tests.test_auto import PROFILES

    monkeypatch.setattr("sglang_neo.scheduler.tables_for", lambda runner, anew: PROFILES["deferred"])
    mode = {"neo_mode": "auto", "neo_deferred_slots": 2, "disable_overlap_schedule": not overlap}
    test_an_ordinary_request_changes_places_with_best_effort_ones(tiny, alone, mode)


@in_modes("sync")
def test_an_ordinary_request_changes_places_with_best_effort_ones(tiny: Tiny, alone: Any, mode: dict[str, Any]) -> None:
    """It has gone to the host; without ranks it would wait there until somebody ends."""
    from sglang_neo.planning.placement import Rules

    rng = random.Random(2)
    requests = [Request(f"b{i}", random_prompt(rng, 80), 120, priority=-10) for i in range(5)]
    requests.append(Request("o", random_prompt(rng, 60), 60, arrive=5, priority=0))
    moved, back, pushed = [False], [False], [0]

    def push_out(scheduler: Any, step: int) -> None:
        for req in scheduler.running_batch.reqs:
            on_host = getattr(req, "neo_host_row", None) is not None
            if req.rid == "o" and not moved[0] and len(req.output_ids) > 3:
                pushed[0] += not on_host
                moved[0] = on_host or scheduler.placement.move_to_host(req)
            elif req.rid == "o" and moved[0]:
                back[0] |= not on_host
        scheduler.token_manager.audit()

    with InProcessScheduler("neo", tiny("llama"), **PRIORITIES, **mode) as scheduler:
        scheduler.scheduler.placement.rules = Rules(growth_steps=2, return_steps=30, cooldown_steps=4)
        got = scheduler.run(requests, push_out)
        moves = scheduler.scheduler.token_manager.migrations
    assert moved[0] and back[0] and moves.to_host > pushed[0], moves
    assert_exact(alone("llama", requests), tokens(got))


def test_seats_go_to_ordinary_requests_first(tiny: Tiny, alone: Any) -> None:
    """Four seats, ten host rows, six of them best-effort: the ordinary ones end first although they came last."""
    rng = random.Random(3)
    requests = [Request(f"b{i}", random_prompt(rng, 60), 12, priority=-10) for i in range(6)]
    requests += [Request(f"o{i}", random_prompt(rng, 60), 12, priority=5) for i in range(4)]
    ended: list[str] = []

    def watch(scheduler: Any, step: int) -> None:
        scheduler.token_manager.audit()
        for req in scheduler.running_batch.reqs:
            if req.finished() and req.rid not in ended:
                ended.append(req.rid)
            elif len(req.output_ids) == 1 and getattr(req, "neo_host_row", None) is None:
                scheduler.placement.move_to_host(req)

    options: dict[str, Any] = {**PRIORITIES, "max_total_tokens": 2048, "neo_deferred_slots": 1}
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        from sglang_neo.planning.placement import Rules

        scheduler.scheduler.placement.rules = Rules(returns_per_step=0)
        got = scheduler.run(requests, watch)
    order = [name[0] for name in ended]
    assert order.index("b") >= 3, ended
    assert_exact(alone("llama", requests), tokens(got))
