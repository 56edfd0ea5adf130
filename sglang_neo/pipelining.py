"""Pipelined steps in the running scheduler: which host rows ride in them, and in which lane.

A decode step takes as many host rows as the CPU can attend to behind the device's work, which is measured
(``planning/pace.py``). The others wait for a later one, and those go first that have waited longest. So a step runs a
*part* of the running batch (``NeoScheduleBatch.part_of``), unless all ride.

A prefill is a batch of its own in SGLang, and holds up whoever decodes. In pipelined mode host rows go on beside it:
they are a decode batch, another such part, that runs as the second lane of the prefill's forward and is an ordinary
decode step in everything else: its tokens are sampled, relayed and published as those of any other.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from sglang.srt.managers.overlap_utils import resolve_forward_inputs
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_neo.batching import NeoScheduleBatch, host_rows_to_decode
from sglang_neo.hybrid.host_attention import CpuTimes
from sglang_neo.hybrid.pipelined import Lanes, PipelinedAttention
from sglang_neo.planning.lanes import LaneLimits, riding, second_lane
from sglang_neo.planning.pace import Pace
from sglang_neo.ranks import least_of_each
from sglang_neo.recovery import LaunchedHostRows
from sglang_neo.token_manager import HostRow, NeoTokenManager, host_row

logger = logging.getLogger(__name__)


class Decoded(NamedTuple):
    """A decode step that ran beside a prefill."""

    batch: NeoScheduleBatch
    result: Any  # SGLang's


def lanes_of(batch: Any, buckets: Sequence[tuple[int, int]]) -> Lanes | None:
    """Who of a decode batch rides where; None: one lane is better.

    Args:
        buckets: rows of both lanes where steps run from graphs; none: any number will do.
    """
    rows = {i: row.tokens for i, req in enumerate(batch.reqs) if (row := host_row(req)) is not None}
    on_host = list(rows)
    in_b = second_lane(list(rows.values()), len(batch.reqs), buckets)
    if in_b == 0:
        return None
    device = [i for i in range(len(batch.reqs)) if i not in rows]
    return Lanes([*device, *on_host[:-in_b]], on_host[-in_b:])


class Pipelining:
    """Owned by the scheduler. What it decides on is the same in all tensor-parallel ranks, or agreed on.

    Args:
        scheduler: SGLang's.
        attention: of its model runner.
        manager: of host memory.
    """

    #: Decode steps after which ranks agree anew on what each has measured; one alone need not ask.
    AGREE_EVERY = 16

    def __init__(self, scheduler: Any, attention: PipelinedAttention, manager: NeoTokenManager):
        self._scheduler, self._attention, self._manager = scheduler, attention, manager
        self._step = self._decode_steps = 0
        self._pace = Pace()
        self._since: tuple[float, CpuTimes] | None = None  # when the last result was processed, and the CPU's account
        #: Of the next steps, the same in all ranks; what is measured takes their place, unless that is switched off.
        self.limits = LaneLimits()
        self.measures = True
        #: Host rows that had to wait, summed over decode steps, since the start.
        self.waited = 0
        #: Decode steps in one lane because there is no graph for two, since the start.
        self.no_graph = 0

    # -- the next decode step ---------------------------------------------------------------------------------

    def next_part(self, batch: NeoScheduleBatch) -> NeoScheduleBatch:
        """What the next decode step runs of the running batch, which has rows and room for a token of each."""
        on_host = [i for i, req in enumerate(batch.reqs) if host_row(req) is not None]
        chosen = self._riding(batch, on_host, self.limits.decode)
        self._agree()
        if len(chosen) == len(on_host):
            batch.neo_in_parts = False
            batch.prepare_for_decode()
            part = batch
        else:
            batch.forward_mode = ForwardMode.DECODE
            waiting = set(on_host) - set(chosen)
            self.waited += len(waiting)
            for i in chosen:
                self._manager.grow(batch.reqs[i])
            part = batch.part_of([i for i in range(len(batch.reqs)) if i not in waiting])
        part.neo_lanes = self._lanes(part)
        return part

    def _riding(self, batch: Any, on_host: Sequence[int], limit: float) -> list[int]:
        """Which of the rows at these indices ride in a step, ascending. It is their turn then."""
        self._step += 1
        rows: list[tuple[int, int, HostRow]] = []
        for i in on_host:
            row = host_row(batch.reqs[i])
            assert row is not None
            if row.turn is None:
                row.turn = self._step
            rows.append((row.turn, i, row))
        rows.sort(key=lambda entry: entry[:2])
        chosen = [rows[at] for at in riding([row.tokens for _, _, row in rows], limit)]
        for _, _, row in chosen:
            row.turn = self._step
        return sorted(i for _, i, _ in chosen)

    def _lanes(self, batch: Any) -> Lanes | None:
        """Who rides where; None: one lane is better."""
        lanes = lanes_of(batch, self._scheduler.tp_worker.model_runner.neo_lane_buckets)
        if lanes is None and sum(host_row(req) is not None for req in batch.reqs) > 1:
            if not self.no_graph:
                logger.info(f"sglang_neo: steps run in one lane: no graph in two for {len(batch.reqs)} rows")
            self.no_graph += 1
        return lanes

    # -- measuring --------------------------------------------------------------------------------------------

    def idle(self) -> None:
        """There is nothing to run: the time until the next result is no step's."""
        self._since = None

    def processed(self, batch: Any, result: Any) -> None:
        """To be told of every result that has been processed."""
        now = time.perf_counter(), self._attention.cpu_times()
        since, self._since = self._since, now
        if since is None:
            return
        seconds, between = now[0] - since[0], now[1].between - since[1].between
        layers, idle = max(seconds - between, 0.0), now[1].wait - since[1].wait - between
        beside: Decoded | None = getattr(result, "neo_beside", None)
        launched: LaunchedHostRows | None = getattr(result if beside is None else beside.result, "neo_launched", None)
        if launched is None or launched.refused is not None or not launched.tokens or not layers:
            return
        if beside is None:
            self._pace.decoded(layers, idle, launched.tokens, len(batch.reqs), seconds)
        else:
            self._pace.prefilled(layers, idle, launched.tokens, sum(batch.extend_lens))

    def _agree(self) -> None:
        runner = self._scheduler.tp_worker.model_runner
        self._decode_steps += 1
        if not self.measures:
            return
        if self._decode_steps % (self.AGREE_EVERY if runner.ps.tp_size > 1 else 1) == 0:
            measured = self._pace.limits
            self.limits = LaneLimits(*least_of_each(runner, [measured.decode, measured.per_prompt_token]))

    # -- beside a prefill -------------------------------------------------------------------------------------

    def run(self, batch: Any, forward: Callable[[], Any]) -> Any:
        """Runs a batch, with host rows in a second lane if it is a prefill.

        Args:
            forward: SGLang's ``run_batch`` of it, or what stands for its result if that raises
                (``Recovery.raised``).

        Returns:
            Its result. ``neo_beside`` of it is what was decoded beside it, if anything.
        """
        part = self._part_beside(batch, self._scheduler.running_batch) if batch.forward_mode.is_extend() else None
        if part is None:
            return forward()
        scheduler = self._scheduler
        with self._stream_of_forwards():
            resolve_forward_inputs(part, scheduler.future_map)
        part.sampling_info = part.sampling_info.copy_for_forward()
        scheduler.tp_worker.neo_beside = part
        result = forward()
        if error := getattr(result, "neo_raised", None):
            scheduler.tp_worker.neo_beside = None
            result.neo_beside = Decoded(part, scheduler.recovery.raised(part, error))
            return result
        part.launch_ts, part.forward_iter = batch.launch_ts, batch.forward_iter
        with self._stream_of_forwards():
            self._relay(part, result.neo_beside)
        result.neo_beside = Decoded(part, result.neo_beside)
        return result

    def _part_beside(self, prefill: Any, running: Any) -> NeoScheduleBatch | None:
        """Host rows of the running batch as a decode step of their own; None if there are none, or they have no room
        for a token."""
        planned, prefill.neo_beside = getattr(prefill, "neo_beside", None), None
        on_host = host_rows_to_decode(running)
        if planned is not None:
            chosen = [i for i in on_host if any(running.reqs[i] is req for req in planned)]
        else:
            chosen = self._riding(running, on_host, self.limits.beside(prefill.extend_num_tokens)) if on_host else []
        if not chosen or not self._manager.can_grow([running.reqs[i] for i in chosen]):
            return None
        for i in chosen:
            self._manager.grow(running.reqs[i])
        NeoScheduleBatch.adopt(running)
        return running.part_of(chosen)

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
