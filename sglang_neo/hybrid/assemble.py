"""Building the host side of a model runner: pool, copies, workers, hand-off; or the reason why there is none."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

import torch

from cpu_kernels.cores import NotEnoughCores
from cpu_kernels.workers import WorkerPool
from sglang_neo.hybrid.geometry import AttentionGeometry, NoCpuAttention, attention_geometry, attention_layers
from sglang_neo.hybrid.host_attention import HostAttention
from sglang_neo.host_kv import limits
from sglang_neo.host_kv.pages import HostPages
from sglang_neo.host_kv.pool import HostKVPool, PoolGeometry
from sglang_neo.host_kv.transfer import KVTransfer
from sglang_neo.refusals import gpu_only_reasons

logger = logging.getLogger(__name__)


class GpuOnly(Exception):
    """This server has no host rows; the message says why."""


@dataclass
class HostSide:
    """What a model runner has beside SGLang's device pool."""

    pool: HostKVPool
    pages: HostPages
    transfer: KVTransfer
    attention: HostAttention
    first_layer: int

    def close(self) -> None:
        """Ends the workers, then gives the memory back; harmless to repeat."""
        self.attention.close()
        self.pool.close()


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
    except NoCpuAttention as missing:
        raise GpuOnly(str(missing)) from None
    device_pool = runner.token_to_kv_pool
    pool = _pool(runner, geometry, device_pool)
    workers = _workers(runner)
    transfer = KVTransfer(pool, device_pool.k_buffer, device_pool.v_buffer, runner.device)
    attention = HostAttention(geometry, pool, workers, runner.device, runner.dtype)
    logger.info(
        f"Host KV Cache is allocated. dtype: {pool.geometry.dtype}, #tokens: {pool.pages * pool.page_tokens}, "
        f"size: {pool.bytes / (1 << 30):.2f} GB; CPU attention: {workers.threads} threads"
    )
    return HostSide(pool, HostPages(pool.pages), transfer, attention, layers[0].layer_id)


def _pool(runner: Any, geometry: AttentionGeometry, device_pool: Any) -> HostKVPool:
    args = runner.server_args
    dtype = geometry.dtype if args.neo_host_kv_dtype == "auto" else args.neo_host_kv_dtype
    shape = PoolGeometry(geometry.layers, geometry.kv_heads, geometry.head_dim, dtype)
    k_bytes, v_bytes = device_pool.get_kv_size_bytes()
    budget = limits.host_pool_bytes(
        size_gb=args.neo_host_kv_size,
        ratio=args.neo_host_kv_ratio,
        device_pool_bytes=int(k_bytes + v_bytes),
        ranks=args.tp_size * args.dp_size,
    )
    pages = _same_in_all_ranks(runner, shape.pages_for(budget))
    if pages < 1:
        raise GpuOnly(f"{budget / 1e9:.2f} GB of host memory hold no page of KV")
    pin = str(runner.device).startswith("cuda")
    return HostKVPool.create(shape, pages, pin=pin, threads=len(os.sched_getaffinity(0)))


def _same_in_all_ranks(runner: Any, pages: int) -> int:
    """The smallest of all tensor-parallel ranks: page numbers must mean the same in each."""
    if runner.ps.tp_size == 1:
        return pages
    smallest = torch.tensor(pages, dtype=torch.int64)
    torch.distributed.all_reduce(smallest, op=torch.distributed.ReduceOp.MIN, group=runner.tp_group.cpu_group)
    return int(smallest.item())


def _workers(runner: Any) -> WorkerPool:
    """Threads on cores of their own; on cores shared with others where none are free, which is said."""
    args = runner.server_args
    ranks = args.tp_size * args.dp_size
    cores = len(os.sched_getaffinity(0))
    # Every rank's scheduler needs a core for itself, where there are enough.
    share = max(1, (args.neo_cpu_threads or cores - ranks) // ranks)
    try:
        return WorkerPool.on_claimed_cores(share, reserve=0)
    except (NotEnoughCores, RuntimeError) as error:
        logger.warning(f"CPU attention runs on {share} thread(s) that share cores with others: {error}")
        return WorkerPool(share)
