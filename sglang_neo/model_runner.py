"""Model worker, model runner and KV configurator: SGLang's, with a host pool and attention on the CPU beside theirs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput
from sglang.srt.runtime_context import get_schedule

from sglang_neo import token_manager
from sglang_neo.errors import UsageError
from sglang_neo.host_kv import limits
from sglang_neo.hybrid import assemble
from sglang_neo.hybrid.backend import hide_host_rows, make_hybrid
from sglang_neo.hybrid.deferred import DeferredStep, rows_of_output
from sglang_neo.hybrid.host_attention import HostAttention, StepRefused
from sglang_neo.hybrid.parity import check_parity
from sglang_neo.hybrid.pipelined import Lanes, LaneSizes, PipelinedAttention, lay_out
from sglang_neo.planning.correction import Measured
from sglang_neo.planning.lanes import lane_a
from sglang_neo.recovery import LaunchedHostRows
from sglang_neo.refusals import gpu_only_reasons
from sglang_neo.tensors import pinned
from sglang_neo.token_manager import NeoReqToTokenPool, host_row

logger = logging.getLogger(__name__)


class NeoKVCacheConfigurator(KVCacheConfigurator):
    """Sizes and builds the KV pools as SGLang does, beside our staging region; the owners of slots are ours."""

    def _profile_available_bytes(self, pre_model_load_memory: int) -> int:
        available: int = super()._profile_available_bytes(pre_model_load_memory)
        kept = self._staging_bytes(available)
        if str(self.device).startswith("cuda"):
            from sglang_neo.hybrid.graphs import host_graph_bytes

            kept += host_graph_bytes(self.server_args)
        return max(0, available - kept)

    def _staging_bytes(self, available: int) -> int:
        """Of the region that ``assemble.host_side`` will make; all ranks must come to the same number."""
        args, model = self.server_args, self.model_config
        if args.neo_mode == "gpu-only" or gpu_only_reasons(args):
            return 0
        values = 2 * model.get_num_kv_heads(self.ps.tp_size) * model.head_dim  # of a token in one layer
        host_size = 1 if args.neo_host_kv_dtype == "int8" else self.kv_cache_dtype.itemsize
        most = limits.most_host_tokens(
            size_gb=args.neo_host_kv_size,
            ratio=args.neo_host_kv_ratio,
            gpu_pool_bytes=available,
            ranks=args.tp_size * args.dp_size,
            token_bytes=values * host_size * model.num_hidden_layers,
        )
        tokens = limits.staging_tokens(asked=args.neo_host_prompt_tokens, context=model.context_len, host_tokens=most)
        return (tokens + 2 * self.page_size) * values * self.kv_cache_dtype.itemsize

    def _build_token_to_kv_pool_allocator(
        self, *, token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator | None, **kwargs: Any
    ) -> BaseTokenToKVPoolAllocator:
        built = super()._build_token_to_kv_pool_allocator(
            token_to_kv_pool_allocator=token_to_kv_pool_allocator, **kwargs
        )
        return built if token_to_kv_pool_allocator is not None else token_manager.adopt(built)

    def _build_req_to_token_pool(self, *, max_num_reqs: int) -> ReqToTokenPool:
        pool = super()._build_req_to_token_pool(max_num_reqs=max_num_reqs)
        if type(pool) is ReqToTokenPool:
            pool.__class__ = NeoReqToTokenPool  # the same object with one method more
        return pool


@dataclasses.dataclass(frozen=True)
class HostBatchRows:
    """The host rows of a decode batch that is about to run."""

    reqs: Sequence[Any]
    index: Sequence[int]  # where in the batch they are, ascending


def host_batch_rows(batch: ScheduleBatch) -> HostBatchRows | None:
    """None if the batch has no host rows."""
    index = [i for i, req in enumerate(batch.reqs) if host_row(req) is not None]
    return HostBatchRows([batch.reqs[i] for i in index], index) if index else None


@dataclasses.dataclass
class Beside:
    """A decode batch of host rows that runs as lane B of a prefill."""

    forward_batch: Any  # SGLang's
    rows: HostBatchRows
    output: Any = None  # SGLang's ModelRunnerOutput, when the prefill has run
    launched: LaunchedHostRows | None = None


def host_prompts(batch: ScheduleBatch) -> Sequence[Any] | None:
    """The requests of a prefill batch whose KV goes to host memory (all of them, or none)."""
    to_host = batch.forward_mode.is_extend() and batch.reqs and host_row(batch.reqs[0]) is not None
    return batch.reqs if to_host else None


class NeoModelRunner(ModelRunner):
    """Executes steps: SGLang's own where all rows are on the device, else with the host rows' attention on the CPU."""

    kv_cache_configurator: KVCacheConfigurator
    decode_cuda_graph_runner: Any
    prefill_cuda_graph_runner: Any
    #: None: this server runs gpu-only, and ``neo_gpu_only_reason`` says why.
    neo_host: assemble.HostSide | None = None
    neo_gpu_only_reason: str | None = None
    #: Set by the worker for the next forward, and what became of it.
    neo_rows: HostBatchRows | None = None
    #: The same: in which lanes these are; None: one batch, in mode sync.
    neo_lanes: Lanes | None = None
    #: The same: requests of a prefill batch that goes to host memory.
    neo_prompts: Sequence[Any] | None = None
    #: The same: host rows that decode beside a prefill batch. The forward after that is theirs, and has its output.
    neo_beside: Beside | None = None
    #: The same: a deferred step.
    neo_step: DeferredStep | None = None
    neo_launched: LaunchedHostRows | None = None

    def init_kv_cache_configurator(self) -> None:
        super().init_kv_cache_configurator()
        # SGLang's call has two dozen arguments: copy what it built instead of repeating it.
        built = self.kv_cache_configurator
        arguments = {field.name: getattr(built, field.name) for field in dataclasses.fields(built) if field.init}
        self.kv_cache_configurator = NeoKVCacheConfigurator(**arguments)

    def _init_post_memory_pool_components(self) -> None:
        super()._init_post_memory_pool_components()
        try:
            self.neo_host = assemble.host_side(self)
        except assemble.GpuOnly as reason:
            self.neo_gpu_only_reason = str(reason)
            logger.info(f"sglang_neo: gpu-only: {reason}")
            return
        manager = self.token_to_kv_pool_allocator.token_manager
        host = self.neo_host
        manager.attach_host(
            host.pages, host.pool.geometry.page_tokens, host.transfer, host.attention, host.prefill.tokens
        )
        self.req_to_token_pool.token_manager = manager

    def init_attention_backends(self) -> None:
        super().init_attention_backends()
        if self.neo_host is not None:
            host = self.neo_host
            make_hybrid(self.attn_backend, host.attention, host.prefill, host.first_layer)
            if host.deferred is not None:
                try:
                    check_parity(self, host.deferred)
                except Exception as error:
                    if isinstance(error, UsageError) and self._can_do_without_slots:
                        logger.warning(f"sglang_neo: no deferred mode: {error}")
                        host.deferred = None
                        return
                    self.neo_close()
                    raise

    @property
    def _can_do_without_slots(self) -> bool:
        """Whether nobody asked for deferred steps, and there are others."""
        host = self.neo_host
        return self.server_args.neo_deferred_slots is None and host is not None and host.attention is not host.deferred

    def forward(self, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        beside, self.neo_beside = self.neo_beside, None
        if beside is not None and beside.forward_batch is forward_batch:
            return beside.output
        (rows, lanes), self.neo_rows, self.neo_lanes = (self.neo_rows, self.neo_lanes), None, None
        prompts, self.neo_prompts = self.neo_prompts, None
        if prompts is not None or beside is not None:
            with self._to_host(prompts), self._no_static_buffers(), self._with_second_lane(beside):
                return super().forward(forward_batch, *args, **kwargs)
        step, self.neo_step = self.neo_step, None
        if step is not None:
            return self._forward_deferred(forward_batch, step, *args, **kwargs)
        if rows is None:
            return super().forward(forward_batch, *args, **kwargs)
        assert self.neo_host is not None and forward_batch.forward_mode.is_decode()
        self.neo_host.transfer.settle()
        attention = self.neo_host.attention
        if lanes is not None:
            assert isinstance(attention, PipelinedAttention)
            return self._forward_in_lanes(forward_batch, attention, rows, lanes, *args, **kwargs)
        refused = None
        try:
            attention.launch([req.neo_host_row for req in rows.reqs], rows.index)
        except StepRefused as reason:
            refused = str(reason)
        self.neo_launched = LaunchedHostRows(rows.reqs, attention.launched_epoch, refused)
        hide_host_rows(forward_batch, attention.host_row_index(), torch.tensor(rows.index))
        if refused is not None:
            return super().forward(forward_batch, *args, **kwargs)
        with self._graphs_with_handoffs(attention), attention.emitting(len(rows.reqs)) as layers:
            output = super().forward(forward_batch, *args, **kwargs)
        # A graph has its hand-offs in it; else each layer's attention must have come by.
        if layers.received != (0 if output.can_run_graph else attention.geometry.layers):
            raise RuntimeError(f"a step handed over host rows of {layers.received} layers")
        return output

    @contextlib.contextmanager
    def _to_host(self, prompts: Sequence[Any] | None) -> Iterator[None]:
        """For the prefill of prompts that go to host memory; None: to the device."""
        if prompts is None:
            yield
            return
        assert self.neo_host is not None
        rows, lines = [req.neo_host_row for req in prompts], [req.req_pool_idx for req in prompts]
        with self.neo_host.prefill.running(rows, lines, self.req_to_token_pool.req_to_token):
            yield

    @contextlib.contextmanager
    def _with_second_lane(self, beside: Beside | None) -> Iterator[None]:
        """For a prefill beside which host rows decode; None: it is alone."""
        if beside is None:
            yield
            return
        assert self.neo_host is not None
        attention = self.neo_host.attention
        assert isinstance(attention, PipelinedAttention)
        self.neo_host.transfer.settle()
        refused, outputs = None, list[Any]()
        try:
            attention.launch_beside([req.neo_host_row for req in beside.rows.reqs])
        except StepRefused as reason:
            refused = str(reason)
        beside.launched = LaunchedHostRows(
            beside.rows.reqs, attention.launched_epoch, refused, mode="pipelined_prefill"
        )
        forward = attention.beside(self.model.forward, beside.forward_batch, outputs, flags=refused is None)
        with self._forward_of_model(forward):
            yield
        beside.output = ModelRunnerOutput(logits_output=outputs[0], can_run_graph=False)

    @contextlib.contextmanager
    def _forward_of_model(self, forward: Callable[..., Any]) -> Iterator[None]:
        """SGLang's runners call this in place of the model's own."""
        self.model.forward = forward
        try:
            yield
        finally:
            del self.model.forward

    @property
    def neo_lane_buckets(self) -> Sequence[tuple[int, int]]:
        """Rows of lanes A and B of the graphs in two lanes; none where such steps run eagerly."""
        return getattr(self.decode_cuda_graph_runner, "lane_buckets", ())

    def _forward_in_lanes(
        self,
        forward_batch: Any,
        attention: PipelinedAttention,
        rows: HostBatchRows,
        lanes: Lanes,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        padded = lane_a(forward_batch.batch_size, len(lanes.b), self.neo_lane_buckets)
        sizes = LaneSizes(padded or len(lanes.a), len(lanes.b))
        of_req = {at: req.neo_host_row for at, req in zip(rows.index, rows.reqs, strict=True)}
        index = [[place for place, at in enumerate(lane) if at in of_req] for lane in (lanes.a, lanes.b)]
        refused = None
        try:
            attention.launch_lanes([[of_req[at] for at in lane if at in of_req] for lane in (lanes.a, lanes.b)], index)
        except StepRefused as reason:
            refused = str(reason)
        epoch, tokens = attention.launched_epoch, sum(row.tokens for row in of_req.values())
        self.neo_launched = LaunchedHostRows(rows.reqs, epoch, refused, mode="pipelined", tokens=tokens)
        at_cpu = pinned(rows.index, forward_batch.input_ids.device)
        hide_host_rows(forward_batch, at_cpu.to(forward_batch.input_ids.device, non_blocking=True), at_cpu)
        whole, places = lay_out(forward_batch, lanes, sizes)
        # Nobody answers the flags of a graph in a step that was refused. It runs in lanes of the same sizes even so:
        # another rank's service may have taken it.
        captured = padded is not None and refused is None
        with self._in_lanes(attention, sizes, captured, flags=refused is None):
            output = super().forward(whole, *args, **kwargs)
        if output.can_run_graph != captured:
            raise RuntimeError("a step in two lanes did not run as it was meant to")
        if places is not None:
            output.logits_output = rows_of_output(output.logits_output, places)
        return output

    @contextlib.contextmanager
    def _in_lanes(self, attention: PipelinedAttention, sizes: LaneSizes, captured: bool, flags: bool) -> Iterator[None]:
        """For a forward in two lanes: its graph, or the model's forward in lanes where SGLang runs it eagerly."""
        runner, attention.sizes = self.decode_cuda_graph_runner, sizes
        try:
            if captured:
                with runner.lanes(sizes):
                    yield
                return
            self.decode_cuda_graph_runner = None
            forward = attention.in_lanes(self.model.forward, sizes, flags=lambda: flags)
            try:
                # SGLang's static buffers may have no room for a batch that is padded.
                with self._forward_of_model(forward), envs.SGLANG_EAGER_INPUT_NO_COPY.override(True):
                    yield
            finally:
                self.decode_cuda_graph_runner = runner
        finally:
            attention.sizes = None

    def _forward_deferred(self, forward_batch: Any, step: DeferredStep, *args: Any, **kwargs: Any) -> Any:
        assert self.neo_host is not None and forward_batch.forward_mode.is_decode()
        attention = self.neo_host.deferred
        assert attention is not None
        self.neo_host.transfer.settle()
        refused, epoch = None, 0
        try:
            epoch = attention.launch_step(step)
        except StepRefused as reason:
            refused = str(reason)
        self.neo_launched = LaunchedHostRows(step.reqs, attention.rests_on, refused, epoch, "deferred", step.others)
        whole, rows = attention.with_slots(forward_batch, step)
        if refused is not None:
            output = super().forward(whole, *args, **kwargs)
        else:
            with self._graphs_with_handoffs(attention), attention.emitting(attention.slots) as layers:
                output = super().forward(whole, *args, **kwargs)
            if layers.received != (0 if output.can_run_graph else attention.geometry.layers):
                raise RuntimeError(f"a deferred step exchanged rows in {layers.received} layers")
        output.logits_output = rows_of_output(output.logits_output, rows)
        return output

    def neo_eager_reason(self, captured: bool, launched: LaunchedHostRows | None, rows: int) -> str | None:
        """Why a decode step did not run from a CUDA graph, in a few words; None if it did.

        Args:
            captured: whether it did.
            launched: what it had to do with the CPU, None if nothing.
            rows: of its batch.
        """
        if captured:
            return None
        graphs = self.decode_cuda_graph_runner
        if not hasattr(graphs, "host_sizes"):
            return "no graphs"
        if launched is None:
            return "batch size" if rows > max(graphs.capture_bs) else "left to SGLang"
        if launched.mode == "pipelined_prefill":
            return "beside a prefill"
        if launched.refused is not None:
            return "refused by the workers"
        if not graphs.host_sizes:
            return "no graphs with hand-offs"
        return "batch size" if rows > max(graphs.host_sizes) else "left to SGLang"

    @contextlib.contextmanager
    def _no_static_buffers(self) -> Iterator[None]:
        """SGLang's captured prefills name the device pool's buffers, and those that its eager runner copies inputs to
        may be as small as that pool."""
        runner, self.prefill_cuda_graph_runner = self.prefill_cuda_graph_runner, None
        try:
            with envs.SGLANG_EAGER_INPUT_NO_COPY.override(True):
                yield
        finally:
            self.prefill_cuda_graph_runner = runner

    @contextlib.contextmanager
    def _graphs_with_handoffs(self, attention: HostAttention) -> Iterator[None]:
        """For a forward with host rows: the graphs that have its hand-offs in them, or none."""
        runner = self.decode_cuda_graph_runner
        if getattr(runner, "host_sizes", None):
            with runner.host_rows(attention):
                yield
            return
        self.decode_cuda_graph_runner = None  # SGLang then runs eagerly
        try:
            yield
        finally:
            self.decode_cuda_graph_runner = runner

    def _decode_cuda_graph_runner_cls(self) -> Any:
        from sglang_neo.hybrid.graphs import NeoDecodeCudaGraphRunner  # of use on CUDA only

        return NeoDecodeCudaGraphRunner

    def neo_close(self) -> None:
        """Ends the CPU workers and gives host memory back; harmless to repeat."""
        if self.neo_host is not None:
            self.neo_host.close()


class StepSpan:
    """What a step took, by the device's own clock where that is not the host's; on the CPU device with its waits for
    the workers, and what these did meanwhile."""

    def __init__(self, runner: NeoModelRunner):
        self._cuda = str(runner.device).startswith("cuda")
        self._attention = runner.neo_host.attention if runner.neo_host is not None else None
        self._before = self._account()
        self._begin: Any = self._now()
        self._end: Any = None
        self._after = self._before

    def _account(self) -> tuple[float, float]:
        """Seconds that the device has waited and that hand-offs were in hand, since the start."""
        if self._cuda or self._attention is None:
            return 0.0, 0.0
        return self._attention.stream.waited, self._attention.service.status().answer_ns / 1e9

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def end(self) -> None:
        self._end = self._now()
        self._after = self._account()

    def measured(self, before: StepSpan | None) -> Measured:
        """Counted from the end of the step ``before`` it, if that is given. To be asked once its results are there."""
        begin = self._begin if before is None else before._end
        if self._cuda:
            self._end.synchronize()
            return Measured(float(begin.elapsed_time(self._end)) / 1e3)
        wait, cpu = (after - was for after, was in zip(self._after, self._before, strict=True))
        return Measured(float(self._end - begin), wait, cpu)


class NeoTpModelWorker(TpModelWorker):
    """SGLang has no factory for the model runner, so the method that names its class is overridden."""

    #: Set by the scheduler for the next prefill: a decode batch of host rows that runs beside it. Its result becomes
    #: ``neo_beside`` of the prefill's.
    neo_beside: ScheduleBatch | None = None

    def _init_model_runner(self) -> None:
        self._model_runner = NeoModelRunner(
            model_config=self.model_config,
            mem_fraction_static=get_schedule().mem_fraction_static,
            gpu_id=self.gpu_id,
            ps=self.ps,
            nccl_port=self.nccl_port,
            server_args=self.server_args,
            is_draft_worker=self.is_draft_worker,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            memory_pool_config=self.memory_pool_config,
        )

    def forward_batch_generation(self, batch: ScheduleBatch | None, *args: Any, **kwargs: Any) -> Any:
        runner, step = self.model_runner, getattr(batch, "neo_step", None)
        decode = step is None and batch is not None and batch.forward_mode.is_decode()
        runner.neo_rows = host_batch_rows(batch) if decode else None
        runner.neo_lanes = getattr(batch, "neo_lanes", None) if decode else None
        runner.neo_prompts = host_prompts(batch) if batch is not None else None
        runner.neo_step, runner.neo_launched = step, None
        part, self.neo_beside = self.neo_beside, None
        runner.neo_beside = beside = self._beside(part) if part is not None else None
        span = StepSpan(runner)
        result = super().forward_batch_generation(batch, *args, **kwargs)
        span.end()
        result.neo_launched, result.neo_span = runner.neo_launched, span
        result.neo_planned = getattr(batch, "neo_planned", None)
        if batch is not None and batch.forward_mode.is_decode():
            captured, rows = result.can_run_cuda_graph, len(batch.reqs)
            result.neo_eager = runner.neo_eager_reason(captured, result.neo_launched, rows)
        if beside is not None:
            runner.neo_beside = beside
            # SGLang finds the model's output there already, and samples.
            result.neo_beside = super().forward_batch_generation(None, beside.forward_batch)
            result.neo_beside.neo_launched = beside.launched
            result.neo_beside.neo_eager = runner.neo_eager_reason(False, beside.launched, len(beside.rows.reqs))
            # Tensors of the scheduler's stream, until the forward is surely over.
            result.extra_keep_alive_refs = [*(result.extra_keep_alive_refs or ()), part, beside.forward_batch]
        return result

    def _beside(self, part: ScheduleBatch) -> Beside:
        rows = host_batch_rows(part)
        assert rows is not None and len(rows.reqs) == len(part.reqs)
        forward_batch = ForwardBatch.init_new(part, self.model_runner, return_hidden_states_before_norm=False)
        return Beside(forward_batch, rows)

    def get_worker_info(self) -> tuple[Any, ...]:
        """SGLang's, where the longest request is the longest that fits either pool.

        And the longest prompt is one that admission takes: SGLang accepts some that need the pool's last page, which
        it never admits (``PrefillAdder.add_one_req`` wants a page beside the prompt), and all that wait stand behind.
        """
        info = list(super().get_worker_info())
        manager = self.model_runner.token_to_kv_pool_allocator.token_manager
        on_device, on_host = info[0] - manager.device_page_tokens, 0
        if manager.has_host:
            on_host = manager.longest_host_request
            info[4] = min(self.model_config.context_len - 1, max(info[4], on_host))
        margin = 5  # SGLang's
        info[5] = min(info[4] - margin, max(on_device, on_host - margin))
        return tuple(info)
