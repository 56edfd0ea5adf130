"""Pipelined mode: the rows of a step in two lanes; tokens exact against plain SGLang, nothing lost."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_neo.hybrid.host_attention import Emission, StepRefused
from sglang_neo.hybrid.pipelined import LaneEmission, PipelinedAttention, PrefillLane
from sglang_neo.planning.placement import Rules
from tests.harness.exact import assert_exact, first_difference
from tests.harness.graphs import capture_decode_steps
from tests.harness.inprocess import InProcessScheduler
from tests.harness.models import ARCHITECTURES
from tests.harness.traffic import RandomMoves, random_options, random_requests, tokens
from tests.test_recovery import Stall, crowd

Tiny = Callable[..., Path]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)


@pytest.mark.parametrize(  # CI tries the others in mode auto (test_auto.py), which has steps of this kind among its own
    "arch",
    [pytest.param(arch, marks=[] if arch in ("llama", "mixtral") else pytest.mark.slow) for arch in ARCHITECTURES],
)
def test_exact_under_random_migrations(tiny: Tiny, alone: Any, arch: str) -> None:
    requests = random_requests(seed=3)
    i = list(ARCHITECTURES).index(arch)
    options: dict[str, Any] = {
        "page_size": (1, 64)[i % 2],
        "disable_overlap_schedule": i % 3 == 1,
        "neo_check_integrity": True,
        "neo_mode": "pipelined",
    }
    moves = RandomMoves(seed=i, rate=0.3)
    with InProcessScheduler("neo", tiny(arch), **options) as scheduler:
        got = scheduler.run(requests, moves)
        state = scheduler.scheduler.neo_state()
    assert state["active_mode"] == "pipelined" and state["steps_total"]["pipelined"] > 10, state
    assert_exact(alone(arch, requests), tokens(got))


#: More of them: NEO_TEST_SEEDS=100 pytest tests/test_pipelined.py -k random_workloads
SEEDS = range(int(os.environ.get("NEO_TEST_SEEDS", "2")))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_workloads(tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every other one from a stand-in for CUDA graphs."""
    rng = random.Random(seed)
    requests = random_requests(seed=100 + seed, count=rng.randrange(6, 13))
    moves = RandomMoves(seed, rate=rng.choice([0.1, 0.3, 0.6]))
    arch = rng.choice(list(ARCHITECTURES))
    options = random_options(rng, seed, pools=[1024, 2048]) | {
        "disable_overlap_schedule": seed % 4 == 1,
        "max_running_requests": 16,
        "neo_check_integrity": True,
        "neo_mode": "pipelined",
    }
    print(f"seed {seed}: {arch}, {options}, moves at a rate of {moves.rate}")
    with InProcessScheduler("neo", tiny(arch), **options) as scheduler:
        backend = None
        if seed % 2 == 0:
            runner = scheduler.scheduler.tp_worker.model_runner
            backend = capture_decode_steps(runner, [1, 2, 4, 6, 8, 12, 16], monkeypatch)
        got = scheduler.run(requests, moves)
        steps = scheduler.scheduler.neo_metrics.counters.steps
    assert steps["pipelined"] > 5, steps
    assert_exact(alone(arch, requests), tokens(got))
    if backend is not None:
        replayed = [key for key in backend.replays if (key.variant_label or "").startswith("lane-b-")]
        assert len(replayed) == steps["pipelined"], "every step in two lanes has a graph"
        assert len(set(replayed)) > 1


def test_the_lanes_take_turns(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """A and B hand over a layer before either has its answer; beside a prefill, B waits when the next layer's attention
    is on its way."""
    events: list[tuple[str, str, int]] = []

    def noting(owner: type, name: str) -> None:
        own = getattr(owner, name)

        def noted(self: Any, *args: Any) -> None:
            if isinstance(self, PrefillLane):
                events.append(("attend", "A", self.received))
            elif isinstance(self, LaneEmission):
                events.append((name, "A" if self.has_device_rows else "B", args[0]))
            own(self, *args)

        monkeypatch.setattr(owner, name, noted)

    noting(Emission, "send")
    noting(Emission, "receive")
    noting(PrefillLane, "handed_over")
    with InProcessScheduler("neo", tiny("llama"), max_total_tokens=512, neo_mode="pipelined") as scheduler:
        layers = scheduler.scheduler.placement.attention.geometry.layers
        scheduler.run(crowd(seed=2, count=8, answer=30), RandomMoves(seed=2, rate=0.3))
        counts = scheduler.scheduler.neo_metrics.counters.steps
    decode = [("send", lane, 0) for lane in "AB"]
    beside = [("attend", "A", 0), ("send", "B", 0)]
    for layer in range(layers):
        more = layer + 1 < layers
        for lane in "AB":
            decode += [("receive", lane, layer)] + [("send", lane, layer + 1)] * more
        beside += [("attend", "A", layer + 1)] * more + [("receive", "B", layer)] + [("send", "B", layer + 1)] * more
    steps = {"pipelined": 0, "pipelined_prefill": 0}
    while events:
        kind, order = ("pipelined", decode) if events[0][0] == "send" else ("pipelined_prefill", beside)
        assert events[: len(order)] == order
        del events[: len(order)]
        steps[kind] += 1
    assert min(steps.values()) > 0 and all(counts[kind] == count for kind, count in steps.items()), (steps, counts)


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_workers_that_stop_for_a_while(tiny: Tiny, alone: Any, overlap: bool) -> None:
    requests = crowd(seed=1)
    stall = Stall(after=8)
    options: dict[str, Any] = {"max_total_tokens": 512, "max_running_requests": 16, "neo_watchdog_timeout": 0.8}
    with InProcessScheduler(
        "neo", tiny("llama"), disable_overlap_schedule=not overlap, neo_mode="pipelined", **options
    ) as scheduler:
        scheduler.scheduler.placement.rules = Rules(pause_steps=4)
        got = scheduler.run(requests, stall)
        recovery = scheduler.scheduler.recovery
    assert stall.stalls == 1 and recovery.failed_steps >= 1 and recovery.restarted_reqs >= 2
    assert_exact(alone("llama", requests), tokens(got))


def test_refused_steps_run_in_lanes_of_the_same_sizes(tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others have a graph: padded as it is, so that another rank may have run that."""
    own, forward, launched, eager = PipelinedAttention.launch_lanes, PipelinedAttention.in_lanes, [], []

    def launch_lanes(attention: Any, *args: Any) -> int:
        launched.append(args)
        if len(launched) in (4, 9):
            raise StepRefused("no steps today")
        return own(attention, *args)

    def in_lanes(attention: Any, model: Any, sizes: Any, flags: Any = lambda: True) -> Any:
        eager.append((tuple(sizes), flags()))
        return forward(attention, model, sizes, flags)

    requests = crowd(seed=10, count=9, answer=30)
    options = {"max_total_tokens": 400, "max_running_requests": 9, "neo_mode": "pipelined"}
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        runner = scheduler.scheduler.tp_worker.model_runner
        capture_decode_steps(runner, [1, 2, 4, 6, 8, 12], monkeypatch)
        monkeypatch.setattr(PipelinedAttention, "launch_lanes", launch_lanes)
        monkeypatch.setattr(PipelinedAttention, "in_lanes", in_lanes)
        scheduler.scheduler.placement.rules = Rules(pause_steps=2)
        got = scheduler.run(requests)
        failed, counted = scheduler.scheduler.recovery.failed_steps, scheduler.scheduler.neo_metrics.counters.eager
        buckets = set(map(tuple, runner.neo_lane_buckets))
    assert len(eager) == failed == counted["refused by the workers"] == 2, (eager, counted)
    assert all(sizes in buckets and not flags for sizes, flags in eager), (eager, buckets)
    assert_exact(alone("llama", requests), tokens(got))


def test_an_error_in_one_lane_ends_both(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the other lane stays suspended."""
    seen: list[str] = []
    with InProcessScheduler("neo", tiny("llama"), max_total_tokens=512, neo_mode="pipelined") as scheduler:
        attention = scheduler.scheduler.placement.attention

        def forward(lane: str) -> None:
            try:
                attention.current.give_way()
                if lane == "B":
                    raise ValueError("lane B fails")
                attention.current.give_way()
            finally:
                seen.append(lane)

        emissions = [LaneEmission(attention, attention, 1, False, device) for device in (True, False)]
        outer = attention.current
        with pytest.raises(ValueError, match="lane B fails"):
            attention._take_turns([lambda: forward("A"), lambda: forward("B")], emissions)
        assert sorted(seen) == ["A", "B"] and attention.current is outer


def capped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """As torch's ``scaled_dot_product_attention``, with scores capped at SOFT_CAP."""
    assert attn_mask is None and scale is not None
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
    scores = SOFT_CAP * torch.tanh(query @ key.transpose(-1, -2) * scale / SOFT_CAP)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ value


SOFT_CAP = 1.5


@pytest.mark.parametrize("ours", [SOFT_CAP, 0.0])
def test_attention_with_a_soft_cap(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, ours: float) -> None:
    """SGLang's attention for the CPU knows no soft cap: it is given one, and the model too. Negative control: the CPU
    kernels do without."""
    from sglang.srt.layers.attention import torch_native_backend
    from sglang.srt.layers.radix_attention import RadixAttention

    own = RadixAttention.__init__

    def capped(layer: Any, *args: Any, **kwargs: Any) -> None:
        own(layer, *args, **kwargs)
        layer.logit_cap = ours

    monkeypatch.setattr(torch_native_backend, "scaled_dot_product_attention", capped_attention)
    monkeypatch.setattr(RadixAttention, "__init__", capped)
    requests = crowd(seed=9, count=12, answer=30)
    with InProcessScheduler("plain", tiny("llama"), max_running_requests=16) as scheduler:
        expected = {name: result.reference() for name, result in scheduler.run(requests).items()}
    with InProcessScheduler("neo", tiny("llama"), max_total_tokens=400, neo_mode="pipelined") as scheduler:
        got = tokens(scheduler.run(requests))
        steps = scheduler.scheduler.neo_metrics.counters.steps
    assert steps["pipelined"] > 10, steps
    if ours:
        assert_exact(expected, got)
    else:
        assert sum(first_difference(name, r, got[name]) is not None for name, r in expected.items()) >= 2


@pytest.mark.parametrize("wrong", ["inbox", "lane"])
def test_a_wrong_exchange_is_seen(tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """Negative controls: lane B gets lane A's answers; lane B's host rows take each other's places."""
    requests, most = crowd(seed=3, count=16, answer=30), 0
    options: dict[str, Any] = {"max_total_tokens": 300, "max_running_requests": 16, "neo_mode": "pipelined"}
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        attention = scheduler.scheduler.placement.attention
        own = attention._second.load_control

        def load_control(number: int, index: Any) -> None:
            nonlocal most
            most = max(most, len(index))
            own(number, index[::-1] if wrong == "lane" else index)

        monkeypatch.setattr(attention._second, "load_control", load_control)
        if wrong == "inbox":
            attention._second.inbox = attention.inbox
        got = scheduler.run(requests)
    assert most > 1, "there was nothing to take for another"
    with pytest.raises(AssertionError):
        assert_exact(alone("llama", requests), tokens(got))
