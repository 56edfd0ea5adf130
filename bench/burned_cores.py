"""Other processes take the CPU workers' cores in mid-run: ``python -m bench.burned_cores MODEL --out FILE``.

On a GPU, with 20 layers of the 70B shape: ``bench/h200_planner.sh burned``.

One of our schedulers in this process, in mode auto and without sockets, serves a backlog that its device pool is too
small for. In the second of three phases, processes that do nothing but run are pinned to the workers' cores. Told are,
for each phase, decode steps, those with the CPU among them, and output tokens per second; after how many steps with the
CPU the fail-safe left it out; and the same in mode gpu-only, with the same cores burned, and the ratio of both.

Exit codes: 0; 1 if the CPU took no part in the first phase, in more than 10 steps of the second, or in none of the
third; 2: bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

from bench.hybrid_step import add_scheduler_arguments, requests, scheduler_options
from bench.record import provenance
from tests.harness.inprocess import InProcessScheduler, abort_all


def _burn(core: int) -> None:
    if core >= 0:
        os.sched_setaffinity(0, {core})
    parent = os.getppid()
    while os.getppid() == parent:  # however that ends
        for _ in range(100_000):
            pass


class Phases:
    """``on_step``: counts by phase; burns in the second."""

    def __init__(self, seconds: float, cores: list[int]):
        self._seconds, self._cores = seconds, cores
        self._reqs: dict[Any, None] = {}
        self._begin = 0.0
        self._burning: list[Any] = []
        self.phases: list[dict[str, float]] = []
        #: Decode steps with the CPU since the burning began, until it was left out; None: it was not.
        self.steps_until_left_out: int | None = None
        self._at_begin = 0

    def __call__(self, scheduler: Any, step: int) -> None:
        now = time.perf_counter()
        self._begin = self._begin or now
        phase = int((now - self._begin) / self._seconds)
        if phase > 2:
            abort_all(scheduler)
            return
        steps, planner = scheduler.neo_metrics.counters.steps, scheduler.planner
        with_cpu = sum(steps.values()) - steps["gpu_only"]
        self._reqs.update(dict.fromkeys(scheduler.running_batch.reqs))
        tokens = sum(len(req.output_ids) for req in self._reqs)
        if phase >= len(self.phases):
            self.phases.append({"begin": now, "with_cpu": with_cpu, "all": sum(steps.values()), "tokens": tokens})
            if phase == 1:
                self._at_begin = with_cpu
                self._start()
            if phase == 2:
                self.stop()
        if phase == 1 and planner is not None and self.steps_until_left_out is None and planner.memory.guard.closed:
            self.steps_until_left_out = with_cpu - self._at_begin
        self.last = {"begin": now, "with_cpu": with_cpu, "all": sum(steps.values()), "tokens": tokens}

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for core in self._cores:
            process = context.Process(target=_burn, args=(core,), daemon=True)
            process.start()
            self._burning.append(process)

    def stop(self) -> None:
        for process in self._burning:
            process.kill()
            process.join()
        self._burning.clear()


def _rates(phases: Phases) -> list[dict[str, float]]:
    found = []
    for begin, end in zip(phases.phases, [*phases.phases[1:], phases.last], strict=True):
        seconds = end["begin"] - begin["begin"]
        found.append(
            {
                "seconds": seconds,
                "steps": end["all"] - begin["all"],
                "steps_with_cpu": end["with_cpu"] - begin["with_cpu"],
                "tokens_per_second": (end["tokens"] - begin["tokens"]) / seconds if seconds else 0.0,
            }
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    add_scheduler_arguments(parser, device="cpu", dtype="float32")
    parser.set_defaults(pool=1000)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=60, help="of each prompt")
    parser.add_argument("--phase", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--per-core", type=int, default=4, help="processes on each of the workers' cores")
    parser.add_argument("--answer", type=int, default=2000, help="tokens of each, at most")
    parser.add_argument("--host-gb", type=float, default=1.0)
    parser.add_argument("--vocabulary", type=int, default=250)
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        print(f"error: {args.model} is no model", file=sys.stderr)
        return 2
    options = scheduler_options(args, args.rows + 4)
    asked = [
        dataclasses.replace(request, vanishes=True)
        for request in requests(args.rows, args.tokens, args.answer, args.vocabulary, 1)
    ]

    def run(**more: Any) -> tuple[Phases, Any]:
        """Phases of one scheduler, and what its planner says at the end. The cores are those of the first one's
        workers."""
        with InProcessScheduler("neo", args.model, **options, **more) as scheduler:
            if (attention := scheduler.scheduler.placement.attention) is not None:
                workers = attention.workers
                cores[:] = (list(workers.cores) or [-1] * workers.threads) * args.per_core
            phases = Phases(args.phase, cores)
            try:
                scheduler.run(asked, phases, most_steps=1 << 40)
            finally:
                phases.stop()
            planner = scheduler.scheduler.planner
            return phases, planner.report() if planner is not None else None

    cores: list[int] = []
    phases, report = run(neo_mode="auto", neo_host_kv_size=args.host_gb)
    plain, _ = run(neo_mode="gpu-only")
    found, alone = _rates(phases), _rates(plain)
    record = {
        **provenance(),
        "arguments": {name: str(value) for name, value in vars(args).items()},
        "phases": found,
        "gpu_only_phases": alone,
        "tokens_per_second_over_gpu_only": [
            mine["tokens_per_second"] / its["tokens_per_second"] for mine, its in zip(found, alone, strict=False)
        ],
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
