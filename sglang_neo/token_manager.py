"""The token manager: who owns which token's KV, in the device pool and in the host pool.

SGLang has two sibling allocators, one for slots (page size 1) and one for pages. What sglang_neo adds is one component,
``NeoTokenManager``, that a thin subclass of each carries, so both gain it without a shared base class.

A request that runs is a *device row* or a *host row*. To SGLang a host row is a request without device KV: its
committed and allocated lengths are 0, it locks no node of the radix cache, and its line of ``req_to_token`` is zero. So
SGLang's own accounting, retraction, abort and leak checks stay right. It keeps its request slot (``req_pool_idx``), by
which SGLang relays the next token's id. Its KV stands in a ``HostRow``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from sglang.srt.mem_cache.allocator import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from sglang_neo.errors import UsageError
from sglang_neo.host_kv.pages import HostPages


@dataclass(frozen=True)
class PoolUsage:
    """Token slots of one pool."""

    total_tokens: int
    free_tokens: int
    page_size: int


@dataclass
class HostRow:
    """A request's KV in the host pool."""

    pages: list[int]
    tokens: int  # whose KV is there, or is appended by the step that runs
    #: The copy that brings the KV here, until it is known to be over (``sglang_neo.host_kv.transfer.Transfer``).
    arrival: Any = None
    #: What the request said about its insertion into the device's radix cache before it came here.
    skip_insert: bool = field(default=False, repr=False)


@dataclass
class Migrations:
    """Since the start, by direction."""

    to_host: int = 0
    to_device: int = 0
    to_host_tokens: int = 0
    to_device_tokens: int = 0


class Steps(Protocol):
    """The steps given to the CPU workers, by ascending number (``sglang_neo.hybrid.host_attention.HostAttention``)."""

    @property
    def launched_epoch(self) -> int:
        """The last one given."""

    @property
    def completed_epoch(self) -> int:
        """All up to this one are over."""

    def wait_launched(self) -> None:
        """Blocks until all that were given are over."""


def host_row(req: Any) -> HostRow | None:
    """The request's KV in host memory; None for a device row."""
    row: HostRow | None = getattr(req, "neo_host_row", None)
    return row


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
        self._rows: dict[str, HostRow] = {}
        self.migrations = Migrations()

    def attach_host(self, pages: HostPages, page_tokens: int, transfer: Any, steps: Steps) -> None:
        """Adds a host pool.

        Args:
            pages: of the pool, none in use.
            page_tokens: tokens of a page.
            transfer: copies KV between the pools (``sglang_neo.host_kv.transfer.KVTransfer``).
            steps: which steps may still use host pages.
        """
        assert self._pages is None, "there is a host pool already"
        self._pages, self._page_tokens, self._transfer, self._steps = pages, page_tokens, transfer, steps

    # -- how much ---------------------------------------------------------------------------------------------

    @property
    def has_host(self) -> bool:
        return self._pages is not None

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

    def host_rows(self) -> Mapping[str, HostRow]:
        """By request id; a view, not a copy: it is asked for in every step."""
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
        pages = self._pages.alloc(-(-tokens // self._page_tokens), owner=req.rid)
        if pages is None:
            return False
        slots = req_to_token_pool.req_to_token[req.req_pool_idx, :tokens].to(torch.int64)
        arrival = self._transfer.to_host(slots, pages)
        skip = getattr(req, "skip_radix_cache_insert", False)
        # Frees what the tree does not hold, and unlocks the rest; see release_kv_cache in SGLang's mem_cache/common.py.
        tree_cache.cache_finished_req(req, is_insert=False, kv_len_to_handle=tokens)
        self._forget_device(req, req_to_token_pool)
        req.neo_host_row = self._rows[req.rid] = HostRow(pages, tokens, arrival, skip)
        req.skip_radix_cache_insert = True
        self.migrations.to_host += 1
        self.migrations.to_host_tokens += tokens
        return True

    def move_to_device(self, req: Any, tree_cache: Any, req_to_token_pool: ReqToTokenPool) -> bool:
        """Makes a host row a device row; to be called like ``move_to_host``. False if the device pool is full."""
        row = host_row(req)
        assert row is not None
        needed = self.device_footprint(row.tokens)
        evict_from_tree_cache(tree_cache, needed)
        slots = self._allocator.alloc(needed)
        if slots is None:
            return False
        assert self._steps is not None
        self._steps.wait_launched()  # one in flight may be appending to the row
        slots = slots[: row.tokens].to(torch.int64)
        departure = self._transfer.to_device(row.pages[: -(-row.tokens // self._page_tokens)], slots)
        req_to_token_pool.write((req.req_pool_idx, slice(0, row.tokens)), slots.to(torch.int32))
        req.kv_committed_len = req.kv.kv_allocated_len = row.tokens
        req.skip_radix_cache_insert = row.skip_insert
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

    # -- while it runs ----------------------------------------------------------------------------------------

    def can_grow(self, reqs: Iterable[Any]) -> bool:
        """Whether host memory has room for one more token of every host row among ``reqs``."""
        rows = (host_row(req) for req in reqs)
        needed = sum(1 for row in rows if row is not None and row.tokens % self._page_tokens == 0)
        return self._pages is None or needed <= self._pages.free_count

    def grow(self, req: Any) -> None:
        """Room for the next token of a host row, which then counts as there. Call ``can_grow`` first."""
        row = host_row(req)
        assert row is not None and self._pages is not None
        if row.tokens == len(row.pages) * self._page_tokens:
            pages = self._pages.alloc(1, owner=req.rid)
            assert pages is not None, "the host pool is full: can_grow was not asked"
            row.pages.extend(pages)
        row.tokens += 1
        # SGLang counts a decoded token as device KV.
        req.kv_committed_len = req.kv.kv_allocated_len = 0

    def release(self, req: Any) -> None:
        """The request has ended, been aborted or retracted; its host pages go as soon as no step names them."""
        row = host_row(req)
        if row is not None:
            req.skip_radix_cache_insert = row.skip_insert
            self._drop(req, row)

    def _drop(self, req: Any, row: HostRow) -> None:
        assert self._pages is not None and self._steps is not None
        if row.arrival is not None:
            row.arrival.synchronize()
        self._pages.free(row.pages, epoch=self._steps.launched_epoch)
        del self._rows[req.rid]
        req.neo_host_row = None

    def reclaim(self) -> None:
        """Makes host pages free that steps have named which are over now."""
        if self._pages is not None and self._steps is not None:
            self._pages.release_up_to(self._steps.completed_epoch)

    # -- checking ---------------------------------------------------------------------------------------------

    def audit(self) -> None:
        """Raises AssertionError if a page of either pool is lost or has two owners.

        Copies the device's free list to the host: for tests and debugging, not for a hot path.
        """
        if self._pages is not None:
            self._pages.audit({rid: row.pages for rid, row in self._rows.items()})
            for rid, row in self._rows.items():
                held = len(row.pages) * self._page_tokens
                assert held - self._page_tokens <= row.tokens <= held, f"{rid}: {row.tokens} tokens in {held} slots"
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
