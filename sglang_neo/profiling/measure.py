"""The planner's tables (planning/tables.py) from trials: which sizes are tried, and what follows from the times.

What cannot be timed by itself is a difference: device attention is a step with KV less the same step without, what a
hand-off takes from the device is a step with host rows less that step without and less the CPU's time. Sizes grow until
one run takes ``CAP_S`` or the next one is not expected to fit in the time that its part of the profile has: a slow
machine is measured at fewer sizes. Beyond, times go on in a straight line.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sglang_neo.planning.tables import CpuAttention, Curve, Surface, Tables
from sglang_neo.profiling.trial import Trials

#: A run that takes longer is the last of its line.
CAP_S = 0.2
#: What all runs of a profile may take together, about, and the parts of it, in order: linear, device attention, prefill
#: attention, CPU attention, hand-offs, copies, bandwidth. What a part leaves goes to those after it.
BUDGET_S = 12.0
SHARES = (0.25, 0.2, 0.15, 0.2, 0.1, 0.05, 0.05)
#: Tokens of a prompt whose attention is next to nothing.
_SHORT = 16
#: KV tokens of all rows together.
_KV = (0, 512, 4096, 32768, 131072, 524288)
_ROWS = (1, 4, 16, 64, 256)
_PAST = (0, 512, 8192)


def sizes_up_to(most: int, graphs: Sequence[int] = ()) -> list[int]:
    """Sizes to time a pass at, ascending: where captured graphs pad, both sides of each step of theirs."""
    if not graphs:
        return sorted({min(1 << i, most) for i in range(most.bit_length() + 1)})
    kept: list[int] = []
    for size in sorted(graphs):
        if size <= most and (not kept or size > 1.3 * kept[-1]):
            kept.append(size)
    return sorted({size for at in kept for size in (at, at + 1) if size <= most} | {1, most})


def along(
    sizes: Iterable[int],
    most: int,
    measure: Callable[[int], float],
    last: Callable[[], float],
    left: Callable[[], float] = lambda: math.inf,
) -> dict[float, float]:
    """Times by size; sizes above ``most`` and those whose run would take too long go on in a straight line.

    Two runs are made whatever they take: one alone says nothing of what follows.

    Args:
        last: what the last run took; ``measure`` may give a part of it. 0: there was none, it is known without.
        left: seconds for further runs.
    """
    points: dict[float, float] = {}
    measured: list[tuple[float, float]] = []
    runs: list[tuple[float, float]] = []

    def fits(size: int) -> bool:
        return len(runs) < 2 or (runs[-1][1] < CAP_S and _expected(runs, size) <= left())

    for size in sizes:
        if size <= most and len(measured) == len(points) and fits(size):
            points[size] = measure(size)
            measured.append((size, points[size]))
            if last() > 0:
                runs.append((size, last()))
        elif len(measured) > 1:
            points[size] = max(_straight(measured, size), measured[-1][1])
        else:
            points[size] = measured[0][1] * size / max(measured[0][0], 1) if measured else 0.0
    return points


def _straight(points: Sequence[tuple[float, float]], size: float) -> float:
    (x0, y0), (x1, y1) = points[-2:]
    return y1 + (y1 - y0) * (size - x1) / (x1 - x0)


def _expected(runs: Sequence[tuple[float, float]], size: float) -> float:
    """Of a run of a larger size; after a single one no more than in proportion to it."""
    if len(runs) > 1:
        return max(_straight(runs, size), runs[-1][1])
    at, took = runs[0]
    return took * size / at if at else took


class Profile:
    """One measurement of everything.

    Args:
        trials: of the model runner.
        told: called after each of ``STEPS`` parts.
    """

    STEPS = len(SHARES)

    def __init__(self, trials: Trials, told: Callable[[], Any] = lambda: None):
        self._t, self._told = trials, told
        self._begin, self._part, self._until = 0.0, 0, math.inf
        self._rows = [rows for rows in _ROWS if rows <= trials.most_rows]
        #: Device rows of a step that is to show what others in it take.
        self._beside = max(1, min(4, trials.most_rows // 2))
        args = trials.runner.server_args
        self._prefill = args.chunked_prefill_size if (args.chunked_prefill_size or 0) > 0 else args.max_prefill_tokens

    def tables(self) -> Tables:
        """Raises TrialError if the CPU side does not work."""
        t = self._t
        layers = t.attention.geometry.layers
        token_bytes = t.host.pool.geometry.bytes_per_page / t.host_page
        t.decode(1, 1)  # whatever is slow the first time only
        self._begin = t.spent
        with self._next_part():
            linear, eager = self._linear()
        with self._next_part():
            device_attention = self._device_attention(linear)
        with self._next_part():
            prefill_attention = self._prefill_attention(linear, eager)
        with self._next_part():
            cpu = self._cpu_attention()
        with self._next_part():
            handoff, lane = self._handoffs(linear, cpu, layers)
            slot_handoff = self._slot_handoff(linear, layers) or handoff
        with self._next_part():
            to_host, to_device = self._copies()
        with self._next_part():
            free, copying = self._bandwidth(token_bytes / layers, cpu)
        return Tables(
            layers=layers,
            linear=linear,
            prefill_attention=prefill_attention,
            device_attention=device_attention,
            cpu_attention=cpu,
            handoff=handoff,
            slot_handoff=slot_handoff,
            to_host=to_host,
            to_device=to_device,
            step_overhead=t.sample(min(8, t.most_rows)),
            eager_overhead=eager,
            lane_overhead=lane,
            host_bandwidth=free,
            host_bandwidth_copying=copying,
            host_token_bytes=token_bytes,
        )

    @contextlib.contextmanager
    def _next_part(self) -> Iterator[None]:
        """One of ``SHARES``, with its share of the time that is left."""
        spent = self._t.spent
        left = max(0.0, self._begin + BUDGET_S - spent)
        self._until = spent + left * SHARES[self._part] / sum(SHARES[self._part :])
        yield
        self._part += 1
        self._told()

    def _left(self) -> float:
        """Seconds of this part, the same in all ranks."""
        return self._until - self._t.spent

    def _along(
        self, sizes: Iterable[int], most: int, measure: Callable[[int], float], lines: int = 1
    ) -> dict[float, float]:
        """``lines``: that are to share what is left, this one included."""
        end = self._t.spent + self._left() / lines

        def run(size: int) -> float:
            self._t.last = 0.0
            return measure(size)

        return along(sizes, most, run, lambda: self._t.last, lambda: end - self._t.spent)

    def _by_rows(
        self, most: Callable[[int], int], measure: Callable[[int, int], float]
    ) -> dict[tuple[float, float], float]:
        """Times by rows and tokens, a line of ``_KV`` for each number of rows: for as many of these as there is time.

        Args:
            most: tokens of so many rows.
        """
        points: dict[tuple[float, float], float] = {}
        first: list[tuple[float, float]] = []  # runs of the lines
        for i, rows in enumerate(self._rows):
            # The two runs of a line that are made whatever they take.
            if first and 2 * _expected(first, rows) > self._left():
                break
            took: list[float] = []

            def at(tokens: int, rows: int = rows, took: list[float] = took) -> float:
                seconds = measure(rows, tokens)
                took.append(self._t.last)
                return seconds

            line = self._along(_KV, most(rows), at, len(self._rows) - i)
            first.append((rows, max(took[:2])))
            points.update({(rows, tokens): seconds for tokens, seconds in line.items()})
        return points

    def _linear(self) -> tuple[Curve, float]:
        """Passes without attention to speak of: decode steps as they will run, prefills of short prompts beyond. And
        what a prefill takes more than a decode step of as many rows."""
        t = self._t
        graphs = getattr(t.runner.decode_cuda_graph_runner, "capture_bs", ())
        most = min(t.most_rows, t.device_tokens // t.page, max(graphs, default=256))
        timed: list[int] = []

        def decode(rows: int) -> float:
            timed.append(rows)
            return t.decode(rows, 1)

        points = self._along(sizes_up_to(most, graphs), most, decode, 2)
        least = min(max(timed[-1], _SHORT), t.device_tokens // 2)
        eager = max(0.0, t.extend(self._short(least)) - Curve.fit(points).at(least))
        sizes, size = [], 2 * least
        while size < self._prefill:
            sizes.append(size)
            size *= 2
        room = min(t.device_tokens, t.most_rows * min(t.context - 1, t.device_tokens))
        beyond = self._along([*sizes, self._prefill], room, lambda tokens: t.extend(self._short(tokens)) - eager)
        known = {x: y for x, y in points.items() if x <= timed[-1]}
        return Curve.fit({**known, **{x: y for x, y in beyond.items() if x > timed[-1]}}), eager

    def _short(self, tokens: int) -> list[int]:
        """Lengths of the shortest prompts that make up so many tokens."""
        rows = max(1, min(-(-tokens // _SHORT), self._t.most_rows, self._t.device_tokens // self._t.page))
        return [tokens // rows + (row < tokens % rows) for row in range(rows)]

    def _device_attention(self, linear: Curve) -> Surface:
        t = self._t

        def most(rows: int) -> int:
            return rows * min(t.context - 1, t.device_tokens)  # rows may share slots: what they read is the same

        def measure(rows: int, tokens: int) -> float:
            return max(0.0, t.decode(rows, tokens // rows) - linear.at(rows)) if tokens > rows else 0.0

        return Surface.fit(self._by_rows(most, measure))

    def _prefill_attention(self, linear: Curve, eager: float) -> Surface:
        t = self._t
        longest = min(t.context - 1, t.device_tokens)
        sizes = [size for size in (64, 512, 4096) if size < min(self._prefill, longest)] + [self._prefill]
        points: dict[tuple[float, float], float] = {}
        line: dict[float, float] = {}
        last = 0
        for i, tokens in enumerate(sizes):

            def measure(past: int, tokens: int = tokens) -> float:
                return max(0.0, t.extend([tokens], past) - linear.at(tokens) - eager)

            if not points or (tokens <= longest and linear.at(tokens) < min(CAP_S, self._left() / 2)):
                line = self._along(_PAST, longest - tokens, measure, len(sizes) - i)
            else:
                # Each new token attends to those before it, and to half of the new ones.
                line = {
                    past: seconds * tokens * (past + tokens / 2) / (last * (past + last / 2))
                    for past, seconds in line.items()
                }
            last = tokens
            points.update({(tokens, past): seconds for past, seconds in line.items()})
        return Surface.fit(points)

    def _cpu_attention(self) -> CpuAttention:
        t, threads = self._t, self._t.attention.workers.threads
        most = t.host_pages * t.host_page
        end = self._until
        self._until -= self._left() / 3
        private = self._by_rows(lambda rows: most, lambda rows, tokens: t.handoffs(t.host_rows(rows, tokens)))
        self._until = end

        def prefix_of(rows: int, tokens: int) -> float:
            alone = private[rows, 0] if (rows, 0) in private else Surface.fit(private).at(rows, 0)
            return max(0.0, t.handoffs(t.host_rows(rows, rows, tokens)) - alone) if tokens else 0.0

        shared = self._by_rows(lambda rows: most // 2, prefix_of)
        return CpuAttention((threads,), (Surface.fit(private),), (Surface.fit(shared),))

    def _handoffs(self, linear: Curve, cpu: CpuAttention, layers: int) -> tuple[Curve, float]:
        """What a hand-off takes from the device per layer, by host rows; and what a second lane takes besides."""
        t, device = self._t, self._beside
        points: dict[float, float] = {}
        for rows in self._rows:
            if device + rows > t.most_rows or (points and t.last > self._left()):
                break
            step = t.hybrid(device, t.host_rows(rows, rows), in_lanes=False)
            own = (step - linear.at(device + rows)) / layers - cpu.at(rows, rows, cpu.threads[0])
            points[float(rows)] = max(own, 0.0)
        handoff = Curve.fit(points)
        rows = min(8, t.most_rows - device)
        if rows < 2 or t.last > max(self._left(), CAP_S):
            return handoff, 0.0  # no graph is that slow, so nothing is added but the second pass
        step = t.hybrid(device, t.host_rows(rows, rows), in_lanes=True)
        a, b = device + rows - rows // 2, rows // 2
        parts = linear.at(a) + linear.at(b) + layers * (handoff.at(rows - b) + handoff.at(b))
        return handoff, max(0.0, step - parts)

    def _slot_handoff(self, linear: Curve, layers: int) -> Curve | None:
        """What the exchange of slot rows takes from the device per layer; None: there are no deferred steps."""
        t, slots, device = self._t, self._t.slots, self._beside
        if not slots or device + slots > t.most_rows:
            return None
        return Curve.fit({float(slots): max(0.0, t.deferred(device) - linear.at(device + slots)) / layers})

    def _copies(self) -> tuple[Curve, Curve]:
        t = self._t
        most = min(t.device_tokens, t.host_pages * t.host_page)
        sizes = [size for size in (64, 512, 4096) if size <= most] or [most]
        return Curve.fit(self._along(sizes, most, t.to_host, 2)), Curve.fit(self._along(sizes, most, t.to_device))

    def _bandwidth(self, layer_token_bytes: float, cpu: CpuAttention) -> tuple[float, float]:
        """Bytes per second that the CPU reads, without copies and with."""
        t = self._t
        most = t.host_pages * t.host_page
        # More rows than one: a single one is read by few threads.
        count = min(max(self._rows), 16)

        def run(tokens: int) -> float:
            return t.attention.geometry.layers * cpu.at(count, tokens, cpu.threads[0])

        left = self._left() / 2
        tokens = max([size for size in _KV if size <= most // 2 and run(size) <= left], default=0)
        rows = t.host_rows(count, max(tokens, t.host_page))
        read = layer_token_bytes * sum(row.tokens for row in rows)
        free = read / t.handoffs(rows)
        copied = min(4096, t.device_tokens, most)
        stop = threading.Event()

        def copies() -> None:
            while not stop.is_set():
                t.copy_once(copied)

        copying = threading.Thread(target=copies, name="copies", daemon=True)
        copying.start()
        try:
            together = read / t.handoffs(rows)
        finally:
            stop.set()
            copying.join()
        return free, min(free, together)
