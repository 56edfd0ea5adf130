"""How fast servers are, as clients see it: plain SGLang and ours, one after the other or in turns.

    python -m bench.serving MODEL --out FILE.json [--variant plain --variant neo ...] [--workload TEXT ...]
                            [--rounds 3] [--together] [--plots FOLDER] [-- flags for every server]
    python -m bench.serving --compare OLD.json NEW.json [--spread 0.05]
    python -m bench.serving --compare RESULT.json --spread 0.05         whether its own rounds agree
    python -m bench.serving --self-test

Variants are plain (SGLang), neo (ours), neo:MODE (``--neo-mode MODE``), each with flags of its own after an equals
sign: ``--variant "neo:deferred=--neo-deferred-slots 8"``. The first is what the others' ratios are against. Each round
runs all variants on all workloads; the order of the variants turns round from round to round. With --together all are
up at the same time and only one is asked at a time: right for small models, where a start takes longer than a run. The
result is written after every run, so one that is cut short leaves what it had.

Exit codes: 0; 1 a request failed, or --compare found a difference; 2 bad input, or a server did not start; 128 + n
when signal n stopped it. Servers are stopped in each case.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.record import provenance
from bench.servers import NEO, PLAIN, Server, ServerPool, ServerSpec
from bench.serving import report, selftest, workloads
from bench.serving.client import run as run_workload
from bench.serving.measures import measure
from cpu_kernels.cores import claimed_cores, keep_off
from sglang_neo.affinity import worth_it

#: Minutes on two cores with the small model that `make setup` converts, also where others keep them busy.
SMALL = (
    "backlog:prompt=64,output=32,count=10,concurrency=10",
    "backlog:prompt=32,output=24,count=8,concurrency=4",
    "sweep:rates=0.5/1.5,prompt=64,output=16,count=6",
    "prefixes:prefixes=2,prefix=96,suffix=16,output=8,count=6",
    "chat:users=2,turns=2,prompt=32,output=12",
)
#: The full set, for a GPU.
FULL = (
    "backlog:prompt=900,output=200,count=96,concurrency=48",
    "grid:prompts=128/2048,outputs=32/512,count=64,concurrency=64",
    "sweep:rates=1/2/4/8,prompt=900,output=200,count=120",
    "trace:name=azure_conv_2023,count=300,speed=1,longest=4096",
    "lengths:name=openai_summaries,rate=8,count=400",
    "prefixes:prefixes=5,prefix=1500,suffix=50,output=50,count=100,concurrency=50",
    "chat:users=24,turns=4,prompt=200,output=100",
)
SETS = {"small": SMALL, "full": FULL}


@dataclasses.dataclass(frozen=True)
class Variant:
    """``name`` is all that was written, flags included: two variants may differ in nothing else."""

    name: str
    entry: tuple[str, ...]
    flags: tuple[str, ...]


def variant(text: str) -> Variant:
    """Raises ValueError if there is none of that name."""
    server, _, own = text.partition("=")
    flags = tuple(shlex.split(own))
    if server == "plain":
        return Variant(text, PLAIN, flags)
    kind, _, mode = server.partition(":")
    if kind == "neo":
        return Variant(text, NEO, (*(("--neo-mode", mode) if mode else ()), "--neo-report-host-rows", *flags))
    raise ValueError(f"no variant {server!r}: there are plain, neo and neo:MODE")


class Servers:
    """Starts what is asked for; all at once with ``together``, else one at a time."""

    def __init__(self, model: Path, common: Sequence[str], logs: Path, together: bool):
        self._model, self._common, self._logs, self._together = model, tuple(common), logs, together
        self._stack = contextlib.ExitStack()
        self._kept: dict[str, Server] = {}

    @contextlib.contextmanager
    def of(self, chosen: Variant) -> Iterator[Server]:
        if self._together:
            if chosen.name not in self._kept:
                self._kept[chosen.name] = self._stack.enter_context(self._started(chosen))
            yield self._kept[chosen.name]
        else:
            with self._started(chosen) as server:
                yield server

    @contextlib.contextmanager
    def _started(self, chosen: Variant) -> Iterator[Server]:
        folder = self._logs / re.sub(r"[^\w.]+", "-", chosen.name).strip("-")
        folder.mkdir(parents=True, exist_ok=True)
        spec = ServerSpec(self._model, ("--enable-metrics", *self._common, *chosen.flags), chosen.entry)
        print(f"starting {chosen.name}", flush=True)
        with ServerPool(folder).starting(spec) as server:
            yield server.wait_ready()

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def _out_of_the_way() -> Iterator[None]:
    """The client keeps off the cores that a server's CPU attention threads have claimed, where two are left for others:
    elsewhere it would have a machine of its own."""
    before = os.sched_getaffinity(0)
    claimed = set(claimed_cores()) & before
    if worth_it(len(before), len(claimed), ranks=1):
        keep_off(claimed, [os.getpid()])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.serving",
        description=__doc__,
        epilog=workloads.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--variant", action="append", help="default: plain and neo")
    parser.add_argument("--workload", action="append", default=[])
    parser.add_argument("--set", choices=SETS, help="a set of workloads; default without --workload: small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--together", action="store_true", help="all servers up at once")
    parser.add_argument("--plots", type=Path)
    parser.add_argument("--vocabulary", type=int, help="token ids below it; default: the model's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that one request may take")
    parser.add_argument(
        "--warm-up", default="backlog:prompt=32,output=8,count=4", help="sent before each server's runs"
    )
    parser.add_argument("--logs", type=Path, help="of the servers; default: a temporary folder")
    parser.add_argument(
        "--time-limit", type=float, default=float("inf"), help="seconds after which no further run is begun"
    )
    parser.add_argument(
        "--compare", type=Path, nargs="+", metavar="RESULT", help="two results; or one, whose rounds are compared"
    )
    parser.add_argument("--spread", type=float, help="fraction by which compared figures may differ")
    parser.add_argument("--self-test", action="store_true", help="how many chunks a second this client can take")
    return parser


def _vocabulary(model: Path) -> int:
    config = json.loads((model / "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])


def save(result: dict[str, Any], path: Path) -> None:
    """At once or not at all: whoever stops this program finds the result of the runs before."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(partial, path)


def compare(paths: Sequence[Path], spread: float | None) -> int:
    """Prints what differs; returns the exit code. Raises ValueError for results that cannot be compared."""
    results = [json.loads(path.read_text()) for path in paths]
    for path, result in zip(paths, results, strict=True):
        if not isinstance(result, dict) or not isinstance(result.get("runs"), list):
            raise ValueError(f"{path} is no result of this bench")
    if len(results) == 1:
        if spread is None:
            raise ValueError("--compare with one result needs --spread")
        differences = report.uneven(results[0], spread)
    elif len(results) == 2:
        differences = report.compare(results[0], results[1], spread)
    else:
        raise ValueError("--compare takes one result or two")
    for line in differences:
        print(line)
    print(f"{len(differences)} differences beyond {'the spread of the rounds' if spread is None else f'{spread:.1%}'}")
    return 1 if differences else 0


def serve(args: argparse.Namespace, flags: Sequence[str]) -> int:
    named = args.variant or ("plain", "neo")
    if len(set(named)) < len(named):
        raise ValueError("a variant is given twice")
    variants = [variant(text) for text in named]
    texts = [*(SETS[args.set] if args.set else ()), *args.workload] or list(SMALL)
    vocabulary = args.vocabulary or _vocabulary(args.model)
    chosen = workloads.parse_all(texts, vocabulary, args.seed)
    warm_up = workloads.parse_all([args.warm_up], vocabulary, args.seed + 1)
    result: dict[str, Any] = {**provenance(), "model": args.model.name, "flags": list(flags), "runs": []}
    failed = 0
    deadline = time.monotonic() + args.time_limit
    with contextlib.ExitStack() as stack:
        logs = args.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = Servers(args.model, flags, logs, args.together)
        stack.callback(servers.close)
        total = args.rounds * len(variants) * len(chosen)
        for round_ in range(args.rounds):
            for one in variants if round_ % 2 == 0 else variants[::-1]:
                if time.monotonic() >= deadline:
                    break
                with servers.of(one) as server, _out_of_the_way():
                    for workload in warm_up:
                        run_workload(server.url, workload, args.timeout, sample_every_s=0)
                    for workload in chosen:
                        if time.monotonic() >= deadline:
                            break
                        server.post("/flush_cache?timeout=60", {})  # what a run cut off may still be ending
                        run = run_workload(server.url, workload, args.timeout)
                        measures = measure(run.answers, run.seconds, run.samples)
                        failed += measures["failed"]
                        result["runs"].append(
                            {
                                "workload": workload.name,
                                "variant": one.name,
                                "variant_flags": list(one.flags),
                                "round": round_,
                                "measures": measures,
                                "client": dataclasses.asdict(run.load),
                                "neo": server.info().get("neo"),
                                "samples": run.samples,
                            }
                        )
                        save(result, args.out)
                        print(
                            f"[{len(result['runs'])}/{total}] round {round_} {one.name:10} {workload.name}: "
                            f"{measures['sustained_tokens_per_s']:.1f} tok/s sustained, "
                            f"{measures['decode_only']['tokens_per_s']:.1f} decode-only; "
                            f"client {run.load.cpu_share:.0%} busy",
                            flush=True,
                        )
                        if not run.load.keeps_up():
                            print("  the client was too busy to measure a server", file=sys.stderr)
                        for error in measures["errors"][:3]:
                            print(f"  {error}", file=sys.stderr)
    # In the order of the variants, whatever the order of the runs was: the first is the base of the ratios.
    order = [one.name for one in variants]
    result["runs"].sort(key=lambda run: (run["round"], order.index(run["variant"])))
    result["summary"] = report.summary(result["runs"])
    result["at_equal_latency"] = report.at_equal_latency(result["runs"])
    save(result, args.out)
    if len(result["runs"]) < total:
        print(f"--time-limit: {len(result['runs'])} of {total} runs were made")
    print(report.table(result["runs"]))
    if args.plots is not None:
        for path in report.plots(result, args.plots):
            print(path)
    return 1 if failed else 0


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGINT leave by an exception, so that servers are stopped on the way; later ones must not cut that
    short."""

    def leave(signum: int, frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        print(f"error: stopped by {signal.Signals(signum).name}", file=sys.stderr)
        raise SystemExit(128 + signum)

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    for each in before:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    split = argv.index("--") if "--" in argv else len(argv)
    args = _argument_parser().parse_args(argv[:split])
    try:
        if args.self_test:
            print(json.dumps(selftest.measure(), indent=1))
            return 0
        if args.compare is not None:
            return compare(args.compare, args.spread)
        if args.model is None or args.out is None:
            raise ValueError("MODEL and --out are needed")
        if not (args.model / "config.json").is_file():
            raise ValueError(f"{args.model} is no model: it has no config.json")
        if args.rounds < 1:
            raise ValueError("--rounds must be at least 1")
        if not args.out.parent.is_dir():
            raise ValueError(f"{args.out.parent} is no folder")
        with stopped_by_signals():
            return serve(args, argv[split + 1 :])
    except (ValueError, OSError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except AssertionError as error:  # a server that did not start: the end of its log is in the message
        lines = str(error).splitlines()
        print("\n".join(lines[-12:]), file=sys.stderr)
        print(f"error: {lines[0]}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
