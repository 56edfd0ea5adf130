"""What cutting a plan's work for many threads costs, and what the order of pages does.

    python -m bench.plan_cost --rows 8 --tokens 1000 --cut-for 13
    python -m bench.plan_cost --rows 64 --tokens 4096 --shared 4096 --pool-mib 256 --rounds 10

One thread runs the attention of the same rows (bf16) in several ways, in turn, layer by layer, each time over other
memory than the time before: as one item over pages in random order, as the items of a plan for ``--cut-for`` threads,
and as one item over pages in order. Measured is its CPU time, which does not count what other processes take, so it can
be compared on a machine that is busy; what they take of caches and memory does count, and hits all ways alike.

With ``--shared`` the rows' first tokens are in the same pages, which are read for many rows at a time.

Prints one line of JSON: for every way its items, cuts and partial results, the median and the quartiles of microseconds
per layer, and the ratio of the medians to the first way's.
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


def tables(rows: int, own: int, shared: int, pages: int, rng: random.Random | None) -> list[list[int]]:
    """Page ids by row, ``shared`` ones of all rows first: random ones of the pool's, or without ``rng`` in order."""
    used = shared + rows * own
    ids = rng.sample(range(pages), used) if rng is not None else list(range(used))
    return [ids[:shared] + ids[shared + row * own : shared + (row + 1) * own] for row in range(rows)]


def measure(
    rows: int,
    tokens: int,
    shared: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    cut_for: int,
    pool_mib: int,
    rounds: int,
) -> dict[str, dict[str, float]]:
    """By way: see the head of this file. ValueError where something does not fit."""
    if shared % PAGE_TOKENS or shared > tokens:
        raise ValueError(f"shared must be a multiple of {PAGE_TOKENS} and at most the tokens of a row")
    common = shared // PAGE_TOKENS
    own = -(-tokens // PAGE_TOKENS) - common
    used = common + rows * own
    groups = [(range(rows), shared)] if shared else None
    layer_bytes = HostPool.bytes_needed(1, used, kv_heads, head_dim)
    layers = 6  # between two reads of a layer four others are read, at least
    pages = max(used, (pool_mib << 20) * used // (layers * layer_bytes))
    memory = Memory(HostPool.bytes_needed(layers, pages, kv_heads, head_dim))
    pool = HostPool(memory.address, layers, pages, kv_heads, head_dim)
    box_bytes = rows * q_heads * head_dim * 2
    boxes = Memory(2 * box_bytes)
    q, out = ((boxes.address + i * box_bytes, (rows, q_heads, head_dim), None, "bfloat16") for i in range(2))
    rng = random.Random(0)
    scattered, ordered = (tables(rows, own, common, pages, order) for order in (rng, None))
    ways = {
        "one item": (scattered, 1),
        f"cut for {cut_for} threads": (scattered, cut_for),
        "pages in order": (ordered, 1),
    }
    plans = {
        name: Plan(pool, [tokens] * rows, ids, q_heads, threads=threads, prefix_groups=groups)
        for name, (ids, threads) in ways.items()
    }
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
            "cuts": plan.native.units - plans["one item"].native.units,
            "partials": plan.native.partials,
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
    parser.add_argument("--shared", type=int, default=0, metavar="TOKENS", help="of all rows; default: none")
    parser.add_argument("--shape", default="64,8,128", metavar="Q_HEADS,KV_HEADS,HEAD_DIM", help="default: %(default)s")
    parser.add_argument("--cut-for", type=int, default=13, metavar="THREADS", help="default: %(default)s")
    parser.add_argument("--pool-mib", type=int, default=1536, help="memory of six layers; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=300, help="default: %(default)s")
    args = parser.parse_args(arguments)
    try:
        q_heads, kv_heads, head_dim = map(int, args.shape.split(","))
        shape = (q_heads, kv_heads, head_dim)
        ways = measure(args.rows, args.tokens, args.shared, *shape, args.cut_for, args.pool_mib, args.rounds)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        json.dumps({"rows": args.rows, "tokens": args.tokens, "shared": args.shared, "shape": args.shape, "ways": ways})
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
