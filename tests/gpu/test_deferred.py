"""Deferred steps on a GPU, from CUDA graphs and eager, audited: what they answer, and that wrong parking is seen.

Log-probabilities are compared as in test_captured.py, up to where an answer leaves the reference's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.inprocess import InProcessScheduler
from tests.harness.traffic import RandomMoves, random_requests

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from tests.gpu.test_captured import CASES, HOST, assert_alike, options, replays  # noqa: E402

Tiny = Callable[..., Path]


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(("backend", "dtype", "page_size"), CASES)
def test_deferred_steps_in_graphs(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, backend: str, dtype: str, page_size: int, slots: int
) -> None:
    model = tiny("llama", dtype=dtype, head_dim=64)
    requests = random_requests(seed=21)
    settings = options(backend, dtype, page_size)
    with InProcessScheduler("plain", model, **settings) as scheduler:
        expected = scheduler.run(requests)
    moves = RandomMoves(seed=3, rate=0.05)
    deferred: dict[str, Any] = {"neo_deferred_slots": slots, "neo_check_integrity": True}
    with InProcessScheduler("neo", model, **settings, **HOST, **deferred) as scheduler:
        counts = replays(scheduler, monkeypatch)
        got = scheduler.run(requests, moves)
        steps = scheduler.scheduler.neo_metrics.counters.steps
    assert counts["host-rows"] > 20 and steps["deferred"] >= counts["host-rows"], (counts, steps)
    assert_alike(expected, got)


@pytest.mark.parametrize("overlap", [True, False])
def test_deferred_steps_without_graphs(tiny: Tiny, overlap: bool) -> None:
    model = tiny("qwen3", dtype="bfloat16", head_dim=64)
    requests = random_requests(seed=22)
    settings = options("triton", "bfloat16", 1) | {
        "disable_cuda_graph": True,
        "disable_overlap_schedule": not overlap,
    }
    with InProcessScheduler("plain", model, **settings) as scheduler:
        expected = scheduler.run(requests)
    with InProcessScheduler(
        "neo", model, **settings, **HOST, neo_deferred_slots=2, neo_check_integrity=True
    ) as scheduler:
        got = scheduler.run(requests, RandomMoves(seed=3, rate=0.05))
        steps = scheduler.scheduler.neo_metrics.counters.steps
    assert steps["deferred"] > 20, steps
    assert_alike(expected, got)


def test_a_wrong_parking_place_is_seen(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the rows parked at one layer change slots in mid-flight; the audit stops the server."""
    from sglang_neo.deferral import AuditError

    model = tiny("llama", dtype="bfloat16", head_dim=64)
    settings = options("triton", "bfloat16", 1)
    moves = RandomMoves(seed=3, rate=0.2)

    def on_step(scheduler: Any, step: int) -> None:
        moves(scheduler, step)
        parked = scheduler.placement.attention.parked[1]
        parked.tickets.copy_(parked.tickets.flip(0))

    with (
        InProcessScheduler(
            "neo", model, **settings, **HOST, neo_deferred_slots=2, neo_check_integrity=True
        ) as scheduler,
        pytest.raises(AuditError),
    ):
        scheduler.run(random_requests(seed=21), on_step)


def test_workers_that_stop_for_longer_than_the_watchdog(tiny: Tiny, caplog: pytest.LogCaptureFixture) -> None:
    from bench.hybrid_step import stall

    model = tiny("llama", dtype="bfloat16", head_dim=64)
    requests = random_requests(seed=22)
    settings = options("triton", "bfloat16", 1)
    with InProcessScheduler("plain", model, **settings) as scheduler:
        expected = scheduler.run(requests)
    moves, stalls = RandomMoves(seed=3, rate=0.05), [0]

    def on_step(scheduler: Any, step: int) -> None:
        moves(scheduler, step)
        if not stalls[0] and scheduler.token_manager.host_rows() and step > 20:
            stalls[0] += 1
            stall(scheduler.placement.attention.workers, 6.0)

    deferred: dict[str, Any] = {"neo_watchdog_timeout": 2.0, "neo_deferred_slots": 2}
    with caplog.at_level(logging.ERROR), InProcessScheduler("neo", model, **settings, **HOST, **deferred) as scheduler:
        got = scheduler.run(requests, on_step)
        recovery = scheduler.scheduler.recovery
    assert stalls[0] and recovery.failed_steps > 0
    assert_alike(expected, got, least=50)
