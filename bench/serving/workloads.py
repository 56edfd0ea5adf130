"""What clients ask for, and when: pure, from a seed. Prompts are random token ids, never one token repeated.

A workload is written ``kind:key=value,key=value``:

    backlog   prompt=900 output=200 count=64 concurrency=32 seconds=60      a standing backlog: as many at once as
                                                                concurrency says; ended after so many seconds, if given
    poisson   rate=2 prompt=900 output=200 count=100            independent arrivals, rate per second
    sweep     rates=0.5/1/2 prompt=.. output=.. count=..        one poisson workload for each rate
    grid      prompts=128/1024 outputs=32/256 count=.. concurrency=..    one backlog for each pair
    trace     name=azure_conv_2023 count=200 speed=1 longest=4096        a recorded trace with its arrival times
    lengths   name=openai_summaries rate=2 count=200            recorded lengths, poisson arrivals
    prefixes  prefixes=5 prefix=1500 suffix=50 output=50 count=50 concurrency=50      shared beginnings
    chat      users=8 turns=4 prompt=200 output=100             each turn goes on from the one before, in full
"""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TRACES = Path(__file__).parents[1] / "traces"


@dataclass(frozen=True)
class Ask:
    """One request. ``prompt`` is what is new in it: with ``after``, it follows that request's prompt and answer."""

    prompt: tuple[int, ...]
    output_tokens: int
    at: float = 0.0  # seconds after the start; 0 in a backlog
    after: int | None = None  # index of an earlier request of the workload, whose end it waits for


@dataclass(frozen=True)
class Workload:
    """
    Attributes:
        concurrency: the most requests under way at once; None: they are sent when they arrive.
        seconds: after which what is under way is cut off; None: all are answered.
    """

    name: str
    asks: tuple[Ask, ...]
    concurrency: int | None = None
    seconds: float | None = None


class WorkloadError(ValueError):
    """A workload's text makes no sense; the message says what is wrong."""


def parse(text: str, vocabulary: int, seed: int = 1) -> list[Workload]:
    """The workloads that ``text`` names. ``vocabulary``: token ids below it are used.

    Raises WorkloadError.
    """
    kind, _, rest = text.partition(":")
    if kind not in _KINDS:
        raise WorkloadError(f"no workload {kind!r}: there are {', '.join(_KINDS)}")
    build, defaults = _KINDS[kind]
    given: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in defaults:
            raise WorkloadError(f"{kind} knows {', '.join(defaults)}, not {part!r}")
        given[key] = value
    values = {**defaults, **given}
    try:
        return build(text, values, _Tokens(vocabulary, seed))
    except (ValueError, OSError) as error:
        raise WorkloadError(f"{text}: {error}") from None


class _Tokens:
    def __init__(self, vocabulary: int, seed: int):
        self.random = random.Random(seed)
        self._vocabulary = vocabulary

    def prompt(self, length: int) -> tuple[int, ...]:
        if length < 1:
            raise ValueError("a prompt has at least one token")
        return tuple(self.random.randrange(3, self._vocabulary) for _ in range(length))

    def arrivals(self, rate: float, count: int) -> list[float]:
        if not rate > 0:
            raise ValueError("a rate must be greater than 0")
        times, now = [], 0.0
        for _ in range(count):
            times.append(now)
            now += self.random.expovariate(rate)
        return times


_Values = dict[str, str]


def _backlog(name: str, v: _Values, tokens: _Tokens) -> list[Workload]:
    count = int(v["count"])
    asks = tuple(Ask(tokens.prompt(int(v["prompt"])), int(v["output"])) for _ in range(count))
    seconds = float(v.get("seconds") or 0) or None
    return [Workload(name, asks, int(v["concurrency"] or count), seconds)]


def _poisson(name: str, v: _Values, tokens: _Tokens) -> list[Workload]:
    times = tokens.arrivals(float(v["rate"]), int(v["count"]))
    return [Workload(name, tuple(Ask(tokens.prompt(int(v["prompt"])), int(v["output"]), at) for at in times))]


def _sweep(name: str, v: _Values, tokens: _Tokens) -> list[Workload]:
    found = []
    for rate in v["rates"].split("/"):
        own = f"poisson:rate={rate},prompt={v['prompt']},output={v['output']},count={v['count']}"
        found += _poisson(own, {**v, "rate": rate}, tokens)
    return found


def _grid(name: str, v: _Values, tokens: _Tokens) -> list[Workload]:
    found = []
    for prompt in v["prompts"].split("/"):
        for output in v["outputs"].split("/"):
            own = f"backlog:prompt={prompt},output={output},count={v['count']},concurrency={v['concurrency']}"
            found += _backlog(own, {**v, "prompt": prompt, "output": output}, tokens)
    return found


def _rows(name: str, count: int) -> list[dict[str, str]]:
    path = TRACES / f"{name}.csv"
    if not path.is_file():
        raise ValueError(f"no trace {name}: there are {', '.join(sorted(p.stem for p in TRACES.glob('*.csv')))}")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    if len(rows) < count:
        raise ValueError(f"the trace {name} has {len(rows)} requests")
    return rows[:count]


def _trace(name: str, v: _Values, tokens: _Tokens) -> list[Workload]:
    rows = _rows(v["name"], int(v["count"]))
    if "seconds" not in rows[0]:
        raise ValueError(f"the trace {v['name']} has no arrival times: use lengths")
    longest, speed = int(v["longest"]), float(v["speed"])
    asks = []
    for row in rows:
        output = max(1, int(row["output_tokens"]))
        prompt = max(1, min(int(row["prompt_tokens"]), longest - output))
        asks.append(Ask(tokens.prompt(prompt), output, float(row["seconds"]) / speed))
    return [Workload(name, tuple(asks))]


def _lengths(name: str, v: _Values, tokens: _Tokens) -> list[Workload]:
    rows = _rows(v["name"], int(v["count"]))
    times = tokens.arrivals(float(v["rate"]), len(rows))
    asks = (
        Ask(tokens.prompt(max(1, int(r["prompt_tokens"]))), max(1, int(r["output_tokens"])), at)
        for r, at in zip(rows, times, strict=True)
    )
    return [Workload(name, tuple(asks))]


def _prefixes(name: str, v: _Values, tokens: _Tokens) -> list[Workload]:
    shared = [tokens.prompt(int(v["prefix"])) for _ in range(int(v["prefixes"]))]
    count = int(v["count"])
    asks = tuple(Ask(shared[i % len(shared)] + tokens.prompt(int(v["suffix"])), int(v["output"])) for i in range(count))
    return [Workload(name, asks, int(v["concurrency"] or count))]


def _chat(name: str, v: _Values, tokens: _Tokens) -> list[Workload]:
    users, turns = int(v["users"]), int(v["turns"])
    asks = tuple(
        Ask(tokens.prompt(int(v["prompt"])), int(v["output"]), after=None if turn == 0 else (turn - 1) * users + user)
        for turn in range(turns)
        for user in range(users)
    )
    return [Workload(name, asks, users)]


_KINDS: dict[str, tuple[Callable[[str, _Values, _Tokens], list[Workload]], _Values]] = {
    "backlog": (_backlog, {"prompt": "900", "output": "200", "count": "32", "concurrency": "", "seconds": ""}),
    "poisson": (_poisson, {"rate": "1", "prompt": "900", "output": "200", "count": "64"}),
    "sweep": (_sweep, {"rates": "0.5/1/2", "prompt": "900", "output": "200", "count": "64"}),
    "grid": (_grid, {"prompts": "128/1024", "outputs": "32/256", "count": "32", "concurrency": ""}),
    "trace": (_trace, {"name": "azure_conv_2023", "count": "200", "speed": "1", "longest": "4096"}),
    "lengths": (_lengths, {"name": "openai_summaries", "rate": "2", "count": "200"}),
    "prefixes": (
        _prefixes,
        {"prefixes": "5", "prefix": "1500", "suffix": "50", "output": "50", "count": "50", "concurrency": ""},
    ),
    "chat": (_chat, {"users": "8", "turns": "4", "prompt": "200", "output": "100"}),
}


def parse_all(texts: Sequence[str], vocabulary: int, seed: int = 1) -> list[Workload]:
    """All workloads of several texts. Raises WorkloadError."""
    return [workload for text in texts for workload in parse(text, vocabulary, seed)]
