"""What a hand-off costs a CUDA graph, from the GPU to the CPU workers and back.

    python -m bench.handoff_gpu --threads 14 --out FILE

Three graphs of the same layers are replayed in turn. In each layer all of them copy q, k and v of the host rows into
the outbox and the inbox back, in pinned memory:

- ``copies`` does no more;
- ``operations`` also writes the ready flag and waits for a done flag that is up already, by stream memory operations:
  what the graph pays for the nodes;
- ``handoffs`` writes, waits and clears as the protocol says, and cpu_kernels' HandoffService appends k and v and
  computes the attention meanwhile.

The cost of one hand-off is (handoffs - copies) / layers. The last layer's output is compared with the reference first.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from bench.record import provenance
from cpu_kernels.attention import HostPool, Plan
from cpu_kernels.workers import Handoffs, HandoffService, Step, WorkerPool

_HEADER = 64  # bytes of an outbox before its rows
_WAIT_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ


@triton.jit
def _copy32(source, target, words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    # Volatile: pinned memory that the CPU has rewritten must not come from a cache.
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < words, volatile=True), mask=i < words)


class StreamOperations:
    """Writes and waits of 32-bit values in a stream, by the CUDA driver; captured like kernels."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        self._write, self._wait = driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2
        for function in (self._write, self._wait):
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        self._stream = stream.cuda_stream

    def write(self, address: int, value: int) -> None:
        self._checked(self._write(self._stream, address, value, 0))

    def wait(self, address: int, value: int) -> None:
        self._checked(self._wait(self._stream, address, value, _WAIT_GEQ))

    @staticmethod
    def _checked(code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA driver error {code}: stream memory operations are needed")


class Boxes:
    """Outboxes, inboxes and flags of all layers in pinned memory, and their counterparts on the device."""

    def __init__(self, layers: int, rows: int, q_heads: int, kv_heads: int, head_dim: int) -> None:
        self.layers, self.rows = layers, rows
        self.shape = (q_heads, kv_heads, head_dim)
        self.row_bytes = (q_heads + 2 * kv_heads) * head_dim * 2
        self.answer_bytes = q_heads * head_dim * 2
        self.outbox = torch.zeros(layers, (_HEADER + rows * self.row_bytes) // 4, dtype=torch.int32).pin_memory()
        self.inbox = torch.zeros(layers, rows * self.answer_bytes // 4, dtype=torch.int32).pin_memory()
        self.flags = torch.zeros(2, layers, 16, dtype=torch.int32).pin_memory()  # ready, done: a cache line each
        self.packed = torch.zeros_like(self.outbox[0], device="cuda")  # header and rows
        self.rows_on_device().normal_()
        self.answer = torch.zeros_like(self.inbox[0], device="cuda")

    def rows_on_device(self) -> torch.Tensor:
        """[rows, q, k, v] bf16."""
        return self.packed[_HEADER // 4 :].view(torch.bfloat16).view(self.rows, -1)

    def ready(self, layer: int) -> int:
        return self.flags[0, layer].data_ptr()

    def done(self, layer: int) -> int:
        return self.flags[1, layer].data_ptr()

    def views(self) -> dict[str, Any]:
        """q, k, v and out of all layers for Plan.jobs."""
        q_heads, kv_heads, dim = self.shape
        base, layer_bytes = self.outbox.data_ptr() + _HEADER, self.outbox.stride(0) * 4

        def packed(first: int, heads: int) -> tuple[Any, ...]:
            strides = (layer_bytes, self.row_bytes, dim * 2, 2)
            return base + first * dim * 2, (self.layers, self.rows, heads, dim), strides, "bfloat16"

        out = (self.inbox.data_ptr(), (self.layers, self.rows, q_heads, dim), None, "bfloat16")
        return dict(q=packed(0, q_heads), k=packed(q_heads, kv_heads), v=packed(q_heads + kv_heads, kv_heads), out=out)


def _copy(source: torch.Tensor, target: torch.Tensor, by_kernel: bool) -> None:
    if by_kernel:
        words = source.numel()
        _copy32[(triton.cdiv(words, 2048),)](source, target, words, BLOCK=2048, num_warps=4)
    else:
        target.copy_(source, non_blocking=True)


def capture(boxes: Boxes, kind: str, by_kernel: bool, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of all layers; ``kind`` as in the module's description."""
    operations = StreamOperations(stream)

    def layer_work(layer: int, flags: bool) -> None:
        _copy(boxes.packed, boxes.outbox[layer], by_kernel)
        if flags and kind != "copies":
            operations.write(boxes.ready(layer), 1)
            operations.wait(boxes.done(layer), 1)
            operations.write(boxes.done(layer), 0 if kind == "handoffs" else 1)
        _copy(boxes.inbox[layer], boxes.answer, by_kernel)

    with torch.cuda.stream(stream):
        layer_work(0, flags=False)  # compiles
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        boxes.packed[:1].add_(1)  # the step's number
        for layer in range(boxes.layers):
            layer_work(layer, flags=True)
    return graph


def replay_ms(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        begin.record()
        graph.replay()
        end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def relative_error(pool: HostPool, boxes: Boxes, tables: list[list[int]], tokens: int) -> float:
    """Of the last layer's answer, as a fraction of its largest value."""
    q_heads, kv_heads, dim = boxes.shape
    sent = boxes.rows_on_device().float().cpu().view(boxes.rows, -1, dim)
    got = boxes.answer.view(torch.bfloat16).float().cpu().view(boxes.rows, q_heads, dim)
    want = torch.empty_like(got)
    for row, table in enumerate(tables):
        at = [table[t // 64] * 64 + t % 64 for t in range(tokens)]
        k, v = (torch.empty(tokens, kv_heads, dim) for _ in range(2))
        pool.read(boxes.layers - 1, at, k, v)
        q = sent[row, :q_heads].view(kv_heads, -1, dim)
        scores = torch.einsum("hgd,thd->hgt", q, k) * dim**-0.5
        want[row] = torch.einsum("hgt,thd->hgd", scores.softmax(-1), v).reshape(q_heads, dim)
    return float((got - want).abs().max() / want.abs().max())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    q_heads, kv_heads, dim = (int(x) for x in args.shape.split(","))
    boxes = Boxes(args.layers, args.rows, q_heads, kv_heads, dim)
    pages = -(-args.tokens // 64)
    memory = torch.zeros(HostPool.bytes_needed(args.layers, args.rows * pages, kv_heads, dim), dtype=torch.uint8)
    pool = HostPool(memory, args.layers, args.rows * pages, kv_heads, dim)
    tables = [list(range(row * pages, (row + 1) * pages)) for row in range(args.rows)]
    filling = torch.randn(args.rows * pages * 64, kv_heads, dim).to(torch.bfloat16)
    for layer in range(args.layers):
        pool.write(layer, range(len(filling)), filling, filling)
    stream = torch.cuda.Stream()
    graphs = {k: capture(boxes, k, args.transfer == "kernel", stream) for k in ("copies", "operations", "handoffs")}
    usable = os.sched_getaffinity(0)
    workers = WorkerPool.on_claimed_cores(args.threads, reserve=args.reserve)
    service = HandoffService(workers, timeout_s=10)
    os.sched_setaffinity(0, usable - set(workers.cores) or usable)
    plan = Plan(pool, [args.tokens] * args.rows, tables, q_heads, threads=workers.threads)
    flags = Handoffs()
    for layer in range(args.layers):
        flags.add(None, boxes.ready(layer), boxes.done(layer), boxes.outbox[layer].data_ptr(), layer=layer)
    handoffs = flags.with_jobs(plan.jobs(range(args.layers), **boxes.views()))
    number = int(boxes.packed[0])
    epoch = 0

    def prepare(kind: str) -> None:
        nonlocal number, epoch
        number += 1
        boxes.flags[1].fill_(kind == "operations")
        if kind == "handoffs":
            boxes.flags.zero_()
            epoch += 1
            service.submit(Step(epoch, number, handoffs))

    took: dict[str, list[float]] = {kind: [] for kind in graphs}
    for repetition in range(args.repetitions + 3):
        for kind, graph in graphs.items():
            prepare(kind)
            ms = replay_ms(graph, stream)
            if repetition >= 3:  # the first warm up
                took[kind].append(ms)
        if not service.wait_epoch(epoch, 10) or service.outcome(epoch) != "complete":
            raise RuntimeError(f"the hand-offs failed: {service.status().fault}")
        if repetition == 0 and (error := relative_error(pool, boxes, tables, args.tokens)) > 1e-2:
            raise RuntimeError(f"wrong answer: error {error:.2g} of the largest value")
    status = service.status()
    service.close()
    workers.close()
    os.sched_setaffinity(0, usable)
    medians = {kind: statistics.median(times) for kind, times in took.items()}
    quartiles = statistics.quantiles(took["handoffs"], n=4)
    return {
        "rows": args.rows,
        "tokens": args.tokens,
        "layers": args.layers,
        "shape": args.shape,
        "threads": len(workers.cores) or args.threads,
        "transfer": args.transfer,
        "isa": plan.isa,
        "error": error,
        "graph_ms": {kind: round(ms, 4) for kind, ms in medians.items()},
        "us_per_handoff": round((medians["handoffs"] - medians["copies"]) / args.layers * 1e3, 3),
        "us_of_operations": round((medians["operations"] - medians["copies"]) / args.layers * 1e3, 3),
        "us_per_handoff_quartiles": [
            round((q - medians["copies"]) / args.layers * 1e3, 3) for q in (quartiles[0], quartiles[2])
        ],
        "us_ready_seen_to_done": round(status.answer_ns / status.handoffs / 1e3, 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser("python -m bench.handoff_gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1, help="of each row, the new one included")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--shape", default="64,8,128", metavar="Q_HEADS,KV_HEADS,HEAD_DIM", help="default: %(default)s")
    parser.add_argument("--threads", type=int, help="workers; default: all cores that may be claimed")
    parser.add_argument("--reserve", type=int, default=2, help="cores that no worker gets; default: %(default)s")
    parser.add_argument("--transfer", choices=("kernel", "memcpy"), default="kernel", help="how boxes are copied")
    parser.add_argument("--repetitions", type=int, default=50)
    parser.add_argument("--out", metavar="FILE", help="write the result there as JSON, too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: a CUDA GPU is needed", file=sys.stderr)
        return 2
    result = measure(args)
    print(json.dumps(result))
    if args.out:
        Path(args.out).write_text(json.dumps({**provenance(), "result": result}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
