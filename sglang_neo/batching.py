"""Batches with rows of both kinds: SGLang's, where device memory is counted for device rows only.

SGLang names these classes and functions as globals of its modules. ``install`` puts ours there; for requests without
host rows and schedulers without a host pool they do exactly what SGLang's do, so plain and our schedulers can share a
process.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers import schedule_batch, scheduler
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.allocation import alloc_for_decode
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_neo.planning.prefix import loads_back
from sglang_neo.token_manager import NeoTokenManager, host_row

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
        index_cpu = torch.tensor(device, dtype=torch.int64)
        index = index_cpu.to(batch.device, non_blocking=True)
        part = copy.copy(batch)  # a batch of the device rows, for as long as this call
        part.reqs = [batch.reqs[i] for i in device]
        part.req_pool_indices = batch.req_pool_indices[index]
        part.seq_lens = batch.seq_lens[index]
        part.seq_lens_cpu = batch.seq_lens_cpu[index_cpu]
        slots[index] = alloc_for_decode(part, token_per_req).to(torch.int64)
    return slots


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
    #: Of a part that is a deferred step: ``sglang_neo.hybrid.deferred.DeferredStep``.
    neo_step: Any = None

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
        part.neo_in_parts, part.neo_whole = False, self
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
        at_cpu = torch.tensor(index, dtype=torch.int64)
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


class NeoPrefillAdder(PrefillAdder):
    """Admission that counts both pools.

    A request needs device memory for its prompt now, and memory anywhere for what it will generate: the device gives
    way by moving rows to the host. So SGLang's reservation for future tokens (``rem_total_tokens``) is held against
    both pools, and the prompt's own tokens against the device.
    """

    rem_total_token_offset: Any
    _device_only = False
    _both_pools = False

    @property
    def _manager(self) -> NeoTokenManager | None:
        return manager_of(self.token_to_kv_pool_allocator)

    @property
    def rem_total_tokens(self) -> Any:
        tokens = PrefillAdder.rem_total_tokens.fget(self)
        manager = self._manager
        if manager is None or self._device_only:
            return tokens
        return tokens + manager.host_available()

    @property
    def cur_rem_tokens(self) -> Any:
        tokens = PrefillAdder.cur_rem_tokens.fget(self)
        return tokens + self._manager.host_available() if self._both_pools and self._manager else tokens

    def add_one_req(self, req: Req, has_chunked_req: bool, truncation_align_size: int | None) -> AddReqResult:
        manager = self._manager
        if manager is not None:
            with self._lock_node(req.last_node):  # what it would use of the radix cache cannot be evicted for it
                step = self._step_tokens(req, req.host_hit_length)
                if not loads_back(req.host_hit_length, step + self.page_size, manager.device_usage().total_tokens):
                    req.host_hit_length = 0
                if self._prompt_tokens(req) > self.cur_rem_tokens:
                    return AddReqResult.NO_TOKEN
        return super().add_one_req(req, has_chunked_req, truncation_align_size)

    def add_one_req_ignore_eos(self, req: Req) -> AddReqResult:
        # Without a radix cache SGLang simulates when such requests end, against what is free now.
        self._both_pools = self._manager is not None
        try:
            return super().add_one_req_ignore_eos(req)
        finally:
            self._both_pools = False

    def add_chunked_req(self, req: Req) -> Req | None:
        if self._manager is None:
            return super().add_chunked_req(req)
        # The next chunk must fit the device as it is now; its tail is cut to whole pages, as SGLang cuts its chunks.
        room = int(self.cur_rem_tokens - self.page_size) // self.page_size * self.page_size
        if room <= 0:
            self.rem_chunk_tokens = 0  # it waits where it is, and nobody overtakes it
            return req
        self.rem_chunk_tokens = min(self.rem_chunk_tokens, room)
        self._device_only = True
        try:
            # Not SGLang's reservation for others either: they can leave the device.
            offset, self.rem_total_token_offset = self.rem_total_token_offset, self.cur_rem_token_offset
            before = self.rem_total_token_offset
            rest = super().add_chunked_req(req)
            self.rem_total_token_offset = offset + self.rem_total_token_offset - before
        finally:
            self._device_only = False
        return rest

    def _prompt_tokens(self, req: Req) -> int:
        """Device tokens that the request's next prefill step needs, with what comes back from the host for it and the
        page that SGLang allows for alignment."""
        return int(req.host_hit_length) + self._step_tokens(req, req.host_hit_length) + self.page_size

    def _step_tokens(self, req: Req, host_hit: int) -> int:
        """Of them, those that the step computes if ``host_hit`` come back."""
        tokens = len(req.full_untruncated_fill_ids) - len(req.prefix_indices) - host_hit
        if self.rem_chunk_tokens is not None:
            tokens = min(tokens, self.rem_chunk_tokens)
        return int(self.ceil_paged_tokens(tokens))
