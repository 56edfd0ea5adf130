"""The radix cache of the host pool: prefixes whose KV lies in host memory, shared by requests that begin with them.

It is SGLang's own tree, so matching, splitting, locks and eviction policies are SGLang's; only what a token's value
means is ours: its slot in the host pool, ``page * page_tokens + offset``. Nodes begin and end at page borders.

Only whole pages enter, and only with tokens whose KV is there in all layers: those of steps whose results have been
published. No later step writes to such a page. One in flight may still read it for a request that has just ended; what
it computes from it is thrown away, so a page that is evicted is free at once, in all ranks alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sglang_neo.host_kv.pages import HostPages


@dataclass
class HostCacheCounters:
    """Since the start."""

    hit_tokens: int = 0  # found here and used, by a row that moves here or by loading back
    loaded_tokens: int = 0  # of them, copied to the device
    evicted_tokens: int = 0
    kept_tokens: int = 0  # copied here when the device's tree evicted them


class Prefix(NamedTuple):
    """Pages in the tree, from the first token on."""

    node: Any  # the last one: what a lock is taken on
    pages: list[int]


class _PagesAsSlots:
    """The host pool's pages as the tree's allocator, which it gives what it evicts."""

    device = "cpu"

    def __init__(self, pages: HostPages, page_tokens: int):
        self._pages, self._page_tokens = pages, page_tokens

    def free_segment(self, slots: torch.Tensor, start_pos: int) -> None:
        self._pages.free(pages_of(slots, self._page_tokens))


def pages_of(slots: torch.Tensor, page_tokens: int) -> list[int]:
    """The pages of int64 ``slots`` [tokens] that fill whole pages."""
    found: list[int] = (slots[::page_tokens] // page_tokens).tolist()
    return found


class HostRadixCache(RadixCache):
    """Owns the pages that are in it, whether locked or not.

    Args:
        pages: of the host pool.
        page_tokens: tokens of a page.
        eviction_policy: SGLang's ``--radix-eviction-policy``.
        disable_finished_insert: what a request generates does not enter (SGLang's deterministic inference).
    """

    def __init__(
        self, pages: HostPages, page_tokens: int, eviction_policy: str = "lru", disable_finished_insert: bool = False
    ):
        self.counters = HostCacheCounters()
        super().__init__(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=_PagesAsSlots(pages, page_tokens),
                page_size=page_tokens,
                eviction_policy=eviction_policy,
                disable_finished_insert=disable_finished_insert,
            )
        )

    def find(self, key: RadixKey) -> Prefix:
        """The longest prefix of ``key`` that is here. Nothing keeps it until it is locked."""
        found = self.match_prefix(MatchPrefixParams(key=key))
        return Prefix(found.last_device_node, pages_of(found.device_indices, self.page_size))

    def add(self, key: RadixKey, pages: Sequence[int], priority: int = 0) -> Prefix:
        """Takes ``pages``, which hold ``key``'s tokens from the first one on and fill it.

        Returns:
            What is here then. Where it differs from ``pages``, the tree had the tokens already, and the caller keeps
            its page.
        """
        assert len(key) == len(pages) * self.page_size
        first = torch.tensor(pages, dtype=torch.int64) * self.page_size
        slots = (first.unsqueeze(1) + torch.arange(self.page_size)).view(-1)
        self.insert(InsertParams(key=key, value=slots, priority=priority))
        return self.find(key)

    def evict(self, params: EvictParams) -> EvictResult:
        result = super().evict(params)
        self.counters.evicted_tokens += result.num_tokens_evicted
        return result

    def clear(self) -> None:
        """Gives every page back. Nothing may be locked."""
        assert self.protected_size() == 0, "a request still holds cached host KV"
        super().evict(EvictParams(num_tokens=self.evictable_size()))

    def pages(self) -> list[int]:
        """All that it owns."""
        if not self.root_node.children:
            return []
        return pages_of(self.all_values_flatten(), self.page_size)
