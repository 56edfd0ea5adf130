"""Tuning measured on this machine: the best prefetch and the thresholds between kernels depend on the CPU.

    python -m cpu_kernels.calibration        measures (about a second), prints what was tried, saves the result

Where results are kept and when they hold: see cpu_kernels.tuning_files.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import logging
import math
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cpu_kernels import machine
from cpu_kernels.attention import HostPool, Plan, Tuning
from cpu_kernels.isa import choose_isa
from cpu_kernels.probe import Memory, Threads, worker_threads
from cpu_kernels.tuning_files import (
    DOT_ISAS,
    TILE_ISAS,
    Calibration,
    Trial,
    build_id,
    directory,
    forget,
    load,
    remember,
    save,
)

_log = logging.getLogger(__name__)


def ensure(isa: str | None = None, threads: int | None = None) -> Tuning:
    """The saved tuning; measures and saves one if there is none (about a second). For the start of a server.

    Of several processes that start together, one measures and the others take what it has saved. Results that cannot be
    saved are used all the same, with one line in the log. Switched off: Tuning().
    """
    where = directory()
    if where is None:
        return Tuning()
    tuning = load(isa)
    if tuning is not None:
        return tuning
    with _turn(where):
        forget()
        tuning = load(isa)
        if tuning is not None:
            return tuning
        result = calibrate(isa, threads)
        try:
            save(result)
        except OSError as error:
            _log.warning("calibration was not saved: %s", error)
            remember(result)
    return result.applied()


@contextlib.contextmanager
def _turn(where: Path) -> Iterator[None]:
    """One process at a time, of those that can write there."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            where.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(where / "calibration.lock", "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


_KV_HEADS, _GROUP, _HEAD_DIM, _PAGE = 8, 4, 128, 64
#: What a setting must gain over the default, or a faster but less exact kernel over the other, to be taken.
_GAIN = 1.03


class _Rig:
    """Plans over one pool of bf16 pages in memory that no cache holds, and a clock."""

    def __init__(self, isa: str, threads: int, make_threads: Callable[[int], Threads]) -> None:
        self.isa, self.threads = isa, threads
        self.make_threads = make_threads
        self.page_bytes = HostPool.bytes_needed(1, 1, _KV_HEADS, _HEAD_DIM, "bfloat16", _PAGE)
        wanted = min(4 * machine.last_level_cache_bytes(), 2 << 30, machine.available_memory() // 4)
        self.memory = Memory(max(wanted, 64 << 20), threads=threads)
        self.io = Memory(8 << 20, threads=1)
        self.next_layer = 0

    def jobs(
        self, rows: int, tokens: int, tuning: Tuning, *, threads: int = 0, group: int = _GROUP, shared: bool = False
    ) -> list[Any]:
        """One job per layer for ``rows`` rows of ``tokens`` tokens."""
        per_row = -(-tokens // _PAGE)
        pages = per_row * (1 if shared else rows)
        layers = self.memory.bytes // (pages * self.page_bytes)
        pool = HostPool(self.memory.address, layers, pages, _KV_HEADS, _HEAD_DIM, "bfloat16", _PAGE)
        # 0, 37, 74 ... modulo the number of pages: an order that no prefetcher knows. The number is no multiple of 37.
        order = [(i * 37) % pages for i in range(pages)] if pages % 37 else list(range(pages))
        tables = [order[:per_row] if shared else order[r * per_row : (r + 1) * per_row] for r in range(rows)]
        plan = Plan(
            pool,
            array("i", [tokens] * rows),
            tables,
            _KV_HEADS * group,
            threads=threads or self.threads,
            isa=self.isa,
            tuning=tuning,
            prefix_groups=[(range(rows), tokens)] if shared else None,
        )
        dims = (rows, _KV_HEADS * group, _HEAD_DIM)
        q = (self.io.address, dims, None, "bfloat16")
        out = (self.io.address + (4 << 20), dims, None, "bfloat16")
        return [plan.job(layer, q, out) for layer in range(min(layers, 64))]

    def compare(self, candidates: Sequence[tuple[list[Any], int]], seconds: float, each: int = 1) -> list[float]:
        """Seconds of one run per candidate (its jobs, its threads), taken in turn until the time is up.

        The 25th percentile, because other processes only ever make a run longer.

        ``each``: so many runs in one turn, of which the fastest counts: the workers are awake then.
        """
        took: list[list[float]] = [[] for _ in candidates]
        threads = [self.make_threads(count) for _, count in candidates]
        end = time.perf_counter() + seconds
        rounds = 0
        while rounds < 4 or (time.perf_counter() < end and rounds < 200):
            for i, (jobs, _) in enumerate(candidates):
                once = math.inf
                for _ in range(each):
                    self.next_layer += 1
                    once = min(once, threads[i].seconds(jobs[self.next_layer % len(jobs)]))
                if rounds:  # the first warms up
                    took[i].append(once)
            rounds += 1
        return [sorted(t)[len(t) // 4] for t in took]


def _with(tuning: Tuning, name: str, value: int) -> Tuning:
    changes: dict[str, Any] = {name: value}
    return replace(tuning, **changes)


def _first_gain(on: Sequence[float], off: Sequence[float]) -> int | None:
    """The first index from which on it is always faster by the required gain."""
    at = len(on)
    while at > 0 and off[at - 1] > _GAIN * on[at - 1]:
        at -= 1
    return at if at < len(on) else None


def calibrate(isa: str | None = None, threads: int | None = None, seconds: float = 0.9) -> Calibration:
    """Measures on this machine; saves nothing.

    Args:
        isa: default: see choose_isa.
        threads: that read together; default: all usable cores.
        seconds: roughly how long to measure; getting the memory ready (four times the last cache) comes on top.
    """
    name = choose_isa(isa).name
    count = threads if threads is not None else machine.usable_cores()
    if count < 1:
        raise ValueError(f"threads must be at least 1, not {count}")
    with worker_threads() as make_threads:
        rig = _Rig(name, count, make_threads)
        began = time.perf_counter()
        tuning, tried = _measure(rig, seconds)
        took = time.perf_counter() - began
    defaults = asdict(Tuning())
    measured = {trial_field for trial in tried for trial_field in trial.what.split(", ")}
    changed = {k: v for k, v in asdict(tuning).items() if k in measured and k in defaults}
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return Calibration(machine.cpu_id(), name, build_id(), count, date, round(took, 3), changed, tuple(tried))


def _measure(rig: _Rig, seconds: float) -> tuple[Tuning, list[Trial]]:
    tuning, tried = Tuning(), []

    # 16 rows of 256 tokens: 16 MiB a layer.
    prefetches = [(tuning.prefetch_hint, tuning.prefetch_tiles)]
    prefetches += [p for h in ("none", "t0", "t1", "t2", "nta") for n in (1, 2) if (p := (h, n)) not in prefetches]
    prefetches.remove(("none", 2))
    settings = [replace(tuning, prefetch_hint=hint, prefetch_tiles=tiles) for hint, tiles in prefetches]
    times = rig.compare([(rig.jobs(16, 256, s), rig.threads) for s in settings], 0.4 * seconds)
    for (hint, tiles), once in zip(prefetches, times, strict=True):
        tried.append(Trial("prefetch_hint, prefetch_tiles", f"{hint}, {tiles}", once * 1e6))
    best = min(range(len(times)), key=times.__getitem__)
    if times[0] > _GAIN * times[best]:
        tuning = settings[best]

    if rig.threads > 1:
        sizes = [32 << i for i in range(10)]  # tokens x KV heads of one row
        every = replace(tuning, min_thread_tokens=1, min_split_tokens=1)
        one, two = ([(rig.jobs(1, n // _KV_HEADS, every, threads=k), k) for n in sizes] for k in (1, 2))
        times = rig.compare([c for pair in zip(two, one, strict=True) for c in pair], 0.2 * seconds, each=8)
        on, off = times[::2], times[1::2]
        for n, t2, t1 in zip(sizes, on, off, strict=True):
            tried.append(Trial("min_thread_tokens", str(n // 2), t2 * 1e6, t1 * 1e6))
        gain = _first_gain(on, off)
        # Two threads pay from n tokens on, so one thread is given at least half of that. If two never pay, other
        # processes had the cores: that says nothing about the threshold.
        if gain is not None:
            tuning = replace(tuning, min_thread_tokens=sizes[gain] // 2)

    rows = [2, 3, 4, 6, 8]
    alone = replace(tuning, prefix_min_rows=1 << 20)
    together = replace(tuning, prefix_min_rows=2)
    pairs = [(rig.jobs(n, 1024, t, shared=True), rig.threads) for n in rows for t in (together, alone)]
    times = rig.compare(pairs, 0.2 * seconds)
    for n, t_on, t_off in zip(rows, times[::2], times[1::2], strict=True):
        tried.append(Trial("prefix_min_rows", str(n), t_on * 1e6, t_off * 1e6))
    gain = _first_gain(times[::2], times[1::2])
    if gain is not None:  # else disturbed too: reading once for eight rows pays on any CPU
        tuning = replace(tuning, prefix_min_rows=rows[gain])

    groups = [1, 2, 4, 8, 16]
    never = 1 << 20  # queries
    for name, isas in (("dot_min_queries", DOT_ISAS), ("tile_min_queries", TILE_ISAS)):
        if rig.isa not in isas:
            continue
        base = replace(tuning, tile_min_queries=never)
        setting = [_with(base, name, n) for n in (1, never)]
        pairs = [(rig.jobs(16, 256, t, group=g), rig.threads) for g in groups for t in setting]
        times = rig.compare(pairs, 0.15 * seconds)
        for g, t_on, t_off in zip(groups, times[::2], times[1::2], strict=True):
            tried.append(Trial(name, str(g), t_on * 1e6, t_off * 1e6))
        gain = _first_gain(times[::2], times[1::2])
        # None up to 16 queries: left to shared prefixes, which bring more queries to data that is in a cache.
        tuning = _with(tuning, name, groups[-1] + 1 if gain is None else groups[gain])
    return tuning, tried


def table(result: Calibration) -> str:
    """What was tried and what was chosen, as text."""
    lines = [
        f"{result.isa}, {result.threads} thread(s), {result.cpu}; measured for {result.seconds:.2f} s",
        f"{'setting':32} {'value':>10} {'us/run':>10} {'without':>10}",
    ]
    chosen = {k: str(v) for k, v in result.tuning.items()}
    for trial in result.tried:
        names = trial.what.split(", ")
        mark = " <" if ", ".join(chosen.get(n, "") for n in names) == trial.value else ""
        against = "" if trial.against is None else f"{trial.against:10.1f}"
        lines.append(f"{trial.what:32} {trial.value:>10} {trial.microseconds:10.1f} {against:>10}{mark}")
    lines.append("chosen: " + ", ".join(f"{k}={v}" for k, v in chosen.items()))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m cpu_kernels.calibration", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--isa", help="instruction set; default: the one that would be chosen")
    parser.add_argument("--threads", type=int, help="that read together; default: all usable cores")
    parser.add_argument("--dry-run", action="store_true", help="save nothing")
    options = parser.parse_args(argv)
    try:
        result = calibrate(options.isa, options.threads)
        print(table(result))
        if not options.dry_run:
            print(f"saved: {save(result)}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
