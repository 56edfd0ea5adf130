"""Random traffic for a long time: arrivals, aborts, migrations, shared prefixes, failures of the CPU side, forwards
that raise, both pools full at times. Both pools are checked after every step, answers compared with the same requests
alone.

CI runs some hundred steps; ``NEO_TEST_STEPS=10000 NEO_TEST_SEEDS=2 pytest tests/test_traffic.py`` is the long version.

The long version with seed 0, on the CPU device of two busy cores; all answers exact, both pools as they were:

    mode        steps  answers compared  moves out, back  retractions  failed steps (raised)
    sync        10357               323       1058,  915          369               96 (48)
    pipelined   10385               325       1076,  829          475              151 (48)
    deferred    10215               288       1101, 1038          383              147 (47)
    auto        10573               286       1168,  641          593              541 (48)
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_neo import recovery as recovery_module
from sglang_neo import scheduler as scheduler_module
from sglang_neo.hybrid.deferred import DeferredAttention
from sglang_neo.hybrid.host_attention import HostAttention, StepRefused
from sglang_neo.planning.placement import Rules
from tests.harness.exact import assert_exact
from tests.harness.inprocess import InProcessScheduler, Request
from tests.harness.traffic import RandomMoves, random_prompt, tokens
from tests.test_auto import PROFILES, Restless
from tests.test_raised_steps import Faults

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)

STEPS = int(os.environ.get("NEO_TEST_STEPS", "200"))
#: Requests are handed in in rounds of about so many steps; the radix cache lives on from round to round.
ROUND = 400
#: One answer in so many is compared with the same request alone.
COMPARED = 4


def round_of_requests(rng: random.Random, prefixes: list[list[int]], number: int) -> list[Request]:
    requests, step = [], 0
    while step < ROUND:
        step += int(rng.expovariate(0.15))
        start = rng.choice(prefixes)[: rng.randrange(10, 90)] if rng.random() < 0.5 else []
        prompt = start + random_prompt(rng, rng.randrange(1, 80))
        answer = rng.choice([1, 3, 20, 60, 90])
        abort = step + rng.randrange(0, 60) if rng.random() < 0.2 else None
        requests.append(Request(f"{number}-{len(requests):04}", prompt, answer, arrive=step, abort=abort))
    return requests


class SometimesRefuses:
    """The hand-off service takes no step now and then."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch, rate: float = 0.01):
        self._rng, self._rate, self.refused = random.Random(seed), rate, 0
        own = HostAttention._jobs_of

        def jobs_of(attention: Any, *args: Any) -> Any:
            if self._rng.random() < self._rate:
                self.refused += 1
                raise RuntimeError("refused by the test")
            return own(attention, *args)

        monkeypatch.setattr(HostAttention, "_jobs_of", jobs_of)


class SometimesRefusesDeferred:
    """The same for deferred steps: from a refusal on, none is taken until the service has been reset."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch, rate: float = 0.01):
        self._rng, self._rate, self.refused, self._poisoned = random.Random(seed), rate, 0, False
        launch, reset = DeferredAttention.launch_step, DeferredAttention.reset

        def refusing(attention: Any, step: Any) -> int:
            if self._poisoned or self._rng.random() < self._rate:
                self.refused, self._poisoned = self.refused + 1, True
                raise StepRefused("refused by the test")
            return launch(attention, step)

        def healing(attention: Any, *args: Any, **how: Any) -> bool:
            self._poisoned = False
            return reset(attention, *args, **how)

        monkeypatch.setattr(DeferredAttention, "launch_step", refusing)
        monkeypatch.setattr(DeferredAttention, "reset", healing)


@pytest.mark.parametrize("mode", ["sync", "pipelined", "deferred", "auto"])
@pytest.mark.parametrize("seed", range(int(os.environ.get("NEO_TEST_SEEDS", "1"))))
@pytest.mark.timeout(max(300, STEPS))
def test_random_traffic(
    tiny: Callable[..., Path], alone: Any, monkeypatch: pytest.MonkeyPatch, seed: int, mode: str
) -> None:
    """Deferred steps with every hand-off audited; auto on a machine that is another one every few steps."""
    rng = random.Random(1000 + seed)
    prefixes = [random_prompt(rng, 90) for _ in range(3)]
    options: dict[str, Any] = {
        "page_size": rng.choice([1, 16]),
        "max_total_tokens": 768,
        "max_running_requests": 20,
        "chunked_prefill_size": rng.choice([64, 512]),
        "disable_overlap_schedule": seed % 2 == 1,
        "neo_host_kv_size": 10 * 64 * 2 * 2 * 16 * 3 * 4 / 1e9,  # ten pages
    }
    print(f"seed {seed}: {options}")
    options["neo_mode"] = mode
    if mode in ("deferred", "auto"):
        options |= {"neo_deferred_slots": 2, "neo_check_integrity": True}
        options["neo_host_kv_size"] *= 1.101  # one page is nobody's
    moves = RandomMoves(seed, rate=0.03)
    if mode == "auto":
        moves = Restless(seed, rate=0.03, every=20)
        monkeypatch.setattr(scheduler_module, "tables_for", lambda runner, anew: PROFILES["sync"])
    refusals: list[Any] = [] if mode == "deferred" else [SometimesRefuses(seed, monkeypatch)]
    draw = random.Random(2000 + seed)
    faults = Faults(monkeypatch, lambda batch: draw.random() < 0.005)
    for name in ("_CHANCES", "_MOST_IN_A_ROW"):
        monkeypatch.setattr(recovery_module, name, 1 << 30)
    compared: list[Request] = []
    got: dict[str, list[int]] = {}
    steps = rounds = retractions = 0
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        manager, recovery = scheduler.scheduler.token_manager, scheduler.scheduler.recovery
        scheduler.scheduler.placement.rules = Rules(pause_steps=2, cooldown_steps=6, return_steps=16)
        before = manager.host_usage()
        faults.hook(scheduler)
        if mode in ("deferred", "auto"):  # after the trial at start
            refusals.append(SometimesRefusesDeferred(seed, monkeypatch))
        while steps < STEPS:
            requests = round_of_requests(rng, prefixes, rounds)
            results = scheduler.run(requests, moves)
            steps, rounds = steps + scheduler.steps, rounds + 1
            retractions += sum(result.retractions for result in results.values())
            finished = [r for r in requests if results[r.name].finish == "length"]
            assert all(len(results[r.name].tokens) == r.max_new_tokens for r in finished)
            kept = finished[::COMPARED]
            compared += kept
            got |= {name: found for name, found in tokens(results).items() if name in {r.name for r in kept}}
            assert manager.host_available() == before.total_tokens, "host memory is free or evictable between rounds"
            assert not manager.host_rows()
        moved = manager.migrations
    print(f"{steps} steps, {len(compared)} answers compared, {moved}, {retractions} retractions, "
          f"{recovery.failed_steps} failed steps, raised: {dict(faults.kinds)}")  # fmt: skip
    assert moved.to_host > 20 and moved.to_device > 5 and moves.host_steps > STEPS / 10
    assert recovery.raised_steps == sum(faults.kinds.values()) > STEPS / 1000
    # Each refused or raising step, and what was beside it; a refused one may raise too.
    failed = sum(each.refused for each in refusals) + recovery.raised_steps + faults.kinds["beside"]
    assert 0.9 * failed - 2 < recovery.failed_steps <= failed
    assert_exact(alone("llama", compared), got)
