"""Prompts that are computed straight into host memory: exact, without device slots, and no page lost."""

from __future__ import annotations

import itertools
import os
import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_neo.hybrid.prefill import PromptLayers
from tests.harness.exact import Reference, assert_exact, first_difference
from tests.harness.inprocess import InProcessScheduler, Request
from tests.harness.traffic import RandomMoves, random_prompt, tokens
from tests.test_host_prefixes import chats, empty_device_tree, host_tokens

Tiny = Callable[..., Path]
Alone = Callable[[str, list[Request]], dict[str, Reference]]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)

FULL = bool(os.environ.get("NEO_TEST_FULL"))

#: Page size, chunked prefill, overlap scheduling.
MATRIX = [(1, -1, True), (64, 128, True), (1, 100, False)]
if FULL:
    MATRIX += [(64, -1, False), (16, 32, False), (1, 64, True), (16, 512, True)]


def long_prompts(seed: int, count: int = 5) -> list[Request]:
    """Some longer than a device pool of 256 tokens, some not, the first ones with a beginning in common."""
    rng = random.Random(seed)
    start = random_prompt(rng, 150)
    prompts = [(start if i < 3 else []) + random_prompt(rng, rng.randrange(40, 330)) for i in range(count)]
    return [Request(f"r{i}", p, rng.randrange(5, 30), arrive=3 * i) for i, p in enumerate(prompts)]


@pytest.mark.parametrize(("page_size", "chunk", "overlap"), MATRIX)
def test_prompts_larger_than_the_device_pool(
    tiny: Tiny, alone: Alone, page_size: int, chunk: int, overlap: bool
) -> None:
    requests = long_prompts(seed=1)
    options: dict[str, Any] = {
        "page_size": page_size,
        "chunked_prefill_size": chunk,
        "disable_overlap_schedule": not overlap,
        "max_total_tokens": 256,
    }
    most = [0]

    def watch(scheduler: Any, step: int) -> None:
        scheduler.token_manager.audit()
        usage = scheduler.token_manager.device_usage()
        most[0] = max(most[0], usage.total_tokens - usage.free_tokens)

    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        got = scheduler.run(requests, watch)
        manager = scheduler.scheduler.token_manager
    assert max(len(r.prompt) for r in requests) > 256 and manager.prefilled_tokens > 256
    assert manager.migrations.to_host == 0, "nobody had to leave the device for a prompt"
    assert_exact(alone("llama", requests), tokens(got))


@pytest.mark.parametrize("policy", ["dfs-weight", pytest.param("lpm", marks=pytest.mark.slow)])
def test_orders_of_the_queue_by_prefixes(tiny: Tiny, alone: Alone, policy: str) -> None:
    """SGLang walks a tree for them, and drops whom it does not find there: each pool's requests are in its own."""
    requests = [replace(request, arrive=0) for request in long_prompts(seed=1, count=8)]
    options: dict[str, Any] = {"max_total_tokens": 256, "max_running_requests": 3, "schedule_policy": policy}
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        got = scheduler.run(requests)
        assert scheduler.scheduler.token_manager.prefilled_tokens > 256
    assert_exact(alone("llama", requests), tokens(got))


@pytest.mark.parametrize(("page_size", "chunk", "overlap"), MATRIX)
def test_chats_that_never_fit_the_device(tiny: Tiny, alone: Alone, page_size: int, chunk: int, overlap: bool) -> None:
    """What a turn left on the host is used there by the next."""
    turns = chats(seed=1, count=4, turns=2)
    expected = [alone("llama", requests) for requests in turns]
    options: dict[str, Any] = {
        "page_size": page_size,
        "chunked_prefill_size": chunk,
        "disable_overlap_schedule": not overlap,
        "max_total_tokens": 128,
    }
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        manager = scheduler.scheduler.token_manager
        for requests, references in zip(turns, expected, strict=True):
            got = scheduler.run(requests, lambda s, step: s.token_manager.audit())
            assert_exact(references, tokens(got))
        counters = manager.host_cache_counters
        assert counters.loaded_tokens == 0 and counters.hit_tokens > 500, counters
        # Each chat's first turn is there, but for the page that it ended in.
        assert sum(r.cached_tokens for r in got.values()) >= sum(len(r.prompt) - 64 for r in turns[0])
        scheduler.flush()
        assert manager.host_usage().free_tokens == manager.host_usage().total_tokens


def test_a_prefix_on_the_device_is_read_there(tiny: Tiny, alone: Alone) -> None:
    rng = random.Random(4)
    prefix = random_prompt(rng, 200)
    first = [Request("first", prefix, 2)]
    rest = [Request(f"r{i}", prefix + random_prompt(rng, 150), 20) for i in range(2)]
    with InProcessScheduler("neo", tiny("llama"), max_total_tokens=256) as scheduler:
        scheduler.run(first)
        manager = scheduler.scheduler.token_manager
        assert manager.prefilled_tokens == 0, "it has room on the device"
        got = scheduler.run(rest)
        assert manager.prefilled_tokens == 2 * 150, "only what was new"
    assert all(result.cached_tokens == 200 for result in got.values())
    assert_exact(alone("llama", rest), tokens(got))


def test_without_a_radix_cache(tiny: Tiny, alone: Alone) -> None:
    requests = long_prompts(seed=2)
    options = {"max_total_tokens": 256, "disable_radix_cache": True, "chunked_prefill_size": 128}
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:  # type: ignore[arg-type]
        got = scheduler.run(requests, check=False)
        manager = scheduler.scheduler.token_manager
        manager.audit()
        assert manager.host_usage().free_tokens == manager.host_usage().total_tokens
    assert_exact(alone("llama", requests), tokens(got))


def test_a_prompt_too_long_for_both_gets_sglangs_error(tiny: Tiny) -> None:
    rng = random.Random(5)
    options = {"max_total_tokens": 128, "neo_host_kv_size": host_tokens(64 * 6)}
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:  # type: ignore[arg-type]
        longest = scheduler.scheduler.max_req_input_len - 1
        requests = [Request("fits", random_prompt(rng, longest), 50), Request("long", random_prompt(rng, longest + 1))]
        got = scheduler.run(requests)
    assert 128 < longest < 64 * 6
    assert got["fits"].finish == "length" and got["long"].finish == "abort"


@pytest.mark.parametrize("host_pages", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_no_accepted_prompt_waits_for_ever(tiny: Tiny, host_pages: int) -> None:
    """Lengths up to the longest that is accepted: plain SGLang never admits those that need the last of its pages."""
    options = {"page_size": 64, "max_total_tokens": 256, "neo_host_kv_size": host_tokens(64 * host_pages)}
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        longest = scheduler.scheduler.max_req_input_len
        requests = [
            Request(f"r{length}", random_prompt(random.Random(length), length), 3, arrive=length)
            for length in (*range(longest - 66, longest - 1, 16), longest - 1, longest)
        ]
        got = scheduler.run(requests)
    assert [name for name, result in got.items() if result.finish == "abort"] == [f"r{longest}"]


def test_the_staging_region_limits_prompts_on_the_host(tiny: Tiny, alone: Alone) -> None:
    rng = random.Random(6)
    options = {"max_total_tokens": 128, "neo_host_prompt_tokens": 300}
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:  # type: ignore[arg-type]
        state = scheduler.scheduler.neo_state()["host_prefill"]
        requests = [Request(f"r{i}", random_prompt(rng, 250), 20) for i in range(4)]
        got = scheduler.run([*requests, Request("long", random_prompt(rng, 300))])
    assert state["staging_tokens"] == 300 and state["staging_bytes"] == 301 * 2 * 2 * 16 * 4
    assert got.pop("long").finish == "abort"
    assert_exact(alone("llama", requests), tokens(got))


@pytest.mark.parametrize("chunk", [-1, 128])
def test_log_probabilities_of_the_prompt(tiny: Tiny, chunk: int) -> None:
    rng = random.Random(7)
    requests = [Request(f"r{i}", random_prompt(rng, 300), 4, input_logprobs=True) for i in range(2)]
    results = []
    for kind, pool in (("plain", 2048), ("neo", 256)):
        options = {"max_total_tokens": pool, "chunked_prefill_size": chunk}
        with InProcessScheduler(kind, tiny("llama"), **options) as scheduler:  # type: ignore[arg-type]
            results.append(scheduler.run(requests))
    for request in requests:
        expected, got = (result[request.name].input_logprobs for result in results)
        assert len(expected) == 299
        assert got == pytest.approx(expected, abs=1e-3)


def test_aborts_between_chunks(tiny: Tiny) -> None:
    rng = random.Random(8)
    requests = [
        Request(f"r{i:02}", random_prompt(rng, 400), 10, arrive=5 * i, abort=5 * i + rng.randrange(1, 8))
        for i in range(8)
    ]
    for overlap in (True, False):
        options = {"chunked_prefill_size": 64, "disable_overlap_schedule": not overlap, "max_total_tokens": 256}
        with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:  # type: ignore[arg-type]
            manager = scheduler.scheduler.token_manager
            before = manager.host_usage()
            got = scheduler.run(requests, lambda s, step: s.token_manager.audit())
            assert any(not result.tokens for result in got.values()), "none was aborted before its first token"
            assert manager.host_available() == before.total_tokens and not manager.host_rows()
            scheduler.flush()
            assert manager.host_usage() == before


@pytest.mark.parametrize("seed", range(20 if FULL else 1))
def test_both_pools_full(tiny: Tiny, alone: Alone, seed: int) -> None:
    """Prompts of all lengths, shared beginnings, rows that move, evictions and retractions."""
    rng = random.Random(seed)
    starts = [random_prompt(rng, 200) for _ in range(3)]
    prompts = [
        rng.choice(starts)[: rng.randrange(50, 200)] + random_prompt(rng, rng.choice([5, 80, 300])) for _ in range(12)
    ]
    requests = [
        Request(f"r{i:02}", p, rng.choice([2, 30, 60]), arrive=rng.randrange(40)) for i, p in enumerate(prompts)
    ]
    options: dict[str, Any] = {
        "page_size": rng.choice([1, 16, 64]),
        "chunked_prefill_size": rng.choice([64, 256]),
        "disable_overlap_schedule": seed % 2 == 1,
        "max_total_tokens": 384,
        "max_running_requests": 16,
        "neo_host_kv_size": host_tokens(64 * 14),
        "schedule_conservativeness": 0.1,
    }
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        got = scheduler.run(requests, RandomMoves(seed, rate=0.05))
        manager = scheduler.scheduler.token_manager
    assert manager.prefilled_tokens > 0 and manager.host_cache_counters.hit_tokens > 0
    assert_exact(alone("llama", requests), tokens(got))


def test_int8_pages_cost_little_quality(tiny: Tiny) -> None:
    """A prompt whose earlier chunks, and a prefix, come back from int8 pages: not exact, but near."""
    rng = random.Random(9)
    start = random_prompt(rng, 200)
    requests = [Request(f"r{i}", start + random_prompt(rng, 200), 1, arrive=10 * i) for i in range(3)]
    results = []
    for kind, options in (("plain", {}), ("neo", {"max_total_tokens": 256, "neo_host_kv_dtype": "int8"})):
        with InProcessScheduler(kind, tiny("llama"), chunked_prefill_size=128, **options) as scheduler:  # type: ignore[arg-type]
            results.append(scheduler.run(requests))
    expected, got = results
    assert sum(r.cached_tokens for r in got.values()) >= 2 * 192
    off = [abs(expected[r.name].top_logprobs[0][0] - got[r.name].top_logprobs[0][0]) for r in requests]
    assert 0 < statistics.fmean(off) < 0.3, off


# -- metering ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [10, 1e6])
def test_prompts_to_the_host_come_one_by_one_while_device_rows_run(tiny: Tiny, alone: Alone, rate: float) -> None:
    rng = random.Random(10)
    running = [Request(f"d{i}", random_prompt(rng, 60), 150) for i in range(2)]
    burst = [Request(f"h{i}", random_prompt(rng, 250), 3, arrive=3) for i in range(4)]
    options = {"max_total_tokens": 480, "neo_host_prefill_rate": rate, "chunked_prefill_size": 256}
    turns: list[int] = []  # in which a prompt was computed to the host
    seen = [0]

    def watch(scheduler: Any, step: int) -> None:
        if scheduler.token_manager.prefilled_tokens > seen[0]:
            turns.append(step)
        seen[0] = scheduler.token_manager.prefilled_tokens

    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:  # type: ignore[arg-type]
        got = scheduler.run([*running, *burst], watch)
    apart = [b - a for a, b in itertools.pairwise(turns)]
    assert seen[0] == 4 * 250 and len(turns) == 4, "each in a step of its own: a step computes 256 tokens"
    assert min(apart) >= 250 / 10 if rate == 10 else max(apart) < 5, apart
    assert_exact(alone("llama", [*running, *burst]), tokens(got))


def test_prompts_for_the_device_do_not_wait_for_one_that_goes_to_the_host_in_chunks(tiny: Tiny, alone: Alone) -> None:
    rng = random.Random(11)
    requests = [
        Request("device", random_prompt(rng, 30), 120),
        Request("host", random_prompt(rng, 500), 5, arrive=2),
        Request("short", random_prompt(rng, 20), 5, arrive=10),
        Request("z-cut", random_prompt(rng, 100), 5, arrive=12),  # would need chunks itself
        Request("gone", random_prompt(rng, 500), 5, arrive=130, abort=150),
    ]
    options = {"max_total_tokens": 320, "neo_host_prefill_rate": 4, "chunked_prefill_size": 64}
    order: list[str] = []

    def watch(scheduler: Any, step: int) -> None:
        scheduler.token_manager.audit()
        running = [req for req in scheduler.running_batch.reqs if req.output_ids and req.rid not in order]
        order.extend(req.rid for req in running)

    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:  # type: ignore[arg-type]
        got = scheduler.run(requests, watch)
        computed = scheduler.scheduler.token_manager.prefilled_tokens
    assert order[:2] == ["device", "short"] and order.index("host") < order.index("z-cut"), order
    assert computed >= 500
    del got["gone"]
    assert_exact(alone("llama", requests[:4]), tokens(got))


# -- negative controls ------------------------------------------------------------------------------------------------

_BRING, _TAKE = PromptLayers.bring, PromptLayers.take


def _brings_nothing_into_the_last_layer(layers: PromptLayers, layer: int) -> None:
    if layer < 2:
        _BRING(layers, layer)


def _takes_the_layer_before(layers: PromptLayers, layer: int) -> None:
    _TAKE(layers, layer)
    pages = layers._owner.transfer.pool.pages_tensor
    if layer:
        pages[layer, layers._out_pages] = pages[layer - 1, layers._out_pages]


@pytest.mark.parametrize(
    ("method", "fault"), [("bring", _brings_nothing_into_the_last_layer), ("take", _takes_the_layer_before)]
)
def test_a_wrong_layer_is_seen(
    tiny: Tiny, alone: Alone, monkeypatch: pytest.MonkeyPatch, method: str, fault: Any
) -> None:
    requests = long_prompts(seed=1)
    monkeypatch.setattr(PromptLayers, method, fault)
    with InProcessScheduler("neo", tiny("llama"), max_total_tokens=64, chunked_prefill_size=64) as scheduler:
        empty_device_tree(scheduler.scheduler)
        got = tokens(scheduler.run(requests))
    expected = alone("llama", requests)
    assert sum(first_difference(n, r, got[n]) is not None for n, r in expected.items()) >= 3
