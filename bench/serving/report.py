"""Tables, plots and the comparison of two results."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.serving.measures import CLASSES

#: What is compared between variants and between results: name in a table, path in a run's measures, bigger is better.
FIGURES = (
    ("sustained tok/s", ("sustained_tokens_per_s",), True),
    ("decode tok/s", ("decode_only", "tokens_per_s"), True),
    ("TTFT p50 s", ("all", "ttft_s", "p50"), False),
    ("TTFT p99 s", ("all", "ttft_s", "p99"), False),
    ("TPOT p50 s", ("all", "tpot_s", "p50"), False),
    ("TPOT p99 s", ("all", "tpot_s", "p99"), False),
    ("E2E p50 s", ("all", "end_to_end_s", "p50"), False),
    ("E2E p99 s", ("all", "end_to_end_s", "p99"), False),
)
#: Those that a regression check looks at: tails of a few dozen requests say nothing about a build.
CHECKED = ("sustained tok/s", "decode tok/s")
#: Two results may always differ by so much.
FLOOR = 0.02


def figure(measures: dict[str, Any], path: Sequence[str]) -> float | None:
    value: Any = measures
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def by_workload(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[int, dict[str, Any]]]]:
    """Measures of all rounds: workload -> variant -> round."""
    found: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}
    for run in runs:
        found.setdefault(run["workload"], {}).setdefault(run["variant"], {})[run["round"]] = run["measures"]
    return found


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per workload, variant and figure: median, lowest and highest of the rounds, ratio to the first variant.

    The ratio is the median of the ratios within each round, where both have that round.
    """
    entries = []
    for workload, variants in by_workload(runs).items():
        first = next(iter(variants))
        for variant, rounds in variants.items():
            for name, path, _ in FIGURES:
                by_round = {r: v for r, m in rounds.items() if (v := figure(m, path)) is not None}
                if not by_round:
                    continue
                values = list(by_round.values())
                base = {r: figure(m, path) for r, m in variants[first].items()}
                ratios = [v / b for r, v in by_round.items() if (b := base.get(r))]
                entries.append(
                    {
                        "workload": workload,
                        "variant": variant,
                        "figure": name,
                        "median": statistics.median(values),
                        "min": min(values),
                        "max": max(values),
                        "rounds": len(values),
                        "ratio": statistics.median(ratios) if ratios else None,
                    }
                )
    return entries


def table(runs: Sequence[dict[str, Any]]) -> str:
    """For people: one line per workload and variant."""
    lines = []
    entries = summary(runs)
    for workload, variants in by_workload(runs).items():
        lines.append(workload)
        for variant, rounds in variants.items():
            own = {e["figure"]: e for e in entries if (e["workload"], e["variant"]) == (workload, variant)}
            parts = []
            for name in ("sustained tok/s", "decode tok/s"):
                if name in own:
                    e = own[name]
                    ratio = f" x{e['ratio']:.3f}" if e["ratio"] is not None else ""
                    parts.append(f"{name} {e['median']:.1f} ({e['min']:.1f}-{e['max']:.1f}){ratio}")
            for name in ("TTFT p50 s", "TTFT p99 s", "TPOT p50 s", "TPOT p99 s", "E2E p99 s"):
                if name in own:
                    parts.append(f"{name[:-2]} {own[name]['median']:.3g}")
            last = rounds[max(rounds)]
            failed = sum(m["failed"] for m in rounds.values())
            host = last["host_output_tokens"] / max(1, last["output_tokens"])
            parts.append(f"retracted {last['retractions']}, host tokens {host:.0%}, failed {failed}")
            lines.append(f"  {variant:14} {'; '.join(parts)}")
            if host:
                lines += [f"    {kind}: {_latencies(rounds, kind)}" for kind in CLASSES if last[kind]["requests"]]
    equal = at_equal_latency(runs)
    if equal:
        lines.append("sustained tok/s where the first variant's E2E p99 may be as long")
    for point in equal:
        first = point["first_tokens_per_s"]
        least = f"; the first variant has at least {point['first_least_s']:.3g} s"
        beside = f" against {first:.1f}, x{point['tokens_per_s'] / first:.3f}" if first else least
        name = f"{point['variant']:14} {point['workload']}"
        lines.append(f"  {name}: {point['e2e_p99_s']:.3g} s, {point['tokens_per_s']:.1f}{beside}")
    return "\n".join(lines)


def _latencies(rounds: dict[int, dict[str, Any]], kind: str) -> str:
    """Of one class of requests: p50 and p99, medians of the rounds, seconds."""
    parts = [f"{rounds[max(rounds)][kind]['requests']} requests"]
    for title, name in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("E2E", "end_to_end_s")):
        values = [[v for m in rounds.values() if (v := figure(m, (kind, name, p))) is not None] for p in ("p50", "p99")]
        if all(values):
            parts.append(f"{title} p50 {statistics.median(values[0]):.3g} p99 {statistics.median(values[1]):.3g}")
    return ", ".join(parts)


def at_equal_latency(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each other variant and each rate of arrivals: its throughput, and the first variant's where the 99th
    percentile of its end-to-end time is the same.

    The first variant's throughput at a latency is the most that it has at that or a lower one, between two of its
    points by linear interpolation; None below its lowest. ``first_least_s`` is that lowest.
    """
    points: dict[str, list[tuple[float, float, str]]] = {}
    for workload, variants in by_workload(runs).items():
        for variant, rounds in variants.items():
            pairs = [
                (late, rate)
                for m in rounds.values()
                if (late := figure(m, ("all", "end_to_end_s", "p99"))) and (rate := figure(m, FIGURES[0][1]))
            ]
            if workload.startswith("poisson:") and pairs:
                lates, rates = zip(*pairs, strict=True)
                points.setdefault(variant, []).append((statistics.median(lates), statistics.median(rates), workload))
    # Not the first of ``points``: at the lowest rate all of its requests may have failed.
    first = points.pop(runs[0]["variant"], None) if runs else None
    if first is None:
        return []
    curve = sorted((late, rate) for late, rate, _ in first)
    return [
        {
            "variant": variant,
            "workload": workload,
            "e2e_p99_s": late,
            "tokens_per_s": rate,
            "first_tokens_per_s": _most_within(curve, late),
            "first_least_s": curve[0][0],
        }
        for variant, own in points.items()
        for late, rate, workload in own
    ]


def _most_within(curve: Sequence[tuple[float, float]], late: float) -> float | None:
    """The highest rate of (latency, rate) points, in the order of latency, and of the lines between them, up to
    ``late``."""
    if late < curve[0][0]:
        return None
    most = max(rate for at, rate in curve if at <= late)
    for (a, low), (b, high) in itertools.pairwise(curve):
        if a <= late < b:
            most = max(most, low + (high - low) * (late - a) / (b - a))
    return most


def compare(old: dict[str, Any], new: dict[str, Any], spread: float | None = None) -> list[str]:
    """What differs between two results of the same runs by more than ``spread``, a fraction; empty: nothing.

    Without ``spread``, as much is allowed as the rounds of either result differ among themselves.
    Raises ValueError if they have no workload and variant in common.
    """
    before = {(e["workload"], e["variant"], e["figure"]): e for e in summary(old["runs"])}
    after = {(e["workload"], e["variant"], e["figure"]): e for e in summary(new["runs"])}
    common = [key for key in before if key in after and key[2] in CHECKED]
    if not common:
        raise ValueError("the two results have no workload and variant in common")
    found = []
    for key in common:
        a, b = before[key], after[key]
        allowed = max(FLOOR, _width(a), _width(b)) if spread is None else spread
        change = b["median"] / a["median"] - 1 if a["median"] else float(b["median"] > 0)
        if abs(change) > allowed:
            workload, variant, name = key
            found.append(
                f"{workload}, {variant}: {name} {a['median']:.4g} -> {b['median']:.4g} "
                f"({change:+.1%}, allowed {allowed:.1%})"
            )
    return found


def uneven(result: dict[str, Any], spread: float) -> list[str]:
    """Where the rounds of one result differ by more than ``spread``, a fraction of their median; empty: nowhere.

    Raises ValueError if nothing was run more than once.
    """
    repeated = [e for e in summary(result["runs"]) if e["figure"] in CHECKED and e["rounds"] > 1]
    if not repeated:
        raise ValueError("the result has no workload that was run more than once")
    return [
        f"{e['workload']}, {e['variant']}: {e['figure']} {e['min']:.4g} to {e['max']:.4g} in {e['rounds']} rounds "
        f"({_width(e):.1%}, allowed {spread:.1%})"
        for e in repeated
        if _width(e) > spread
    ]


def _width(entry: dict[str, Any]) -> float:
    """How far the rounds of an entry of the summary lie apart, as a fraction of their median; 1 if that is 0."""
    apart: float = entry["max"] - entry["min"]
    return apart / entry["median"] if entry["median"] else float(apart > 0)


def plots(result: dict[str, Any], folder: Path) -> list[Path]:
    """Load-latency curves, courses over time, ratios; as PNG. Raises ValueError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []

    def save(figure_: Any, name: str) -> None:
        figure_.tight_layout()
        figure_.savefig(folder / name, dpi=110)
        pyplot.close(figure_)
        written.append(folder / name)

    runs = result["runs"]
    grouped = by_workload(runs)
    rates = {w: float(w.split("rate=")[1].split(",")[0]) for w in grouped if w.startswith("poisson:")}
    if len(rates) > 1:
        wanted = [f for f in FIGURES if f[0] in ("TTFT p50 s", "TTFT p99 s", "TPOT p50 s", "TPOT p99 s", "E2E p99 s")]
        wanted.append(FIGURES[0])
        figure_, axes = pyplot.subplots(2, 3, figsize=(13, 7))
        for (name, path, _), axis in zip(wanted, axes.flat, strict=True):
            for variant in dict.fromkeys(run["variant"] for run in runs):
                points = []
                for workload, rate in sorted(rates.items(), key=lambda item: item[1]):
                    values = [figure(m, path) for m in grouped[workload].get(variant, {}).values()]
                    kept = [value for value in values if value is not None]
                    if kept:
                        points.append((rate, statistics.median(kept)))
                axis.plot(*zip(*points, strict=True), marker="o", label=variant)
            axis.set_xlabel("requests per second")
            axis.set_title(name)
            axis.set_ylim(bottom=0)
        axes.flat[0].legend()
        save(figure_, "load_latency.png")
    entries = [e for e in summary(runs) if e["figure"] in CHECKED and e["ratio"] is not None]
    if len({e["variant"] for e in entries}) > 1:
        names = list(dict.fromkeys(e["workload"] for e in entries))
        figure_, axis = pyplot.subplots(figsize=(9, 1 + 0.5 * len(names)))
        variants = list(dict.fromkeys(e["variant"] for e in entries))[1:]
        height = 0.8 / max(1, len(variants) * len(CHECKED))
        for i, (variant, name) in enumerate((v, c) for v in variants for c in CHECKED):
            ratios = {e["workload"]: e["ratio"] for e in entries if (e["variant"], e["figure"]) == (variant, name)}
            at = [names.index(w) - 0.4 + (i + 0.5) * height for w in ratios]
            axis.barh(at, list(ratios.values()), height, label=f"{variant}, {name}")
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_yticks(range(len(names)), [name[:70] for name in names], fontsize=7)
        axis.set_xlabel(f"ratio to {entries[0]['variant']}")
        axis.legend(fontsize=7)
        save(figure_, "ratios.png")
    sampled = [run for run in runs if run["samples"]]
    for workload in dict.fromkeys(run["workload"] for run in sampled):
        figure_, axes = pyplot.subplots(3, 1, figsize=(9, 7), sharex=True)
        own = [run for run in sampled if run["workload"] == workload]
        for i, run in enumerate(own):
            label = f"{run['variant']} {run['round']}"
            for axis, name in zip(axes, ("num_running_reqs", "neo_host_running_reqs", "num_queue_reqs"), strict=True):
                points = [(s["time"], s[name]) for s in run["samples"] if name in s]
                if points:
                    axis.plot(*zip(*points, strict=True), label=label, color=f"C{i}")
                axis.set_title(name.replace("_", " "), fontsize=8)
        axes[-1].set_xlabel("seconds")
        axes[0].legend(fontsize=7)
        number = list(dict.fromkeys(run["workload"] for run in sampled)).index(workload)
        figure_.suptitle(workload, fontsize=9)
        save(figure_, f"timeline_{number}.png")
    return written
