"""SGLang's scheduler and model runner, plain or ours, inside the test's own process, one after the other.

A server takes 20 s to start, most of it imports. Here SGLang is imported once per test session and a scheduler is
built in well under a second, with the real event loop, batching, radix cache and memory pools; only the sockets have
nobody at the other end: requests are handed in where the loop would receive them, and results are read from SGLang's
own request objects.

    with InProcessScheduler("neo", model, page_size=64) as scheduler:
        results = scheduler.run([Request("a", [5, 6, 7]), Request("b", [8, 9], arrive=3)])

Everything that these objects need from SGLang's internals stands in this file.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import socket
import types
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from tests.harness.exact import Reference

Kind = Literal["plain", "neo"]

#: The event loop is stopped after so many turns: a request that never finishes must fail its test, not hang it.
MAX_STEPS = 5000

DEFAULT_ARGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_total_tokens": 2048,
    "max_running_requests": 8,
    "random_seed": 1,
    "log_level": "warning",
    # The watchdog kills the parent process, here the one that runs the tests.
    "watchdog_timeout": 1e6,
}


@dataclass(frozen=True)
class Request:
    """One request. Steps are turns of the event loop, counted from the start of ``run``."""

    name: str
    prompt: Sequence[int]
    max_new_tokens: int = 16
    arrive: int = 0
    abort: int | None = None
    vanishes: bool = False  # ``on_step`` may abort it
    sampling: Mapping[str, Any] = field(default_factory=dict)  # on top of greedy and ignore_eos
    priority: int | None = None
    input_logprobs: bool = False  # of the prompt, which then finds nothing cached


@dataclass(frozen=True)
class Result:
    """What became of a request."""

    tokens: list[int]
    logprobs: list[float]  # of each token
    top_logprobs: list[list[float]]  # the two best at each token
    finish: str  # SGLang's finish reason: "length", "stop" or "abort"
    cached_tokens: int  # of the prompt, found in the radix cache
    retractions: int
    input_logprobs: list[float]  # of the prompt's tokens but the first, if they were asked for

    def reference(self) -> Reference:
        """As a reference for ``assert_exact``."""
        return Reference(self.tokens, [abs(top[0] - top[1]) for top in self.top_logprobs])


def server_args(kind: Kind, model: Path, **arguments: Any) -> Any:
    """Plain or our server arguments with DEFAULT_ARGS under ``arguments``, resolved."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import common

    from sglang_neo.args import NeoServerArgs

    load_plugins()
    # On the CPU device SGLang runs lscpu a dozen times per scheduler; the machine is always the same one.
    if not hasattr(common.parse_lscpu_topology, "cache_info"):
        common.parse_lscpu_topology = functools.cache(common.parse_lscpu_topology)
    args_class = NeoServerArgs if kind == "neo" else ServerArgs
    if kind == "neo":  # a mode that depends on nothing that is measured
        arguments.setdefault("neo_mode", "deferred" if arguments.get("neo_deferred_slots") else "sync")
        if arguments["neo_mode"] == "auto":
            arguments.setdefault("neo_deferred_slots", 0)
    return args_class(**{"model_path": str(model), **DEFAULT_ARGS, **arguments})


class _ProcessState:
    """SGLang's process-wide state for one scheduler or runner: published arguments, process groups, port names."""

    def __init__(self, args: Any):
        from sglang.srt.distributed.parallel_state import model_parallel_is_initialized
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import PortArgs

        if model_parallel_is_initialized():
            raise RuntimeError("another scheduler or runner is open in this process: close it first")
        self.ports = PortArgs.init_new(args)
        publish(args, role="scheduler")

    def close(self) -> None:
        from sglang.srt.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel
        from sglang.srt.managers.load_snapshot import shm_path_for
        from sglang.srt.runtime_context import reset_context

        destroy_model_parallel()
        destroy_distributed_environment()
        reset_context()
        # Files that SGLang leaves behind: the load snapshot (its reader's to remove) and placeholders of the sockets.
        Path(shm_path_for(self.ports.instance_id)).unlink(missing_ok=True)
        for name, value in vars(self.ports).items():
            if name.endswith("_ipc_name") and value:
                Path(value.removeprefix("ipc://")).unlink(missing_ok=True)


def free_port() -> int:
    """A TCP port of this machine that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_imports_set_apart = False


def _collect_garbage() -> None:
    global _imports_set_apart
    gc.collect()
    if not _imports_set_apart:
        gc.freeze()  # what SGLang's imports left, millions of objects, is here to stay: not to be walked through again
        _imports_set_apart = True


class InProcessScheduler:
    """A real scheduler with its event loop. Use as a context manager: there can be one at a time in a process.

    Args:
        rank: of the tensor-parallel ranks, each in a process of its own. All are given the same requests.
        port: at which they meet.
        arguments: of the server, on top of DEFAULT_ARGS.
    """

    def __init__(self, kind: Kind, model: Path, rank: int = 0, port: int | None = None, **arguments: Any):
        self.kind, self._rank = kind, rank
        self.args = server_args(kind, model, **arguments)
        self.steps = 0  # turns of the event loop in the last run
        #: Whether forwards are meant to raise; else a run in which one did has failed, though the server went on.
        self.forwards_may_raise = False
        self._state = _ProcessState(self.args)
        if port is not None:
            self._state.ports.nccl_port = port
        try:
            self.scheduler = self._build()
        except BaseException:
            self._state.close()
            raise

    def _build(self) -> Any:
        from sglang.srt.managers.scheduler import Scheduler

        from sglang_neo import seams
        from sglang_neo.scheduler import NeoScheduler

        scheduler_class = NeoScheduler if self.kind == "neo" else Scheduler
        scheduler = scheduler_class(self.args, self._state.ports, self._rank, self._rank, 0, 0, 0, 0, None)
        if self.kind == "neo":
            seams.check_running(scheduler)
            if scheduler.pipelining is not None:
                scheduler.pipelining.measures = False  # who rides must not depend on how busy the machine is
        # Nobody reads what a scheduler sends; without a socket its senders do nothing. Only rank 0 has sockets.
        sockets = [
            scheduler.ipc_channels.recv_from_tokenizer,
            scheduler.ipc_channels.recv_from_rpc,
            scheduler.ipc_channels.send_to_tokenizer.socket,
            scheduler.ipc_channels.send_to_detokenizer.socket,
        ]
        self._sockets = [each for each in sockets if each is not None]
        # Nor does anybody wake one that sleeps: on the CPU device an idle scheduler waits a second for its sockets.
        scheduler.idle_sleeper = None
        scheduler.ipc_channels.send_to_tokenizer.socket = None
        scheduler.ipc_channels.send_to_detokenizer.socket = None
        return scheduler

    def __enter__(self) -> InProcessScheduler:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self.scheduler is None:
            return
        for each in self._sockets:
            each.close(linger=0)
        for each in self._sockets[:1]:
            each.context.term()
        if self.scheduler.load_snapshot_writer is not None:
            self.scheduler.load_snapshot_writer.close()
        if self.kind == "neo":
            self.scheduler.tp_worker.model_runner.neo_close()
        self.scheduler = None
        self._state.close()
        _collect_garbage()

    # -- running requests -------------------------------------------------------------------------------------

    def run(
        self,
        requests: Sequence[Request],
        on_step: Callable[[Any, int], None] | None = None,
        check: bool = True,
        most_steps: int = MAX_STEPS,
    ) -> dict[str, Result]:
        """Serve ``requests`` to their end; returns results by name. The radix cache lives on between runs.

        SGLang's own accounting of every KV slot is checked after each step.

        Args:
            on_step: called with the scheduler and the step before each turn of the event loop.
            check: run ``check_idle`` at the end.
            most_steps: turns of the event loop after which AssertionError is raised.
        """
        from sglang.srt.environ import envs

        for request in requests:
            # SGLang aborts every request whose id starts with the given one.
            also = [r.name for r in requests if r is not request and r.name.startswith(request.name)]
            if also and request.abort is not None:
                raise ValueError(f"aborting {request.name} would also abort {also}: choose other names")
        scheduler = self.scheduler
        seen: dict[str, Any] = {}
        arrivals = sorted(requests, key=lambda request: request.arrive)
        aborts = sorted((r for r in requests if r.abort is not None), key=lambda request: request.abort or 0)
        self.steps = 0

        def receive() -> list[Any]:
            step, self.steps = self.steps, self.steps + 1
            if step > most_steps:
                unfinished = [name for name, req in seen.items() if not req.finished()]
                raise AssertionError(f"still running after {most_steps} steps: {unfinished}")
            if on_step is not None:
                on_step(scheduler, step)
            received: list[Any] = []
            while arrivals and arrivals[0].arrive <= step:
                received.append(tokenized(arrivals.pop(0)))
            while aborts and (aborts[0].abort or 0) <= step:
                received.append(_abort(aborts.pop(0).name))
            if not (received or arrivals or aborts) and scheduler.is_fully_idle():
                scheduler.gracefully_exit = True  # this turn still runs SGLang's check for leaks
            return received

        def add_to_queue(req: Any, *args: Any, **kwargs: Any) -> None:
            seen[req.rid] = req
            type(scheduler)._add_request_to_queue(scheduler, req, *args, **kwargs)

        scheduler.request_receiver = types.SimpleNamespace(recv_requests=receive)
        scheduler._add_request_to_queue = add_to_queue
        scheduler.gracefully_exit = False
        with (
            envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.override(1),
            envs.SGLANG_CHECK_KV_PAGE_INVARIANTS.override(True),
        ):
            scheduler.run_event_loop()
        if check:
            self.check_idle()
        return {request.name: _result(request, seen[request.name]) for request in requests}

    def flush(self) -> None:
        """Empty the radix cache."""
        assert self.scheduler.flush_cache(), "the scheduler is not idle"

    # -- looking inside ---------------------------------------------------------------------------------------

    @property
    def allocator(self) -> Any:
        return self.scheduler.token_to_kv_pool_allocator

    def check_idle(self) -> None:
        """Raises AssertionError unless every KV slot is free or in the radix cache, evictable, and none is both."""
        free, cached = self.allocator.available_size(), self.scheduler.tree_cache.evictable_size()
        total = self.allocator.size
        assert free + cached == total, f"KV slots lost: {free} free + {cached} cached of {total}"
        assert self.scheduler.tree_cache.protected_size() == 0, "a finished request still holds cached KV"
        if self.kind == "neo":
            raised = self.scheduler.recovery.raised_steps
            assert self.forwards_may_raise or not raised, f"{raised} steps have raised, see the log"
            manager = self.allocator.token_manager
            manager.audit()
            usage = manager.device_usage()
            assert (usage.total_tokens, usage.free_tokens) == (total, free)
            # Then the audit has found every host page free, waiting for the end of a step, or in the radix cache.
            assert not manager.host_rows(), "a finished request still has host memory"
            assert manager.host_cached() == manager.host_evictable(), "a finished request still holds cached host KV"


def tokenized(request: Request) -> Any:
    """As SGLang's tokenizer hands it to the scheduler."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": request.max_new_tokens, **request.sampling}
    params = SamplingParams(**sampling)
    params.normalize(None)
    return TokenizedGenerateReqInput(
        rid=request.name,
        input_text=None,
        input_ids=array("q", request.prompt),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=True,
        logprob_start_len=0 if request.input_logprobs else -1,
        top_logprobs_num=2,
        token_ids_logprob=None,
        stream=False,
        priority=request.priority,
    )


def abort_all(scheduler: Any) -> None:
    """For ``on_step``: ends all requests of a run, which must say that they may vanish."""
    from sglang.srt.managers.io_struct import AbortReq

    scheduler.abort_request(AbortReq(abort_all=True))


def _abort(name: str) -> Any:
    from sglang.srt.managers.io_struct import AbortReq

    return AbortReq(rid=name)


def _result(request: Request, req: Any) -> Result:
    if req.finished():
        finish = req.finished_reason.to_json()["type"]
    elif request.abort is not None or request.vanishes:
        finish = "abort"  # taken from the waiting queue: SGLang leaves the request object as it was
    else:
        raise AssertionError(f"the scheduler is idle, but request {request.name} has not finished")
    tokens = list(req.output_ids)
    return Result(
        tokens=tokens,
        logprobs=list(req.logprob.output_token_logprobs_val)[: len(tokens)],
        top_logprobs=[list(top) for top in req.logprob.output_top_logprobs_val][: len(tokens)],
        finish=finish,
        cached_tokens=req.cached_tokens,
        retractions=req.retraction_count,
        input_logprobs=list(req.logprob.input_token_logprobs_val or [])[1:] if request.input_logprobs else [],
    )


class InProcessRunner:
    """A model worker without a scheduler: prompts in, tokens and logits of every step out."""

    def __init__(self, kind: Kind, model: Path, **arguments: Any):
        from sglang.srt.distributed.parallel_state_wrapper import ParallelState
        from sglang.srt.layers.moe import initialize_moe_config
        from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
        from sglang.srt.managers.tp_worker import TpModelWorker

        from sglang_neo.model_runner import NeoTpModelWorker

        args = server_args(kind, model, **arguments)
        self._state = _ProcessState(args)
        self.worker: Any = None
        try:
            initialize_moe_config(args)
            initialize_fp8_gemm_config(args)
            single = {
                f"{group}_{what}": value
                for group in ("tp", "pp", "attn_tp", "attn_cp", "attn_dp", "moe_ep", "moe_dp")
                for what, value in (("rank", 0), ("size", 1))
            }
            ps = ParallelState(**single, dp_rank=None, dp_size=1, dcp_size=1, gpu_id=0)
            worker_class = NeoTpModelWorker if kind == "neo" else TpModelWorker
            self.worker = worker_class(server_args=args, gpu_id=0, ps=ps, nccl_port=self._state.ports.nccl_port)
            self.worker.alloc_memory_pool()
            self.worker.init_attention_backends()
            self.worker.init_cuda_graphs()
        except BaseException:
            self._state.close()
            raise

    @property
    def model_runner(self) -> Any:
        return self.worker.model_runner

    def __enter__(self) -> InProcessRunner:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self.worker is not None:
            self.worker = None
            self._state.close()
            _collect_garbage()

    def generate(
        self, prompts: Sequence[Sequence[int]], steps: int, on_step: Callable[[Any, int], None] | None = None
    ) -> tuple[list[list[int]], torch.Tensor]:
        """Greedy tokens ``[prompt][step]`` and logits ``[prompt, step, vocabulary]``: one prefill, then decoding.

        Args:
            on_step: called with the model runner and the step before each decode step (1, 2, ...).
        """
        from sglang.benchmark import one_batch

        runner = self.model_runner
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(runner.req_to_token_pool.clear)
            cleanup.callback(runner.token_to_kv_pool_allocator.clear)
            requests = [_bare_request(str(i), prompt, steps) for i, prompt in enumerate(prompts)]
            tokens, logits, batch = one_batch.extend(requests, runner)
            all_tokens, all_logits = [tokens.tolist()], [logits.clone()]
            for step in range(1, steps):
                if on_step is not None:
                    on_step(runner, step)
                tokens, logits = one_batch.decode(tokens, batch, runner)
                all_tokens.append(tokens.tolist())
                all_logits.append(logits.clone())
        return [list(row) for row in zip(*all_tokens, strict=True)], torch.stack(all_logits, dim=1)

    def references(self, prompts: Sequence[Sequence[int]], steps: int) -> dict[str, Reference]:
        """``generate`` of each prompt alone, as references named by their index."""
        found = {}
        for i, prompt in enumerate(prompts):
            [tokens], logits = self.generate([prompt], steps)
            found[str(i)] = _reference(tokens, logits[0])
        return found

    def answers(self, requests: Sequence[Request]) -> dict[str, Reference]:
        """What each request is to be answered, by name: several at a time, those with the longest answers first."""
        runner, found = self.model_runner, {}
        waiting = sorted(requests, key=lambda request: -request.max_new_tokens)
        while waiting:
            steps, room = waiting[0].max_new_tokens, runner.max_total_num_tokens
            batch: list[Request] = []
            while waiting and len(batch) < runner.req_to_token_pool.size:
                room -= len(waiting[0].prompt) + steps
                if room < 0 and batch:
                    break
                batch.append(waiting.pop(0))
            rows, logits = self.generate([request.prompt for request in batch], steps)
            for request, row, row_logits in zip(batch, rows, logits, strict=True):
                count = request.max_new_tokens
                found[request.name] = _reference(row[:count], row_logits[:count])
        return found


def _reference(tokens: Sequence[int], logits: torch.Tensor) -> Reference:
    """Of one row; logits ``[step, vocabulary]``."""
    best = logits.float().topk(2, dim=-1).values
    return Reference(tokens, (best[:, 0] - best[:, 1]).tolist())


def _bare_request(name: str, prompt: Sequence[int], max_new_tokens: int) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    req = Req(
        rid=name,
        origin_input_text="",
        origin_input_ids=array("q", prompt),
        sampling_params=SamplingParams(temperature=0, max_new_tokens=max_new_tokens),
    )
    req.full_untruncated_fill_ids = req.origin_input_ids
    req.logprob_start_len = -1
    req.set_extend_range(0, len(prompt))
    return req
