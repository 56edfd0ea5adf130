"""The token manager: who owns which token's slot in the KV pool.

SGLang has two sibling allocators, one for slots (page size 1) and one for pages. What sglang_neo adds is one component,
``NeoTokenManager``, that a thin subclass of each carries, so both gain it without a shared base class. Today it reports
and audits the device pool; the host pool joins it when host KV exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)

from sglang_neo.errors import UsageError


@dataclass(frozen=True)
class PoolUsage:
    """Token slots of one pool."""

    total_tokens: int
    free_tokens: int
    page_size: int


class NeoTokenManager:
    """What sglang_neo adds to an SGLang slot allocator. The allocator owns the free list; this only looks at it."""

    def __init__(self, allocator: BaseTokenToKVPoolAllocator):
        self._allocator = allocator

    def device_usage(self) -> PoolUsage:
        a = self._allocator
        return PoolUsage(total_tokens=int(a.size), free_tokens=int(a.available_size()), page_size=int(a.page_size))

    def audit(self) -> None:
        """Raises AssertionError if a free page is listed twice, or is the dummy page 0, or lies outside the pool.

        Copies the free list to the host: for tests and debugging, not for a hot path.
        """
        a = self._allocator
        if not a.is_not_in_free_group:
            return  # frees are being collected: the list is complete only at the group's end
        pages = torch.cat((a.free_pages, a.release_pages)).cpu()
        count = int(a.size) // int(a.page_size)
        assert len(torch.unique(pages)) == len(pages), "a KV page is free twice"
        if len(pages):
            low, high = int(pages.min()), int(pages.max())
            assert low >= 1 and high <= count, f"free KV pages {low}..{high} lie outside 1..{count}"


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
