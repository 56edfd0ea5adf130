"""Batches with rows of both kinds: SGLang's, where device memory is counted for device rows only.

Decode batches hold rows of both kinds. A prefill batch is of one kind: an attention backend finds a layer's KV in one
tensor, which is either the device pool's or the staging region's.

SGLang names these classes and functions as globals of its modules. ``install`` puts ours there; for requests without
host rows and schedulers without a host pool they do exactly what SGLang's do, so plain and our schedulers can share a
process.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers import schedule_batch, scheduler
from sglang.srt.managers.schedule_batch import Req, ReqKvInfo, ScheduleBatch
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult, PrefillAdder
from sglang.srt.mem_cache.allocation import alloc_for_decode, alloc_for_extend, alloc_req_slots
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_neo.recovery import times_raised
from sglang_neo.tensors import pinned
from sglang_neo.token_manager import NeoTokenManager, host_row, keeps_device_kv

#: What SGLang's penalizers (sampling/penaltylib) change with every token, ``[rows, ...]``.
_PENALTY_STATE = (
    "cumulated_frequency_penalties",
    "cumulated_presence_penalties",
    "cumulated_repetition_penalties",
    "len_output_tokens",
)


def install() -> None:
    """Once per process, before a scheduler runs; harmless to repeat. The seams are listed in seams.py."""
    scheduler.PrefillAdder = NeoPrefillAdder
    schedule_batch.alloc_for_decode = alloc_for_hybrid_decode
    schedule_batch.alloc_for_extend = alloc_for_host_extend


def manager_of(allocator: Any) -> NeoTokenManager | None:
    """The allocator's token manager if it has a host pool."""
    manager: NeoTokenManager | None = getattr(allocator, "token_manager", None)
    return manager if manager is not None and manager.has_host else None


def alloc_for_hybrid_decode(batch: ScheduleBatch, token_per_req: int) -> torch.Tensor:
    """As SGLang's ``alloc_for_decode`` (mem_cache/allocation.py): int64 [rows], the slot of each row's new token.

    Host rows get slot 0, which nobody owns. Raises RuntimeError as SGLang's does if device memory does not suffice.
    """
    device = [i for i, req in enumerate(batch.reqs) if host_row(req) is None]
    if len(device) == len(batch.reqs):
        return alloc_for_decode(batch, token_per_req)
    slots = torch.zeros(len(batch.reqs), dtype=torch.int64, device=batch.device)
    if device:
        index_cpu = pinned(device, batch.device)
        index = index_cpu.to(batch.device, non_blocking=True)
        part = copy.copy(batch)  # a batch of the device rows, for as long as this call
        part.reqs = [batch.reqs[i] for i in device]
        part.req_pool_indices = batch.req_pool_indices[index]
        part.seq_lens = batch.seq_lens[index]
        part.seq_lens_cpu = batch.seq_lens_cpu[index_cpu]
        slots[index] = alloc_for_decode(part, token_per_req).to(torch.int64)
    return slots


def alloc_for_host_extend(batch: ScheduleBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As SGLang's ``alloc_for_extend`` (mem_cache/allocation.py): int64 [new tokens], their slots, and the requests'
    lines of ``req_to_token``, int64 [requests], on the device and on the host.

    Prompts that go to the host get host pages, and slots of the staging region, one prompt behind the other. Their
    lines are written when the step runs: an earlier step may be reading them now.
    """
    manager = manager_of(batch.token_to_kv_pool_allocator)
    if manager is None or not manager.admitting_to_host:
        return alloc_for_extend(batch)
    for req in batch.reqs:
        req.kv_committed_len = len(req.prefix_indices)  # by which SGLang knows who goes on with its request slot
    lines_cpu = pinned(alloc_req_slots(batch.req_to_token_pool, batch.reqs, batch.tree_cache), batch.device)
    page = manager.device_page_tokens
    first, slots = page, []
    for req in batch.reqs:
        end = req.extend_range.end
        manager.begin_prefill(req, first)
        slots.append(torch.arange(first + len(req.prefix_indices), first + end, dtype=torch.int64))
        first += manager.device_footprint(end)
        if req.kv is None:
            req.kv = ReqKvInfo(kv_allocated_len=end, swa_evicted_seqlen=0)
    assert first - page <= manager.staging_tokens, "admission gave more prompts than the staging region holds"
    return (
        torch.cat(slots).to(batch.device, non_blocking=True),  # a prefill is longer than what this may wait for
        lines_cpu.to(batch.device, non_blocking=True),
        lines_cpu,
    )


def host_rows_to_decode(batch: ScheduleBatch) -> list[int]:
    """Indices of the host rows of a running batch that is about to decode beside a prefill. SGLang filters it before
    a decode step only, and a request that wants no token has a decode step in none."""
    return [
        i
        for i, req in enumerate(batch.reqs)
        if host_row(req) is not None and not (req.finished() or req.is_retracted or req.is_prefill_only)
    ]


class NeoScheduleBatch(ScheduleBatch):
    """A decode batch whose rows may be host rows."""

    sampling_info: Any
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    orig_seq_lens: torch.Tensor
    #: Its rows are decoded in parts (``part_of``), each prepared by itself: sglang_neo/deferral.py.
    neo_in_parts = False
    #: Of a part: the batch that it is of.
    neo_whole: NeoScheduleBatch | None = None
    #: Of a prefill, in mode auto: requests whose host rows decode beside it.
    neo_beside: Any = None
    #: Of a decode step in two lanes: ``sglang_neo.hybrid.pipelined.Lanes``.
    neo_lanes: Any = None
    #: Of a part that is a deferred step: ``sglang_neo.hybrid.deferred.DeferredStep``.
    neo_step: Any = None
    #: What the planner expects of the step: ``sglang_neo.planning.planner.StepPlan``.
    neo_planned: Any = None

    @staticmethod
    def adopt(batch: ScheduleBatch) -> None:
        """Makes SGLang's batch ours, in place: SGLang makes them in many places."""
        if type(batch) is ScheduleBatch:
            batch.__class__ = NeoScheduleBatch

    def new_tokens_required_next_decode(self, selected_indices: list[int] | None = None) -> int:
        selected = range(len(self.reqs)) if selected_indices is None else selected_indices
        device = [i for i in selected if host_row(self.reqs[i]) is None]
        required: int = super().new_tokens_required_next_decode(device)
        return required

    def check_decode_mem(self, selected_indices: list[int] | None = None) -> bool:
        manager = manager_of(self.token_to_kv_pool_allocator)
        if manager is not None:
            reqs = self.reqs if selected_indices is None else [self.reqs[i] for i in selected_indices]
            if not manager.can_grow(reqs):
                return False
        return bool(super().check_decode_mem(selected_indices))

    def prepare_for_decode(self) -> None:
        if self.neo_in_parts:
            return
        super().prepare_for_decode()
        manager = manager_of(self.token_to_kv_pool_allocator)
        if manager is not None:
            for req in self.reqs:
                if host_row(req) is not None:
                    manager.grow(req)

    def part_of(self, index: Sequence[int]) -> NeoScheduleBatch:
        """A batch of some of the rows, in their order here, prepared for a decode step that has no others.

        Lengths and penalties of these rows advance here too. Host rows among them have room for their token already.

        Args:
            index: ascending; none give a batch without rows, which can be run all the same.
        """
        part = copy.copy(self)
        part.neo_in_parts, part.neo_whole, part.neo_step, part.neo_planned = False, self, None, None
        part.sampling_info = copy.copy(self.sampling_info)
        orchestrator = part.sampling_info.penalizer_orchestrator = copy.copy(self.sampling_info.penalizer_orchestrator)
        orchestrator.batch = part
        orchestrator.penalizers = {kind: copy.copy(p) for kind, p in orchestrator.penalizers.items()}
        for penalizer in orchestrator.penalizers.values():
            penalizer._orchestrator_ref = weakref.ref(orchestrator)
        if not index:
            part.reqs, part.return_logprob, part.has_grammar = [], False, False
            part.prepare_for_idle()
            part.forward_mode = ForwardMode.DECODE
            return part
        part.filter_batch(keep_indices=list(index))
        ScheduleBatch.prepare_for_decode(part)
        for req in part.reqs:
            if host_row(req) is not None:
                req.kv_committed_len = req.kv.kv_allocated_len = 0  # SGLang counts a decoded token as device KV
        at_cpu = pinned(index, self.device)
        at = at_cpu.to(self.device, non_blocking=True)
        # New tensors, as in SGLang: a forward in flight may be reading the old ones.
        self.seq_lens = self.seq_lens.index_copy(0, at, part.seq_lens)
        self.orig_seq_lens = self.orig_seq_lens.index_copy(0, at, part.orig_seq_lens)
        self.seq_lens_cpu = self.seq_lens_cpu.index_copy(0, at_cpu, part.seq_lens_cpu)
        self.seq_lens_sum = None
        for kind, penalizer in orchestrator.penalizers.items():
            whole = vars(self.sampling_info.penalizer_orchestrator.penalizers[kind])
            for name in _PENALTY_STATE:
                state = vars(penalizer).get(name)
                if state is not None and state is not whole[name]:  # the same where the part is the whole
                    whole[name].index_copy_(0, at, state)
        return part


class _HostSlots:
    """The host pool as the allocator whose free tokens admission counts."""

    def __init__(self, manager: NeoTokenManager):
        self._manager = manager

    def available_size(self) -> int:
        return self._manager.host_usage().free_tokens


#: Stands for the host's radix cache where there is none.
_NO_TREE = ChunkCache(
    CacheInitParams(disable=True, req_to_token_pool=None, token_to_kv_pool_allocator=None, page_size=1)
)


class NeoPrefillAdder(PrefillAdder):
    """SGLang's admission, asked twice: who fits the device, and, where the device is full, who fits the host.

    Each pool is counted by SGLang's own rules: the prompt, and what the pool's rows are expected to generate. To count
    the host, the host's radix cache and its free pages take the places of the device's; a prompt is computed straight
    into host pages then, and needs a place in the staging region.
    """

    running_batch: Any
    rem_input_tokens: Any
    rem_chunk_tokens: Any
    rem_total_token_offset: Any
    cur_rem_token_offset: Any
    preempt_list: list[Req]
    max_running_requests: int

    def __init__(
        self,
        page_size: int,
        tree_cache: Any,
        token_to_kv_pool_allocator: Any,
        running_batch: Any,
        *args: Any,
        **kw: Any,
    ):
        manager = manager_of(token_to_kv_pool_allocator)
        self._manager = manager
        self._to_host = manager is not None and manager.admitting_to_host
        self._staged = self._new_on_host = 0
        if manager is not None and self._to_host:
            tree_cache, token_to_kv_pool_allocator = manager.host_cache or _NO_TREE, _HostSlots(manager)
        super().__init__(page_size, tree_cache, token_to_kv_pool_allocator, running_batch, *args, **kw)
        if manager is not None and self._to_host and manager.host_step_tokens is not None:
            self.rem_input_tokens = min(self.rem_input_tokens, manager.host_step_tokens)
            if self.rem_chunk_tokens is not None:
                self.rem_chunk_tokens = min(self.rem_chunk_tokens, manager.host_step_tokens)

    def _here(self, req: Req) -> bool:
        """Whether the request's KV lies in the pool that is counted."""
        return (host_row(req) is not None) == self._to_host

    def _get_running_request_total_token_offset(self, req: Req) -> int:
        offset: int = super()._get_running_request_total_token_offset(req)
        return offset if self._here(req) else 0

    def add_one_req(self, req: Req, has_chunked_req: bool, truncation_align_size: int | None) -> AddReqResult:
        manager = self._manager
        if self.can_run_list and any(map(times_raised, (req, *self.can_run_list))):
            return AddReqResult.OTHER  # one by one: see recovery.py
        if manager is not None and not self._to_host and manager.host_chunks and self._would_be_cut(req):
            return AddReqResult.OTHER
        if manager is None or not self._to_host:
            return super().add_one_req(req, has_chunked_req, truncation_align_size)
        if keeps_device_kv(req):
            return AddReqResult.NO_TOKEN
        if manager.host_step_prompts is not None and self._new_on_host >= manager.host_step_prompts:
            return AddReqResult.OTHER
        if manager.host_cache is None:  # what was matched is on the device, in a tree that ours stands not behind
            req.prefix_indices, req.last_node, req.host_hit_length = req.prefix_indices[:0], None, 0
        prompt, prefix = len(req.full_untruncated_fill_ids), len(req.prefix_indices)
        if prompt > manager.staging_tokens:
            return AddReqResult.NO_TOKEN
        longest = prompt if self.rem_chunk_tokens is None else min(prompt, prefix + self.rem_chunk_tokens)
        if self._staged + self.ceil_paged_tokens(longest) > manager.staging_tokens:
            return AddReqResult.OTHER
        beside = self._beside(req)
        with self._lock_node(req.last_node):  # what it would use of the host's tree cannot be evicted for it
            answer = min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)
            if prompt - prefix + answer + self.page_size + beside >= self.rem_total_tokens:
                return AddReqResult.NO_TOKEN
        result = super().add_one_req(req, has_chunked_req, truncation_align_size)
        if self.can_run_list and self.can_run_list[-1] is req:
            self._new_on_host += 1
            self._count_host(req, beside)
        return result

    def add_one_req_ignore_eos(self, req: Req) -> AddReqResult:
        # Without a radix cache SGLang simulates when the running requests end: those of the pool that is counted.
        running = self.running_batch
        if self._manager is not None and running is not None:
            here = [other for other in running.reqs if self._here(other)]
            self.running_batch = SimpleNamespace(reqs=here, batch_size=running.batch_size)
        try:
            return super().add_one_req_ignore_eos(req)
        finally:
            self.running_batch = running

    def preempt_to_schedule(self, req: Req, server_args: Any) -> bool:
        # Who lives in the other pool has no room to give there; its place in the batch may be what is missing.
        running = self.running_batch.reqs
        if self._manager is None or len(running) >= self.max_running_requests:
            return bool(super().preempt_to_schedule(req, server_args))
        others = [other for other in running if not self._here(other)]
        self.preempt_list.extend(others)
        try:
            return bool(super().preempt_to_schedule(req, server_args))
        finally:
            self.preempt_list[:] = [other for other in self.preempt_list if other not in others]

    def add_chunked_req(self, req: Req) -> Req | None:
        manager = self._manager
        if manager is None:
            return super().add_chunked_req(req)
        # The next chunk must fit the pool as it is now; its tail is cut to whole pages, as SGLang cuts its chunks.
        free = int(self.cur_rem_tokens - self.page_size)
        row = host_row(req)
        if row is not None:
            free += len(row.pages) * manager.host_page_tokens - row.tokens
        room = free // self.page_size * self.page_size
        if room <= 0:
            self.rem_chunk_tokens = 0  # it waits where it is, and nobody overtakes it
            return req
        self.rem_chunk_tokens = min(self.rem_chunk_tokens, room)
        # Not SGLang's reservation for others: it has counted this prompt's future once, and device rows can leave.
        offset, self.rem_total_token_offset = self.rem_total_token_offset, self.cur_rem_token_offset
        before = self.rem_total_token_offset
        rest = super().add_chunked_req(req)
        self.rem_total_token_offset = offset + self.rem_total_token_offset - before
        if self._to_host:
            self._count_host(req, manager.host_page_tokens)
        return rest

    def _would_be_cut(self, req: Req) -> bool:
        """Whether the prompt needs more than one step."""
        tokens = len(req.full_untruncated_fill_ids) - len(req.prefix_indices) - req.host_hit_length
        return self.rem_chunk_tokens is not None and self.ceil_paged_tokens(tokens) > self.rem_chunk_tokens

    def _beside(self, req: Req) -> int:
        """Host tokens that a prompt takes beside those that it computes: the rest of its last page, and what it has on
        the device only."""
        manager = self._manager
        assert manager is not None
        found = getattr(req, "neo_host_prefix", None)
        copied = found.tokens - len(found.pages) * manager.host_page_tokens if found is not None else 0
        return manager.host_page_tokens + int(copied)

    def _count_host(self, req: Req, beside: int) -> None:
        self._staged += self.ceil_paged_tokens(req.extend_range.end)
        self.cur_rem_token_offset += beside
        self.rem_total_token_offset += beside
