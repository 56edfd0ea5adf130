"""How many slots deferred steps have where the user does not say: as many rows as the CPU finishes within a step.

This must be known before graphs are captured, and so before the planner's tables can be measured. What bounds a decode
step of the usual size is reading the weights, so its time is that of reading as many bytes; the CPU's time is that of
the real kernel over the real pool. How many of these slots are used in a step, the planner decides by its tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from cpu_kernels.attention import Plan
from cpu_kernels.workers import WorkerPool
from sglang_neo.hybrid.geometry import AttentionGeometry
from sglang_neo.planning import inequalities
from sglang_neo.planning.inequalities import ROW_TOKENS

#: Usual host rows that are timed together.
_ROWS = 8
#: Bytes that are read to see how fast the device reads, and runs of which the fastest counts.
_READ_BYTES, _RUNS = 256 << 20, 4


def usual_slots(runner: Any, geometry: AttentionGeometry, pool: Any, workers: WorkerPool) -> int:
    """Slots that this machine has a use for; 0: the CPU does not finish a single row in a step, or there is not the
    room for as many rows as one slot takes.

    Args:
        runner: SGLang's model runner, its model loaded.
        pool: of host memory; what lies in its pages is read, and means nothing.
    """
    tokens = min(ROW_TOKENS, pool.pages * pool.geometry.page_tokens)
    step, row = _step_seconds(runner), _row_seconds(geometry, pool, workers, tokens) * ROW_TOKENS / tokens
    return inequalities.usual_slots(
        step,
        row,
        geometry.layers,
        host_rows=runner.max_running_requests,
        rows_that_fit=pool.pages * pool.geometry.page_tokens / ROW_TOKENS,
        graph_slots=min(pool.geometry.page_tokens, runner.max_running_requests - 1),
    )


def _step_seconds(runner: Any) -> float:
    """Of reading all weights once, from the device's memory."""
    weights = [parameter.detach() for parameter in runner.model.parameters()]
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    pieces, read = [], 0
    for weight in sorted(weights, key=lambda weight: -weight.numel()):
        pieces.append(weight.reshape(-1).view(torch.uint8)[: _READ_BYTES - read])
        read += pieces[-1].numel()
        if read >= _READ_BYTES:
            break
    target = torch.empty(max(len(piece) for piece in pieces), dtype=torch.uint8, device=runner.device)

    def copy() -> None:
        for piece in pieces:
            target[: len(piece)].copy_(piece)

    return _fastest(copy, runner.device) / (2 * read) * size  # a copy reads and writes


def _row_seconds(geometry: AttentionGeometry, pool: Any, workers: WorkerPool, tokens: int) -> float:
    """Of the CPU's attention to one row in all layers, among others."""
    page = pool.geometry.page_tokens
    needed = -(-tokens // page)
    rows = max(1, min(_ROWS, pool.pages // needed))
    plan = Plan(
        pool.kernel_pool,
        [tokens] * rows,
        [range(row * needed, (row + 1) * needed) for row in range(rows)],
        geometry.q_heads,
        scale=geometry.scale,
        soft_cap=geometry.soft_cap,
        threads=workers.threads,
        q_dtype=geometry.dtype,
    )
    q = torch.zeros((rows, geometry.q_heads, geometry.head_dim), dtype=getattr(torch, geometry.dtype))
    out = torch.zeros_like(q)
    jobs = plan.jobs(range(geometry.layers), *(x.expand(geometry.layers, *x.shape) for x in (q, out)))

    def attend() -> None:
        for layer in range(geometry.layers):
            workers.run(jobs[layer])

    return _fastest(attend) / rows


def _fastest(run: Callable[[], None], device: Any = "cpu") -> float:
    def once() -> float:
        begin = time.perf_counter()
        run()
        if str(device).startswith("cuda"):
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    return min(once() for _ in range(_RUNS))
