"""Other processes take the CPU workers' cores in mid-run: ``python -m bench.burned_cores MODEL --out FILE``.

One of our schedulers in this process, in mode auto and without sockets, serves a backlog that its device pool is too
small for. In the second of three phases, processes that do nothing but run are pinned to the workers' cores. Told are,
for each phase, decode steps, those with the CPU among them, and steps per second; and after how many steps with the CPU
the fail-safe left it out.

Exit codes: 0; 1 if the CPU took no part in the first phase, in more than 10 steps of the second, or in none of the
third; 2: bad input.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from bench.hybrid_step import requests
from bench.record import provenance
from tests.harness.inprocess import InProcessScheduler


def _burn(core: int) -> None:
    if core >= 0:
        os.sched_setaffinity(0, {core})
    while True:
        pass


class Phases:
    """``on_step``: counts by phase; burns in the second."""

    def __init__(self, seconds: float, per_core: int):
        self._seconds, self._per_core = seconds, per_core
        self._begin = 0.0
        self._burning: list[Any] = []
        self.phases: list[dict[str, float]] = []
        #: Decode steps with the CPU since the burning began, until it was left out; None: it was not.
        self.steps_until_left_out: int | None = None
        self._at_begin = 0

    def __call__(self, scheduler: Any, step: int) -> None:
        now = time.perf_counter()
        self._begin = self._begin or now
        phase = min(int((now - self._begin) / self._seconds), 2)
        steps, planner = scheduler.neo_metrics.counters.steps, scheduler.planner
        with_cpu = sum(steps.values()) - steps["gpu_only"]
        tokens = sum(len(req.output_ids) for req in scheduler.running_batch.reqs)
        if phase >= len(self.phases):
            self.phases.append({"begin": now, "with_cpu": with_cpu, "all": sum(steps.values()), "tokens": tokens})
            if phase == 1:
                self._at_begin = with_cpu
                self._start(scheduler.placement.attention.workers)
            if phase == 2:
                self.stop()
        if phase == 1 and self.steps_until_left_out is None and planner.memory.guard.closed:
            self.steps_until_left_out = with_cpu - self._at_begin
        self.last = {"begin": now, "with_cpu": with_cpu, "all": sum(steps.values()), "tokens": tokens}

    def _start(self, workers: Any) -> None:
        cores = list(workers.cores) or [-1] * workers.threads
        context = multiprocessing.get_context("spawn")
        for core in cores * self._per_core:
            process = context.Process(target=_burn, args=(core,), daemon=True)
            process.start()
            self._burning.append(process)

    def stop(self) -> None:
        for process in self._burning:
            process.kill()
            process.join()
        self._burning.clear()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=60, help="of each prompt")
    parser.add_argument("--pool", type=int, default=1000, help="tokens of the device pool")
    parser.add_argument("--phase", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--per-core", type=int, default=4, help="processes on each of the workers' cores")
    parser.add_argument("--answer", type=int, default=2000, help="tokens of each, at most")
    parser.add_argument("--host-gb", type=float, default=1.0)
    parser.add_argument("--vocabulary", type=int, default=250)
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        print(f"error: {args.model} is no model", file=sys.stderr)
        return 2
    options: dict[str, Any] = {
        "device": args.device,
        "dtype": args.dtype,
        "neo_mode": "auto",
        "max_total_tokens": args.pool,
        "max_running_requests": args.rows + 4,
        "neo_host_kv_size": args.host_gb,
        "log_level": "info",
    }
    phases = Phases(args.phase, args.per_core)
    with InProcessScheduler("neo", args.model, **options) as scheduler:
        try:
            scheduler.run(requests(args.rows, args.tokens, args.answer, args.vocabulary, 1), phases)
        finally:
            phases.stop()
        report = scheduler.scheduler.planner.report()
    found = []
    for begin, end in zip(phases.phases, [*phases.phases[1:], phases.last], strict=True):
        seconds = end["begin"] - begin["begin"]
        found.append(
            {
                "seconds": seconds,
                "steps": end["all"] - begin["all"],
                "steps_with_cpu": end["with_cpu"] - begin["with_cpu"],
                "steps_per_second": (end["all"] - begin["all"]) / seconds if seconds else 0.0,
            }
        )
    record = {
        **provenance(),
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "phases": found,
        "steps_with_cpu_until_left_out": phases.steps_until_left_out,
        "counters": report["counters"],
        "corrections": report["corrections"],
    }
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))
    before, meanwhile, after = ([phase["steps_with_cpu"] for phase in found] + [0, 0])[:3]
    return 0 if before > 0 and meanwhile <= 10 and after > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
