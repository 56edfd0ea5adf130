"""Who lives where, in the running scheduler: the rules of planning/placement.py applied to SGLang's requests."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS

from sglang_neo.planning.metering import Meter
from sglang_neo.planning.placement import Row, Rules, pause_after, to_admit, to_device, to_exchange, to_host
from sglang_neo.token_manager import HostRow, NeoTokenManager, host_row, keeps_device_kv


def to_come(req: Any) -> int:
    """Tokens that a request may still generate, as SGLang's admission counts them."""
    return int(min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS))


def _device_rows(batch: Any) -> int:
    return sum(host_row(req) is None and not req.finished() for req in batch.reqs)


class Placement:
    """Moves requests between the pools, between two launches, when NeoScheduler asks for it.

    Everything it decides on is the same in all tensor-parallel ranks (token counts, order of requests), so each decides
    for itself and all decide alike.
    """

    def __init__(self, scheduler: Any, rules: Rules | None = None):
        self._scheduler = scheduler
        self.rules = rules or Rules()
        self._manager: NeoTokenManager = scheduler.token_to_kv_pool_allocator.token_manager
        self._step = 0
        #: Host rows whose prompt was in the step launched last, and what it did of it.
        self._prefilling: list[tuple[HostRow, Any]] = []
        self._last_departure = -self.rules.cooldown_steps
        self._paused_until = 0
        #: Of prompts that the planner lets the host have in this step; None: the meter decides.
        self.planned_tokens: int | None = None
        #: New ones of these.
        self.planned_prompts = 0
        #: Host rows that deferred mode has seats for; None: rows take turns.
        self.seats: int | None = None
        #: Whether rows come back by these rules; not where the planner says who does.
        self.returns = True
        host = scheduler.tp_worker.model_runner.neo_host
        self.attention = host.attention if host is not None else None
        self.staging_bytes = host.prefill.bytes if host is not None else 0
        #: Requests live in host memory from their prompt on (mode symmetric).
        self.all_on_host = scheduler.server_args.neo_mode == "symmetric" and self._manager.has_host
        self.meter = Meter(scheduler.server_args.neo_host_prefill_rate)
        #: The first waiting request when the host had no room for it, and the tokens that it had.
        self._refused: tuple[Any, int] | None = None

    def begin_step(self, last_batch: Any) -> None:
        """``last_batch``: SGLang's, the step launched before."""
        self._step += 1
        for prefilled, part in self._prefilling:  # its result has been processed by now
            if prefilled.part is part:
                prefilled.part = None
        self._prefilling = []
        if last_batch is not None and last_batch.forward_mode.is_extend():
            for req in last_batch.reqs:
                row = host_row(req)
                if row is not None:
                    self._manager.prefill_launched(req)
                    self._prefilling.append((row, row.part))
        if self._scheduler.server_args.neo_check_integrity:
            self._manager.audit()

    def pause(self, failures: int) -> int:
        """Nobody goes to the host for as many steps as this returns. ``failures``: of the CPU side, in a row."""
        steps = pause_after(failures, self.rules)
        self._paused_until = self._step + steps
        return steps

    @property
    def paused(self) -> bool:
        """Whether the CPU side is given a rest after a failure."""
        return self._step < self._paused_until

    @property
    def steps_since_departure(self) -> int:
        return self._step - self._last_departure

    @property
    def _open(self) -> bool:
        return self._manager.has_host and not self.paused

    # -- prompts ----------------------------------------------------------------------------------------------

    def device_takes_prompts(self) -> bool:
        """Whether waiting prompts may be computed into the device's pool. Where all live on the host, those alone that
        the host has no room for though nobody is there, and those that come while it is given a rest."""
        scheduler = self._scheduler
        if not self.all_on_host or not self._open or scheduler.chunked_req is not None:
            return True
        queue = scheduler.waiting_queue
        refused = self._refused is not None and bool(queue) and queue[0] is self._refused[0]
        return refused and not self._manager.host_rows()

    def host_takes_prompts(self, batch: Any) -> bool:
        """Whether waiting prompts may be computed straight into host memory: the device has no room for the first of
        them, the host may have, and it is their time."""
        scheduler = self._scheduler
        if not self.host_prefill_is_due(batch):
            return False
        if not (self._open and (batch.batch_is_full or self.all_on_host) and scheduler.waiting_queue):
            return False
        if scheduler.get_num_allocatable_reqs(len(batch.reqs)) <= 0 or self.host_step_prompts() == 0:
            return False
        if self._refused is None:
            return True
        first, available = self._refused
        return scheduler.waiting_queue[0] is not first or self._manager.host_available() > available

    def host_prefill_is_due(self, batch: Any) -> bool:
        """Whether a prefill to the host would not hold up the device rows of ``batch`` more than it may."""
        return self.planned_tokens > 0 if self.planned_tokens is not None else self.meter.open(_device_rows(batch))

    def host_step_tokens(self, batch: Any) -> int | None:
        """Tokens of such a step at most; None: as many as SGLang gives one."""
        aligned = self._scheduler.truncation_align_size is not None  # chunks of a size of its own
        if aligned or not _device_rows(batch):
            return None
        return self.meter.step_tokens if self.planned_tokens is None else max(self.planned_tokens, Meter.LEAST_AT_ONCE)

    def host_step_prompts(self) -> int | None:
        """New prompts of such a step at most; None: any number."""
        if self.planned_tokens is not None:
            return self.planned_prompts
        return None if self.seats is None else to_admit(len(self._manager.host_rows()), self.seats)

    def after_host_admission(self, batch: Any) -> None:
        """``batch``: of prompts that go to the host, prepared; None if the host had no room for the first."""
        self._refused = None
        if batch is not None:
            for req in batch.reqs:
                self._manager.disown_device(req)
            self.meter.computed(batch.extend_num_tokens)
        elif self._scheduler.waiting_queue:
            self._refused = (self._scheduler.waiting_queue[0], self._manager.host_available())

    # -- to the host ------------------------------------------------------------------------------------------

    def before_chunk(self, batch: Any) -> None:
        """Room for the next chunk of a prompt that is prefilled in chunks, if one is."""
        req = self._scheduler.chunked_req
        if req is None or not self._open:
            return
        left = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
        chunk = min(left, self._scheduler.chunked_prefill_size or left)
        self._make_room(batch, self._device_footprint(chunk) + self._page, partly=True)

    def before_decode(self, batch: Any) -> None:
        """Room for the next token of every row; if there is plenty, rows come back from the host."""
        if not self._manager.has_host:
            return
        if _device_rows(batch):
            self.meter.decoded()
        needed = batch.new_tokens_required_next_decode()
        if self.device_free() < needed:
            # In a pause SGLang retracts; the last row it would abort.
            if self._open or _device_rows(batch) == 1:
                self._make_room(batch, needed, partly=True, growth_steps=self.rules.growth_steps)
        elif self._may_return_now(batch):
            self._return(batch)

    def _make_room(self, batch: Any, needed: int, partly: bool, growth_steps: int = 0) -> bool:
        """Moves the newest rows out until ``needed`` tokens are free on the device, and as many as the rows that stay
        grow by in so many steps; whether any row moved."""

        def growth(req: Any) -> int:
            return self._device_footprint(min(growth_steps, to_come(req)))

        moved = False
        while True:
            staying = sum([growth(req) for req in batch.reqs if host_row(req) is None and not req.finished()])
            if (missing := max(needed, staying) - self.device_free()) <= 0:
                break
            rows = [
                dataclasses.replace(row, growth=growth(batch.reqs[row.index]))
                for row in self._rows(batch, self._may_leave)
            ]
            leaving = to_host(rows, missing, self._manager.host_available(), partly=partly)
            if not any([self.move_to_host(batch.reqs[index]) for index in leaving]):
                break
            moved = True  # rows that share a prefix free less than they occupy: look again
        return moved

    def move_to_host(self, req: Any) -> bool:
        """Moves one running request out, now. False if host memory has no room, or if it waits to be prefilled again
        (``recovery.py``): the tokens of its failed steps are none."""
        scheduler = self._scheduler
        if req.is_retracted:
            return False
        with self.stream_of_forwards():
            moved = self._manager.move_to_host(req, scheduler.tree_cache, scheduler.req_to_token_pool)
        if moved:
            self._last_departure = self._step
        return moved

    # -- back to the device -----------------------------------------------------------------------------------

    def somebody_can_come(self, batch: Any) -> bool:
        """Whether a waiting request could join ``batch``: who may not, for want of a place among those that run at once
        (``--max-running-requests``), shall not keep the device from rows that run already."""
        scheduler = self._scheduler
        return bool(scheduler.waiting_queue) and scheduler.get_num_allocatable_reqs(len(batch.reqs)) > 0

    def _may_return_now(self, batch: Any) -> bool:
        return self.returns and not self.all_on_host and not self.somebody_can_come(batch) and self._settled

    @property
    def _settled(self) -> bool:
        """Whether nobody has left the device a moment ago."""
        return self.steps_since_departure >= self.rules.cooldown_steps

    def _return(self, batch: Any) -> None:
        rows = self._rows(batch, self.may_return)
        if not rows:
            return
        free = self.device_free()
        returning = to_device(rows, _device_rows(batch), free, self._page, self.rules)
        for index in returning:
            self.move_to_device(batch.reqs[index])
        if not returning:
            self._exchange(batch, rows)

    def exchange(self, batch: Any) -> None:
        """A host row that ranks higher than device rows changes places with them, unless somebody has left a moment
        ago. Whoever waits loses nothing by it."""
        if self._ranked and self._settled:
            self._exchange(batch, self._rows(batch, self.may_return))

    def _exchange(self, batch: Any, rows: Sequence[Row]) -> None:
        if not (rows and self._ranked and self._open):
            return
        device_rows, free = self._rows(batch, self._may_leave), self.device_free()
        found = to_exchange(rows, device_rows, free, self._page, self._manager.host_available(), self.rules)
        if found is not None:
            for index in found[1]:
                self.move_to_host(batch.reqs[index])
            self.move_to_device(batch.reqs[found[0]])

    # -- priorities -------------------------------------------------------------------------------------------

    @property
    def _ranked(self) -> bool:
        return bool(self._scheduler.enable_priority_scheduling)

    def rank(self, req: Any) -> int:
        """Of a request: SGLang's priority, the higher the more it matters; 0 where priorities mean nothing."""
        if not self._ranked:
            return 0
        return int(-req.priority if self._scheduler.schedule_low_priority_values_first else req.priority)

    def before_admission(self, batch: Any) -> None:
        """Room for the first waiting prompt where rows of lower rank have it: they go on in host memory, where SGLang
        would throw their KV away (``PrefillAdder.preempt_to_schedule``)."""
        scheduler = self._scheduler
        if not (scheduler.enable_priority_preemption and self._open and scheduler.waiting_queue and batch.reqs):
            return
        if scheduler.get_num_allocatable_reqs(len(batch.reqs)) <= 0:
            return  # a request slot is what is missing
        first = max(scheduler.waiting_queue, key=self.rank)  # of several the one that came first, as SGLang sorts them
        threshold = scheduler.priority_scheduling_preemption_threshold
        lower = self._rows(batch, lambda req: self._may_leave(req) and self.rank(first) - self.rank(req) > threshold)
        if not lower:
            return
        ratio = scheduler.new_token_ratio_tracker.current
        # As admission counts: every row on the device takes what it is expected to generate.
        growth = {i: int(to_come(req) * ratio) for i, req in enumerate(batch.reqs) if host_row(req) is None}
        lower = [dataclasses.replace(row, device_tokens=row.device_tokens + growth[row.index]) for row in lower]
        prompt = len(first.origin_input_ids) + len(first.output_ids)
        needed = self._device_footprint(prompt + to_come(first)) + self._page + sum(growth.values())
        leaving = to_host(lower, needed - self.device_free(), self._manager.host_available(), partly=False)
        for index in leaving:
            self.move_to_host(batch.reqs[index])

    def move_to_device(self, req: Any) -> bool:
        """Moves one host row back, now. False if the device has no room for it, or it waits to be prefilled again."""
        scheduler = self._scheduler
        if req.is_retracted:
            return False
        with self.stream_of_forwards():
            return self._manager.move_to_device(req, scheduler.tree_cache, scheduler.req_to_token_pool)

    @contextlib.contextmanager
    def stream_of_forwards(self) -> Iterator[None]:
        """With overlap scheduling a forward may be in flight, on a stream of its own: copies go behind it there."""
        scheduler = self._scheduler
        if not (scheduler.enable_overlap and str(scheduler.device).startswith("cuda")):
            yield
            return
        # A context of its own: SGLang's, entered twice, would not find back to the first stream.
        with scheduler.device_module.stream(scheduler.forward_stream):
            scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
            yield
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)

    # -- counting ---------------------------------------------------------------------------------------------

    @property
    def _page(self) -> int:
        return self._manager.device_page_tokens

    def _device_footprint(self, tokens: int) -> int:
        return self._manager.device_footprint(tokens)

    def device_free(self) -> int:
        """Tokens of the device pool that are free or can be evicted."""
        scheduler = self._scheduler
        return int(scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size())

    def _rows(self, batch: Any, wanted: Callable[[Any], bool]) -> Sequence[Row]:
        """Those of the batch, in the order in which they began to run."""
        found = []
        for index, req in enumerate(batch.reqs):
            if wanted(req):
                tokens = req.seqlen - 1
                sizes = self._device_footprint(tokens), self._manager.host_footprint(tokens + 1)
                found.append(Row(index, *sizes, self.rank(req)))
        return found

    def may_return(self, req: Any) -> bool:
        """Not a request whose prefill may be in flight: SGLang's processing of it depends on where the request is."""
        row = host_row(req)
        return row is not None and row.part is None

    def _may_leave(self, req: Any) -> bool:
        return (
            host_row(req) is None and not req.finished() and not keeps_device_kv(req) and bool(req.kv_committed_len > 0)
        )
