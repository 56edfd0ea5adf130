"""Requests that decode from host memory: tokens exact against plain SGLang, under every migration, and nothing lost."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.exact import assert_exact, first_difference
from tests.harness.inprocess import InProcessRunner, InProcessScheduler, Request
from tests.harness.models import ARCHITECTURES
from tests.harness.traffic import RandomMoves, random_options, random_prompt, random_requests, tokens

Tiny = Callable[..., Path]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)


#: Every architecture with both page sizes; overlap scheduling on and off in turns.
SETTINGS = [
    pytest.param(arch, page_size, (i + page_size) % 2 == 0, id=f"{arch}-{page_size}")
    for i, arch in enumerate(ARCHITECTURES)
    for page_size in (1, 64)
]


@pytest.mark.parametrize(("arch", "page_size", "overlap"), SETTINGS)
def test_exact_under_random_migrations(tiny: Tiny, alone: Any, arch: str, page_size: int, overlap: bool) -> None:
    requests = random_requests(seed=3)
    moves = RandomMoves(seed=page_size)
    with InProcessScheduler("neo", tiny(arch), page_size=page_size, disable_overlap_schedule=not overlap) as scheduler:
        got = scheduler.run(requests, moves)
        moved = scheduler.scheduler.token_manager.migrations
    assert moved.to_host > 5 and moved.to_device > 5 and moves.host_steps > 30, (moved, moves.host_steps)
    assert_exact(alone(arch, requests), tokens(got))


@pytest.mark.slow  # in CI the real model's tokens are compared over HTTP, and moves with tiny models
def test_a_real_model_is_exact_under_random_migrations(smollm2: Path) -> None:
    rng = random.Random(12)
    requests = [Request(f"r{i}", [rng.randrange(3, 49000) for _ in range(20 + 9 * i)], 24, arrive=i) for i in range(5)]
    with InProcessRunner("plain", smollm2) as runner:
        alone = runner.answers(requests)
    moves = RandomMoves(seed=2)
    with InProcessScheduler("neo", smollm2) as scheduler:
        got = scheduler.run(requests, moves)
        moved = scheduler.scheduler.token_manager.migrations
    assert moved.to_host > 5 and moved.to_device > 5, moved
    assert_exact(alone, tokens(got))


#: More of them: NEO_TEST_SEEDS=100 pytest tests/test_host_rows.py -k random_workloads
SEEDS = range(int(os.environ.get("NEO_TEST_SEEDS", "6")))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_workloads(tiny: Tiny, alone: Any, seed: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(seed=100 + seed, count=rng.randrange(4, 11))
    moves = RandomMoves(seed, rate=rng.choice([0.05, 0.3, 0.8]))
    arch = rng.choice(list(ARCHITECTURES))
    options = random_options(rng, seed, pools=[512, 1024, 2048], pages=[1, 16, 32, 64])
    print(f"seed {seed}: {arch}, {options}, moves at a rate of {moves.rate}")
    with InProcessScheduler("neo", tiny(arch), **options) as scheduler:
        got = scheduler.run(requests, moves)
    assert moves.host_steps > 0
    assert_exact(alone(arch, requests), tokens(got))


#: Requests, tokens of each prompt and answer, device pool. NEO_TEST_FULL=1: many and long ones, which takes minutes.
CROWD = (32, 300, 200, 2000) if os.environ.get("NEO_TEST_FULL") else (24, 100, 40, 512)


@pytest.mark.parametrize("page_size", [1, pytest.param(64, marks=pytest.mark.slow)])
def test_small_pool_serves_from_the_host_instead_of_retracting(tiny: Tiny, alone: Any, page_size: int) -> None:
    """Plain SGLang runs three or four at once and queues or retracts the others."""
    count, prompt, answer, pool = CROWD
    rng = random.Random(5)
    requests = [Request(f"r{i:02}", random_prompt(rng, prompt), answer) for i in range(count)]
    most: dict[str, int] = {}
    results = {}
    for kind in ("plain", "neo"):
        most[kind] = 0

        def watch(scheduler: Any, step: int, kind: str = kind) -> None:
            most[kind] = max(most[kind], len(scheduler.running_batch.reqs))
            if kind == "neo":
                scheduler.token_manager.audit()

        options = {"max_total_tokens": -(-pool // page_size) * page_size, "max_running_requests": 64}
        with InProcessScheduler(kind, tiny("llama"), page_size=page_size, **options) as scheduler:  # type: ignore[arg-type]
            results[kind] = scheduler.run(requests, watch)
    assert_exact(alone("llama", requests), tokens(results["neo"]))
    assert sum(result.retractions for result in results["neo"].values()) == 0
    assert most["neo"] >= 3 * most["plain"], most


def test_one_request_may_outgrow_the_device_pool(tiny: Tiny, alone: Any) -> None:
    rng = random.Random(6)
    requests = [Request("long", random_prompt(rng, 60), 240)]
    with InProcessScheduler("neo", tiny("llama"), max_total_tokens=128) as scheduler:
        got = scheduler.run(requests)
    assert len(got["long"].tokens) == 240
    assert_exact(alone("llama", requests), tokens(got))


def test_requests_come_back_when_the_device_has_room(tiny: Tiny, alone: Any) -> None:
    """A crowd of short requests drives a long one out; when they have gone, it returns and stays."""
    rng = random.Random(7)
    short = [Request(f"s{i}", random_prompt(rng, 60), 20, arrive=i) for i in range(8)]
    requests = [*short, Request("z-long", random_prompt(rng, 60), 150, arrive=9)]
    seen: list[bool] = []

    def watch(scheduler: Any, step: int) -> None:
        scheduler.token_manager.audit()
        seen.append("z-long" in [req.rid for req in scheduler.token_manager.host_rows()])

    with InProcessScheduler("neo", tiny("llama"), max_total_tokens=512, max_running_requests=16) as scheduler:
        got = scheduler.run(requests, watch)
        moved = scheduler.scheduler.token_manager.migrations
    assert_exact(alone("llama", requests), tokens(got))
    assert True in seen and not seen[-2], "the long request was to leave and to come back"
    assert moved.to_host < 30, f"thrashing: {moved}"


@pytest.mark.parametrize("seed", range(2))
def test_aborts_leave_both_pools_as_they_were(tiny: Tiny, seed: int) -> None:
    rng = random.Random(seed)
    requests = [
        Request(f"r{i:02}", random_prompt(rng, rng.randrange(1, 200)), 50, arrive=rng.randrange(30),
                abort=rng.randrange(1, 70) if rng.random() < 0.6 else None)
        for i in range(16)
    ]  # fmt: skip
    with InProcessScheduler("neo", tiny("llama"), max_total_tokens=700, max_running_requests=16) as scheduler:
        manager = scheduler.scheduler.token_manager
        before = manager.host_usage()
        scheduler.run(requests, RandomMoves(seed))
        assert manager.host_available() == before.total_tokens and not manager.host_rows()
        manager.audit()
        scheduler.flush()
        assert manager.host_usage() == before
        manager.audit()


def test_retraction_is_the_last_resort(tiny: Tiny, alone: Any) -> None:
    """Both pools full: SGLang's retraction, and the answers stay right."""
    rng = random.Random(8)
    requests = [Request(f"r{i}", random_prompt(rng, 40), 100, arrive=i) for i in range(7)]
    four_pages = 4 * 64 * 2 * 2 * 16 * 3 * 4 / 1e9  # tokens, K and V, heads, head_dim, layers, bytes
    options = {
        "max_total_tokens": 320,
        "max_running_requests": 16,
        "neo_host_kv_size": four_pages,
        "schedule_conservativeness": 0.05,  # so that admission gives more than there is room for
    }
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        manager = scheduler.scheduler.token_manager
        assert manager.host_usage().total_tokens == 4 * 64
        got = scheduler.run(requests, lambda s, step: s.token_manager.audit())
        assert manager.host_available() == 4 * 64
    assert sum(result.retractions for result in got.values()) > 0
    assert_exact(alone("llama", requests), tokens(got))


# -- negative controls: the comparison above would see these faults ---------------------------------------------------


def _no_answer(step: Any, layer: int, out: torch.Tensor) -> None:
    """The CPU's answers are not put where they belong."""
    step._owner.stream.take_flag(step._owner.flag(layer, 1))
    step.received += 1


def _last_layer_only(step: Any, layer: int, out: torch.Tensor) -> None:

    (_no_answer if layer == 0 else _RECEIVE)(step, layer, out)


def _swapped_rows(step: Any, layer: int, out: torch.Tensor) -> None:
    _RECEIVE(step, layer, out)
    index = step._owner.host_row_index()
    out[index] = out[index.flip(0)]


from sglang_neo.hybrid.host_attention import Emission  # noqa: E402

_RECEIVE = Emission.receive


@pytest.mark.parametrize("fault", [_no_answer, _last_layer_only, _swapped_rows])
def test_a_broken_hand_off_is_seen(tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    requests = random_requests(seed=3)
    monkeypatch.setattr(Emission, "receive", fault)
    with InProcessScheduler("neo", tiny("llama")) as scheduler:
        got = tokens(scheduler.run(requests, RandomMoves(1, rate=0.5)))
    differ = sum(first_difference(n, r, got[n]) is not None for n, r in alone("llama", requests).items())
    assert differ >= 5


def test_a_lost_token_is_seen(tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A migration that forgets the newest token."""
    from sglang_neo.token_manager import NeoTokenManager

    move = NeoTokenManager.move_to_host

    def forgetful(self: Any, req: Any, *args: Any) -> bool:
        moved = move(self, req, *args)
        if moved:
            row = req.neo_host_row
            pool = self._transfer.pool
            page, at = row.pages[(row.tokens - 1) // 64], (row.tokens - 1) % 64
            zero = torch.zeros(1, pool.geometry.kv_heads, pool.geometry.head_dim)
            for layer in range(pool.geometry.layers):
                pool.kernel_pool.write(layer, [page * 64 + at], zero, zero)
        return moved

    monkeypatch.setattr(NeoTokenManager, "move_to_host", forgetful)
    requests = random_requests(seed=3)
    with InProcessScheduler("neo", tiny("llama")) as scheduler:
        got = tokens(scheduler.run(requests, RandomMoves(1, rate=0.5)))
    differ = sum(first_difference(n, r, got[n]) is not None for n, r in alone("llama", requests).items())
    assert differ >= 3
