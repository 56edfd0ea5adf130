"""NeoScheduler: SGLang's scheduler, which owns which request lives where."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Iterator
from typing import Any

from sglang.srt.managers.io_struct import GetInternalStateReq, GetInternalStateReqOutput
from sglang.srt.managers.schedule_batch import NextBatchPlan
from sglang.srt.managers.scheduler import Scheduler

from cpu_kernels import choose_isa
from sglang_neo import __version__, batching, seams
from sglang_neo.args import LANE_MODES
from sglang_neo.batching import NeoScheduleBatch
from sglang_neo.deferral import Deferral
from sglang_neo.hybrid.pipelined import PipelinedAttention
from sglang_neo.metrics import NeoMetrics
from sglang_neo.model_runner import NeoTpModelWorker
from sglang_neo.pipelining import Pipelining
from sglang_neo.placement import Placement
from sglang_neo.planner_bridge import PlannerBridge, limits_of
from sglang_neo.prefix_cache import NeoRadixCache, add_host_cache, ordered_by_host_tree
from sglang_neo.profiling.store import tables_for
from sglang_neo.recovery import Recovery
from sglang_neo.timeline import extend_profiler
from sglang_neo.token_manager import NeoTokenManager, host_row, keeps_device_kv

logger = logging.getLogger(__name__)


def report_host_rows(batch: Any, result: Any) -> None:
    """Notes in each request who made the token that ``result`` has for it, for ``meta_info``.

    SGLang passes a request's ``customized_info`` on: lists with one value per output token
    (managers/scheduler_components/output_streamer.py).
    """
    launched = getattr(result, "neo_launched", None)
    on_host = {id(req) for req in launched.reqs} if launched is not None else set()
    for req in batch.reqs:
        if req.finished() or req.is_retracted:
            continue
        if req.customized_info is None:
            req.customized_info = {}
        kinds = req.customized_info.setdefault("neo_host_row", [])
        del kinds[len(req.output_ids) :]  # noted for a token that was not published: its step failed
        kinds += [0] * (len(req.output_ids) - len(kinds))
        kinds.append(int(id(req) in on_host))


class NeoScheduler(Scheduler):
    """Overrides only what seams.py names; policy stands in modules of its own."""

    max_total_num_tokens: int
    chunked_req: Any
    #: While nothing is to be launched.
    _pausing = False

    def __init__(self, *args: Any, **kwargs: Any):
        batching.install()
        super().__init__(*args, **kwargs)
        self.placement = Placement(self)
        add_host_cache(self.tree_cache, self.token_manager, self.placement.stream_of_forwards)
        attention, collector = self.placement.attention, self.metrics_collector
        runner = self.tp_worker.model_runner
        self.recovery = Recovery(self, attention, self.placement.pause, self.token_manager.steps_over)
        host = runner.neo_host
        self.deferral = (
            Deferral(self, host.deferred, self.token_manager, self.placement.rank)
            if host is not None and host.deferred is not None
            else None
        )
        if self.deferral is not None:
            self.placement.seats = self.deferral.seats
        #: None: the mode is fixed, or there are no host rows.
        self.planner: PlannerBridge | None = None
        if attention is not None and self.server_args.neo_mode == "auto":
            self.planner = self._make_planner(attention)
        #: In mode auto it runs what the planner chooses beside prefills, and chooses nothing by itself.
        self.pipelining = (
            Pipelining(self, attention, self.token_manager)
            if isinstance(attention, PipelinedAttention)
            and (self.server_args.neo_mode in LANE_MODES or self.planner is not None)
            else None
        )
        if self.planner is not None and isinstance(self.tree_cache, NeoRadixCache):
            self.tree_cache.loading_back_pays = self.planner.loading_back_pays
        if attention is not None:
            extend_profiler(self.profiler_manager, attention)
        self.neo_metrics = NeoMetrics(
            self.token_manager,
            attention.cpu_times if attention is not None else None,
            collector.labels if collector is not None else None,
            self.server_args.decode_log_interval if self.ps.tp_rank == 0 else 0,
            self.recovery,
            self.planner,
        )

    def _make_planner(self, attention: Any) -> PlannerBridge | None:
        """None if this machine could not be measured, which is said: the server then does without a planner."""
        runner = self.tp_worker.model_runner
        try:
            tables = tables_for(runner, anew=self.server_args.neo_profile_anew)
        except Exception:
            if runner.ps.tp_size > 1:
                raise  # the other ranks wait for this one's measurements
            mode = "sync" if self.deferral is None else "deferred"
            logger.exception(
                "sglang_neo: this machine could not be measured, so there is no planner and steps run as in mode "
                f"{mode}. --neo-mode chooses another one"
            )
            return None
        limits = limits_of(self, attention, self.placement.rules, self.deferral)
        return PlannerBridge(self, tables, limits, self.placement, self.deferral)

    def init_tp_model_worker(self) -> None:
        self.tp_worker = NeoTpModelWorker(
            server_args=self.server_args, gpu_id=self.ps.gpu_id, ps=self.ps, nccl_port=self.nccl_port
        )

    @property
    def last_batch(self) -> Any:
        """As after any decode step, the running batch where the last step was a part of it: SGLang counts both."""
        return self._last_batch

    @last_batch.setter
    def last_batch(self, batch: Any) -> None:
        self._last_batch = getattr(batch, "neo_whole", None) or batch

    @property
    def token_manager(self) -> NeoTokenManager:
        manager: NeoTokenManager = self.token_to_kv_pool_allocator.token_manager
        return manager

    # -- which request lives where ----------------------------------------------------------------------------

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> Any:
        self.placement.begin_step(self.recovery.of_raised(last_batch))
        if self.deferral is not None:
            self.deferral.settle(self.recovery)
        if self.recovery.pending:
            if self.recovery.in_flight(last_batch):
                return self._nothing_next(running_batch, last_batch)
            anew = self.recovery.restart(running_batch)
            if self.deferral is not None and anew:
                self.deferral.clear()
            if self.planner is not None:
                self.planner.launching(None)
        if self.planner is not None:
            self.planner.begin_step()
        plan = super().get_next_batch_to_run(running_batch, last_batch)
        decodes = plan.batch_to_run is not None and plan.batch_to_run is plan.running_batch
        if self.planner is not None:
            if decodes:
                plan.batch_to_run = self.planner.part(plan.running_batch)
            elif plan.batch_to_run is not None:
                self.planner.prefilling(plan.batch_to_run, plan.running_batch)
            self.planner.launching(plan.batch_to_run)
        elif decodes and self.deferral is not None:
            plan.batch_to_run = self.deferral.next_part(plan.running_batch, self.placement.paused)
        if self.pipelining is not None and self.planner is None:
            if plan.batch_to_run is plan.running_batch:
                plan.batch_to_run = self.pipelining.next_part(plan.running_batch)
            elif plan.batch_to_run is None:
                self.pipelining.idle()
        return plan

    def _nothing_next(self, running_batch: Any, last_batch: Any) -> NextBatchPlan:
        """A turn in which nothing is launched. A prefill in flight joins the running batch even so: SGLang knows of
        it as the last batch only."""
        self._pausing = True
        try:
            plan = super().get_next_batch_to_run(running_batch, last_batch)
        finally:
            self._pausing = False
        return NextBatchPlan(batch_to_run=None, running_batch=plan.running_batch)

    def _get_new_batch_prefill_raw(self, *, prefill_delayer_single_pass: Any, running_batch: Any) -> Any:
        if self._pausing:
            return None, running_batch
        NeoScheduleBatch.adopt(running_batch)
        if self.planner is not None and not self.planner.before_admission(running_batch):
            return None, running_batch
        with self._without_host_chunk() as host_chunk:
            batch = None
            if self.placement.device_takes_prompts():
                self.placement.before_chunk(running_batch)
                self.placement.before_admission(running_batch)
                batch, running_batch = super()._get_new_batch_prefill_raw(
                    prefill_delayer_single_pass=prefill_delayer_single_pass, running_batch=running_batch
                )
        due = self.placement.host_prefill_is_due if host_chunk else self.placement.host_takes_prompts
        if batch is not None or (self.chunked_req is not None and not host_chunk) or not due(running_batch):
            return batch, running_batch
        device_is_full = running_batch.batch_is_full
        # If the device is not full, the host gets the next chunk only.
        running_batch.batch_is_full = not (device_is_full or self.placement.all_on_host)
        tokens, prompts = self.placement.host_step_tokens(running_batch), self.placement.host_step_prompts()
        with self.token_manager.admission_to_host(tokens, prompts), ordered_by_host_tree(self.policy):
            batch, running_batch = super()._get_new_batch_prefill_raw(
                prefill_delayer_single_pass=prefill_delayer_single_pass, running_batch=running_batch
            )
        running_batch.batch_is_full = device_is_full
        self.placement.after_host_admission(batch)
        return batch, running_batch

    @contextlib.contextmanager
    def _without_host_chunk(self) -> Iterator[bool]:
        """While the device is asked: a prompt that goes to the host in chunks may have to wait for its next one, and
        those for the device do not wait with it. Says whether there is such a prompt."""
        chunked, manager = self.chunked_req, self.token_manager
        manager.host_chunks = chunked is not None and host_row(chunked) is not None
        if not manager.host_chunks:
            yield False
            return
        self.chunked_req = None
        try:
            yield True
        finally:
            assert self.chunked_req is None, "a second prompt goes on in chunks"
            self.chunked_req = chunked

    def update_running_batch(self, batch: Any) -> Any:
        if self._pausing:
            return batch
        NeoScheduleBatch.adopt(batch)
        before = batch.batch_size()
        batch.neo_in_parts = any(part is not None for part in (self.deferral, self.pipelining, self.planner))
        if self.deferral is not None:
            self.deferral.finish_aborted(batch)
        batch.filter_batch()
        if batch.batch_size() < before:
            batch.batch_is_full = False
        if not batch.is_empty():
            self.placement.before_decode(batch)
            if self.planner is not None:
                self.planner.before_decode(batch)
        return super().update_running_batch(batch)

    def init_req_max_new_tokens(self, req: Any) -> None:
        if not self.token_manager.has_host or keeps_device_kv(req):
            if self.token_manager.has_host and len(req.origin_input_ids) >= self.max_total_num_tokens:
                # It would wait for ever: prompts may be longer than that only where the host takes them.
                req.set_finish_with_abort(
                    f"A streaming session's {len(req.origin_input_ids)} tokens do not fit the GPU's KV pool of "
                    f"{self.max_total_num_tokens} tokens, where they have to stay"
                )
            return super().init_req_max_new_tokens(req)
        # SGLang clips to what the device pool can hold; here a request may go on in host memory.
        device, self.max_total_num_tokens = self.max_total_num_tokens, self.max_req_len + 1
        try:
            super().init_req_max_new_tokens(req)
        finally:
            self.max_total_num_tokens = device

    def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        forward = functools.partial(self._run_batch, batch, *args, **kwargs)
        return self.pipelining.run(batch, forward) if self.pipelining is not None else forward()

    def _run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().run_batch(batch, *args, **kwargs)
        except Exception as error:
            if not self.recovery.survives(error):
                raise
            return self.recovery.raised(batch, error)

    def launch_batch_sample_if_needed(self, batch_result: Any, cur_batch: Any) -> None:
        self._launch_sample_if_needed(batch_result, cur_batch)
        if (beside := getattr(batch_result, "neo_beside", None)) is not None:
            self._launch_sample_if_needed(beside.result, beside.batch)

    def _launch_sample_if_needed(self, result: Any, batch: Any) -> None:
        try:
            super().launch_batch_sample_if_needed(result, batch)
        except Exception as error:
            if not self.recovery.survives(error):
                raise
            self.recovery.raised(batch, error, result)

    def process_batch_result(self, batch: Any, result: Any) -> None:
        self._process_batch_result(batch, result)
        if (beside := getattr(result, "neo_beside", None)) is not None:
            self._process_batch_result(*beside)
        if self.pipelining is not None and self.planner is None:
            self.pipelining.processed(batch, result)

    def _process_batch_result(self, batch: Any, result: Any) -> None:
        if getattr(result, "neo_raised", None) is not None:
            with self.recovery.publishing(result):  # there is nothing to publish
                pass
            if self.deferral is not None:
                self.deferral.processed(result)
            return
        if batch.forward_mode.is_decode():
            eager = getattr(result, "neo_eager", None)
            self.neo_metrics.count_decode(getattr(result, "neo_launched", None), eager)
        if self.server_args.neo_report_host_rows:
            report_host_rows(batch, result)
        with self.recovery.publishing(result), self.neo_metrics.timing_tokens(batch):
            super().process_batch_result(batch, result)
        if self.deferral is not None:
            self.deferral.processed(result)
        if self.planner is not None:
            self.planner.processed(result)

    def get_num_allocatable_reqs(self, running_bs: int) -> int:
        """SGLang's, less slot rows that no host row has: a deferred step has them in its batch all the same."""
        res: int = super().get_num_allocatable_reqs(running_bs)
        if self.deferral is not None and self.planner is None:
            res -= max(0, self.deferral.slots - len(self.token_manager.host_rows()))
        return res

    # -- what it says about itself ----------------------------------------------------------------------------

    @property
    def active_mode(self) -> str:
        if not self.token_manager.has_host:
            return "gpu-only"
        if self.planner is not None:
            return "auto"
        if self.deferral is not None:
            return "deferred"
        if self.pipelining is None:
            return "sync"
        return "symmetric" if self.placement.all_on_host else "pipelined"

    def neo_state(self) -> dict[str, Any]:
        """The ``neo`` block of ``/server_info``: what runs here, as plain JSON values."""
        manager, cpu = self.token_manager, self.neo_metrics.cpu_times()
        return {
            "version": __version__,
            "sglang_version": seams.sglang_version(),
            "neo_mode": self.server_args.neo_mode,
            "active_mode": self.active_mode,
            "gpu_only_reason": self.tp_worker.model_runner.neo_gpu_only_reason,
            "device": str(self.device),
            "attention_backend": self.server_args.attention_backend,
            "cpu_kernel_isa": choose_isa().name,
            "classes": seams.running_classes(self),
            "device_kv": dataclasses.asdict(manager.device_usage()),
            "host_kv": dataclasses.asdict(manager.host_usage()),
            "host_kv_used_tokens": manager.host_tokens(),
            "host_cache": {
                **dataclasses.asdict(manager.host_cache_counters),
                "cached_tokens": manager.host_cached(),
                "evictable_tokens": manager.host_evictable(),
            },
            "host_prefill": {
                "staging_tokens": manager.staging_tokens,
                "staging_bytes": self.placement.staging_bytes,
                "computed_tokens": manager.prefilled_tokens,
            },
            "host_running_reqs": len(manager.host_rows()),
            "migrations": dataclasses.asdict(manager.migrations),
            "host_tokens_total": self.neo_metrics.counters.host_tokens,
            "failed_steps": self.recovery.failed_steps,
            "raised_steps": self.recovery.raised_steps,
            "restarted_reqs": self.recovery.restarted_reqs,
            "steps_total": dict(self.neo_metrics.counters.steps),
            "eager_steps_total": dict(self.neo_metrics.counters.eager),
            "lanes": {
                "limit_tokens": self.pipelining.limits.decode if math.isfinite(self.pipelining.limits.decode) else None,
                "waited_total": self.pipelining.waited,
                "no_graph_total": self.pipelining.no_graph,
            }
            if self.pipelining is not None and self.planner is None
            else None,
            "steps_behind_total": self.deferral.counters.behind if self.deferral is not None else 0,
            "planner": self.planner.report() if self.planner is not None else None,
            "cpu_seconds": {"busy": cpu.busy, "wait": cpu.wait},
            "awaited": {"handoffs": cpu.awaited_handoffs, "seconds": cpu.awaited},
            "handoffs": {
                "answered": cpu.handoffs,
                "seconds": cpu.answers,
                "tail_seconds": cpu.tails,
                "held_up": cpu.held_up,
            },
        }

    def get_internal_state(self, recv_req: GetInternalStateReq) -> GetInternalStateReqOutput:
        output = super().get_internal_state(recv_req)
        output.internal_state["neo"] = self.neo_state()
        return output
