"""Every place where sglang_neo leans on an internal of SGLang, with the reason, and the checks that they still hold.

The worst fault we could ship is a server that silently runs plain SGLang. So the version is checked before SGLang is
imported, each name that we override is checked before a worker starts, and the objects that really run are checked
after they are built; any mismatch stops the server with one line.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from dataclasses import dataclass
from typing import Any

from sglang_neo import __version__
from sglang_neo.errors import UsageError

#: Releases whose source every seam below was read in and whose behaviour the test suite ran against.
SUPPORTED_SGLANG = ("0.5.17",)


class SeamError(RuntimeError):
    """An internal of SGLang is not what sglang_neo was written against."""


@dataclass(frozen=True)
class Seam:
    """One internal of SGLang that we call, override or replace."""

    module: str
    name: str  # attribute path in the module
    parameters: tuple[str, ...]  # parameters that we rely on, in any order; empty: not checked
    reason: str


SEAMS = (
    Seam(
        "sglang.srt.managers.scheduler",
        "run_scheduler_process",
        ("server_args", "port_args", "gpu_id", "tp_rank", "dp_rank", "pipe_writer"),
        "sets up the worker process, then looks Scheduler up as a global of its module: we put NeoScheduler there",
    ),
    Seam(
        "sglang.srt.managers.scheduler",
        "Scheduler.__init__",
        ("self", "server_args", "port_args"),
        "builds everything that placement looks at",
    ),
    Seam("sglang.srt.managers.scheduler", "Scheduler.init_tp_model_worker", ("self",), "builds our model worker"),
    Seam(
        "sglang.srt.managers.scheduler",
        "Scheduler.get_internal_state",
        ("self", "recv_req"),
        "carries our state to /server_info",
    ),
    Seam("sglang.srt.managers.tp_worker", "TpModelWorker._init_model_runner", ("self",), "builds our model runner"),
    Seam(
        "sglang.srt.model_executor.model_runner",
        "ModelRunner.init_kv_cache_configurator",
        ("self",),
        "its configurator chooses the slot allocator: we make it ours",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner",
        "ModelRunner._decode_cuda_graph_runner_cls",
        ("self",),
        "chooses the class that captures decode steps: ours captures steps with host rows too",
    ),
    Seam(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner",
        "DecodeCudaGraphRunner._capture_one_stream",
        ("self", "stream_idx"),
        "captures the sizes in capture_bs one by one: the graphs with hand-offs come after them",
    ),
    Seam(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner",
        "DecodeCudaGraphRunner.capture_one_shape",
        ("self", "size", "forward", "stream_idx"),
        "captures one size of whatever forward it is given",
    ),
    Seam(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner",
        "DecodeCudaGraphRunner._make_graph_key",
        ("self", "size", "stream_idx", "variant_label"),
        "names a captured graph, in capture and replay: ours get a name of their own",
    ),
    Seam(
        "sglang.srt.model_executor.runner_backend.full_cuda_graph_backend",
        "FullCudaGraphBackend",
        (),
        "the kind of graph that can hold hand-offs",
    ),
    Seam(
        "sglang.srt.mem_cache.kv_cache_configurator",
        "KVCacheConfigurator._build_token_to_kv_pool_allocator",
        ("self", "sizes", "token_to_kv_pool", "token_to_kv_pool_allocator"),
        "the only place that names the allocator's class",
    ),
    Seam(
        "sglang.srt.mem_cache.kv_cache_configurator",
        "KVCacheConfigurator._profile_available_bytes",
        ("self", "pre_model_load_memory"),
        "the memory for KV pools, out of which the graphs with hand-offs and the staging of prompts are kept",
    ),
    Seam(
        "sglang.srt.mem_cache.allocator",
        "TokenToKVPoolAllocator.__init__",
        ("self", "size", "dtype", "device", "kvcache", "need_sort"),
        "base class of our token manager",
    ),
    Seam(
        "sglang.srt.mem_cache.allocator",
        "PagedTokenToKVPoolAllocator.__init__",
        ("self", "size", "page_size", "dtype", "device", "kvcache", "need_sort"),
        "its sibling for pages above one token",
    ),
    Seam(
        "sglang.srt.managers.scheduler",
        "Scheduler.get_next_batch_to_run",
        ("self", "running_batch", "last_batch"),
        "the moment between two launches: host pages of finished steps become free",
    ),
    Seam(
        "sglang.srt.managers.scheduler",
        "Scheduler._get_new_batch_prefill_raw",
        ("self", "prefill_delayer_single_pass", "running_batch"),
        "admission: where the device has no room, it is asked again for the host",
    ),
    Seam(
        "sglang.srt.managers.scheduler",
        "Scheduler.update_running_batch",
        ("self", "batch"),
        "before it retracts for want of device memory, rows move to the host",
    ),
    Seam(
        "sglang.srt.managers.scheduler",
        "Scheduler.get_num_allocatable_reqs",
        ("self", "running_bs"),
        "the host is not asked for a request that may not run",
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.invariant_checker",
        "SchedulerInvariantChecker",
        ("get_last_batch", "get_running_batch"),
        "counts the rows of both unless they are one: after a part of the running batch, last_batch is that batch",
    ),
    Seam(
        "sglang.srt.managers.overlap_utils",
        "FutureMap.stash",
        ("self", "future_indices", "payload"),
        "keeps every request's newest token in output_tokens_buf, by request slot: deferred rows enter with it",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "ScheduleBatch.filter_batch",
        ("self", "keep_indices"),
        "makes a decode step of a part of the running batch, on a copy of it: rebinds what it filters",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "ScheduleBatch.prepare_for_idle",
        ("self",),
        "a decode step in which nobody has a token",
    ),
    Seam(
        "sglang.srt.sampling.penaltylib",
        "BatchedPenalizerOrchestrator",
        ("vocab_size", "batch", "penalizers"),
        "penalties of a part: copied, filtered, and what a token changed in them written back",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "Req.update_finish_state",
        ("self",),
        "an aborted row in mid-token ends at once",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "Req.is_prefill_only",
        (),
        "who wants no token does not decode beside a prefill",
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.output_streamer",
        "SchedulerOutputStreamer.stream_output",
        ("self", "reqs", "return_logprob"),
        "and is told to the client",
    ),
    Seam(
        "sglang.srt.model_executor.forward_batch_info",
        "ForwardBatch",
        (
            *("input_ids", "positions", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"),
            *("orig_seq_lens", "extend_num_tokens", "extend_seq_lens", "extend_prefix_lens", "extend_start_loc"),
            *("extend_seq_lens_cpu", "extend_prefix_lens_cpu", "extend_logprob_start_lens_cpu", "mrope_positions"),
        ),
        "slot rows are added to it, and the layers read its positions where they stand; the profile makes its own",
    ),
    Seam(
        "sglang.srt.models.llama",
        "LlamaDecoderLayer.forward",
        ("self", "positions", "hidden_states", "forward_batch", "residual"),
        "the shape of a layer whose residual and positions a deferred step reaches; parity.py tries it at start",
    ),
    Seam(
        "sglang.srt.managers.scheduler",
        "Scheduler.init_req_max_new_tokens",
        ("self", "req"),
        "clips a request to the device pool, which it may outgrow",
    ),
    Seam(
        "sglang.srt.managers.scheduler",
        "Scheduler.run_batch",
        ("self", "batch"),
        "a prefill runs with host rows in a second lane; they are what is in running_batch then. What it raises, the "
        "model's forward did: recovery.py",
    ),
    Seam(
        "sglang.srt.managers.scheduler",
        "Scheduler._relay_forward_payload",
        ("self", "future_indices", "batch_result"),
        "called by run_batch after a forward: of the second lane, by us",
    ),
    Seam(
        "sglang.srt.managers.scheduler",
        "Scheduler.launch_batch_sample_if_needed",
        ("self", "batch_result", "cur_batch"),
        "with grammars, sampling waits for the result before: that of the second lane too",
    ),
    Seam(
        "sglang.srt.managers.overlap_utils",
        "resolve_forward_inputs",
        ("batch", "future_map"),
        "called by run_batch before a forward: for the second lane, by us",
    ),
    Seam(
        "sglang.srt.managers.utils",
        "GenerationBatchResult",
        ("copy_done", "delay_sample_func", "future_indices", "extra_keep_alive_refs", "logits_output"),
        "what run_batch fills in; keeps the second lane's tensors alive; an empty one: of a step that has raised",
    ),
    Seam(
        "sglang.srt.managers.utils",
        "GenerationBatchResult.copy_to_cpu",
        ("self", "return_logprob", "return_hidden_states"),
        "called by run_batch where scheduling overlaps",
    ),
    Seam(
        "sglang.srt.sampling.sampling_batch_info",
        "SamplingBatchInfo.copy_for_forward",
        ("self",),
        "what run_batch gives a forward",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner",
        "ModelRunnerOutput",
        ("logits_output", "can_run_graph"),
        "what a forward gives: that of the second lane has run with the prefill",
    ),
    Seam(
        "sglang.srt.managers.scheduler",
        "Scheduler.process_batch_result",
        ("self", "batch", "result"),
        "nothing of a step may be published before its CPU work is known to be right",
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.batch_result_processor",
        "SchedulerBatchResultProcessor",
        ("enable_overlap",),
        "passes over retracted requests where overlap scheduling is on: so rows of a failed step get nothing from it",
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.profiler_manager",
        "SchedulerProfilerManager._start_profile",
        ("self", "stage"),
        "a profile that begins takes the CPU's side too",
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.profiler_manager",
        "SchedulerProfilerManager._stop_profile",
        ("self", "stage"),
        "and is written beside SGLang's own; where that fails, profile_in_progress and torch_profiler end it",
    ),
    Seam(
        "sglang.srt.managers.io_struct",
        "ProfileReqOutput",
        ("success", "message"),
        "and who asked is told",
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.output_streamer",
        "_GenerationStreamAccumulator",
        ("customized_info",),
        "passes on what a request has per output token: --neo-report-host-rows",
    ),
    Seam("sglang.srt.managers.schedule_batch", "NextBatchPlan", (), "a turn without a batch lets a failed step end"),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "Req.reset_for_retract",
        ("self",),
        "with release_kv_cache before it, retracts a request",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "Req.set_extend_range",
        ("self", "start", "end"),
        "a chunk of a prompt that ends where it begins is not put into the radix cache: nor is one that has raised",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "FINISH_ABORT",
        ("message", "status_code", "err_type"),
        "a request that no step can compute is told so, with HTTP status 500",
    ),
    Seam(
        "sglang.srt.managers.scheduler",
        "Scheduler.process_pending_chunked_abort",
        ("self",),
        "an abort of a prompt in chunks waits for the next step: not one that has raised",
    ),
    Seam(
        "sglang.srt.managers.scheduler",
        "Scheduler._add_request_to_queue",
        ("self", "req", "is_retracted"),
        "where a retracted row waits",
    ),
    Seam(
        "sglang.srt.utils.watchdog", "SubprocessWatchdog.stop", ("self",), "children that are told to end do not crash"
    ),
    Seam("sglang.srt.managers.scheduler", "PrefillAdder", (), "admission's arithmetic: we put ours there"),
    Seam(
        "sglang.srt.managers.schedule_policy",
        "PrefillAdder.add_one_req",
        ("self", "req", "has_chunked_req", "truncation_align_size"),
        "a prompt that goes to the host needs pages and staging",
    ),
    Seam(
        "sglang.srt.managers.schedule_policy",
        "PrefillAdder.add_chunked_req",
        ("self", "req"),
        "the next chunk fits what is there",
    ),
    Seam(
        "sglang.srt.managers.schedule_policy",
        "PrefillAdder.add_one_req_ignore_eos",
        ("self", "req"),
        "without a radix cache it simulates the end of running requests: those of one pool",
    ),
    Seam("sglang.srt.managers.schedule_policy", "PrefillAdder.cur_rem_tokens", (), "what is left now"),
    Seam(
        "sglang.srt.managers.schedule_policy",
        "SchedulePolicy._sort_by_dfs_weight",
        ("waiting_queue", "tree_cache"),
        "an order of the queue that walks the policy's tree_cache: the host's, when prompts go there",
    ),
    Seam(
        "sglang.srt.managers.schedule_policy",
        "PrefillAdder.preempt_to_schedule",
        ("self", "req", "server_args"),
        "retracts requests of lower priority, but for those in preempt_list: whoever lives in the other pool",
    ),
    Seam(
        "sglang.srt.managers.scheduler",
        "Scheduler._set_or_validate_priority",
        ("self", "req"),
        "with --enable-priority-scheduling every request has a priority: by it requests move between the pools",
    ),
    Seam(
        "sglang.srt.session.session_controller",
        "Session.__init__",
        ("self", "streaming"),
        "a streaming session keeps device KV between turns",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "Req.set_finish_with_abort",
        ("self", "error_msg"),
        "a prompt that fits nowhere is told so",
    ),
    Seam("sglang.srt.managers.schedule_policy", "PrefillAdder._lock_node", ("self", "last_node"), "a prefix in use"),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "alloc_for_decode",
        ("batch", "token_per_req"),
        "gives every row of a decode batch a device slot: we put ours there, host rows get slot 0",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "alloc_for_extend",
        ("batch",),
        "gives a prefill batch device slots: prompts that go to the host get host pages and staging slots",
    ),
    Seam(
        "sglang.srt.mem_cache.allocation",
        "alloc_req_slots",
        ("req_to_token_pool", "reqs", "tree_cache"),
        "the same needs request slots all the same",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "ReqKvInfo",
        ("kv_allocated_len", "swa_evicted_seqlen"),
        "a request that runs has one, a host row too",
    ),
    Seam("sglang.srt.managers.schedule_policy", "CLIP_MAX_NEW_TOKENS", (), "what admission expects of a long answer"),
    Seam(
        "sglang.srt.mem_cache.chunk_cache",
        "ChunkCache",
        ("params",),
        "a tree without anything in it, for admission to a host pool without a radix cache",
    ),
    Seam(
        "sglang.srt.managers.schedule_policy",
        "PrefillAdder.__init__",
        ("self", "page_size", "tree_cache", "token_to_kv_pool_allocator", "running_batch"),
        "counts available_size and evictable_size of these two: the host's, when prompts go there",
    ),
    Seam(
        "sglang.srt.managers.schedule_policy",
        "PrefillAdder._get_running_request_total_token_offset",
        ("self", "req"),
        "the future of a running request, counted in the pool where it lives",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "ScheduleBatch.prepare_for_decode",
        ("self",),
        "host rows get room for their next token",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "ScheduleBatch.new_tokens_required_next_decode",
        ("self", "selected_indices"),
        "host rows need no device memory",
    ),
    Seam(
        "sglang.srt.managers.schedule_batch",
        "ScheduleBatch.check_decode_mem",
        ("self", "selected_indices"),
        "host rows need host memory",
    ),
    Seam(
        "sglang.srt.mem_cache.common",
        "release_kv_cache",
        ("req", "tree_cache", "is_insert"),
        "a request's end: asks the tree to free committed tokens (none of a host row's), then frees the request slot",
    ),
    Seam(
        "sglang.srt.mem_cache.radix_cache",
        "RadixCache.cache_finished_req",
        ("self", "req", "is_insert", "kv_len_to_handle"),
        "frees the device KV of a row that moves to the host",
    ),
    Seam(
        "sglang.srt.mem_cache.radix_cache",
        "RadixCache.__init__",
        ("self", "params"),
        "the host's prefix cache is one of these, over pages of the host pool",
    ),
    Seam(
        "sglang.srt.mem_cache.radix_cache",
        "RadixCache.match_prefix",
        ("self", "params"),
        "a prefix in host memory counts as a hit too",
    ),
    Seam(
        "sglang.srt.mem_cache.radix_cache",
        "RadixCache.init_load_back",
        ("self", "params"),
        "admission calls it where host_hit_length is above 0: the prefix comes back to the device",
    ),
    Seam(
        "sglang.srt.mem_cache.radix_cache",
        "RadixCache.insert",
        ("self", "params"),
        "puts what has come back into the device's tree",
    ),
    Seam("sglang.srt.mem_cache.radix_cache", "RadixCache.reset", ("self",), "/flush_cache empties both trees"),
    Seam(
        "sglang.srt.mem_cache.radix_cache",
        "RadixCache.evict",
        ("self", "params"),
        "gives what it evicts to free_segment of its allocator: the host's gets pages",
    ),
    Seam(
        "sglang.srt.mem_cache.radix_cache",
        "RadixCache._delete_leaf",
        ("self", "node"),
        "evict calls it for each leaf, whose tokens go on in host memory",
    ),
    Seam("sglang.srt.mem_cache.radix_cache", "RadixCache.all_values_flatten", ("self",), "the pages that a tree owns"),
    Seam("sglang.srt.managers.schedule_batch", "Req.needs_host_load_back", ("self",), "asks host_hit_length"),
    Seam(
        "sglang.srt.mem_cache.memory_pool",
        "ReqToTokenPool.free",
        ("self", "req"),
        "the end of a request in either pool",
    ),
    Seam(
        "sglang.srt.mem_cache.kv_cache_configurator",
        "KVCacheConfigurator._build_req_to_token_pool",
        ("self", "max_num_reqs"),
        "the only place that names the request pool's class",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner",
        "ModelRunner._init_post_memory_pool_components",
        ("self",),
        "the device pool exists, attention backends and graphs do not: the host pool is made here",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner",
        "ModelRunner.init_attention_backends",
        ("self",),
        "the user's backend becomes hybrid",
    ),
    Seam(
        "sglang.srt.model_executor.model_runner",
        "ModelRunner.forward",
        ("self", "forward_batch"),
        "a step with host rows runs eagerly, inside its hand-offs",
    ),
    Seam(
        "sglang.srt.mem_cache.memory_pool",
        "MHATokenToKVPool._store_kv_layer",
        ("self", "layer_idx", "loc", "cache_k", "cache_v"),
        "finds a layer's buffers in k_buffer and v_buffer, within size: in a prefill to the host the staging region's",
    ),
    Seam(
        "sglang.srt.environ",
        "envs.SGLANG_EAGER_INPUT_NO_COPY",
        (),
        "a prompt that is larger than the device pool may be larger than the eager runner's buffers",
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.new_token_ratio_tracker",
        "NewTokenRatioTracker",
        (),
        "its current is what admission reserves of the output to come: the planner counts host memory likewise",
    ),
    Seam(
        "sglang.srt.layers.attention.base_attn_backend",
        "AttentionBackend.forward_extend",
        ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
        "one layer's attention of a prefill batch",
    ),
    Seam(
        "sglang.srt.layers.attention.base_attn_backend",
        "AttentionBackend.forward_decode",
        ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
        "one layer's attention of a decode batch",
    ),
    Seam(
        "sglang.srt.managers.tp_worker",
        "TpModelWorker.forward_batch_generation",
        ("self", "batch", "forward_batch"),
        "knows which rows of the batch are host rows; also takes a ForwardBatch alone, runs the model runner and "
        "samples: that of a prefill's second lane, which has run by then",
    ),
    Seam(
        "sglang.srt.managers.tp_worker",
        "TpModelWorker.get_worker_info",
        ("self",),
        "longest request: bound to the device pool by SGLang",
    ),
    Seam(
        "sglang.srt.managers.tokenizer_manager",
        "TokenizerManager.resolved_config_dict",
        ("self", "base"),
        "/server_info merges it at its top level, after it has awaited get_internal_state",
    ),
    Seam(
        "sglang.srt.managers.tokenizer_manager",
        "TokenizerManager.get_internal_state",
        ("self",),
        "answers of all data-parallel ranks",
    ),
    Seam(
        "sglang.srt.managers.tokenizer_manager",
        "kill_process_tree",
        (),
        "ends the server by SIGKILL on itself; replaced so that the exit code says how it ended",
    ),
    Seam("sglang.srt.entrypoints.engine", "kill_process_tree", (), "the same, while workers start"),
    Seam("sglang.srt.entrypoints.http_server", "kill_process_tree", (), "the same, when the warm-up fails"),
    Seam(
        "uvicorn", "Server.handle_exit", ("self", "sig", "frame"), "its signal handler: replaced until warm-up is over"
    ),
    Seam(
        "sglang.srt.entrypoints.engine",
        "init_tokenizer_manager",
        ("server_args", "port_args", "TokenizerManagerClass"),
        "takes our tokenizer manager",
    ),
    Seam(
        "sglang.srt.managers.load_snapshot",
        "shm_path_for",
        ("ipc_name",),
        "names the shared-memory file that a killed server leaves behind",
    ),
    Seam(
        "sglang.srt.entrypoints.http_server",
        "launch_server",
        ("server_args", "init_tokenizer_manager_func", "run_scheduler_process_func", "launch_callback"),
        "hands our functions to the processes it spawns",
    ),
)


def sglang_version() -> str:
    """The installed SGLang's version. Raises UsageError if SGLang is missing or not a supported release."""
    wanted = " or ".join(SUPPORTED_SGLANG)
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            f"sglang_neo {__version__} extends SGLang {wanted}, which is not installed; "
            "run `make setup`, or `pip install 'sglang-neo[cuda]'` on a CUDA machine"
        ) from None
    if found not in SUPPORTED_SGLANG:
        raise UsageError(
            f"sglang_neo {__version__} extends SGLang {wanted}, but {found} is installed; "
            f"run `pip install sglang=={SUPPORTED_SGLANG[-1]}`"
        )
    return found


def check_seams(seams: tuple[Seam, ...] = SEAMS) -> None:
    """Raises SeamError if a name or parameter that we rely on is not in the installed SGLang."""
    for seam in seams:
        target: Any = importlib.import_module(seam.module)
        for part in seam.name.split("."):
            target = getattr(target, part, None)
        if target is None:
            raise SeamError(f"SGLang has no {seam.module}.{seam.name}, which sglang_neo needs: {seam.reason}")
        if seam.parameters:
            missing = [p for p in seam.parameters if p not in inspect.signature(target).parameters]
            if missing:
                raise SeamError(f"SGLang's {seam.module}.{seam.name} lacks {', '.join(missing)} ({seam.reason})")


def running_classes(scheduler: Any) -> dict[str, str]:
    """Qualified names of the classes that really run in this scheduler process, by role."""
    runner = scheduler.tp_worker.model_runner
    objects = {
        "scheduler": scheduler,
        "model_worker": scheduler.tp_worker,
        "model_runner": runner,
        # Absent ones are named like foreign ones: a scheduler that is not ours need not have them.
        "token_manager": getattr(scheduler, "token_to_kv_pool_allocator", None),
        "request_pool": getattr(scheduler, "req_to_token_pool", None),
    }
    return {role: f"{type(o).__module__}.{type(o).__qualname__}" for role, o in objects.items()}


def check_running(scheduler: Any) -> None:
    """Raises SeamError unless every object of ``running_classes`` is ours and both owners share the token manager."""
    foreign = {role: name for role, name in running_classes(scheduler).items() if not name.startswith("sglang_neo.")}
    if foreign:
        found = ", ".join(f"{role} is {name}" for role, name in foreign.items())
        raise SeamError(f"plain SGLang classes are running where sglang_neo's should: {found}")
    runner = scheduler.tp_worker.model_runner
    if runner.token_to_kv_pool_allocator is not scheduler.token_to_kv_pool_allocator:
        raise SeamError("scheduler and model runner own different token managers")
    if scheduler.token_to_kv_pool_allocator.token_manager.has_host:
        graphs = getattr(runner, "decode_cuda_graph_runner", None)
        if type(graphs).__name__ == "DecodeCudaGraphRunner":
            raise SeamError("SGLang's DecodeCudaGraphRunner runs where sglang_neo's should")
        if not hasattr(type(runner.attn_backend), "neo_host_attention"):
            raise SeamError(f"the attention backend {type(runner.attn_backend).__qualname__} is not hybrid")
        module = importlib.import_module("sglang.srt.managers.schedule_batch")
        if module.alloc_for_decode.__module__ != "sglang_neo.batching":
            raise SeamError("SGLang's alloc_for_decode runs where sglang_neo's should")
