"""Random requests for the in-process scheduler, and random migrations under them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from tests.harness.inprocess import Request, Result
from tests.harness.models import VOCAB_SIZE


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def random_requests(seed: int, count: int = 8, longest: int = 100, shortest_answer: int = 2) -> list[Request]:
    """Lengths of all kinds, some with a common prefix, arriving over time."""
    rng = random.Random(seed)
    prefix = random_prompt(rng, 70)
    requests = []
    for i in range(count):
        start = prefix[: rng.randrange(1, 70)] if rng.random() < 0.4 else []
        prompt = start + random_prompt(rng, rng.randrange(1, longest))
        requests.append(Request(f"r{i:02}", prompt, rng.randrange(shortest_answer, 45), arrive=rng.randrange(20)))
    return requests


class RandomMoves:
    """``on_step`` that moves running requests between the pools at random, and audits both pools after each step."""

    def __init__(self, seed: int, rate: float = 0.3):
        self.rng, self.rate = random.Random(seed), rate
        self.host_steps = 0  # a request spent a step in host memory

    def __call__(self, scheduler: Any, step: int) -> None:
        manager = scheduler.token_manager
        manager.audit()
        self.host_steps += len(manager.host_rows())
        if scheduler.recovery.pending:
            return  # as the scheduler: nothing moves before the failed step is dealt with
        for req in scheduler.running_batch.reqs:
            if req.finished() or req.kv is None or self.rng.random() >= self.rate:
                continue
            if getattr(req, "neo_host_row", None) is None:
                scheduler.placement.move_to_host(req)
            else:
                scheduler.placement.move_to_device(req)


def tokens(results: dict[str, Result]) -> dict[str, list[int]]:
    return {name: result.tokens for name, result in results.items()}


def random_options(
    rng: random.Random, seed: int, pools: Sequence[int], pages: Sequence[int] = (1, 16, 64)
) -> dict[str, Any]:
    """Server arguments that random workloads vary: page size, chunked prefill, radix cache, overlap, device pool."""
    return {
        "page_size": rng.choice(pages),
        "chunked_prefill_size": rng.choice([64, 128, -1]),
        "disable_radix_cache": seed % 3 == 2,
        "disable_overlap_schedule": seed % 2 == 1,
        "max_total_tokens": rng.choice(pools),
    }
