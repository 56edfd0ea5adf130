"""What cutting a plan's work for many threads costs, and what the order of pages does.

    python -m bench.plan_cost --rows 8 --tokens 1000 --cut-for 13

One thread runs the attention of the same rows (bf16) in several ways, in turn, layer by layer, each time over other
memory than the time before: as one item over pages in random order, as the items of a plan for ``--cut-for`` threads,
and as one item over pages in order. Measured is its CPU time, which does not count what other processes take, so it can
be compared on a machine that is busy; what they take of caches and memory does count, and hits all ways alike.

Prints one line of JSON: for every way its items and cuts, the median and the quartiles of microseconds per layer, and
the ratio of the medians to the first way's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence

from cpu_kernels.attention import HostPool, Plan
from cpu_kernels.probe import Memory

PAGE_TOKENS = 64


def tables(rows: int, tokens: int, pages: int, rng: random.Random | None) -> list[list[int]]:
    """Page ids by row: random ones of the pool's, or without ``rng`` the first ones, in order."""
    each = -(-tokens // PAGE_TOKENS)
    ids = rng.sample(range(pages), rows * each) if rng is not None else list(range(rows * each))
    return [ids[row * each : (row + 1) * each] for row in range(rows)]


def measure(
    rows: int, tokens: int, q_heads: int, kv_heads: int, head_dim: int, cut_for: int, pool_mib: int, rounds: int
) -> dict[str, dict[str, float]]:
    """By way: see the head of this file. ValueError where something does not fit."""
    used = rows * -(-tokens // PAGE_TOKENS)
    layer_bytes = HostPool.bytes_needed(1, used, kv_heads, head_dim)
    layers = 6  # between two reads of a layer four others are read, at least
    pages = max(used, (pool_mib << 20) * used // (layers * layer_bytes))
    memory = Memory(HostPool.bytes_needed(layers, pages, kv_heads, head_dim))
    pool = HostPool(memory.address, layers, pages, kv_heads, head_dim)
    box_bytes = rows * q_heads * head_dim * 2
    boxes = Memory(2 * box_bytes)
    q, out = ((boxes.address + i * box_bytes, (rows, q_heads, head_dim), None, "bfloat16") for i in range(2))
    rng = random.Random(0)
    scattered, ordered = tables(rows, tokens, pages, rng), tables(rows, tokens, pages, None)
    ways = {
        "one item": (scattered, 1),
        f"cut for {cut_for} threads": (scattered, cut_for),
        "pages in order": (ordered, 1),
    }
    plans = {name: Plan(pool, [tokens] * rows, ids, q_heads, threads=threads) for name, (ids, threads) in ways.items()}
    jobs = {name: [plan.job(layer, q, out) for layer in range(layers)] for name, plan in plans.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds):
        for at, name in enumerate(ways):
            job = jobs[name][(i + 2 * at) % layers]
            begin = time.thread_time_ns()
            job.run(1)
            times[name].append((time.thread_time_ns() - begin) / 1e3)
    first = statistics.median(times["one item"])
    result = {}
    for name, plan in plans.items():
        low, middle, high = statistics.quantiles(times[name], n=4)
        result[name] = {
            "items": plan.native.items,
            "cuts": plan.native.units - rows * kv_heads,
            "p25_us": round(low, 1),
            "median_us": round(middle, 1),
            "p75_us": round(high, 1),
            "ratio": round(middle / first, 3),
        }
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plan_cost", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--shape", default="64,8,128", metavar="Q_HEADS,KV_HEADS,HEAD_DIM", help="default: %(default)s")
    parser.add_argument("--cut-for", type=int, default=13, metavar="THREADS", help="default: %(default)s")
    parser.add_argument("--pool-mib", type=int, default=1536, help="memory of six layers; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=300, help="default: %(default)s")
    args = parser.parse_args(arguments)
    try:
        q_heads, kv_heads, head_dim = map(int, args.shape.split(","))
        ways = measure(args.rows, args.tokens, q_heads, kv_heads, head_dim, args.cut_for, args.pool_mib, args.rounds)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"rows": args.rows, "tokens": args.tokens, "shape": args.shape, "ways": ways}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
