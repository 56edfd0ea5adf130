"""SGLang's radix cache of the device pool, in front of the one of host memory (host_kv/prefix_cache.py)."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    EvictResult,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from sglang_neo.host_kv.prefix_cache import HostRadixCache
from sglang_neo.token_manager import NeoTokenManager

#: Makes the stream of the forwards current.
StreamOfForwards = Callable[[], contextlib.AbstractContextManager[None]]


class NeoRadixCache(RadixCache):
    """What is on the host counts as a hit too, and comes back to the device when the request is admitted.

    SGLang has the two moments for its own hierarchical cache: ``match_prefix`` reports a ``host_hit_length``, and
    admission calls ``init_load_back`` (managers/schedule_policy.py). A request that is to be prefilled to the host
    (``batching.py``) uses it where it lies.
    """

    token_manager: NeoTokenManager
    stream_of_forwards: StreamOfForwards
    #: Whether to copy a hit to the device: asked for new tokens, tokens before them, and those of them that were hit.
    loading_back_pays: Callable[[int, int, int], bool] | None = None
    #: Prefixes that end in the leaves evicted so far, while ``evict`` runs.
    _leaving: list[tuple[RadixKey, torch.Tensor, int]]

    def reset(self) -> None:
        super().reset()
        self.token_manager.clear_host_cache()

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        result = super().match_prefix(params)
        if params.req is None:  # SGLang looks after its own insertion
            return result
        device = len(result.device_indices)
        if self.token_manager.admitting_to_host:
            prefix = params.req.neo_host_prefix = self.token_manager.host_prefix(params.key, device)
            # Admission asks for the number of tokens, and locks the node, in the tree of the pool it looks at.
            tokens = result.device_indices if prefix.on_device else torch.zeros(prefix.tokens, dtype=torch.int64)
            node = prefix.node
            return result._replace(
                device_indices=tokens, last_device_node=node, last_host_node=node, best_match_node=node
            )
        host = self.token_manager.host_hit(params.key) // self.page_size * self.page_size
        hit = max(0, host - device)
        if hit and self.loading_back_pays and not self.loading_back_pays(len(params.key) - device, device, hit):
            hit = 0
        return result._replace(host_hit_length=hit)

    def evict(self, params: EvictParams) -> EvictResult:
        """As SGLang's, and what is evicted goes on in host memory where there is room.

        Its slots are free afterwards; the copy reads them in stream order, before anything can be written there.
        """
        self._leaving = []
        result = super().evict(params)
        if self._leaving:
            with self.stream_of_forwards():
                for key, slots, priority in self._leaving:
                    self.token_manager.keep(key, slots, priority)
        return result

    def _delete_leaf(self, node: TreeNode) -> None:
        self._leaving.append(_prefix_of(node))
        super()._delete_leaf(node)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, Any]:
        """Copies the host's part of a request's prefix into the device pool and into this tree.

        The request's ``last_node`` is locked. Returns the new slots, int64 [tokens] (none if there is no room after
        all), and the node that the whole prefix ends in.
        """
        req = params.req
        assert req is not None
        begin = len(req.prefix_indices)
        end = begin + params.host_hit_length
        evict_from_tree_cache(self, end - begin)
        slots = self.token_to_kv_pool_allocator.alloc(end - begin)
        if slots is None:
            return req.prefix_indices[:0], req.last_node
        slots = slots.to(torch.int64)
        with self.stream_of_forwards():
            self.token_manager.load_back(RadixKey(req.full_untruncated_fill_ids, req.extra_key), begin, slots)
        key = RadixKey(req.full_untruncated_fill_ids[:end], req.extra_key)
        whole = torch.cat([req.prefix_indices.to(torch.int64), slots])
        added = self.insert(InsertParams(key=key, value=whole, priority=req.priority or 0))
        assert added.prefix_len == begin, "the device had more of a prefix than was matched"
        return slots, added.last_device_node


class _HostTreeOrder:
    """A NeoRadixCache whose root is the host tree's."""

    def __init__(self, tree: NeoRadixCache):
        assert tree.token_manager.host_cache is not None
        self._tree, self.root_node = tree, tree.token_manager.host_cache.root_node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tree, name)


@contextlib.contextmanager
def ordered_by_host_tree(policy: Any) -> Iterator[None]:
    """While prompts are admitted to the host, matches lie in the host's tree. SGLang's ``SchedulePolicy`` has to walk
    that one: with ``--schedule-policy dfs-weight``, whom it does not find from the root is lost from the queue."""
    tree = policy.tree_cache
    if isinstance(tree, NeoRadixCache):
        policy.tree_cache = _HostTreeOrder(tree)
    try:
        yield
    finally:
        policy.tree_cache = tree


def _prefix_of(node: TreeNode) -> tuple[RadixKey, torch.Tensor, int]:
    """The tokens from the root to the end of ``node``, their slots, and the node's priority."""
    extra_key, priority = node.key.extra_key, node.priority
    parts = []
    while node.parent is not None:
        parts.append(node)
        node = node.parent
    ids = array("q")
    for part in reversed(parts):
        ids.extend(part.key.raw_token_ids())
    return RadixKey(ids, extra_key), torch.cat([part.value for part in reversed(parts)]), priority


def add_host_cache(tree: Any, manager: NeoTokenManager, stream_of_forwards: StreamOfForwards) -> bool:
    """Gives ``manager``'s host pool a radix cache behind SGLang's ``tree``, which becomes ours, in place.

    False, and nothing changes, if prefixes are not cached (``--disable-radix-cache``) or by a cache of another kind.
    """
    if type(tree) is not RadixCache or tree.disable or not manager.has_host:
        return False
    manager.attach_host_cache(
        lambda pages, page_tokens: HostRadixCache(
            pages, page_tokens, tree.eviction_policy, tree.disable_finished_insert
        )
    )
    tree.token_manager, tree.stream_of_forwards = manager, stream_of_forwards
    tree.__class__ = NeoRadixCache
    return True
