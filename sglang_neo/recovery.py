"""When a step fails: nothing of it is published for the rows concerned, they are prefilled again, and the server goes
on.

A step fails when its workers are late beyond the watchdog, die, or find that device and plan disagree (the hand-off
service *poisons* it, ``cpu_kernels/src/handoff.hpp``). Device rows of such a step are right: to them a host row was
padding. With overlap scheduling the step behind it has been launched by then, with tokens that do not exist; it fails
as well, or was refused by the service and has run without its host rows.

A forward that raises (out of memory, a kernel that does not know a shape, a fault of ours) fails its step for all of
its rows, which are prefilled again one by one: so a request that cannot be computed fails alone. Then it is answered
with an error. ``Recovery.survives`` says what ends the server all the same, as in SGLang.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.common import release_kv_cache

from sglang_neo.ranks import least_of_all_ranks, meet
from sglang_neo.token_manager import host_row

logger = logging.getLogger(__name__)

#: How long a worker may take to come out of a failed step's job. One that does not would write to memory that has
#: another owner by then, so the server ends.
_RESET_TIMEOUT_S = 60.0

#: How long a rank whose forward has raised waits for the others to come out of theirs.
_MEETING_TIMEOUT_S = 30.0

#: A request gets so many steps that raise; then it is answered with an error.
_CHANCES = 3

#: So many steps that raise one after the other are the server's end: no request is to blame then.
_MOST_IN_A_ROW = 8


@dataclass(frozen=True)
class LaunchedHostRows:
    """What a step that was launched has to do with the CPU."""

    reqs: Sequence[Any]  # its host rows, when it was launched
    epoch: int  # the newest step of the hand-off service that their tokens rest on
    refused: str | None  # why the service took no step; it ran without its host rows then
    launched_epoch: int = 0  # its own number there; 0 if refused
    mode: str = "sync"
    #: Asked if it fails: host rows that have no token from it, but lose their work too.
    others: Callable[[], Iterable[Any]] = tuple
    tokens: int = 0  # of KV that the CPU attends to in each layer, in a step in two lanes


def times_raised(req: Any) -> int:
    """Steps with this request whose forward has raised."""
    return int(getattr(req, "neo_times_raised", 0))


def end_early(scheduler: Any, reqs: Sequence[Any], is_insert: bool = True) -> None:
    """Ends requests between two steps, for what is in their ``to_finish``: SGLang would do it with their next token.

    Args:
        is_insert: whether their device KV is right, and may go to the radix cache.
    """
    for req in reqs:
        req.update_finish_state()
        release_kv_cache(req, scheduler.tree_cache, is_insert=is_insert)
        req.time_stats.set_completion_time()
    if reqs:
        streamer = scheduler.batch_result_processor.output_streamer
        streamer.stream_output(reqs, any(req.return_logprob for req in reqs))


class Recovery:
    """Owned by the scheduler, which asks it at three moments: when a forward raises, when a result is processed, and
    before the next batch.

    Args:
        scheduler: SGLang's.
        attention: ``sglang_neo.hybrid.host_attention.HostAttention`` of its model runner; None: no step has host rows.
        pause: called after each failure with how many there were in a row: keeps rows from moving to the host.
        over: called with the number of a step that is over, and with it all before: what they named is free.
    """

    def __init__(self, scheduler: Any, attention: Any, pause: Any, over: Any):
        self._scheduler, self._attention, self._pause, self._over = scheduler, attention, pause, over
        self._failed: list[Any] = []
        self._broken = self._cpu_failed = False
        self._reason = ""
        self._in_a_row = self._raised_in_a_row = 0
        #: The step that has raised, until ``restart``; and whether it had hand-offs that the device will never come to.
        self._raised_batch: Any = None
        self._handing_over = False
        self.failed_steps = self.raised_steps = 0
        self.restarted_reqs = 0

    # -- when a forward raises --------------------------------------------------------------------------------

    def survives(self, error: Exception) -> bool:
        """Whether the server goes on after a forward that has raised; else it is to end, as SGLang's does, and the log
        has the reason. To be asked once for each, by all ranks.

        It goes on unless too many in a row have raised, or ranks do not all say so (the others may wait for this one in
        the middle of their forward), or the device is lost: after a fault in a kernel CUDA refuses every later call.
        """
        scheduler = self._scheduler
        self.raised_steps += 1
        self._raised_in_a_row += 1
        reason = None
        if not scheduler.is_generation:
            reason = "the model does not generate"
        elif isinstance(error, torch.distributed.DistError):
            reason = "ranks do not reach one another"
        elif self._raised_in_a_row > _MOST_IN_A_ROW:
            reason = f"the {self._raised_in_a_row}th in a row"
        elif not meet(self._runner, _MEETING_TIMEOUT_S):
            reason = "in another rank it did not"
        elif not self._device_is_well():
            reason = "the device is lost"
        if reason is not None:
            logger.error(f"A step has raised {type(error).__name__}, and the server ends: {reason}")
        return reason is None

    def _device_is_well(self) -> bool:
        """Waits for what the step had put on the device's streams."""
        scheduler = self._scheduler
        if not str(scheduler.device).startswith("cuda"):
            return True
        deadline = time.monotonic() + _RESET_TIMEOUT_S
        try:
            ends = [stream.record_event() for stream in (scheduler.forward_stream, torch.cuda.current_stream())]
            while not all(end.query() for end in ends):
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.01)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # it may have been short of memory
        except RuntimeError:
            return False
        return True

    def raised(self, batch: Any, error: Exception, result: Any = None) -> Any:
        """In the place of the result of a step whose forward has raised, or ``result`` itself, turned into that.

        ``restart`` is due once it has been processed (``publishing``); nothing is to be launched before.
        """
        step, decodes = getattr(batch, "neo_step", None), batch.forward_mode.is_decode()
        reqs = [*batch.reqs, *(step.others() if step is not None else ())]
        reason = f"a step of {len(batch.reqs)} requests raised {type(error).__name__}: {error}"
        logger.error(f"sglang_neo: {reason}", exc_info=error)
        for req in reqs:
            req.neo_times_raised = times_raised(req) + 1
            row = host_row(req)
            if row is not None and not decodes:
                self._scheduler.token_manager.discard_part(req)
        self._handing_over |= decodes and (step is not None or any(host_row(req) is not None for req in batch.reqs))
        chunked = self._scheduler.chunked_req
        if chunked is not None and any(req is chunked for req in reqs):
            # As a prompt whose next chunk had no room: SGLang would put what this one computed into the radix cache.
            chunked.set_extend_range(len(chunked.prefix_indices), len(chunked.prefix_indices))
        if not self._broken:
            self._reason = reason
        self._broken = True
        if not decodes or self._raised_batch is None:
            self._raised_batch = batch
        batch.input_ids = None
        if result is None:
            result = GenerationBatchResult()
        epoch = self._attention.launched_epoch if self._attention is not None else 0
        result.delay_sample_func = None
        result.neo_raised = error.with_traceback(None)
        result.neo_launched = LaunchedHostRows(reqs, epoch, reason, mode="sync" if step is None else "deferred")
        return result

    def of_raised(self, batch: Any) -> Any:
        """``batch``; None if its forward has raised: nothing has become of it."""
        return None if batch is self._raised_batch else batch

    # -- when a result is processed ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def publishing(self, result: Any) -> Iterator[None]:
        """Around SGLang's processing of a result: passes over host rows whose step failed."""
        launched: LaunchedHostRows | None = getattr(result, "neo_launched", None)
        if launched is not None:
            if result.copy_done is not None:
                result.copy_done.synchronize()
            self._judge(launched, getattr(result, "neo_raised", None) is not None)
        if getattr(result, "neo_raised", None) is None:
            self._raised_in_a_row = 0
        scheduler = self._scheduler
        processor = scheduler.batch_result_processor
        if self._failed:
            # SGLang passes over retracted requests only where it expects them.
            scheduler.batch_result_processor = dataclasses.replace(processor, enable_overlap=True)
        try:
            yield
        finally:
            scheduler.batch_result_processor = processor

    def settle(self, epoch: int) -> None:
        """Judges a step that no token rests on, so that its failure is known too and what it named becomes free."""
        self._judge(LaunchedHostRows((), epoch, None))

    def _judge(self, launched: LaunchedHostRows, raised: bool = False) -> None:
        reason = launched.refused
        if reason is None:
            assert self._attention is not None
            reason = self._attention.failure(launched.epoch)
        # A rank that had no trouble throws the step away too.
        if least_of_all_ranks(self._runner, 1 if reason is None else 0):
            self._in_a_row = 0
            if not self._cpu_failed:  # else a worker may be busy with a step before it, until ``restart``
                self._over(launched.epoch)
            return
        self.failed_steps += 1
        if not self._broken:  # the step behind it fails because this one did
            self._reason = reason or "another rank's CPU work failed"
        self._broken = True
        self._cpu_failed |= not raised
        for req in (*launched.reqs, *launched.others()):
            if not (req.finished() or req.is_retracted):
                req.is_retracted = True
                self._failed.append(req)

    # -- before the next batch --------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether a step has failed, and ``restart`` is to be called."""
        return self._broken

    def in_flight(self, last_batch: Any) -> bool:
        """Whether a step is in flight in which rows decode, the failed ones maybe among them; or was one of prompts
        that has raised, which have to join the running batch first."""
        scheduler = self._scheduler
        return (last_batch is not None and last_batch is self._raised_batch) or (
            scheduler.enable_overlap
            and any(
                batch.forward_mode.is_decode() or getattr(result, "neo_beside", None) is not None
                for batch, result in scheduler.result_queue
            )
        )

    def restart(self, running_batch: Any) -> bool:
        """Takes the failed rows out of the running batch and puts them back in the queue. No step may be in flight.

        Returns:
            Whether the CPU's part begins anew: whoever was in the middle of it is among the failed.

        Raises:
            RuntimeError: the workers do not come back.
        """
        scheduler = self._scheduler
        cpu_failed, anew = self._cpu_failed, self._cpu_failed or self._handing_over
        failed, self._failed = {id(req) for req in self._failed}, []
        self._broken = self._cpu_failed = False
        self._raised_batch = None
        if anew:
            self._begin_anew()
        scheduler.process_pending_chunked_abort()
        reqs = [req for req in running_batch.reqs if id(req) in failed and not req.finished()]
        staying = [i for i, req in enumerate(running_batch.reqs) if id(req) not in failed or req.finished()]
        running_batch.filter_batch(keep_indices=staying)
        running_batch.batch_is_full = False
        chunked = scheduler.chunked_req
        if chunked is not None and id(chunked) in failed:
            reqs.append(chunked)
            scheduler.chunked_req = None
        for req in reqs:
            if host_row(req) is None:  # of a step that raised, or it has come back since the step that failed
                known = len(req.origin_input_ids) + len(req.output_ids)
                scheduler.token_manager.trim(req, known, scheduler.req_to_token_pool)
            if times_raised(req) >= _CHANCES and req.to_finish is None:
                req.to_finish = FINISH_ABORT(self._reason, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")
        ending = [req for req in reqs if req.to_finish is not None]
        end_early(scheduler, ending, is_insert=False)
        again = [req for req in reqs if not req.finished()]
        for req in again:
            release_kv_cache(req, scheduler.tree_cache, is_insert=False)
            req.reset_for_retract()
            scheduler._add_request_to_queue(req, is_retracted=True)
        self.restarted_reqs += len(again)
        told = f"Restarted {len(again)} requests" + (f", ended {len(ending)}" if ending else "")
        if not anew:
            logger.error(f"{self._reason}. {told}")
            return False
        self._in_a_row += 1
        steps = self._pause(self._in_a_row)
        what = "CPU attention failed" if cpu_failed else "A step with host rows failed"
        logger.error(f"{what}: {self._reason}. {told}; no request moves to host memory for {steps} steps")
        return True

    def _begin_anew(self) -> None:
        """The workers take steps again. Raises RuntimeError if they do not come back."""
        assert self._attention is not None
        if str(self._scheduler.device).startswith("cuda"):
            torch.cuda.synchronize()
        ready = self._attention.reset(_RESET_TIMEOUT_S, abandoned=self._handing_over)
        self._handing_over = False
        if not least_of_all_ranks(self._runner, int(ready)):
            raise RuntimeError(f"a CPU attention worker is stuck and cannot be had back: {self._reason}")
        self._over(self._attention.launched_epoch)

    @property
    def _runner(self) -> Any:
        return self._scheduler.tp_worker.model_runner
