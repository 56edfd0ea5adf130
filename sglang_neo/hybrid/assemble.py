"""Building the host side of a model runner: pool, copies, workers, hand-off; or the reason why there is none."""

from __future__ import annotations

import functools
import logging
import os
import time
from dataclasses import dataclass
from typing import Any

from cpu_kernels import calibration
from cpu_kernels.workers import WorkerPool
from sglang_neo import affinity
from sglang_neo.args import LANE_MODES
from sglang_neo.errors import UsageError
from sglang_neo.host_kv import limits
from sglang_neo.host_kv.device_pool import DeviceKV, device_kv
from sglang_neo.host_kv.memory import HostMemory, HostMemoryError, largest_host_memory
from sglang_neo.host_kv.pages import HostPages
from sglang_neo.host_kv.pool import HostKVPool, UnsupportedKV
from sglang_neo.host_kv.transfer import KVTransfer
from sglang_neo.hybrid.deferred import DeferredAttention, hook_layers, not_deferrable
from sglang_neo.hybrid.geometry import AttentionGeometry, NoCpuAttention, attention_geometry, attention_layers
from sglang_neo.hybrid.host_attention import HostAttention, worker_pool
from sglang_neo.hybrid.pipelined import PipelinedAttention
from sglang_neo.hybrid.prefill import HostPrefill
from sglang_neo.hybrid.slots import usual_slots
from sglang_neo.ranks import least_of_all_ranks
from sglang_neo.refusals import gpu_only_reasons

logger = logging.getLogger(__name__)


class GpuOnly(Exception):
    """This server has no host rows; the message says why."""


@dataclass
class HostSide:
    """What a model runner has beside SGLang's device pool."""

    memory: HostMemory
    pool: HostKVPool
    pages: HostPages
    transfer: KVTransfer
    attention: HostAttention
    prefill: HostPrefill
    #: For deferred steps; ``attention`` itself where there are no others.
    deferred: DeferredAttention | None
    first_layer: int

    def close(self) -> None:
        """Ends the workers, then gives the memory back; harmless to repeat."""
        self.attention.close()
        self.memory.close()


def host_side(runner: Any) -> HostSide:
    """The host side of an SGLang model runner whose KV pool exists.

    Raises GpuOnly if the model or the flags allow no host rows, or nothing is left to have them on.
    """
    args = runner.server_args
    if args.neo_mode == "gpu-only":
        raise GpuOnly("--neo-mode gpu-only")
    reasons = gpu_only_reasons(args)
    if reasons:
        raise GpuOnly("; ".join(reasons))
    if runner.is_draft_worker:
        raise GpuOnly("a draft model has no host rows")
    layers = attention_layers(runner.model)
    try:
        geometry = attention_geometry(layers, runner.dtype)
        if args.neo_host_kv_dtype not in ("auto", "int8", geometry.dtype):
            raise UsageError(
                f"--neo-host-kv-dtype {args.neo_host_kv_dtype} does not go with a model in {geometry.dtype}: "
                f"give auto, {geometry.dtype} or int8"
            )
        device = device_kv(runner.token_to_kv_pool)
        memory, pool = _pool(runner, device)
    except (NoCpuAttention, UnsupportedKV) as missing:
        raise GpuOnly(str(missing)) from None
    pages = pool.pages
    workers = _workers(runner)
    affinity.leave_to_workers(args, workers.cores, [os.getpid()])
    deferred = _deferred_slots(runner, geometry, pool, workers)
    common = geometry, pool, workers, str(runner.device), runner.dtype
    attention: HostAttention | None = None
    with_slots: DeferredAttention | None = None
    if not deferred or args.neo_mode == "auto":
        kind = PipelinedAttention if _pipelined(args) else HostAttention
        attention = kind(*common, runner.req_to_token_pool.size, args.neo_watchdog_timeout)
    if deferred:
        pages -= 1
        with_slots = DeferredAttention(
            *common,
            args.neo_watchdog_timeout,
            slots=deferred,
            hidden_size=runner.model_config.hidden_size,
            spare_page=pages,
            record=args.neo_check_integrity,
            beside=attention,
        )
        hook_layers(runner.model, with_slots)
        attention = attention or with_slots
    assert attention is not None
    transfer = KVTransfer(pool, device.k, device.v)
    host_tokens = pages * pool.geometry.page_tokens
    prefill = HostPrefill(
        runner.token_to_kv_pool,
        device,
        transfer,
        limits.staging_tokens(
            asked=args.neo_host_prompt_tokens, context=runner.model_config.context_len, host_tokens=host_tokens
        ),
        runner.page_size,
    )
    logger.info(
        f"Host KV Cache is allocated. dtype: {pool.geometry.dtype}, #tokens: {host_tokens}, "
        f"KV size: {pool.bytes / (1 << 30):.2f} GB, CPU attention threads: {workers.threads}; "
        f"staging of prompts on the device: #tokens: {prefill.tokens}, {prefill.bytes / (1 << 30):.2f} GB"
    )
    return HostSide(memory, pool, HostPages(pages), transfer, attention, prefill, with_slots, layers[0].layer_id)


def _deferred_slots(runner: Any, geometry: AttentionGeometry, pool: HostKVPool, workers: WorkerPool) -> int:
    """How many slots deferred steps have; 0 if there are none, and the reason is logged."""
    args = runner.server_args
    asked: int | None = args.neo_deferred_slots
    if asked == 0 or (asked is None and args.neo_mode not in ("auto", "deferred")):
        return 0
    reason = not_deferrable(runner.model, args)
    slots = asked or 0
    if asked is None and reason is None and pool.pages > 1:
        slots = least_of_all_ranks(runner, usual_slots(runner, geometry, pool, workers))
        if args.neo_mode == "deferred":
            slots = max(slots, 1)
        if not slots:
            logger.info("sglang_neo: no deferred mode: there is no time or no room for a row in each layer")
            return 0
        logger.info(f"sglang_neo: {slots} deferred slots: what the CPU finishes in a step (--neo-deferred-slots)")
    if slots >= runner.max_running_requests:
        reason = f"{slots} slots leave no room below --max-running-requests {runner.max_running_requests}"
    if slots > pool.geometry.page_tokens:
        reason = f"there can be up to {pool.geometry.page_tokens} slots, not {slots}"
    if pool.pages < 2:
        reason = "host memory has a single page"
    if reason is None:
        return slots
    if asked is None and args.neo_mode == "auto":
        logger.info(f"sglang_neo: no deferred mode: {reason}")
    else:
        logger.warning(f"sglang_neo: no deferred mode, host rows run in mode sync: {reason}")
    return 0


def _pipelined(args: Any) -> bool:
    """Whether steps have two lanes; if they were asked for and cannot have them, the reason is logged."""
    if args.neo_mode not in ("auto", *LANE_MODES):
        return False
    if not args.enable_lora:
        return True
    logger.warning("sglang_neo: no pipelined mode, host rows run in mode sync: LoRA's state is that of one batch")
    return False


def _pool(runner: Any, device: DeviceKV) -> tuple[HostMemory, HostKVPool]:
    args = runner.server_args
    geometry = device.geometry(args.neo_host_kv_dtype)
    size = limits.host_pool_bytes(
        size_gb=args.neo_host_kv_size,
        ratio=args.neo_host_kv_ratio,
        available=least_of_all_ranks(runner, limits.available_host_memory()),
        gpu_pool_bytes=device.bytes,
        ranks=args.tp_size * args.dp_size,
        page_bytes=geometry.bytes_per_page,
    )
    logger.info(f"Host KV Cache: {size.bytes / 1e9:.2f} GB, {size.why}")
    pin = device.device.type == "cuda"
    threads = len(os.sched_getaffinity(0))
    asked = geometry.pages_for_bytes(size.bytes)
    memory, lacking = None, "another rank has no host memory"
    try:
        memory = largest_host_memory(
            asked * geometry.bytes_per_page,
            geometry.bytes_per_page,
            functools.partial(HostMemory, pin=pin, threads=threads),
        )
    except HostMemoryError as error:
        lacking = str(error)
    pages = min(asked, geometry.pages_for_bytes(len(memory.tensor))) if memory is not None else 0
    pages = least_of_all_ranks(runner, pages)
    if memory is None or pages < 1:
        if memory is not None:
            memory.close()
        raise GpuOnly(lacking)
    return memory, HostKVPool(geometry, pages, memory)


def default_threads(cores: int, ranks: int) -> int:
    """CPU attention threads of a machine, at least one.

    Workers never yield while steps run. A worker that has to share its core is off it for milliseconds, and the
    hand-off that it works at is late by as much: so every rank's scheduler has a core, and one core in eight, two at
    most, is left for what turns text into tokens and back and answers clients.
    """
    return max(1, cores - ranks - min(2, cores // 8))


def _workers(runner: Any) -> WorkerPool:
    args = runner.server_args
    ranks = args.tp_size * args.dp_size
    threads = args.neo_cpu_threads or default_threads(len(os.sched_getaffinity(0)), ranks)
    began = time.perf_counter()
    tuning = calibration.ensure(threads=threads)  # before threads are pinned and spin
    logger.info(f"CPU attention kernels: {tuning}, known after {time.perf_counter() - began:.1f} s")
    return worker_pool(max(1, threads // ranks))
