"""What rows that share a prefix gain over rows that read copies of it, by the number of threads and by tuning.

    python -m bench.shared_prefix --threads 1 12 16 --variants held_tiles=4 prefix_piece_kib=1024,held_tiles=1

For each number of threads the attention of one layer (bf16) is run in several ways in turn, always over other memory
than the time before: rows with copies of their own, rows that share all their tokens, and the same with every variant
of the tuning. Results are compared with nothing: ``python -m cpu_kernels.bench --cases shared:64x4096`` does that.

Prints one line of JSON for each number of threads: for every way the median and the least of its times, how often it
ran, the items and partial results of its plan, and how many times as fast as the copies it is.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from cpu_kernels import tuning_files
from cpu_kernels.attention import HostPool, Plan, Tuning
from cpu_kernels.isa import choose_isa
from cpu_kernels.probe import Memory, worker_threads

PAGE_TOKENS = 64
LAYERS, PREFIXES = 3, 8
COPIES_EVERY = 4  # turns
VARIANTS = ("held_tiles=1", "held_tiles=4", "prefix_piece_kib=256", "prefix_piece_kib=1024", "last_round_tokens=4096")


def tuned(variant: str) -> Tuning:
    """The calibrated tuning, or the default, with NAME=VALUE,NAME=VALUE; ValueError for what is no field."""
    base = tuning_files.load(choose_isa().name) or Tuning()
    values: dict[str, Any] = {f.name: getattr(base, f.name) for f in fields(Tuning)}
    for item in filter(None, variant.split(",")):
        name, _, value = item.partition("=")
        if type(values.get(name)) is not int or not value.isdecimal():
            raise ValueError(f"{item}: not NAME=NUMBER with a field of Tuning")
        values[name] = int(value)
    return Tuning(**values)


def measure(
    rows: int,
    tokens: int,
    shape: tuple[int, int, int],
    threads: Sequence[int],
    variants: Sequence[str],
    seconds: float,
) -> Iterator[dict[str, Any]]:
    """For each number of threads what this prints; ``seconds``: how long to measure each of them."""
    q_heads, kv_heads, head_dim = shape
    tunings = {"shared": tuned(""), **{f"shared, {variant}": tuned(variant) for variant in variants}}
    each = -(-tokens // PAGE_TOKENS)
    rng = random.Random(0)
    numbers = bytearray(rng.randbytes(1 << 24))
    numbers[1::2] = bytes(0x3D | byte & 0x82 for byte in numbers[1::2])  # bf16 of magnitude 1/32 to 2
    memory = Memory(HostPool.bytes_needed(LAYERS, rows * each, kv_heads, head_dim), numbers, threads=max(threads))
    pool = HostPool(memory.address, LAYERS, rows * each, kv_heads, head_dim)
    box_bytes = rows * q_heads * head_dim * 2
    boxes = Memory(2 * box_bytes, numbers)
    q, out = ((boxes.address + i * box_bytes, (rows, q_heads, head_dim), None, "bfloat16") for i in range(2))
    pages = rng.sample(range(rows * each), rows * each)
    tables = [pages[row * each : (row + 1) * each] for row in range(rows)]
    everyone = [(range(rows), tokens)]

    def plan_of(ids: Sequence[Sequence[int]], count: int, tuning: Tuning, groups: Any = None) -> Plan:
        return Plan(pool, [tokens] * rows, ids, q_heads, threads=count, tuning=tuning, prefix_groups=groups)

    with worker_threads() as make_threads:
        for count in threads:
            plans = {"copies": [plan_of(tables, count, tunings["shared"])]}
            for name, tuning in tunings.items():  # one prefix after the other, so that none is found in a cache
                plans[name] = [plan_of([table] * rows, count, tuning, everyone) for table in tables[:PREFIXES]]
            jobs = {name: [p.job(layer, q, out) for p in of for layer in range(LAYERS)] for name, of in plans.items()}
            workers = make_threads(count)
            times: dict[str, list[float]] = {name: [] for name in plans}
            end = time.perf_counter() + seconds
            turn = 0
            while turn < 2 or time.perf_counter() < end:
                for i, (name, some) in enumerate(jobs.items()):
                    if name != "copies" or turn % COPIES_EVERY == 0:  # they take longest
                        times[name].append(1e3 * workers.seconds(some[(turn * len(jobs) + i) % len(some)]))
                turn += 1
            base = statistics.median(times["copies"])
            ways = {}
            for name, took in times.items():
                native, middle = plans[name][0].native, statistics.median(took)
                ways[name] = {
                    "median_ms": round(middle, 3),
                    "least_ms": round(min(took), 3),
                    "runs": len(took),
                    "items": native.items,
                    "partials": native.partials,
                    "times_as_fast": round(base / middle, 2),
                }
            yield {"threads": count, "ways": ways}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.shared_prefix", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4096, help="of a row; default: %(default)s")
    parser.add_argument("--shape", default="64,8,128", metavar="Q_HEADS,KV_HEADS,HEAD_DIM", help="default: %(default)s")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], metavar="N")
    parser.add_argument("--variants", nargs="*", default=VARIANTS, metavar="NAME=VALUE,...", help="of the tuning")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each number of threads; default: %(default)s")
    args = parser.parse_args(arguments)
    try:
        q_heads, kv_heads, head_dim = map(int, args.shape.split(","))
        shape = (q_heads, kv_heads, head_dim)
        for line in measure(args.rows, args.tokens, shape, args.threads, args.variants, args.seconds):
            print(json.dumps(line), flush=True)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
