"""A limit on requests that run at once: host rows must not have the places that the device would fill."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_neo.placement import Placement
from sglang_neo.planning.placement import Rules
from tests.harness.exact import assert_exact
from tests.harness.inprocess import InProcessScheduler, Request
from tests.harness.traffic import random_prompt, tokens

Tiny = Callable[..., Path]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)


def workload() -> list[Request]:
    """At first two of them fill the device, and all others go to the host; of those that follow it could have eight."""
    rng = random.Random(5)
    large = [Request(f"a{i}", random_prompt(rng, 130), 12) for i in range(2)]
    small = [Request(f"b{i}", random_prompt(rng, 20), 20) for i in range(40)]
    return large + small


def device_rows(tiny: Tiny, alone: Any, **options: Any) -> float:
    """Rows on the device, the mean over the steps in which others wait and all places are taken."""
    seen: list[int] = []

    def watch(scheduler: Any, step: int) -> None:
        running = scheduler.running_batch.reqs
        if scheduler.waiting_queue and len(running) == scheduler.max_running_requests:
            seen.append(len(running) - len(scheduler.token_manager.host_rows()))

    requests = workload()
    sizes = {"max_total_tokens": 320, "max_running_requests": 12, "neo_host_prefill_rate": 1000}
    with InProcessScheduler("neo", tiny("llama"), **sizes | options) as scheduler:
        scheduler.scheduler.placement.rules = Rules(growth_steps=2, return_steps=4, cooldown_steps=4)
        got = scheduler.run(requests, watch)
    assert_exact(alone("llama", requests), tokens(got))
    assert len(seen) > 10
    return sum(seen) / len(seen)


@pytest.mark.parametrize("mode", [{"neo_deferred_slots": 4}, {"neo_mode": "pipelined"}])
def test_the_device_is_filled_from_the_host(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]
) -> None:
    with_it = device_rows(tiny, alone, **mode)
    # Negative control: while somebody waits, nobody comes back, as if there were a place.
    monkeypatch.setattr(Placement, "somebody_can_come", lambda self, batch: bool(self._scheduler.waiting_queue))
    without = device_rows(tiny, alone, **mode)
    assert with_it > 1.1 * without, (with_it, without)


def test_a_small_row_that_leaves_takes_no_older_one_with_it(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows whose whole growth fits the device just so, and small ones that come into the room that they do not need
    yet: when it runs out the small ones leave, and what is free then is enough."""
    rng = random.Random(6)
    large = [Request(f"a{i}", random_prompt(rng, 100), 60) for i in range(2)]
    small = [Request(f"b{i}", random_prompt(rng, 8), 40, arrive=30) for i in range(6)]
    left: set[str] = set()
    move = Placement.move_to_host

    def watched(self: Placement, req: Any) -> bool:
        left.add(req.rid)
        return move(self, req)

    monkeypatch.setattr(Placement, "move_to_host", watched)
    sizes = {"max_total_tokens": 326, "max_running_requests": 8, "schedule_conservativeness": 0.1}
    with InProcessScheduler("neo", tiny("llama"), **sizes) as scheduler:
        got = scheduler.run([*large, *small])
    assert_exact(alone("llama", [*large, *small]), tokens(got))
    assert left and left <= {request.name for request in small}, left
