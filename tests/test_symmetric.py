"""Mode symmetric: every request in host memory, in two lanes; tokens exact against plain SGLang."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_neo.planning.placement import Rules
from sglang_neo.token_manager import host_row
from tests.harness.exact import assert_exact
from tests.harness.inprocess import InProcessScheduler, Request
from tests.harness.traffic import random_prompt, random_requests, tokens
from tests.test_recovery import Stall, crowd

Tiny = Callable[..., Path]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)


@pytest.mark.parametrize(("overlap", "chunk"), [(True, 64), (False, 512)])
def test_nobody_decodes_on_the_device(tiny: Tiny, alone: Any, overlap: bool, chunk: int) -> None:
    requests = random_requests(seed=11, count=12, longest=200)
    on_device: list[str] = []

    def watch(scheduler: Any, step: int) -> None:
        scheduler.token_manager.audit()
        on_device.extend(r.rid for r in scheduler.running_batch.reqs if host_row(r) is None and not r.finished())

    options: dict[str, Any] = {"disable_overlap_schedule": not overlap, "chunked_prefill_size": chunk}
    with InProcessScheduler("neo", tiny("llama"), neo_mode="symmetric", **options) as scheduler:
        got = scheduler.run(requests, watch)
        state = scheduler.scheduler.neo_state()
    assert not on_device and state["active_mode"] == "symmetric"
    steps = state["steps_total"]
    assert steps["gpu_only"] == 0 and steps["pipelined"] > 20 and steps["pipelined_prefill"] > 2, steps
    assert state["migrations"] == dict.fromkeys(state["migrations"], 0)
    assert_exact(alone("llama", requests), tokens(got))


def test_what_the_host_cannot_have_goes_to_the_device(tiny: Tiny, alone: Any) -> None:
    """A prompt longer than the staging region, when nobody is left on the host, with those behind it; later ones go to
    the host again."""
    rng = random.Random(12)
    requests = [Request(f"r{i}", random_prompt(rng, 300 if i == 3 else 60), 12, arrive=i) for i in range(5)]
    requests += [Request(f"late{i}", random_prompt(rng, 60), 12, arrive=60) for i in range(3)]
    options: dict[str, Any] = {"neo_host_prompt_tokens": 200}
    places: dict[str, set[bool]] = {}

    def watch(scheduler: Any, step: int) -> None:
        for req in scheduler.running_batch.reqs:
            if not req.finished():
                places.setdefault(req.rid, set()).add(host_row(req) is not None)

    with InProcessScheduler("neo", tiny("llama"), neo_mode="symmetric", **options) as scheduler:
        got = scheduler.run(requests, watch)
    assert places.pop("r3") == places.pop("r4") == {False}, places
    assert len(places) == 6 and all(where == {True} for where in places.values()), places
    assert_exact(alone("llama", requests), tokens(got))


def test_while_the_cpu_rests_the_device_serves(tiny: Tiny, alone: Any) -> None:
    requests = crowd(seed=13, count=8, answer=40)
    stall = Stall(after=8)
    options: dict[str, Any] = {"max_running_requests": 16, "neo_watchdog_timeout": 0.8, "neo_mode": "symmetric"}
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        scheduler.scheduler.placement.rules = Rules(pause_steps=4)
        got = scheduler.run(requests, stall)
        recovery, steps = scheduler.scheduler.recovery, scheduler.scheduler.neo_metrics.counters.steps
    assert stall.stalls == 1 and recovery.restarted_reqs >= 4 and steps["gpu_only"] > 0, steps
    assert_exact(alone("llama", requests), tokens(got))
