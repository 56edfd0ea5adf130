"""Two tensor-parallel ranks without a server: both decide alike in modes with lanes, and tokens are exact.

The ranks are children of the test's own process; what they receive is the same.
"""

from __future__ import annotations

import multiprocessing
import queue
import random
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_neo.pipelining import Pipelining
from sglang_neo.planning.lanes import LaneLimits
from sglang_neo.planning.pace import Pace
from tests.harness.exact import assert_exact
from tests.harness.inprocess import InProcessScheduler, Request, free_port
from tests.harness.traffic import RandomMoves, random_prompt, tokens
from tests.test_prefill_lane import arrivals

Tiny = Callable[..., Path]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)

RANKS = 2
OPTIONS: dict[str, Any] = {
    "tp_size": RANKS,
    "max_total_tokens": 512,
    "max_running_requests": 16,
    "chunked_prefill_size": 64,
    "neo_check_integrity": True,
    "neo_cpu_threads": 2,
}


def serve(rank: int, port: int, model: Path, options: dict[str, Any], requests: list[Request], found: Any) -> None:
    try:
        # Each measures what it pleases: rank 1 that its CPU attends to little, rank 0 that there is no limit.
        limits = [LaneLimits(), LaneLimits(decode=400, per_prompt_token=2.0)][rank]
        Pace.limits = property(lambda pace: limits)  # type: ignore[assignment, method-assign]
        Pipelining.AGREE_EVERY = 4
        with InProcessScheduler("neo", model, rank=rank, port=port, **OPTIONS, **options) as scheduler:
            if scheduler.scheduler.pipelining is not None:
                scheduler.scheduler.pipelining.measures = True
            got = scheduler.run(requests, RandomMoves(seed=4, rate=0.05))
            found.put((rank, tokens(got), scheduler.scheduler.neo_state()))
    except BaseException:
        found.put((rank, traceback.format_exc(), None))
        raise


def answers_of(ranks: Sequence[Any], found: Any) -> list[Any]:
    """What all of them put there; fails where one has ended without."""
    answers: list[Any] = []
    while len(answers) < len(ranks):
        ended = [rank.exitcode for rank in ranks if rank.exitcode]
        try:
            answers.append(found.get(timeout=5))
        except queue.Empty:
            if ended:
                pytest.fail(f"a rank ended with {ended[0]} and without an answer")
    return answers


@pytest.mark.parametrize(
    "options",
    [{"neo_mode": "pipelined"}, pytest.param({"neo_mode": "sync"}, marks=pytest.mark.slow)],
    ids=["pipelined", "sync"],
)
def test_two_ranks(tiny: Tiny, alone: Any, options: dict[str, Any]) -> None:
    """Prompts to both pools, one of them larger than the device's."""
    requests = [*arrivals(seed=6), Request("long", random_prompt(random.Random(7), 700), 10, arrive=10)]
    expected = alone("llama", requests)
    context = multiprocessing.get_context("spawn")  # a fork of a process that has run schedulers may die at once
    found: Any = context.Queue()
    port = free_port()
    ranks = [
        context.Process(target=serve, args=(rank, port, tiny("llama"), options, requests, found), daemon=True)
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    try:
        answers = sorted(answers_of(ranks, found), key=lambda answer: answer[0])
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    for _, got, state in answers:
        assert state is not None, got
        assert_exact(expected, got)
    states = [state for _, _, state in answers]
    same = ("steps_total", "migrations", "lanes", "host_tokens_total", "host_prefill")
    assert all(states[0][name] == states[1][name] for name in same), states
    assert states[0]["host_prefill"]["computed_tokens"] > 1000
    if options["neo_mode"] == "pipelined":
        steps, lanes = states[0]["steps_total"], states[0]["lanes"]
        assert steps["pipelined"] > 10 and steps["pipelined_prefill"] > 5, steps
        assert lanes["limit_tokens"] == 400 and lanes["waited_total"] > 5, lanes
