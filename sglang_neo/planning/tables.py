"""Measured times of one model on one machine, and how they are kept.

A table is a curve over one size or a surface over two, sampled by measurement and read by linear interpolation. More
work never takes less time in it: noise that says otherwise is smoothed away when a table is made, interpolation and
extrapolation keep it so, and the planner may rely on it. Times are in seconds, sizes in tokens and rows.

Tables are saved under the key of what they were measured on. Under another key they are refused, not adapted.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

#: Of the file; another number means that the meaning of a field changed.
FORMAT = 3


class ProfileError(ValueError):
    """A file of tables that cannot be used; the message is one line that says why."""


def monotone(values: Sequence[float]) -> tuple[float, ...]:
    """The values, made nondecreasing: halfway between the running maximum and the running minimum from the right."""
    upper = list(accumulate(values, max))
    lower = list(accumulate(reversed(values), min))[::-1]
    return tuple((low + high) / 2 for low, high in zip(lower, upper, strict=True))


def _check_axis(axis: Sequence[float], name: str) -> None:
    if not axis or axis[0] < 0 or any(not a < b for a, b in pairwise(axis)):
        raise ValueError(f"{name} must be increasing and not negative, got {list(axis)}")


def _check_values(values: Sequence[float], name: str) -> None:
    if any(not 0 <= v < float("inf") for v in values) or any(a > b for a, b in pairwise(values)):
        raise ValueError(f"{name} must be finite, not negative and nondecreasing, got {list(values)}")


def _two(values: tuple[Any, ...], step: Any) -> tuple[Any, ...]:
    """At least two points, so that every size lies in an interval: a single one is repeated."""
    return values if len(values) > 1 else (values[0], values[0] + step)


@dataclass(frozen=True)
class Curve:
    """Seconds over one size, piecewise linear. Constant below the first point, with the last slope beyond the last."""

    x: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_axis(self.x, "sizes")
        _check_values(self.seconds, "seconds")
        if len(self.x) != len(self.seconds):
            raise ValueError(f"{len(self.x)} sizes but {len(self.seconds)} times")
        # Derived, not fields: nothing to save or to compare.
        object.__setattr__(self, "_points", (_two(self.x, 1.0), _two(self.seconds, 0.0)))

    @staticmethod
    def fit(points: Mapping[float, float]) -> Curve:
        """From measured points, size -> seconds, in any order."""
        xs = tuple(sorted(points))
        return Curve(xs, monotone([points[x] for x in xs]))

    def at(self, x: float) -> float:
        points: tuple[tuple[float, ...], tuple[float, ...]] = self._points  # type: ignore[attr-defined]
        axis, seconds = points
        i = bisect_right(axis, x, 1, len(axis) - 1)
        low, start = seconds[i - 1], axis[i - 1]
        return low if x <= start else low + (x - start) * (seconds[i] - low) / (axis[i] - start)


@dataclass(frozen=True)
class Surface:
    """Seconds over two sizes, bilinear within the grid.

    Constant below the first point of an axis; beyond the last, the mean last slope of that axis. So a value never falls
    when a size grows, whatever the other size, which extending the bilinear form would not give.

    Attributes:
        seconds: [len(x)][len(y)], nondecreasing in both directions.
    """

    x: tuple[float, ...]
    y: tuple[float, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        _check_axis(self.x, "sizes")
        _check_axis(self.y, "sizes")
        if len(self.seconds) != len(self.x) or any(len(row) != len(self.y) for row in self.seconds):
            raise ValueError(f"seconds must have the shape [{len(self.x)}][{len(self.y)}]")
        for line in (*self.seconds, *zip(*self.seconds, strict=True)):
            _check_values(line, "seconds")
        rows = tuple(_two(row, 0.0) for row in self.seconds)
        grid = rows if len(rows) > 1 else rows * 2
        object.__setattr__(self, "_grid", (_two(self.x, 1.0), _two(self.y, 1.0), grid))
        object.__setattr__(self, "_slope_x", self._last_slope(self.x, tuple(zip(*self.seconds, strict=True))))
        object.__setattr__(self, "_slope_y", self._last_slope(self.y, self.seconds))

    @staticmethod
    def _last_slope(axis: Sequence[float], lines: Sequence[Sequence[float]]) -> float:
        if len(axis) == 1:
            return 0.0
        return sum(line[-1] - line[-2] for line in lines) / len(lines) / (axis[-1] - axis[-2])

    @staticmethod
    def fit(points: Mapping[tuple[float, float], float]) -> Surface:
        """From measured points, (x, y) -> seconds, which must be a whole grid. Raises ValueError otherwise."""
        xs, ys = (tuple(sorted({point[axis] for point in points})) for axis in (0, 1))
        missing = [(x, y) for x in xs for y in ys if (x, y) not in points]
        if missing:
            raise ValueError(f"the grid lacks {missing[0]} and {len(missing) - 1} other points")
        grid = [[points[x, y] for y in ys] for x in xs]
        # Running maxima along one axis and then the other are the least monotone surface above the points, running
        # minima the greatest one below them; the mean of two monotone surfaces is one.
        upper = _along_both(grid, lambda line: list(accumulate(line, max)))
        lower = _along_both(grid, lambda line: list(accumulate(reversed(line), min))[::-1])
        middle = [
            tuple((a + b) / 2 for a, b in zip(low, high, strict=True)) for low, high in zip(lower, upper, strict=True)
        ]
        return Surface(xs, ys, tuple(middle))

    def at(self, x: float, y: float) -> float:
        xs, ys, grid = self._grid  # type: ignore[attr-defined]
        i, j = bisect_right(xs, x, 1, len(xs) - 1), bisect_right(ys, y, 1, len(ys) - 1)
        x0, y0 = xs[i - 1], ys[j - 1]
        u, v = (x - x0) / (xs[i] - x0), (y - y0) / (ys[j] - y0)
        u, v = (0.0 if u < 0 else u if u < 1 else 1.0), (0.0 if v < 0 else v if v < 1 else 1.0)
        low, high = grid[i - 1], grid[i]
        at_low, at_high = low[j - 1], high[j - 1]
        at_low += v * (low[j] - at_low)
        at_high += v * (high[j] - at_high)
        value: float = at_low + u * (at_high - at_low)
        if x > xs[-1]:
            value += (x - xs[-1]) * self._slope_x  # type: ignore[attr-defined]
        if y > ys[-1]:
            value += (y - ys[-1]) * self._slope_y  # type: ignore[attr-defined]
        return value


def _along_both(grid: Sequence[Sequence[float]], smooth: Any) -> list[Sequence[float]]:
    rows = [smooth(row) for row in grid]
    columns = [smooth(column) for column in zip(*rows, strict=True)]
    return list(zip(*columns, strict=True))


@dataclass(frozen=True)
class CpuAttention:
    """Seconds of one hand-off, that is of one layer, from ready to done, for a number of worker threads.

    Attributes:
        threads: numbers of threads that were measured, increasing.
        private: for each, over (rows, KV tokens of all rows together).
        shared: for each, over (rows, tokens of one prefix that all these rows attend to, read once).
    """

    threads: tuple[int, ...]
    private: tuple[Surface, ...]
    shared: tuple[Surface, ...]

    def __post_init__(self) -> None:
        _check_axis(self.threads, "threads")
        if not len(self.threads) == len(self.private) == len(self.shared):
            raise ValueError("one surface of each kind is needed per number of threads")

    def at(self, rows: float, kv_tokens: float, threads: int, shared_tokens: float = 0) -> float:
        """Between two measured numbers of threads: linear. Outside: the nearest.

        Args:
            kv_tokens: that belong to one row each, all rows together.
            shared_tokens: of a prefix common to all rows, besides ``kv_tokens``.
        """
        if rows <= 0:
            return 0.0
        measured = self.threads
        if len(measured) == 1:
            return self._at(0, rows, kv_tokens, shared_tokens)
        i = bisect_right(measured, threads) - 1
        seconds = self._at(max(i, 0), rows, kv_tokens, shared_tokens)
        if 0 <= i < len(measured) - 1 and threads > measured[i]:
            part = (threads - measured[i]) / (measured[i + 1] - measured[i])
            seconds += part * (self._at(i + 1, rows, kv_tokens, shared_tokens) - seconds)
        return seconds

    def _at(self, i: int, rows: float, kv_tokens: float, shared_tokens: float) -> float:
        seconds = self.private[i].at(rows, kv_tokens)
        return seconds + self.shared[i].at(rows, shared_tokens) if shared_tokens > 0 else seconds


@dataclass(frozen=True)
class Tables:
    """What was measured, with the server's processes running. Times per step are of the whole model.

    Attributes:
        layers: of the model; hand-offs per step.
        linear: tokens in the batch -> seconds per step of all that is not attention.
        prefill_attention: (new tokens, tokens before them) -> seconds per step.
        device_attention: (rows, KV tokens of all rows) -> seconds per step of decode attention on the device.
        cpu_attention: seconds per layer.
        handoff: host rows -> seconds per layer that the device's stream spends on outbox, flags and inbox.
        slot_handoff: slot rows of a deferred step -> the same, where these go ahead of the layers and beside them.
        to_host, to_device: tokens of KV -> seconds of a copy, all layers.
        step_overhead: seconds per step that a captured decode step adds (launch, sampling, what shows of scheduling).
        eager_overhead: seconds per step that launching kernel by kernel adds to that.
        lane_overhead: seconds per step that a second lane adds to that.
        host_bandwidth: bytes per second that the CPU reads with all threads while no copy runs.
        host_bandwidth_copying: the same while copies run.
        host_token_bytes: KV bytes of one token in the host pool, all layers.
    """

    layers: int
    linear: Curve
    prefill_attention: Surface
    device_attention: Surface
    cpu_attention: CpuAttention
    handoff: Curve
    slot_handoff: Curve
    to_host: Curve
    to_device: Curve
    step_overhead: float
    eager_overhead: float
    lane_overhead: float
    host_bandwidth: float
    host_bandwidth_copying: float
    host_token_bytes: float

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"a model has at least one layer, got {self.layers}")
        for name in ("step_overhead", "eager_overhead", "lane_overhead"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)}")
        if not 0 < self.host_bandwidth_copying <= self.host_bandwidth < float("inf"):
            raise ValueError("copies take bandwidth away: host_bandwidth_copying must be in (0, host_bandwidth]")
        if not self.host_token_bytes > 0:
            raise ValueError(f"host_token_bytes must be positive, got {self.host_token_bytes}")


@dataclass(frozen=True)
class Key:
    """What tables are measured on. Any difference makes them another machine's, or an older build's."""

    model: str  # with what changes its speed: data types, tensor parallelism
    gpu: str
    cpu: str
    threads: int
    kernels: str  # build of cpu_kernels, with the instruction set
    sglang: str

    @property
    def file_name(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]
        return f"profile-{digest}.json"


def save(path: Path, key: Key, tables: Tables) -> None:
    """Writes the file in one piece: whoever reads it meanwhile sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, "key": asdict(key), "tables": asdict(tables)}, indent=1)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(text + "\n")
    partial.replace(path)


def read(path: Path) -> tuple[Key, Tables]:
    """What a file holds, whatever machine it is of. Raises ProfileError if it is no such file."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path} cannot be read as a profile: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise ProfileError(f"{path} has format {found}, this version reads {FORMAT}: profile again")
    try:
        return Key(**content["key"]), _build(Tables, content["tables"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"{path} is damaged ({error}): profile again") from None


def load(path: Path, key: Key) -> Tables:
    """The tables, if they are of this key. Raises ProfileError otherwise, naming what differs."""
    found, tables = read(path)
    differences = [
        f"{field.name} {getattr(found, field.name)!r} instead of {getattr(key, field.name)!r}"
        for field in fields(Key)
        if getattr(found, field.name) != getattr(key, field.name)
    ]
    if differences:
        raise ProfileError(f"{path} was measured with {', '.join(differences)}: profile again")
    return tables


def tables_of(content: Mapping[str, Any]) -> Tables:
    """From the JSON form of ``asdict(tables)``. Raises ProfileError if it is none."""
    try:
        found = _build(Tables, content)
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(f"these are no tables: {error}") from None
    assert isinstance(found, Tables)
    return found


def _build(kind: type, content: Mapping[str, Any]) -> Any:
    """The inverse of ``asdict``."""
    names = {field.name for field in fields(kind)}
    if set(content) != names:
        raise ValueError(f"{kind.__name__} has {sorted(set(content) ^ names)} too many or too few")
    values = {}
    for name, value in content.items():
        if isinstance(value, dict):
            value = _build(CpuAttention if "threads" in value else Surface if "y" in value else Curve, value)
        elif kind is CpuAttention and name in ("private", "shared"):
            value = tuple(_build(Surface, surface) for surface in value)
        elif isinstance(value, list):
            value = tuple(tuple(item) if isinstance(item, list) else item for item in value)
        values[name] = value
    return kind(**values)
