"""When the CPU side of a step fails: nothing of it is published for its host rows, they are prefilled again, and the
server goes on.

A step fails when its workers are late beyond the watchdog, die, or find that device and plan disagree (the hand-off
service *poisons* it, ``cpu_kernels/src/handoff.hpp``). Device rows of such a step are right: to them a host row was
padding. With overlap scheduling the step behind it has been launched by then, with tokens that do not exist; it fails
as well, or was refused by the service and has run without its host rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_neo.ranks import least_of_all_ranks
from sglang_neo.token_manager import host_row

logger = logging.getLogger(__name__)

#: How long a worker may take to come out of a failed step's job. One that does not would write to memory that has
#: another owner by then, so the server ends.
_RESET_TIMEOUT_S = 60.0


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


class Recovery:
    """Owned by the scheduler, which asks it at two moments: when a result is processed, and before the next batch.

    Args:
        scheduler: SGLang's.
        attention: ``sglang_neo.hybrid.host_attention.HostAttention`` of its model runner.
        pause: called after each failure with how many there were in a row: keeps rows from moving to the host.
        over: called with the number of a step that is over, and with it all before: what they named is free.
    """

    def __init__(self, scheduler: Any, attention: Any, pause: Any, over: Any):
        self._scheduler, self._attention, self._pause, self._over = scheduler, attention, pause, over
        self._failed: list[Any] = []
        self._broken = False
        self._reason = ""
        self._in_a_row = 0
        self.failed_steps = 0
        self.restarted_reqs = 0

    # -- when a result is processed ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def publishing(self, result: Any) -> Iterator[None]:
        """Around SGLang's processing of a result: passes over host rows whose step failed."""
        launched: LaunchedHostRows | None = getattr(result, "neo_launched", None)
        if launched is not None:
            if result.copy_done is not None:
                result.copy_done.synchronize()
            self._judge(launched)
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

    def _judge(self, launched: LaunchedHostRows) -> None:
        reason = launched.refused or self._attention.failure(launched.epoch)
        # A rank that had no trouble throws the step away too.
        if least_of_all_ranks(self._runner, 1 if reason is None else 0):
            self._in_a_row = 0
            if not self._broken:  # else a worker may be busy with a step before it, until ``restart``
                self._over(launched.epoch)
            return
        self.failed_steps += 1
        if not self._broken:  # the step behind it fails because this one did
            self._reason = reason or "another rank's CPU work failed"
        self._broken = True
        for req in (*launched.reqs, *launched.others()):
            if not (req.finished() or req.is_retracted):
                req.is_retracted = True
                self._failed.append(req)

    # -- before the next batch --------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether a step has failed, and ``restart`` is to be called."""
        return self._broken

    def in_flight(self) -> bool:
        """Whether a step is in flight in which rows decode, the failed ones maybe among them."""
        scheduler = self._scheduler
        return scheduler.enable_overlap and any(
            batch.forward_mode.is_decode() or getattr(result, "neo_beside", None) is not None
            for batch, result in scheduler.result_queue
        )

    def restart(self, running_batch: Any) -> None:
        """Takes the failed rows out of the running batch and puts them back in the queue. No step may be in flight.

        Raises RuntimeError if the workers do not come back.
        """
        scheduler = self._scheduler
        failed, self._failed, self._broken = {id(req) for req in self._failed}, [], False
        leaving = [i for i, req in enumerate(running_batch.reqs) if id(req) in failed and not req.finished()]
        reqs = [running_batch.reqs[i] for i in leaving]
        if str(scheduler.device).startswith("cuda"):
            torch.cuda.synchronize()
        if not least_of_all_ranks(self._runner, int(self._attention.reset(_RESET_TIMEOUT_S))):
            raise RuntimeError(f"a CPU attention worker is stuck and cannot be had back: {self._reason}")
        self._over(self._attention.launched_epoch)
        for index in leaving:
            req = running_batch.reqs[index]
            if host_row(req) is None:  # it has come back since the step that failed
                known = len(req.origin_input_ids) + len(req.output_ids)
                scheduler.token_manager.trim(req, known, scheduler.req_to_token_pool)
            running_batch.release_req(index, 0, scheduler.server_args)
        staying = sorted(set(range(len(running_batch.reqs))) - set(leaving))
        running_batch.filter_batch(keep_indices=staying)
        running_batch.batch_is_full = False
        for req in reqs:
            scheduler._add_request_to_queue(req, is_retracted=True)
        self.restarted_reqs += len(reqs)
        self._in_a_row += 1
        steps = self._pause(self._in_a_row)
        logger.error(
            f"CPU attention failed: {self._reason}. Restarted {len(reqs)} requests that were decoded from host memory; "
            f"no request moves there for {steps} steps"
        )

    @property
    def _runner(self) -> Any:
        return self._scheduler.tp_worker.model_runner
