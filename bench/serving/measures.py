"""What a run was like, from what the client saw: pure functions of ``Answer``s and samples.

*Sustained*: all output tokens over the whole run, every request's prefill and waiting counted. *Decode-only*: what the
steps of a steady window would give without any prefill between them: the tokens per second of the window, times by how
much the mean time between two tokens of a request is longer than the median, which has no prefill in it. Both times are
those of requests on the device, where there are any: a deferred request has a token every so many steps only, and
hardly ever without a prefill among them. Tokens that host rows have beside a prefill, in lanes, are counted as if it
had not been there: these figures are too high by that. Classes: a token made by a host row counts as host; so do the
latencies of a request of which any token does.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from bench.serving.client import Answer

CLASSES = ("device", "host")


def percentile(values: Sequence[float], fraction: float) -> float:
    """Of values in any order, by linear interpolation."""
    ordered = sorted(values)
    at = fraction * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def spread(values: Iterable[float]) -> dict[str, float] | None:
    """p50, p99 and mean; None without values."""
    values = list(values)
    if not values:
        return None
    return {"p50": percentile(values, 0.5), "p99": percentile(values, 0.99), "mean": statistics.fmean(values)}


def is_host(answer: Answer) -> bool:
    return any(answer.on_host)


def latencies(answers: Sequence[Answer]) -> dict[str, Any]:
    """TTFT, TPOT and end-to-end in seconds, of whole requests."""
    done = [a for a in answers if a.token_times and a.error is None and not a.cut]
    return {
        "requests": len(done),
        "ttft_s": spread(a.token_times[0] - a.sent for a in done),
        "tpot_s": spread(
            (a.token_times[-1] - a.token_times[0]) / (len(a.token_times) - 1) for a in done if len(a.token_times) > 1
        ),
        "end_to_end_s": spread(a.token_times[-1] - a.sent for a in done),
    }


def running(answers: Sequence[Answer]) -> list[tuple[float, int]]:
    """Requests between their first and last token, as (time, how many from then on)."""
    changes = [(a.token_times[0], 1) for a in answers if a.token_times]
    changes += [(a.token_times[-1], -1) for a in answers if a.token_times]
    course, now = [], 0
    for time, change in sorted(changes):
        now += change
        course.append((time, now))
    return course


def steady_window(answers: Sequence[Answer]) -> tuple[float, float]:
    """From when the number of decoding requests first reaches 80 % of its highest until it last falls below."""
    course = running(answers)
    if not course:
        return 0.0, 0.0
    level = 0.8 * max(number for _, number in course)
    begin = next(time for time, number in course if number >= level)
    end = begin
    for (_, number), (following, _) in itertools.pairwise(course):
        if number >= level:
            end = following
    return begin, end


def decode_only(answers: Sequence[Answer]) -> dict[str, Any]:
    """Tokens per second of a steady window's steps, see above; and by class the median time between two tokens and the
    mean number of requests."""
    begin, end = steady_window(answers)
    gaps: dict[str, list[float]] = {name: [] for name in CLASSES}
    tokens: dict[str, int] = dict.fromkeys(CLASSES, 0)
    inside: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
    for a in answers:
        for i in range(1, len(a.token_times)):
            before, now = a.token_times[i - 1], a.token_times[i]
            overlap = min(now, end) - max(before, begin)
            if overlap < 0 or end <= begin:
                continue
            kind = "host" if i < len(a.on_host) and a.on_host[i] else "device"
            inside[kind] += overlap
            tokens[kind] += begin < now <= end
            if before >= begin and now <= end:
                gaps[kind].append(now - before)
    result: dict[str, Any] = {"window_s": [begin, end], "tokens_per_s": 0.0, "step_s": {}, "requests": {}}
    for kind in CLASSES:
        # Tokens that arrived in one chunk have no time between them; steps are told by the others.
        steps = [gap for gap in gaps[kind] if gap > 1e-4]
        if not steps:
            continue
        median = statistics.median(steps)
        result["step_s"][kind] = median
        result["requests"][kind] = inside[kind] / (end - begin)
    if result["step_s"]:
        kind, median = next(iter(result["step_s"].items()))  # the device, if it is there
        result["tokens_per_s"] = sum(tokens.values()) / (end - begin) * inside[kind] / tokens[kind] / median
    return result


def measure(answers: Sequence[Answer], seconds: float, samples: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Everything about one run."""
    tokens = sum(len(a.token_times) for a in answers)
    host_tokens = sum(sum(a.on_host[: len(a.token_times)]) for a in answers)
    errors = [f"request {a.index}: {a.error}" for a in answers if a.error is not None]
    first = min((a.sent for a in answers), default=0.0)
    last = max((a.token_times[-1] for a in answers if a.token_times), default=seconds)
    result: dict[str, Any] = {
        "requests": len(answers),
        "errors": errors[:10],
        "failed": len(errors),
        "prompt_tokens": sum(a.prompt_tokens for a in answers),
        "cached_tokens": sum(a.cached_tokens for a in answers),
        "output_tokens": tokens,
        "host_output_tokens": host_tokens,
        "retractions": sum(a.retractions for a in answers),
        "seconds": last - first,
        "sustained_tokens_per_s": tokens / max(1e-9, last - first),
        "decode_only": decode_only(answers),
        "all": latencies(answers),
        "device": latencies([a for a in answers if not is_host(a)]),
        "host": latencies([a for a in answers if is_host(a)]),
        "server": server_side(samples),
    }
    return result


def server_side(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """From samples of /metrics: means and peaks of gauges, growth of counters (absent until they first count)."""
    if not samples:
        return {}
    found: dict[str, float] = {}
    for name in sorted({key for sample in samples for key in sample} - {"time"}):
        values = [sample[name] for sample in samples if name in sample]
        if name.endswith("_total"):
            found[name.removesuffix("_total")] = values[-1] - samples[0].get(name, 0.0)
        else:
            found[f"{name}_mean"], found[f"{name}_max"] = statistics.fmean(values), max(values)
    return found
