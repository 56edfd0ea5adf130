"""The token manager: who owns which token's KV, in the device pool and in the host pool.

SGLang has two sibling allocators, one for slots (page size 1) and one for pages. What sglang_neo adds is one component,
``NeoTokenManager``, that a thin subclass of each carries, so both gain it without a shared base class.

A request that runs is a *device row* or a *host row*. To SGLang a host row is a request without device KV: its
committed and allocated lengths are 0, it locks no node of the radix cache, and its line of ``req_to_token`` is zero. So
SGLang's own accounting, retraction, abort and leak checks stay right. It keeps its request slot (``req_pool_idx``), by
which SGLang relays the next token's id. Its KV stands in a ``HostRow``.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from sglang.srt.mem_cache.allocator import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_neo.errors import UsageError
from sglang_neo.host_kv.pages import HostPages
from sglang_neo.host_kv.prefix_cache import HostCacheCounters, HostRadixCache


@dataclass(frozen=True)
class PoolUsage:
    """Token slots of one pool."""

    total_tokens: int
    free_tokens: int
    page_size: int


@dataclass(frozen=True)
class PromptPart:
    """What one prefill step does for a prompt whose KV goes to the host: tokens ``prefix`` to ``end`` are computed.

    Attributes:
        first_slot: where the prompt's token 0 lies in the staging region (``hybrid/prefill.py``).
        device_prefix: int64 [prefix], slots of the device pool that hold the tokens before; None: host pages do.
    """

    first_slot: int
    prefix: int
    end: int
    device_prefix: torch.Tensor | None


@dataclass
class HostRow:
    """A request's KV in the host pool."""

    pages: list[int]
    tokens: int  # whose KV is there, or is appended by the step that runs
    #: The newest token is on its way through the layers (deferred mode): its KV is in some of them only.
    mid_token: bool = False
    #: The first so many pages belong to the host's radix cache, where the row locks ``node``.
    cached_pages: int = 0
    node: Any = None
    #: The copy that brings the KV here, until it is known to be over (``sglang_neo.host_kv.transfer.Transfer``).
    arrival: Any = None
    #: What the last prefill step does of its prompt; None once that is over.
    part: PromptPart | None = None
    #: Number of the last step in lanes in which it had a token (pipelined mode); until then, in which it first waited.
    turn: int | None = None
    #: What the request said about its insertion into the device's radix cache before it came here.
    skip_insert: bool = field(default=False, repr=False)

    @property
    def own_pages(self) -> list[int]:
        return self.pages[self.cached_pages :]


@dataclass
class Migrations:
    """Since the start, by direction."""

    to_host: int = 0
    to_device: int = 0
    to_host_tokens: int = 0
    to_device_tokens: int = 0


class HostPrefix(NamedTuple):
    """What a prompt that is to be prefilled to the host need not compute."""

    node: Any  # of the host's tree, the last of its part
    pages: list[int]
    tokens: int
    on_device: bool  # the device's tree has more of it: ``tokens`` are read there


class Steps(Protocol):
    """The steps given to the CPU workers, by ascending number (``sglang_neo.hybrid.host_attention.HostAttention``)."""

    @property
    def launched_epoch(self) -> int:
        """The last one given."""

    def wait_launched(self) -> None:
        """Blocks until all that were given are over."""


def host_row(req: Any) -> HostRow | None:
    """The request's KV in host memory; None for a device row."""
    row: HostRow | None = getattr(req, "neo_host_row", None)
    return row


def keeps_device_kv(req: Any) -> bool:
    """Whether the request's device KV belongs to others too: a streaming session keeps it between turns."""
    return req.session is not None and bool(req.session.streaming)


class NeoTokenManager:
    """What sglang_neo adds to an SGLang slot allocator, which owns the device's free list.

    Without ``attach_host`` there is no host pool, and every request stays on the device.
    """

    def __init__(self, allocator: BaseTokenToKVPoolAllocator):
        self._allocator = allocator
        self._pages: HostPages | None = None
        self._page_tokens = 1
        self._transfer: Any = None
        self._steps: Steps | None = None
        self._cache: HostRadixCache | None = None
        #: By request, not by its id: clients choose ids, and SGLang lets two that run at once have the same.
        self._rows: dict[Any, HostRow] = {}
        self.migrations = Migrations()
        #: Tokens of prompts computed straight into host memory, since the start.
        self.prefilled_tokens = 0
        #: Longest prompt whose KV can go to the host as it is computed.
        self.staging_tokens = 0
        #: Which pool admission counts and prompts are prefilled to, while it looks at the waiting queue.
        self.admitting_to_host = False
        self.host_step_tokens: int | None = None
        self.host_step_prompts: int | None = None
        #: A prompt is under way to the host in chunks; SGLang knows of one such prompt at a time.
        self.host_chunks = False

    def attach_host(self, pages: HostPages, page_tokens: int, transfer: Any, steps: Steps, staging_tokens: int) -> None:
        """Adds a host pool.

        Args:
            pages: of the pool, none in use.
            page_tokens: tokens of a page.
            transfer: copies KV between the pools (``sglang_neo.host_kv.transfer.KVTransfer``).
            steps: which steps may still use host pages.
            staging_tokens: of the region through which prompts are prefilled (``hybrid/prefill.py``).
        """
        assert self._pages is None, "there is a host pool already"
        self._pages, self._page_tokens, self._transfer, self._steps = pages, page_tokens, transfer, steps
        self.staging_tokens = staging_tokens

    def attach_host_cache(self, make: Callable[[HostPages, int], HostRadixCache]) -> None:
        """Prefixes in the host pool are kept and shared from now on, in what ``make(pages, page_tokens)`` returns."""
        assert self._pages is not None and self._cache is None and not self._rows
        self._cache = make(self._pages, self._page_tokens)

    # -- how much ---------------------------------------------------------------------------------------------

    @property
    def has_host(self) -> bool:
        return self._pages is not None

    @property
    def host_page_tokens(self) -> int:
        return self._page_tokens

    @property
    def host_cache(self) -> HostRadixCache | None:
        return self._cache

    @property
    def device_page_tokens(self) -> int:
        return int(self._allocator.page_size)

    def device_usage(self) -> PoolUsage:
        a = self._allocator
        return PoolUsage(total_tokens=int(a.size), free_tokens=int(a.available_size()), page_size=int(a.page_size))

    def host_usage(self) -> PoolUsage:
        """All zero without a host pool. Pages that a running step still names are not free."""
        if self._pages is None:
            return PoolUsage(0, 0, self._page_tokens)
        size = self._page_tokens
        return PoolUsage(self._pages.count * size, self._pages.free_count * size, size)

    def host_available(self) -> int:
        """Tokens of the host pool that requests can have: free, or cached and held by nobody."""
        return self.host_usage().free_tokens + self.host_evictable()

    def host_evictable(self) -> int:
        """Tokens in the host's radix cache that no running request holds."""
        return int(self._cache.evictable_size()) if self._cache is not None else 0

    def host_cached(self) -> int:
        """Tokens in the host's radix cache."""
        return self.host_evictable() + (int(self._cache.protected_size()) if self._cache is not None else 0)

    @property
    def host_cache_counters(self) -> HostCacheCounters:
        return self._cache.counters if self._cache is not None else HostCacheCounters()

    def host_rows(self) -> Mapping[Any, HostRow]:
        """By request; a view, not a copy: it is asked for in every step."""
        return MappingProxyType(self._rows)

    def host_tokens(self) -> int:
        """Tokens whose KV lies in host memory."""
        return sum(row.tokens for row in self._rows.values())

    def device_footprint(self, tokens: int) -> int:
        """Tokens of the device pool that ``tokens`` tokens of a request occupy: whole pages."""
        page = self.device_page_tokens
        return -(-tokens // page) * page

    def host_footprint(self, tokens: int) -> int:
        """The same in the host pool."""
        return -(-tokens // self._page_tokens) * self._page_tokens

    # -- moving -----------------------------------------------------------------------------------------------

    def move_to_host(self, req: Any, tree_cache: Any, req_to_token_pool: ReqToTokenPool) -> bool:
        """Makes a running device row a host row. False if host memory is full.

        Call it between two launches, with the stream current that forwards run on: a forward in flight is over before
        the copy begins, and the device slots are free at once for later work of that stream.
        """
        assert self._pages is not None and host_row(req) is None
        tokens = req.kv_committed_len
        assert tokens == req.kv.kv_allocated_len and tokens > 0
        row = HostRow([], tokens, skip_insert=getattr(req, "skip_radix_cache_insert", False))
        self._share(req, row)
        pages = self._alloc_pages(-(-tokens // self._page_tokens) - row.cached_pages, req.rid)
        if pages is None:
            self._unlock(row)
            return False
        row.pages += pages
        shared = row.cached_pages * self._page_tokens
        slots = req_to_token_pool.req_to_token[req.req_pool_idx, shared:tokens].to(torch.int64)
        row.arrival = self._transfer.to_host(slots, pages)
        if self._cache is not None:
            self._cache.counters.hit_tokens += shared
        self._enter(req, row)
        # Frees what the tree does not hold, and unlocks the rest; see release_kv_cache in SGLang's mem_cache/common.py.
        tree_cache.cache_finished_req(req, is_insert=False, kv_len_to_handle=tokens)
        self._forget_device(req, req_to_token_pool)
        req.neo_host_row = self._rows[req] = row
        req.skip_radix_cache_insert = True
        self.migrations.to_host += 1
        self.migrations.to_host_tokens += tokens
        return True

    def move_to_device(self, req: Any, tree_cache: Any, req_to_token_pool: ReqToTokenPool) -> bool:
        """Makes a host row a device row; to be called like ``move_to_host``. False if the device pool is full."""
        row = host_row(req)
        assert row is not None
        needed = self.device_footprint(row.tokens - row.mid_token)
        evict_from_tree_cache(tree_cache, needed)
        slots = self._allocator.alloc(needed)
        if slots is None:
            return False
        assert self._steps is not None
        self._steps.wait_launched()  # one in flight may be appending to the row
        row.tokens, row.mid_token = row.tokens - row.mid_token, False  # it begins anew on the device
        slots = slots[: row.tokens].to(torch.int64)
        departure = self._transfer.to_device(row.pages[: -(-row.tokens // self._page_tokens)], slots)
        req_to_token_pool.write((req.req_pool_idx, slice(0, row.tokens)), slots.to(torch.int32))
        req.kv_committed_len = req.kv.kv_allocated_len = row.tokens
        # What was int8 is not what the model computed: no other request may find it on the device.
        req.skip_radix_cache_insert = row.skip_insert or not self._transfer.exact
        tokens = row.tokens
        departure.synchronize()  # the pages may be written to by the next owner at once
        self._drop(req, row)
        self.migrations.to_device += 1
        self.migrations.to_device_tokens += tokens
        return True

    def _forget_device(self, req: Any, req_to_token_pool: ReqToTokenPool) -> None:
        req_to_token_pool.req_to_token[req.req_pool_idx].zero_()
        req.prefix_indices = torch.empty((0,), dtype=torch.int64)
        req.last_node = None
        req.cache_protected_len = 0
        req.kv_committed_len = req.kv.kv_allocated_len = 0

    # -- prompts that go to the host --------------------------------------------------------------------------

    @property
    def longest_host_request(self) -> int:
        """Tokens, prompt and answer, that a request can have there: admission wants a page of each pool beside them."""
        beside = self._page_tokens + self.device_page_tokens + 1
        return max(0, min(self.host_usage().total_tokens - beside, self.staging_tokens))

    @contextlib.contextmanager
    def admission_to_host(self, step_tokens: int | None, step_prompts: int | None) -> Iterator[None]:
        """While SGLang's admission is asked whom the host has room for, in a step of so many tokens and new prompts;
        None: as ever."""
        self.admitting_to_host, self.host_step_tokens, self.host_step_prompts = True, step_tokens, step_prompts
        try:
            yield
        finally:
            self.admitting_to_host = False

    def begin_prefill(self, req: Any, first_slot: int) -> None:
        """Host pages for the part of a prompt that the next step computes; the request is a host row from now on.

        Admission has locked the prefix that it found on the host (``host_prefix``), and the lock passes to the row.
        Nothing else may be allocated on the device until the step is launched: a prefix in the device's tree is read
        by it, and nobody locks that.

        Raises:
            RuntimeError: the host pool is full, which admission should have seen.
        """
        assert self._pages is not None
        row, prefix, device_prefix = host_row(req), len(req.prefix_indices), None
        if row is None:
            row = HostRow([], 0, skip_insert=getattr(req, "skip_radix_cache_insert", False))
            if self._cache is not None:
                found: HostPrefix = req.neo_host_prefix
                row.node, row.pages, row.cached_pages = found.node, list(found.pages), len(found.pages)
                self._cache.counters.hit_tokens += len(found.pages) * self._page_tokens
                if found.on_device:
                    device_prefix = req.prefix_indices
            req.neo_host_row = self._rows[req] = row
            req.skip_radix_cache_insert = True
            req.last_node, req.neo_host_prefix = None, None
        end = req.extend_range.end
        pages = self._alloc_pages(-(-end // self._page_tokens) - len(row.pages), req.rid)
        if pages is None:
            raise RuntimeError(f"the host pool is full: {self.host_usage()}, {self.host_evictable()} evictable")
        row.pages += pages
        row.tokens = end
        row.part = PromptPart(first_slot, prefix, end, device_prefix)
        self.prefilled_tokens += end - prefix

    def disown_device(self, req: Any) -> None:
        """After SGLang has prepared the step: its account of the request's device KV is that of a host row."""
        req.kv_committed_len = req.kv.kv_allocated_len = req.cache_protected_len = 0

    def prefill_launched(self, req: Any) -> None:
        """The whole pages of the part enter the radix cache. SGLang's next look at the request is at its next part, if
        there is one."""
        row = host_row(req)
        assert row is not None
        req.prefix_indices = torch.zeros(row.tokens, dtype=torch.int64)
        self._enter(req, row)

    def discard_part(self, req: Any) -> None:
        """The step that was to compute the prompt's part has come to nothing, and copies no more: what is in the radix
        cache is left of the row, which has its parts before in whole pages."""
        row = host_row(req)
        assert row is not None and self._pages is not None and self._steps is not None
        self._pages.free(row.own_pages, epoch=self._steps.launched_epoch)
        del row.pages[row.cached_pages :]
        row.tokens, row.part = len(row.pages) * self._page_tokens, None

    # -- while it runs ----------------------------------------------------------------------------------------

    def can_grow(self, reqs: Iterable[Any]) -> bool:
        """Whether host memory has room for one more token of every host row among ``reqs``."""
        rows = (host_row(req) for req in reqs)
        growing = (row for row in rows if row is not None and not row.mid_token)
        needed = sum(1 for row in growing if row.tokens % self._page_tokens == 0)
        return needed * self._page_tokens <= self.host_available()

    def grow(self, req: Any) -> None:
        """Room for the next token of a host row, which then counts as there. Call ``can_grow`` first."""
        row = host_row(req)
        assert row is not None and self._pages is not None
        if row.tokens == len(row.pages) * self._page_tokens:
            pages = self._alloc_pages(1, req.rid)
            assert pages is not None, "the host pool is full: can_grow was not asked"
            row.pages.extend(pages)
        row.tokens, row.part = row.tokens + 1, None
        # SGLang counts a decoded token as device KV.
        req.kv_committed_len = req.kv.kv_allocated_len = 0

    def trim(self, req: Any, tokens: int, req_to_token_pool: ReqToTokenPool) -> None:
        """Gives back what a device row has beyond its first ``tokens`` tokens. SGLang frees a request's slots by its
        known tokens, and would lose those of tokens that came to nothing."""
        kept, end = self.device_footprint(tokens), req.kv.kv_allocated_len
        if end <= tokens:
            return
        if kept < end:
            beyond = req_to_token_pool.req_to_token[req.req_pool_idx, kept:end]
            self._allocator.free_segment(beyond, start_pos=kept)
        req.kv_committed_len = req.kv.kv_allocated_len = tokens

    def release(self, req: Any) -> None:
        """The request has ended, been aborted or retracted. Its whole pages stay in the radix cache; the others go as
        soon as no step names them."""
        row = host_row(req)
        if row is not None:
            req.skip_radix_cache_insert = row.skip_insert
            if self._cache is not None and not self._cache.disable_finished_insert:
                self._enter(req, row)
            self._drop(req, row)

    def _drop(self, req: Any, row: HostRow) -> None:
        assert self._pages is not None and self._steps is not None
        if row.arrival is not None:
            row.arrival.synchronize()
        self._pages.free(row.own_pages, epoch=self._steps.launched_epoch)
        self._unlock(row)
        del self._rows[req]
        req.neo_host_row = None

    # -- prefixes on the host ---------------------------------------------------------------------------------

    def host_prefix(self, key: RadixKey, device_tokens: int) -> HostPrefix:
        """What the host has of the beginning of ``key``, of which the device's tree has ``device_tokens``."""
        assert self._cache is not None
        node, pages = self._cache.find(key)
        page = self.device_page_tokens
        tokens = len(pages) * self._page_tokens // page * page
        pages = pages[: tokens // self._page_tokens]
        return HostPrefix(node, pages, max(tokens, device_tokens), on_device=device_tokens > tokens)

    def host_hit(self, key: RadixKey) -> int:
        """Tokens at the beginning of ``key`` that could be loaded back to the device; none from an int8 pool."""
        if self._cache is None or not self._transfer.exact:
            return 0
        return len(self._cache.find(key).pages) * self._page_tokens

    def load_back(self, key: RadixKey, begin: int, slots: torch.Tensor) -> None:
        """Copies KV of cached tokens to the device, in stream order.

        Args:
            key: of which ``host_hit`` found at least ``begin + len(slots)`` tokens.
            begin: the first token to copy.
            slots: int64 [tokens], where to.
        """
        assert self._cache is not None
        page, end = self._page_tokens, begin + len(slots)
        pages = self._cache.find(key).pages
        first, last = begin // page, -(-end // page)
        assert len(pages) >= last, "a prefix has left the host since it was matched"
        # Tokens before the first one go to slot 0, which nobody owns: others may be reading the device's copy.
        before = slots.new_zeros(begin - first * page)
        # Nothing locks the pages: the copy is over before anyone can evict them.
        self._transfer.to_device(pages[first:last], torch.cat([before, slots])).synchronize()
        self._cache.counters.hit_tokens += len(slots)
        self._cache.counters.loaded_tokens += len(slots)

    def keep(self, key: RadixKey, slots: torch.Tensor, priority: int) -> None:
        """Puts a prefix that leaves the device's tree into the host's, in stream order, as far as free pages go.

        Nothing that is in the host's tree gives way to it. It does not become int8: later hits would not be exact, as
        those on the device were.

        Args:
            key: of the whole prefix.
            slots: int64 [tokens], where it lies on the device; to be read before later work overwrites them.
        """
        if self._cache is None or self._pages is None or not self._transfer.exact:
            return
        page = self._page_tokens
        key = key.page_aligned(page)
        there = self._cache.find(key).pages
        end = len(there) + min(len(key) // page - len(there), self._pages.free_count)
        new = self._pages.alloc(end - len(there))
        if not new:
            return
        self._transfer.to_host(slots[len(there) * page : end * page], new)
        self._cache.add(key[: end * page], [*there, *new], priority)
        self._cache.counters.kept_tokens += len(new) * page

    def clear_host_cache(self) -> None:
        """Forgets every prefix on the host. No request may be running there."""
        if self._cache is not None:
            self._cache.clear()

    def _key(self, req: Any, row: HostRow) -> RadixKey:
        """Of the tokens whose KV is complete in all layers now or, for a row that arrives, in stream order.

        The newest token is left out: a step in flight may be working on it. So a row that arrives always has a page of
        its own to copy, and who waits for that copy has waited for those before it.
        """
        ids = req.origin_input_ids + req.output_ids
        known = max(0, min(row.tokens, len(ids)) - 1)
        return RadixKey(ids[: known // self._page_tokens * self._page_tokens], req.extra_key)

    def _caches(self, req: Any, row: HostRow) -> bool:
        overridden = getattr(req, "positional_embed_overrides", None) is not None  # token ids do not tell its KV then
        return self._cache is not None and not row.skip_insert and not overridden

    def _share(self, req: Any, row: HostRow) -> None:
        """Makes the pages of a row that arrives those in the cache, as far as there are."""
        if not self._caches(req, row):
            return
        assert self._cache is not None
        row.node, pages = self._cache.find(self._key(req, row))
        self._cache.inc_lock_ref(row.node)
        row.pages, row.cached_pages = pages, len(pages)

    def _enter(self, req: Any, row: HostRow) -> None:
        """Gives the row's whole pages to the cache, and locks them there instead."""
        if not self._caches(req, row):
            return
        assert self._cache is not None and self._pages is not None and self._steps is not None
        key = self._key(req, row)
        whole = len(key) // self._page_tokens
        if whole <= row.cached_pages:
            return
        node, pages = self._cache.add(key, row.pages[:whole], req.priority or 0)
        doubles = [mine for mine, cached in zip(row.pages, pages, strict=False) if mine != cached]
        self._pages.free(doubles, epoch=self._steps.launched_epoch)
        self._cache.inc_lock_ref(node)
        self._unlock(row)
        row.pages[:whole] = pages
        row.node, row.cached_pages = node, whole

    def _unlock(self, row: HostRow) -> None:
        if row.node is not None:
            assert self._cache is not None
            self._cache.dec_lock_ref(row.node)
            row.node, row.cached_pages = None, 0

    def _alloc_pages(self, count: int, owner: str) -> list[int] | None:
        """Host pages; what nobody holds in the cache makes room. None (and nothing changes) if it cannot."""
        assert self._pages is not None
        missing = count - self._pages.free_count
        if missing * self._page_tokens > self.host_evictable():
            return None
        if missing > 0:
            assert self._cache is not None
            self._cache.evict(EvictParams(num_tokens=missing * self._page_tokens))
        return self._pages.alloc(count, owner)

    def steps_over(self, epoch: int) -> None:
        """Every step up to ``epoch`` is over and has been judged: host pages become free that only such steps named.

        To be called at the same moment of every rank's schedule: admission and placement look at what is free, and
        tensor-parallel ranks must see the same.
        """
        if self._pages is not None:
            self._pages.release_up_to(epoch)

    # -- checking ---------------------------------------------------------------------------------------------

    def audit(self) -> None:
        """Raises AssertionError if a page of either pool is lost or has two owners.

        Copies the device's free list to the host: for tests and debugging, not for a hot path.
        """
        if self._pages is not None:
            owned: dict[object, list[int]] = defaultdict(list)
            for req, row in self._rows.items():
                owned[req.rid] += row.own_pages
            if self._cache is not None:
                owned["the radix cache"] = self._cache.pages()
                cached = len(owned["the radix cache"]) * self._page_tokens
                assert cached == self.host_cached(), (
                    f"{cached} tokens in the host radix cache, {self.host_cached()} counted"
                )
            self._pages.audit(owned)
            for req, row in self._rows.items():
                held = len(row.pages) * self._page_tokens
                assert held - self._page_tokens <= row.tokens <= held, f"{req.rid}: {row.tokens} tokens in {held} slots"
        a = self._allocator
        if not a.is_not_in_free_group:
            return  # frees are being collected: the list is complete only at the group's end
        pages = torch.cat((a.free_pages, a.release_pages)).cpu()
        count = int(a.size) // int(a.page_size)
        assert len(torch.unique(pages)) == len(pages), "a KV page is free twice"
        if len(pages):
            low, high = int(pages.min()), int(pages.max())
            assert low >= 1 and high <= count, f"free KV pages {low}..{high} lie outside 1..{count}"


class NeoReqToTokenPool(ReqToTokenPool):
    """SGLang's request slots. Giving one back ends the request's life in either pool: SGLang does it wherever a request
    ends, is aborted, retracted or preempted (``release_kv_cache``)."""

    token_manager: NeoTokenManager | None = None

    def free(self, req: Any) -> None:
        if self.token_manager is not None:
            self.token_manager.release(req)
        super().free(req)


class NeoTokenToKVPoolAllocator(TokenToKVPoolAllocator):
    """SGLang's slot allocator (page size 1) with a token manager."""

    def __init__(self, size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool):
        super().__init__(size, dtype=dtype, device=device, kvcache=kvcache, need_sort=need_sort)
        self.token_manager = NeoTokenManager(self)


class NeoPagedTokenToKVPoolAllocator(PagedTokenToKVPoolAllocator):
    """SGLang's page allocator with a token manager."""

    def __init__(self, size: int, page_size: int, dtype: torch.dtype, device: str, kvcache: Any, need_sort: bool):
        super().__init__(size, page_size, dtype=dtype, device=device, kvcache=kvcache, need_sort=need_sort)
        self.token_manager = NeoTokenManager(self)


def adopt(allocator: BaseTokenToKVPoolAllocator) -> BaseTokenToKVPoolAllocator:
    """Our allocator with the arguments of ``allocator``, which SGLang has just built and nobody has used yet.

    Raises UsageError for SGLang's special allocators (sliding window, mamba, HiSparse): their slots mean other things.
    """
    common = dict(
        dtype=allocator.dtype,
        device=allocator.device,
        kvcache=allocator.get_kvcache(),
        need_sort=allocator.need_sort,
    )
    if type(allocator) is TokenToKVPoolAllocator:
        return NeoTokenToKVPoolAllocator(allocator.size, **common)
    if type(allocator) is PagedTokenToKVPoolAllocator:
        return NeoPagedTokenToKVPoolAllocator(allocator.size, allocator.page_size, **common)
    raise UsageError(
        f"this model needs SGLang's {type(allocator).__name__}, which sglang_neo does not extend; "
        "serve it with plain SGLang (python -m sglang.launch_server)"
    )
