"""The radix cache of the host pool: which pages it takes, whom it shares them with, which it gives back."""

from __future__ import annotations

import random
from array import array

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_neo.host_kv.pages import HostPages
from sglang_neo.host_kv.prefix_cache import HostRadixCache

PAGE = 16
POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")


def key(*pages: int, rest: int = 0) -> RadixKey:
    """Each number stands for a page of tokens of its own; ``rest`` tokens more."""
    tokens = [1000 * p + i for p in pages for i in range(PAGE)] + list(range(rest))
    return RadixKey(array("q", tokens))


def cache_of(pages: HostPages, policy: str = "lru") -> HostRadixCache:
    return HostRadixCache(pages, PAGE, policy)


def test_what_is_added_is_found_page_by_page() -> None:
    pages = HostPages(8)
    cache = cache_of(pages)
    mine = pages.alloc(3)
    assert mine is not None
    assert cache.add(key(1, 2, 3), mine).pages == mine
    assert cache.find(key(1, 2, 3, 4)).pages == mine
    assert cache.find(key(1, 2, rest=PAGE - 1)).pages == mine[:2], "a part of a page is no hit"
    assert cache.find(key(1, 9)).pages == mine[:1]
    assert cache.find(key(2, 3)).pages == []
    assert cache.find(RadixKey(key(1, 2).token_ids, extra_key="another adapter")).pages == []
    pages.audit({"cache": cache.pages()})


def test_pages_that_are_there_already_stay_the_callers() -> None:
    pages = HostPages(8)
    cache = cache_of(pages)
    first, second = pages.alloc(2), pages.alloc(3)
    assert first is not None and second is not None
    cache.add(key(1, 2), first)
    assert cache.add(key(1, 2, 3), second).pages == [*first, second[2]]
    pages.audit({"cache": cache.pages(), "caller": second[:2]})


def test_eviction_spares_what_is_locked() -> None:
    pages = HostPages(4)
    cache = cache_of(pages)
    a, b = pages.alloc(2), pages.alloc(2)
    assert a is not None and b is not None
    node = cache.add(key(1, 2), a).node
    cache.add(key(5, 6), b)
    cache.inc_lock_ref(node)
    cache.evict(EvictParams(num_tokens=4 * PAGE))
    assert (pages.free_count, cache.counters.evicted_tokens) == (2, 2 * PAGE)
    assert cache.find(key(1, 2)).pages == a and cache.find(key(5, 6)).pages == []
    with pytest.raises(AssertionError, match="still holds"):
        cache.clear()
    cache.dec_lock_ref(node)
    cache.clear()
    assert pages.free_count == 4 and cache.pages() == []
    assert cache.counters.evicted_tokens == 2 * PAGE, "a flush is no eviction"


@pytest.mark.parametrize(("policy", "first_out"), [("lru", 2), ("mru", 1), ("fifo", 1), ("filo", 2), ("lfu", 2)])
def test_the_policy_says_who_goes(policy: str, first_out: int) -> None:
    pages = HostPages(2)
    cache = cache_of(pages, policy)
    for prefix in (1, 2):
        mine = pages.alloc(1)
        assert mine is not None
        cache.add(key(prefix), mine)
    # 1 is the older one, and the one used last and most.
    spare = cache.find(key(1)).pages
    cache.add(key(1), spare)
    cache.evict(EvictParams(num_tokens=PAGE))
    assert [p for p in (1, 2) if not cache.find(key(p)).pages] == [first_out]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_page_is_lost_under_random_use(policy: str) -> None:
    rng = random.Random(policy)
    pages, held = HostPages(40), []
    cache = cache_of(pages, policy)
    for _ in range(300):
        prompt = key(*(rng.randrange(3) for _ in range(rng.randrange(1, 6))))
        shared = cache.find(prompt)
        cache.inc_lock_ref(shared.node)
        own = pages.alloc(len(prompt) // PAGE - len(shared.pages))
        if own is None:
            cache.dec_lock_ref(shared.node)
            cache.evict(EvictParams(num_tokens=5 * PAGE))
        else:
            held.append(cache.add(prompt, shared.pages + own, rng.randrange(3)).node)
            cache.inc_lock_ref(held[-1])
            cache.dec_lock_ref(shared.node)
        while held and (len(held) > 4 or rng.random() < 0.3):
            cache.dec_lock_ref(held.pop(rng.randrange(len(held))))
        pages.audit({"cache": cache.pages()})
        assert len(cache.pages()) * PAGE == cache.evictable_size() + cache.protected_size()
    for node in held:
        cache.dec_lock_ref(node)
    cache.clear()
    assert pages.free_count == 40
