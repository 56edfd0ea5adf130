"""The planner's tables (planning/tables.py) from trials: which sizes are tried, and what follows from the times.

What cannot be timed by itself is a difference: device attention is a step with KV less the same step without, what a
hand-off takes from the device is a step with host rows less that step without and less the CPU's time. Sizes grow until
one run takes ``CAP_S``; beyond, times go on in a straight line.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sglang_neo.planning.tables import CpuAttention, Curve, Surface, Tables
from sglang_neo.profiling.trial import Trials

#: A run that takes longer is the last of its line.
CAP_S = 0.2
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
    sizes: Iterable[int], most: int, measure: Callable[[int], float], last: Callable[[], float]
) -> dict[float, float]:
    """Times by size; sizes above ``most`` and those behind a run of ``CAP_S`` go on in a straight line.

    Args:
        last: what the last run took; ``measure`` may give a part of it.
    """
    points: dict[float, float] = {}
    measured: list[tuple[float, float]] = []
    for size in sizes:
        if size <= most and (len(measured) < 2 or last() < CAP_S):
            points[size] = measure(size)
            measured.append((size, points[size]))
        elif len(measured) > 1:
            (x0, y0), (x1, y1) = measured[-2:]
            points[size] = y1 + max(y1 - y0, 0.0) * (size - x1) / (x1 - x0)
        else:
            points[size] = measured[0][1] * size / max(measured[0][0], 1) if measured else 0.0
    return points


class Profile:
    """One measurement of everything.

    Args:
        trials: of the model runner.
        told: called after each of ``STEPS`` parts.
    """

    STEPS = 7

    def __init__(self, trials: Trials, told: Callable[[], Any] = lambda: None):
        self._t, self._told = trials, told
        self._rows = [rows for rows in _ROWS if rows <= trials.most_rows]
        args = trials.runner.server_args
        self._prefill = args.chunked_prefill_size if (args.chunked_prefill_size or 0) > 0 else args.max_prefill_tokens

    def tables(self) -> Tables:
        """Raises TrialError if the CPU side does not work."""
        t = self._t
        layers = t.attention.geometry.layers
        linear, eager = self._linear()
        self._told()
        device_attention = self._device_attention(linear)
        self._told()
        prefill_attention = self._prefill_attention(linear, eager)
        self._told()
        cpu = self._cpu_attention()
        self._told()
        handoff, lane = self._handoffs(linear, cpu, layers)
        self._told()
        to_host, to_device = self._copies()
        self._told()
        token_bytes = t.host.pool.geometry.bytes_per_page / t.host_page
        free, copying = self._bandwidth(token_bytes / layers)
        self._told()
        return Tables(
            layers=layers,
            linear=linear,
            prefill_attention=prefill_attention,
            device_attention=device_attention,
            cpu_attention=cpu,
            handoff=handoff,
            to_host=to_host,
            to_device=to_device,
            step_overhead=t.sample(min(8, t.most_rows)),
            eager_overhead=eager,
            lane_overhead=lane,
            host_bandwidth=free,
            host_bandwidth_copying=copying,
            host_token_bytes=token_bytes,
        )

    def _along(self, sizes: Iterable[int], most: int, measure: Callable[[int], float]) -> dict[float, float]:
        self._t.last = 0.0
        return along(sizes, most, measure, lambda: self._t.last)

    def _linear(self) -> tuple[Curve, float]:
        """Passes without attention to speak of: decode steps as they will run, prefills of short prompts beyond. And
        what a prefill takes more than a decode step of as many rows."""
        t = self._t
        graphs = getattr(t.runner.decode_cuda_graph_runner, "capture_bs", ())
        most = min(t.most_rows, t.device_tokens // t.page, max(graphs, default=256))
        points = self._along(sizes_up_to(most, graphs), most, lambda rows: t.decode(rows, 1))
        least = min(max(most, _SHORT), t.device_tokens // 2)
        eager = max(0.0, t.extend(self._short(least)) - Curve.fit(points).at(least))
        sizes, size = [], 2 * least
        while size < self._prefill:
            sizes.append(size)
            size *= 2
        room = min(t.device_tokens, t.most_rows * min(t.context - 1, t.device_tokens))
        beyond = self._along([*sizes, self._prefill], room, lambda tokens: t.extend(self._short(tokens)) - eager)
        return Curve.fit({**points, **{x: y for x, y in beyond.items() if x > most}}), eager

    def _short(self, tokens: int) -> list[int]:
        """Lengths of the shortest prompts that make up so many tokens."""
        rows = max(1, min(-(-tokens // _SHORT), self._t.most_rows, self._t.device_tokens // self._t.page))
        return [tokens // rows + (row < tokens % rows) for row in range(rows)]

    def _device_attention(self, linear: Curve) -> Surface:
        t = self._t
        points: dict[tuple[float, float], float] = {}
        for rows in self._rows:
            most = rows * min(t.context - 1, t.device_tokens)  # rows may share slots: what they read is the same

            def measure(tokens: int, rows: int = rows) -> float:
                return max(0.0, t.decode(rows, max(1, tokens // rows)) - linear.at(rows)) if tokens > rows else 0.0

            points.update({(rows, tokens): seconds for tokens, seconds in self._along(_KV, most, measure).items()})
        return Surface.fit(points)

    def _prefill_attention(self, linear: Curve, eager: float) -> Surface:
        t = self._t
        longest = min(t.context - 1, t.device_tokens)
        sizes = [size for size in (64, 512, 4096) if size < min(self._prefill, longest)] + [self._prefill]
        points: dict[tuple[float, float], float] = {}
        line: dict[float, float] = {}
        last = 0
        for tokens in sizes:

            def measure(past: int, tokens: int = tokens) -> float:
                return max(0.0, t.extend([tokens], past) - linear.at(tokens) - eager)

            if not points or (tokens <= longest and linear.at(tokens) < CAP_S):
                line = self._along(_PAST, longest - tokens, measure)
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
        private: dict[tuple[float, float], float] = {}
        shared: dict[tuple[float, float], float] = {}
        for rows in self._rows:
            line = self._along(_KV, most, lambda tokens, rows=rows: t.handoffs(t.host_rows(rows, tokens)))  # type: ignore[misc]
            private.update({(rows, tokens): seconds for tokens, seconds in line.items()})
        for rows in self._rows:
            alone = private[rows, 0]

            def measure(prefix: int, rows: int = rows, alone: float = alone) -> float:
                return max(0.0, t.handoffs(t.host_rows(rows, rows, prefix)) - alone) if prefix else 0.0

            line = self._along(_KV, most // 2, measure)
            shared.update({(rows, tokens): seconds for tokens, seconds in line.items()})
        return CpuAttention((threads,), (Surface.fit(private),), (Surface.fit(shared),))

    def _handoffs(self, linear: Curve, cpu: CpuAttention, layers: int) -> tuple[Curve, float]:
        """What a hand-off takes from the device per layer, by host rows; and what a second lane takes besides."""
        t = self._t
        device = max(1, min(4, t.most_rows // 2))
        points = {}
        for rows in self._rows:
            if device + rows > t.most_rows:
                break
            step = t.hybrid(device, t.host_rows(rows, rows), in_lanes=False)
            own = (step - linear.at(device + rows)) / layers - cpu.at(rows, rows, cpu.threads[0])
            points[float(rows)] = max(own, 0.0)
        handoff = Curve.fit(points)
        rows = min(8, t.most_rows - device)
        if rows < 2:
            return handoff, 0.0
        step = t.hybrid(device, t.host_rows(rows, rows), in_lanes=True)
        a, b = device + rows - rows // 2, rows // 2
        parts = linear.at(a) + linear.at(b) + layers * (handoff.at(rows - b) + handoff.at(b))
        return handoff, max(0.0, step - parts)

    def _copies(self) -> tuple[Curve, Curve]:
        t = self._t
        most = min(t.device_tokens, t.host_pages * t.host_page)
        sizes = [size for size in (64, 512, 4096) if size <= most] or [most]
        return Curve.fit(self._along(sizes, most, t.to_host)), Curve.fit(self._along(sizes, most, t.to_device))

    def _bandwidth(self, layer_token_bytes: float) -> tuple[float, float]:
        """Bytes per second that the CPU reads, without copies and with."""
        t = self._t
        most = t.host_pages * t.host_page
        tokens = max([size for size in _KV if size <= most // 2] or [most])
        # More rows than one: a single one is read by few threads.
        rows = t.host_rows(min(max(self._rows), 16), max(tokens, 1))
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
