"""Steps in two lanes on a GPU, from CUDA graphs and eager. Log-probabilities are compared as in test_captured.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.harness.inprocess import InProcessScheduler
from tests.harness.traffic import RandomMoves, random_requests

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from tests.gpu.test_captured import CASES, HOST, assert_alike, options, replays  # noqa: E402

Tiny = Callable[..., Path]


@pytest.mark.parametrize(("backend", "dtype", "page_size"), CASES)
def test_two_lanes_in_graphs(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, backend: str, dtype: str, page_size: int
) -> None:
    model = tiny("llama", dtype=dtype, head_dim=64)
    requests = random_requests(seed=21)
    settings = options(backend, dtype, page_size)
    with InProcessScheduler("plain", model, **settings) as scheduler:
        expected = scheduler.run(requests)
    with InProcessScheduler("neo", model, **settings, **HOST, neo_mode="pipelined") as scheduler:
        counts = replays(scheduler, monkeypatch)
        got = scheduler.run(requests, RandomMoves(seed=3, rate=0.3))
        steps, eager = scheduler.scheduler.neo_metrics.counters.steps, scheduler.scheduler.neo_metrics.counters.eager
    in_lanes = sum(count for label, count in counts.items() if label is not None and label.startswith("lane-b-"))
    assert in_lanes == steps["pipelined"] > 10 and steps["pipelined_prefill"] > 2, (counts, steps)
    assert eager == {"beside a prefill": steps["pipelined_prefill"]}, eager
    assert_alike(expected, got)


def test_two_lanes_without_graphs(tiny: Tiny) -> None:
    model = tiny("qwen3", dtype="bfloat16", head_dim=64)
    requests = random_requests(seed=22)
    settings = options("triton", "bfloat16", 1) | {"disable_cuda_graph": True}
    with InProcessScheduler("plain", model, **settings) as scheduler:
        expected = scheduler.run(requests)
    with InProcessScheduler("neo", model, **settings, **HOST, neo_mode="pipelined") as scheduler:
        got = scheduler.run(requests, RandomMoves(seed=3, rate=0.3))
        steps = scheduler.scheduler.neo_metrics.counters.steps
    assert steps["pipelined"] > 10 and steps["pipelined_prefill"] > 2, steps
    assert_alike(expected, got)


def test_everything_on_the_host(tiny: Tiny) -> None:
    model = tiny("llama", dtype="bfloat16", head_dim=64)
    requests = random_requests(seed=21)
    settings = options("triton", "bfloat16", 1)
    with InProcessScheduler("plain", model, **settings) as scheduler:
        expected = scheduler.run(requests)
    with InProcessScheduler("neo", model, **settings, **HOST, neo_mode="symmetric") as scheduler:
        got = scheduler.run(requests)
        steps = scheduler.scheduler.neo_metrics.counters.steps
    assert steps["gpu_only"] == 0 and steps["pipelined"] > 20 and steps["pipelined_prefill"] > 2, steps
    assert_alike(expected, got)
