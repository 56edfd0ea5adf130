"""How fast the kernels are, beside what the memory can give and what others reach.

    python -m cpu_kernels.bench [--json FILE] [--plot FILE]

Every repetition stands between two probes: plain reading of the same memory by the same threads with the fastest of
several loops. Repetitions walk on through at least four times the last cache, so that keys and values come from memory,
pages in random order. Every result is compared with a float64 reference before its speed is printed.

Exit codes: 0; 1 if a result is wrong; 2 for bad input.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpu_kernels import _native, anchors, machine, tuning_files
from cpu_kernels.attention import HostPool, Plan, Tuning
from cpu_kernels.cases import (
    PAGE_TOKENS,
    Case,
    Data,
    Shape,
    WrongAnswer,
    case_pages,
    decode,
    encode,
    parse_case,
    random_tables,
    read_lengths,
)
from cpu_kernels.isa import choose_isa, features, isas
from cpu_kernels.probe import Memory, ReadProbe, Threads, worker_threads

#: What can be measured: the pool's element type, and whether int8 is attended to in 16-bit arithmetic.
DTYPES = {
    "bfloat16": ("bfloat16", True),
    "float16": ("float16", True),
    "float32": ("float32", True),
    "int8": ("int8", True),
    "int8-fast": ("int8", False),
}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
#: Largest error allowed, as a fraction of the largest value of the outputs.
BOUNDS = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-5, "int8": 5e-4, "int8-fast": 3e-2}
#: Others add up in 16 bits, which is theirs to choose.
_OTHERS_BOUND = 2e-2
CASES = ("64x1024", "8x8192", "256x256", "1x128", "1x1024", "ragged", "copies:64x4096", "shared:64x4096")
#: Without --cases and --dtypes: every case in bf16, and these in the other types.
_FEW = {
    "int8": CASES[:6],
    "int8-fast": CASES[:2],
    "float16": CASES[:1],
    "float32": CASES[:1],
}
#: Cases that others are measured on, if they are measured at all.
_COMPARED = ("64x1024", "8x8192")
_REPETITION_S = 0.02  # at least, if the runs are shorter
_LATE = "the time is up (--budget)"
_LEAST = 3  # repetitions, or there is no number


@dataclass(frozen=True)
class Entry:
    """One line of the result. ``backend`` other than "cpu_kernels": one of others', then ``isa`` is None."""

    case: Case
    dtype: str  # key of DTYPES
    isa: str | None
    threads: int
    backend: str = "cpu_kernels"

    def names(self) -> dict[str, Any]:
        return {
            "case": self.case.name,
            "dtype": self.dtype,
            "isa": self.isa,
            "threads": self.threads,
            "backend": self.backend,
        }

    @property
    def error_bound(self) -> float:
        return BOUNDS[self.dtype] if self.backend == "cpu_kernels" else _OTHERS_BOUND

    @property
    def label(self) -> str:
        who = self.isa if self.backend == "cpu_kernels" else self.backend
        return f"{self.case.name:16} {self.dtype:9} {who:26} {self.threads:3}"


@dataclass(frozen=True)
class Options:
    entries: tuple[Entry, ...]
    shape: Shape
    repetitions: int
    budget: float  # seconds
    tuning: dict[str, Any] = field(default_factory=dict)  # fields of Tuning instead of those calibrated


@dataclass(frozen=True)
class Runner:
    """Something to measure: ``seconds(first, count)`` runs layers first, first + 1, ... of ``layers`` around."""

    layers: int
    bytes: int  # of K and V that one layer reads
    error: float
    first_s: float  # the run that was checked
    seconds: Callable[[int, int], float]


class Skipped(Exception):
    """This entry gets no number; the message says why."""


def say(line: str) -> None:
    print(line, flush=True)


def note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _digits(x: float) -> float:
    """Five significant digits: however slow a busy machine makes something, no number becomes zero."""
    return float(f"{x:.5g}")


def _queries(case: Case, data: Data) -> NDArray[np.generic]:
    s = data.shape
    rng = np.random.default_rng(3)
    return encode(rng.standard_normal((len(case.lengths), s.q_heads, s.head_dim), np.float32), data.q_dtype)


class Session:
    """Memory, threads and probes of one invocation."""

    def __init__(self, options: Options, make_threads: Callable[[int], Threads], deadline: float) -> None:
        self.options, self.deadline, self.make_threads = options, deadline, make_threads
        self.walk = 4 * machine.last_level_cache_bytes()
        self.remarks: list[str] = []
        need = max(self.bytes_for(dtype) for dtype in {DTYPES[e.dtype][0] for e in options.entries})
        allowed = machine.available_memory() // 2
        if need > allowed:
            self.remark(f"memory: {need >> 20} MiB are needed, {allowed >> 20} MiB used: half of what is available")
        self.cores = machine.usable_cores()
        self.load = os.getloadavg()[0]
        if self.load > 0.5 * self.cores:
            self.remark(f"the machine is busy (load {self.load:.1f} on {self.cores} cores): expect low, uneven numbers")
        self.memory = Memory(min(need, allowed), threads=self.cores)
        self.probes: dict[int, ReadProbe] = {}
        self.references: dict[tuple[Case, str], NDArray[np.float64]] = {}
        self.data: Data | None = None

    def remark(self, line: str) -> None:
        self.remarks.append(line)
        note(line)

    def bytes_for(self, dtype: str) -> int:
        """The memory that all entries of an element type walk through."""
        s = self.options.shape
        page = HostPool.bytes_needed(1, 1, s.kv_heads, s.head_dim, dtype, PAGE_TOKENS)
        most = max(case_pages(e.case) for e in self.options.entries if DTYPES[e.dtype][0] == dtype)
        return max(self.walk, most * page)

    def data_for(self, dtype: str) -> Data:
        if self.data is None or self.data.dtype != dtype:
            self.references.clear()
            self.data = Data(self.memory, self.bytes_for(dtype), self.options.shape, dtype, self.cores)
        return self.data

    def probe(self, threads: int) -> ReadProbe:
        if threads not in self.probes:
            probe = ReadProbe(self.memory, self.make_threads(threads), 128 << 20)
            rate = probe.tried[probe.name] * 1e9
            probe.pass_bytes = min(self.memory.bytes, max(probe.pass_bytes, int(rate * _REPETITION_S / 2) >> 21 << 21))
            self.probes[threads] = probe
            tried = ", ".join(f"{name}: {gb:.1f}" for name, gb in probe.tried.items())
            note(f"probe with {threads} thread(s), GB/s: {tried}")
        return self.probes[threads]

    def runner(self, entry: Entry) -> Runner:
        """Checked, or WrongAnswer."""
        data = self.data_for(DTYPES[entry.dtype][0])
        return self._ours(entry, data) if entry.backend == "cpu_kernels" else self._others(entry, data)

    def _ours(self, entry: Entry, data: Data) -> Runner:
        case, threads = entry.case, self.make_threads(entry.threads)
        pages = case_pages(case)
        if pages > data.pages:
            raise Skipped("not enough memory")
        pool = data.view(pages)
        tables = random_tables(case, pages)
        q = _queries(case, data)
        out = np.full_like(q, np.nan) if q.dtype != np.uint16 else np.full_like(q, 0xFFFF)
        tuning = replace(tuning_files.load(entry.isa) or Tuning(), **self.options.tuning)
        tuning = replace(tuning, accurate_int8=DTYPES[entry.dtype][1])
        plan = Plan(
            pool,
            np.asarray(case.lengths, np.int32),
            tables,
            data.shape.q_heads,
            threads=entry.threads,
            isa=entry.isa,
            tuning=tuning,
            prefix_groups=[(range(len(case.lengths)), case.lengths[0])] if case.shared else None,
        )
        walk = -(-self.walk // max(1, plan.bytes)) + 1
        jobs = [plan.job(layer, q, out) for layer in range(min(pool.layers, walk))]
        first_s = threads.seconds(jobs[0])
        # As many rows as make the reference cheap, first and last among them.
        rows = sorted({int(r) for r in np.linspace(0, len(tables) - 1, 64)})
        if (case, data.dtype) not in self.references:
            lengths = [case.lengths[r] for r in rows]
            self.references[case, data.dtype] = data.reference(q[rows], lengths, [tables[r] for r in rows], 0)
        want = self.references[case, data.dtype]
        got = decode(out, data.q_dtype)
        error = float(np.abs(got[rows] - want).max() / np.abs(want).max())
        if not (error <= entry.error_bound and np.isfinite(got).all()):
            raise WrongAnswer(f"error {error:.2g} of the largest value, the bound is {entry.error_bound:.2g}")
        if plan.ran != {entry.isa}:
            raise WrongAnswer(f"kernels of {', '.join(sorted(plan.ran)) or 'none'} ran")

        def seconds(first: int, count: int) -> float:
            return threads.seconds(*(jobs[(first + i) % len(jobs)] for i in range(count)))

        return Runner(len(jobs), plan.bytes, error, first_s, seconds)

    def _others(self, entry: Entry, data: Data) -> Runner:
        case, s = entry.case, data.shape
        q = _queries(case, data)
        try:
            if entry.backend == anchors.GGML:
                anchor = anchors.ggml(data, q, case.lengths[0], entry.threads)
            else:
                anchor = anchors.sdpa(entry.backend, data, q, case.lengths[0], entry.threads)
            error, first_s = anchors.check(anchor, data, q, entry.error_bound)
        except anchors.Missing as missing:
            raise Skipped(str(missing)) from None

        def seconds(first: int, count: int) -> float:
            begin = time.perf_counter()
            for i in range(count):
                anchor.run((first + i) % anchor.layers)
            return time.perf_counter() - begin

        size = 2 * case.tokens * s.kv_heads * s.head_dim * anchor.k.itemsize
        return Runner(anchor.layers, size, error, first_s, seconds)

    def measure(self, entry: Entry, allowance: float) -> dict[str, Any]:
        """The entry's result. ``allowance``: seconds it may take, unless fewer than three repetitions fit.

        Raises WrongAnswer; Skipped if not even those fit before the deadline.
        """
        end = time.perf_counter() + allowance
        if end - allowance > self.deadline:
            raise Skipped(_LATE)
        probe = self.probe(entry.threads)
        runner = self.runner(entry)
        # The first run may have had to make threads and such; a second look if that could matter.
        once = runner.first_s if runner.first_s > 0.1 else runner.seconds(1 % runner.layers, 1)
        count = min(runner.layers, max(1, round(_REPETITION_S / once)))
        least = _LEAST * (count * once + probe.pass_bytes / probe.tried[probe.name] / 1e9)
        if time.perf_counter() + least > self.deadline:
            raise Skipped(_LATE)
        at, probed = 0, [probe.gb_per_s()]
        took: list[float] = []
        while len(took) < self.options.repetitions and (len(took) < _LEAST or time.perf_counter() < end):
            took.append(runner.seconds(at, count) / count)
            probed.append(probe.gb_per_s())
            at = (at + count) % runner.layers
        speeds = [runner.bytes / t / 1e9 for t in took]
        beside = [(a + b) / 2 for a, b in pairwise(probed)]
        fractions = [x / p for x, p in zip(speeds, beside, strict=True)]
        middle = statistics.median(took)
        quarter, _, three = statistics.quantiles(took, n=4)
        return {
            **entry.names(),
            "gb_per_s": _digits(runner.bytes / middle / 1e9),
            "fraction": _digits(statistics.median(fractions)),
            "probe_gb_per_s": _digits(statistics.median(probed)),
            "tokens_per_s": round(entry.case.tokens / middle),
            "median_ms": _digits(middle * 1e3),
            "spread": _digits((three - quarter) / middle),
            "fraction_min": _digits(min(fractions)),
            "fraction_max": _digits(max(fractions)),
            "repetitions": len(took),
            "layers_per_repetition": count,
            "bytes_per_layer": runner.bytes,
            "rows": len(entry.case.lengths),
            "tokens": entry.case.tokens,
            "error": float(f"{runner.error:.3g}"),
            "error_bound": entry.error_bound,
        }


def _rank(entry: Entry) -> int:
    """The order of measuring: what matters most first, in case time is up, and few changes of element type, because
    each fills the memory anew."""
    if entry.backend == anchors.SDPA[1]:
        return 6  # slowest by far
    if entry.backend == anchors.SDPA[0]:
        return 1
    if entry.isa is not None and entry.isa != choose_isa().name:
        return 5
    return {"bfloat16": 0, "int8": 2, "int8-fast": 2, "float16": 3, "float32": 4}[entry.dtype]


def run(options: Options, began: float | None = None) -> dict[str, Any]:
    """Measures all entries, printing as it goes; what goes into the JSON file. Raises WrongAnswer."""
    began = time.perf_counter() if began is None else began
    deadline = began + options.budget
    with worker_threads() as make_threads:
        session = Session(options, make_threads, deadline)
        s = options.shape
        say(
            f"{machine.cpu_name()}, {session.cores} cores, last cache {machine.last_level_cache_bytes() >> 20} MiB; "
            f"{s.q_heads} query heads, {s.kv_heads} KV heads, head_dim {s.head_dim}; "
            f"walking {session.memory.bytes >> 20} MiB"
        )
        title = f"{'case':16} {'dtype':9} {'isa or library':26} thr"
        say(f"{title} {'GB/s':>7} {'fraction':>8} {'probe':>6} {'tokens/s':>11} {'ms/layer':>9} {'error':>8}")
        results, skipped = [], []
        entries = sorted(options.entries, key=_rank)
        missing: dict[str, str] = {}
        for i, entry in enumerate(entries):
            if entry.backend in missing:
                continue
            allowance = (deadline - time.perf_counter()) / (len(entries) - i)
            try:
                r = session.measure(entry, allowance)
            except Skipped as reason:
                skipped.append({**entry.names(), "reason": str(reason)})
                if "installed" in str(reason):
                    missing[entry.backend] = str(reason)
                    say(f"{entry.backend} skipped: {reason}")
                else:
                    say(f"{entry.label} skipped: {reason}")
                continue
            except WrongAnswer as wrong:
                raise WrongAnswer(f"{' '.join(entry.label.split())} thread(s): {wrong}") from None
            results.append(r)
            say(
                f"{entry.label} {r['gb_per_s']:7.2f} {r['fraction']:8.3f} {r['probe_gb_per_s']:6.1f} "
                f"{r['tokens_per_s']:11,} {r['median_ms']:9.3f} {r['error']:8.1e}"
            )
        found = ratios(results)
        for line in found:
            say(f"{line['what']}, {line['case']}, {line['threads']} thread(s): {line['ratio']:.2f}")
        return {
            **provenance(session),
            "shape": {"q_heads": s.q_heads, "kv_heads": s.kv_heads, "head_dim": s.head_dim},
            "seconds": round(time.perf_counter() - began, 1),
            "remarks": session.remarks,
            "results": results,
            "ratios": found,
            "skipped": skipped,
        }


def ratios(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tokens per second against one another, each as a multiple of the probes beside it: the memory's speed may change
    from minute to minute."""

    def value(r: dict[str, Any]) -> float:
        return float(r["fraction"] * r["tokens"] / r["bytes_per_layer"])

    def pick(case: str, dtype: str, threads: int, other: bool = False) -> list[dict[str, Any]]:
        return [
            r
            for r in results
            if (r["case"], r["dtype"], r["threads"]) == (case, dtype, threads)
            and (r["backend"] != "cpu_kernels") == other
        ]

    def best(rows: Sequence[dict[str, Any]]) -> float:
        return max((value(r) for r in rows), default=0.0)

    found = []
    for case, threads in dict.fromkeys((r["case"], r["threads"]) for r in results):
        pairs = [
            (f"{d} / bfloat16", pick(case, d, threads), pick(case, "bfloat16", threads)) for d in ("int8", "int8-fast")
        ]
        if case.startswith("shared:"):
            copies = case.replace("shared:", "copies:")
            pairs += [
                (f"shared prefix / separate copies, {d}", pick(case, d, threads), pick(copies, d, threads))
                for d in DTYPES
            ]
        for d in DTYPES:
            sdpa = [r for r in pick(case, d, threads, True) if r["backend"] in anchors.SDPA]
            ggml = [r for r in pick(case, d, threads, True) if r["backend"] == anchors.GGML]
            pairs += [(f"{d} / best PyTorch SDPA", pick(case, d, threads), sdpa)]
            pairs += [(f"{d} / llama.cpp", pick(case, d, threads), ggml)]
        for what, a, b in pairs:
            if best(a) and best(b):
                found.append({"what": what, "case": case, "threads": threads, "ratio": round(best(a) / best(b), 3)})
    return found


def _commit() -> str:
    """SGLANG_NEO_COMMIT where the tree was copied without its history, else what git says of this package."""
    given = os.environ.get("SGLANG_NEO_COMMIT")
    if given:
        return given
    try:
        git = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent,
        )
    except OSError:
        return "unknown"
    return git.stdout.strip() or "unknown"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("sglang-neo", "numpy", "torch", "llama_cpp_python"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def provenance(session: Session) -> dict[str, Any]:
    arguments = [Path(a).name if os.path.isabs(a) else a for a in sys.argv[1:]]
    used = {}
    for isa in dict.fromkeys(e.isa for e in session.options.entries if e.isa):
        found = tuning_files.find(isa)
        used[isa] = {"state": found.note, "tuning": found.calibration.tuning if found.calibration else None}
    return {
        "machine": {
            "cpu": machine.cpu_name(),
            "cpu_id": machine.cpu_id(),
            "cores": session.cores,
            "load_before": round(session.load, 2),
            "numa_nodes": machine.numa_nodes(),
            "l2_bytes": machine.cache_bytes(2),
            "l3_bytes": machine.cache_bytes(3),
            "memory_bytes": machine.total_memory(),
            "huge_pages": machine.huge_pages(),
            "features": [name for name, here in features().items() if here],
        },
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": shlex.join(["python", "-m", "cpu_kernels.bench", *arguments]),
        "versions": _versions(),
        "calibration": used,
        "walked_bytes": session.memory.bytes,
        "probes": {
            str(threads): {
                "loop": probe.name,
                "pass_bytes": probe.pass_bytes,
                "tried_gb_per_s": {k: round(v, 2) for k, v in probe.tried.items()},
            }
            for threads, probe in session.probes.items()
        },
    }


def _entries(args: argparse.Namespace, lengths: list[int] | None) -> Iterator[Entry]:
    best = choose_isa().name
    threads = args.threads or sorted({1, machine.usable_cores()})
    dtypes = args.dtypes or list(DTYPES)
    for dtype in dtypes:
        all_ = args.cases is not None or args.dtypes is not None or dtype == "bfloat16"
        cases = [parse_case(c, lengths) for c in (args.cases or (CASES if all_ else _FEW[dtype]))]
        for case in cases:
            for isa in args.isa or [best]:
                for n in threads:
                    yield Entry(case, dtype, isa, n)
            if args.isa is None and args.cases is None and dtype == "bfloat16" and case.name == "64x1024":
                for other in isas():
                    if other.name != best and not other.missing(features()) and _native.has_kernels(other.name):
                        yield Entry(case, dtype, other.name, threads[-1])
            if args.no_compare or case.shared or len(set(case.lengths)) != 1:
                continue
            if (case.name in _COMPARED or args.cases) and not case.name.startswith("copies:"):
                backends = anchors.SDPA if dtype == "bfloat16" else (anchors.GGML,) if dtype == "float16" else ()
                for backend in backends:
                    if backend == anchors.SDPA[1] and not args.cases and case.name != "64x1024":
                        continue  # takes a second a run, and is never the better one
                    for n in threads:
                        yield Entry(case, dtype, None, n, backend)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Options]:
    """ValueError with one line for what argparse cannot see."""
    parser = argparse.ArgumentParser(
        "python -m cpu_kernels.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--plot", metavar="FILE", help="draw them (needs matplotlib)")
    parser.add_argument("--cases", nargs="+", metavar="CASE", help=f"default: {' '.join(CASES)}; any ROWSxTOKENS")
    parser.add_argument("--dtypes", nargs="+", metavar="TYPE", help=f"of {' '.join(DTYPES)} (bf16, fp16, fp32 too)")
    parser.add_argument("--isa", nargs="+", metavar="ISA", help="default: the one that would be chosen")
    parser.add_argument("--threads", nargs="+", type=int, metavar="N", help="default: 1 and all usable cores")
    parser.add_argument("--shape", default="32,8,128", metavar="Q_HEADS,KV_HEADS,HEAD_DIM", help="default: %(default)s")
    parser.add_argument("--lengths", metavar="FILE", help="row lengths for the case ragged: JSON list or CSV")
    parser.add_argument("--repetitions", type=int, default=11, metavar="N", help="at most; default: %(default)s")
    parser.add_argument("--budget", type=float, default=42, metavar="SECONDS", help="default: %(default)s")
    parser.add_argument("--tuning", nargs="+", default=[], metavar="NAME=VALUE", help="fields of Tuning to try")
    parser.add_argument("--no-compare", action="store_true", help="leave PyTorch and llama.cpp out")
    args = parser.parse_args(argv)
    if args.dtypes is not None:
        args.dtypes = list(dict.fromkeys(_SHORT.get(d, d) for d in args.dtypes))
        unknown = [d for d in args.dtypes if d not in DTYPES]
        if unknown:
            raise ValueError(f"unknown element type {unknown[0]!r}; known: {', '.join(DTYPES)}")
    for name in args.isa or ():
        choose_isa(name)
        if not _native.has_kernels(name):
            raise ValueError(f"this build has no kernels for {name!r}")
    if any(n < 1 for n in args.threads or ()):
        raise ValueError("threads must be at least 1")
    if args.repetitions < _LEAST:
        raise ValueError(f"repetitions must be at least {_LEAST}")
    if not args.budget > 0:
        raise ValueError("budget must be positive")
    for path in (args.json, args.plot):
        if path and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"{path}: the folder does not exist")
    if args.plot:
        from cpu_kernels import plot

        plot.require()
    lengths = read_lengths(args.lengths) if args.lengths else None
    entries = tuple(_entries(args, lengths))
    return args, Options(entries, Shape.parse(args.shape), args.repetitions, args.budget, _tuning(args.tuning))


def _tuning(given: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE as fields of Tuning; ValueError if they are none."""
    known = {f.name for f in fields(Tuning)} - {"accurate_int8"}  # that one goes by the element type
    found: dict[str, Any] = {}
    for item in given:
        name, _, value = item.partition("=")
        if name not in known:
            raise ValueError(f"unknown field of Tuning {name!r}; known: {', '.join(sorted(known))}")
        try:
            found[name] = value if name == "prefetch_hint" else int(value)
        except ValueError:
            raise ValueError(f"--tuning {item}: not a number") from None
    replace(Tuning(), **found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    began = time.perf_counter()
    try:
        args, options = parse(argv)
    except ValueError as error:
        note(f"error: {error}")
        return 2
    try:
        document = run(options, began)
    except WrongAnswer as wrong:
        note(f"error: wrong answer: {wrong}")
        return 1
    if args.json:
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")
        note(f"wrote {args.json}")
    if args.plot:
        from cpu_kernels import plot

        plot.draw(document, args.plot)
        note(f"wrote {args.plot}")
    note(f"done in {time.perf_counter() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
