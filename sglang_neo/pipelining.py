"""Pipelined steps in the running scheduler: which host rows ride in them.

A prefill is a batch of its own in SGLang, and holds up whoever decodes. In pipelined mode host rows go on beside it:
they are a decode batch, a *part* of the running batch (``NeoScheduleBatch.part_of``), that runs as the second lane of
the prefill's forward and is an ordinary decode step in everything else: its tokens are sampled, relayed and published
as those of any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from sglang.srt.managers.overlap_utils import resolve_forward_inputs

from sglang_neo.batching import NeoScheduleBatch
from sglang_neo.token_manager import NeoTokenManager, host_row


class Decoded(NamedTuple):
    """A decode step that ran beside a prefill."""

    batch: NeoScheduleBatch
    result: Any  # SGLang's


class Pipelining:
    """Owned by the scheduler. What it decides on is the same in all tensor-parallel ranks.

    Args:
        scheduler: SGLang's.
        manager: of host memory.
    """

    def __init__(self, scheduler: Any, manager: NeoTokenManager):
        self._scheduler, self._manager = scheduler, manager

    # -- beside a prefill -------------------------------------------------------------------------------------

    def run(self, batch: Any, forward: Callable[[], Any]) -> Any:
        """Runs a batch, with host rows in a second lane if it is a prefill.

        Args:
            forward: SGLang's ``run_batch`` of it.

        Returns:
            Its result. ``neo_beside`` of it is what was decoded beside it, if anything.
        """
        part = self._part_beside(self._scheduler.running_batch) if batch.forward_mode.is_extend() else None
        if part is None:
            return forward()
        scheduler = self._scheduler
        with self._stream_of_forwards():
            resolve_forward_inputs(part, scheduler.future_map)
        part.sampling_info = part.sampling_info.copy_for_forward()
        scheduler.tp_worker.neo_beside = part
        result = forward()
        part.launch_ts, part.forward_iter = batch.launch_ts, batch.forward_iter
        with self._stream_of_forwards():
            self._relay(part, result.neo_beside)
        result.neo_beside = Decoded(part, result.neo_beside)
        return result

    def _part_beside(self, running: Any) -> NeoScheduleBatch | None:
        """Host rows of the running batch as a decode step of their own; None if there are none."""
        index = []
        for i, req in enumerate(running.reqs):
            if host_row(req) is None or req.finished() or req.is_retracted or not self._manager.can_grow([req]):
                continue
            self._manager.grow(req)
            index.append(i)
        if not index:
            return None
        NeoScheduleBatch.adopt(running)
        return running.part_of(index)

    def _relay(self, part: NeoScheduleBatch, decoded: Any) -> None:
        """As SGLang's ``run_batch`` does after a forward."""
        scheduler = self._scheduler
        if not scheduler.enable_overlap:
            scheduler._relay_forward_payload(part.req_pool_indices, decoded)
            return
        decoded.copy_done = scheduler.device_module.Event()
        if decoded.delay_sample_func is not None:
            decoded.future_indices = part.req_pool_indices
            return
        scheduler._relay_forward_payload(part.req_pool_indices, decoded)
        scheduler.copy_stream.wait_stream(scheduler.forward_stream)
        with scheduler.copy_stream_ctx:
            decoded.copy_to_cpu(return_logprob=part.return_logprob, return_hidden_states=part.return_hidden_states)

    @contextlib.contextmanager
    def _stream_of_forwards(self) -> Iterator[None]:
        scheduler = self._scheduler
        if not scheduler.enable_overlap:
            yield
            return
        with scheduler.forward_stream_ctx:
            scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
            yield
