"""Prefixes in host memory: shared by the rows there, loaded back for others; exact, and no page lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_neo.host_kv.transfer import KVTransfer
from tests.harness.exact import Reference, assert_exact, first_difference
from tests.harness.inprocess import InProcessScheduler, Request
from tests.harness.traffic import RandomMoves, random_prompt, tokens

Tiny = Callable[..., Path]
Alone = Callable[[str, list[Request]], dict[str, Reference]]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)

TOKEN_BYTES = 2 * 2 * 16 * 3 * 4  # of the tiny llama: K and V, heads, head_dim, layers, bytes


def host_tokens(tokens: int) -> float:
    """``neo_host_kv_size`` for a host pool of so many."""
    return tokens * TOKEN_BYTES / 1e9


def chats(seed: int, count: int, turns: int, prefixes: int = 2) -> list[list[Request]]:
    """Per turn, one request of each chat. Chats share long beginnings; a turn's prompt extends the one before."""
    rng = random.Random(seed)
    starts = [random_prompt(rng, rng.randrange(130, 200)) for _ in range(prefixes)]
    histories = [starts[i % prefixes] + random_prompt(rng, rng.randrange(1, 40)) for i in range(count)]
    found = []
    for turn in range(turns):
        found.append(
            [
                Request(f"t{turn}c{i}", h, rng.randrange(20, 45), arrive=rng.randrange(15))
                for i, h in enumerate(histories)
            ]
        )
        histories = [h + random_prompt(rng, rng.randrange(60, 100)) for h in histories]
    return found


class ToHost(RandomMoves):
    """All go to the host after a while, so that they end there."""

    def __call__(self, scheduler: Any, step: int) -> None:
        scheduler.token_manager.audit()
        for req in scheduler.running_batch.reqs:
            on_device = not req.finished() and req.kv is not None and getattr(req, "neo_host_row", None) is None
            if on_device and self.rng.random() < self.rate:
                scheduler.placement.move_to_host(req)


def empty_device_tree(scheduler: Any) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    scheduler.tree_cache.evict(EvictParams(num_tokens=scheduler.tree_cache.evictable_size()))


#: Page size, chunked prefill, overlap scheduling.
MATRIX = [(1, -1, True), (1, 64, False), (64, -1, False), (64, 128, True), (16, 32, True)]


@pytest.mark.parametrize(("page_size", "chunk", "overlap"), MATRIX)
def test_chats_are_exact(tiny: Tiny, alone: Alone, page_size: int, chunk: int, overlap: bool) -> None:
    turns = chats(seed=1, count=5, turns=3)
    expected = [alone("llama", requests) for requests in turns]
    options = {"page_size": page_size, "chunked_prefill_size": chunk, "disable_overlap_schedule": not overlap}
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:  # type: ignore[arg-type]
        for turn, requests in enumerate(turns):
            got = scheduler.run(requests, (ToHost if turn % 2 == 0 else RandomMoves)(seed=turn))
            assert_exact(expected[turn], tokens(got))
            empty_device_tree(scheduler.scheduler)
        counters = scheduler.scheduler.token_manager.host_cache_counters
        assert counters.loaded_tokens > 500 and counters.hit_tokens > counters.loaded_tokens, counters
        # The last turn's prompts were found, but for what was new.
        assert sum(r.cached_tokens for r in got.values()) > 0.5 * sum(len(r.prompt) for r in requests)
        scheduler.flush()
        usage = scheduler.scheduler.token_manager.host_usage()
        assert usage.free_tokens == usage.total_tokens, "a flush empties the host's tree too"


def test_host_rows_share_their_prefix(tiny: Tiny, alone: Alone) -> None:
    rng = random.Random(2)
    prefix = random_prompt(rng, 300)
    requests = [Request(f"r{i}", prefix + random_prompt(rng, 10), 40, arrive=i) for i in range(4)]
    shared: set[int] = set()
    read: list[tuple[int, int]] = []  # bytes of a layer, of all rows together and of each by itself
    moves = ToHost(0, rate=0.5)

    def watch(scheduler: Any, step: int) -> None:
        moves(scheduler, step)
        rows = [row.pages for row in scheduler.token_manager.host_rows().values()]
        if len(rows) == 4:
            shared.update(set.intersection(*map(set, rows)))
            host, plan = list(scheduler.token_manager.host_rows().values()), scheduler.placement.attention.plan
            read.append((plan(host).bytes, sum(plan([row]).bytes for row in host)))

    with InProcessScheduler("neo", tiny("llama")) as scheduler:
        got = scheduler.run(requests, watch)
    assert len(shared) == 300 // 64
    once = 300 // 64 * 64 * TOKEN_BYTES // 3
    assert read and all(together == apart - 3 * once for together, apart in read), (read[0], once)
    assert_exact(alone("llama", requests), tokens(got))


@pytest.mark.parametrize("page_size", [1, 64])
def test_both_pools_full(tiny: Tiny, alone: Alone, page_size: int) -> None:
    """Evictions in both trees, rows that move and are retracted, prefixes that come back."""
    turns = chats(seed=3, count=8, turns=2, prefixes=3)
    expected = [alone("llama", requests) for requests in turns]
    options = {"page_size": page_size, "max_total_tokens": 704, "neo_host_kv_size": host_tokens(64 * 18)}
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:  # type: ignore[arg-type]
        for requests, references in zip(turns, expected, strict=True):
            got = scheduler.run(requests, RandomMoves(seed=page_size, rate=0.1))
            assert_exact(references, tokens(got))
        counters = scheduler.scheduler.token_manager.host_cache_counters
        computed = scheduler.scheduler.token_manager.prefilled_tokens
    assert counters.evicted_tokens > 0 and counters.hit_tokens > 0 and computed > 0, (counters, computed)


def test_fifty_requests_hit_as_in_an_unlimited_pool(tiny: Tiny, alone: Alone) -> None:
    """Five prefixes of 1,500 tokens, a device pool of 2,000: what plain SGLang finds in a pool for all of them is found
    on one of both sides here."""
    rng = random.Random(9)
    model = {"max_position_embeddings": 4096}
    prefixes = [random_prompt(rng, 1500) for _ in range(5)]
    order = [*range(5), *(rng.randrange(5) for _ in range(45))]
    requests = [Request(f"r{i:02}", prefixes[p] + random_prompt(rng, 20), 6, arrive=4 * i) for i, p in enumerate(order)]
    results = {}
    for kind, pool in (("plain", 16384), ("neo", 2048 - 64)):
        with InProcessScheduler(
            kind,  # type: ignore[arg-type]
            tiny("llama", **model),
            page_size=64,
            max_total_tokens=pool,
            max_running_requests=16,
        ) as scheduler:
            results[kind] = scheduler.run(requests)
            if kind == "neo":
                counters = scheduler.scheduler.token_manager.host_cache_counters
    cached = {kind: [result.cached_tokens for result in got.values()] for kind, got in results.items()}
    assert cached["neo"] == cached["plain"], "as many prompt tokens are computed, request by request"
    assert sum(cached["plain"]) == 45 * (1500 // 64 * 64)
    assert counters.kept_tokens > 0 and counters.loaded_tokens + counters.hit_tokens > 0, counters
    assert_exact({name: result.reference() for name, result in results["plain"].items()}, tokens(results["neo"]))


@pytest.mark.parametrize("page_size", [1, 64])
def test_what_the_device_evicts_goes_on_in_host_memory(tiny: Tiny, alone: Alone, page_size: int) -> None:
    """Nobody ever ran on the host, and the second turn finds the first there."""
    [first, second] = chats(seed=7, count=4, turns=2)
    expected = [alone("llama", requests) for requests in (first, second)]
    with InProcessScheduler("neo", tiny("llama"), page_size=page_size) as scheduler:
        assert_exact(expected[0], tokens(scheduler.run(first)))
        empty_device_tree(scheduler.scheduler)
        manager = scheduler.scheduler.token_manager
        counters = manager.host_cache_counters
        assert manager.migrations.to_host == 0 and manager.prefilled_tokens == 0
        assert manager.host_cached() == counters.kept_tokens > 400
        got = scheduler.run(second)
        assert_exact(expected[1], tokens(got))
        assert counters.loaded_tokens > 300
        free = manager.host_usage().free_tokens
        empty_device_tree(scheduler.scheduler)
        assert manager.host_usage().free_tokens < free, "the second turn is kept as well"
        manager.audit()


@pytest.mark.parametrize("policy", ["lfu", "slru", "priority"])
def test_eviction_policies(tiny: Tiny, alone: Alone, policy: str) -> None:
    [requests, _] = chats(seed=4, count=6, turns=2)
    options = {"radix_eviction_policy": policy, "neo_host_kv_size": host_tokens(64 * 8)}
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:  # type: ignore[arg-type]
        got = scheduler.run(requests, RandomMoves(seed=1))
        tree: Any = scheduler.scheduler.token_manager._cache
        assert tree.eviction_policy == policy
    assert_exact(alone("llama", requests), tokens(got))


def test_disable_radix_cache_holds_for_the_host(tiny: Tiny, alone: Alone) -> None:
    [requests, _] = chats(seed=4, count=6, turns=2)
    with InProcessScheduler("neo", tiny("llama"), disable_radix_cache=True) as scheduler:
        got = scheduler.run(requests, ToHost(1), check=False)
        manager = scheduler.scheduler.token_manager
        manager.audit()
        assert manager.host_usage().free_tokens == manager.host_usage().total_tokens
        assert manager.migrations.to_host > 0 and manager.host_cached() == 0
    assert_exact(alone("llama", requests), tokens(got))


def test_int8_never_enters_the_devices_tree(tiny: Tiny) -> None:
    """Rows share an int8 prefix on the host, but nobody gets it back."""
    [first, second] = chats(seed=5, count=4, turns=2)
    with InProcessScheduler("neo", tiny("llama"), neo_host_kv_dtype="int8") as scheduler:
        scheduler.run(first, RandomMoves(seed=1, rate=0.5))
        manager = scheduler.scheduler.token_manager
        assert manager.migrations.to_device > 0
        empty_device_tree(scheduler.scheduler)
        before = manager.host_cached()
        got = scheduler.run(second, ToHost(1))
        counters = manager.host_cache_counters
    assert before > 0 and counters.loaded_tokens == 0 and counters.hit_tokens > 0
    assert len(got) == 4


def test_a_wrong_prefix_is_seen(tiny: Tiny, alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first page comes back, in the place of all. (Their order would not show: attention asks for none.)"""
    [first, second] = chats(seed=6, count=5, turns=2)
    expected = [alone("llama", requests) for requests in (first, second)]
    with InProcessScheduler("neo", tiny("llama")) as scheduler:
        assert_exact(expected[0], tokens(scheduler.run(first, ToHost(1))))
        copy = KVTransfer.to_device
        monkeypatch.setattr(
            KVTransfer, "to_device", lambda self, pages, slots: copy(self, pages[:1] * len(pages), slots)
        )
        empty_device_tree(scheduler.scheduler)
        got = tokens(scheduler.run(second))
    assert sum(first_difference(n, r, got[n]) is not None for n, r in expected[1].items()) >= 3
