"""What a step will take, from measured tables: the cost model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sglang_neo.planning.tables import Tables

Mode = Literal["gpu_only", "sync", "pipelined", "deferred"]

#: In order of preference among equals: the fewer parts, the better.
MODES: tuple[Mode, ...] = ("gpu_only", "sync", "pipelined", "deferred")


@dataclass(frozen=True)
class Corrections:
    """Factors on the tables, learnt from what steps took (correction.py): measured over predicted."""

    linear: float = 1.0
    prefill: float = 1.0  # linear layers and attention of prefills
    attention: float = 1.0  # decode attention on the device
    cpu: float = 1.0  # attention on the CPU
    overhead: float = 1.0  # of launching, of the second lane and of the hand-offs on the device


class StepCost(NamedTuple):
    """Predicted seconds of a step by the table they come from, ``Corrections`` included.

    ``wait`` is what the device waits for the CPU; ``cpu`` is what the CPU works, which is not part of the step's time.
    """

    linear: float = 0.0
    prefill: float = 0.0
    attention: float = 0.0
    overhead: float = 0.0
    wait: float = 0.0
    cpu: float = 0.0

    @property
    def device(self) -> float:
        """Seconds that the device works."""
        return self.linear + self.prefill + self.attention + self.overhead

    @property
    def seconds(self) -> float:
        return self.linear + self.prefill + self.attention + self.overhead + self.wait


@dataclass(frozen=True)
class Rows:
    """Some rows of a step: how many, and the KV tokens of all of them together."""

    count: float = 0
    tokens: float = 0

    @property
    def mean(self) -> float:
        return self.tokens / self.count if self.count else 0.0


NO_ROWS = Rows()


def lanes_wait(linear_a: float, linear_b: float, attention: float, cpu_a: float, cpu_b: float) -> float:
    """What the device waits for the CPU in two lanes, from times of a step or of a layer.

    In stream order: A's hand-off, its device attention, B's linear layers, B's hand-off, A's answer, A's linear layers,
    A's hand-off of the next layer ... So A's answer has the attention and B's linear layers, B's has A's linear layers
    and the attention of the next layer, and one CPU works on both in turn.

    Args:
        attention: of the device, in lane A.
        cpu_a, cpu_b: of the lanes' hand-offs.
    """
    of_a, of_b = cpu_a - linear_b - attention, cpu_b - linear_a - attention
    return max(0.0, of_a, of_b, cpu_a + cpu_b - linear_a - linear_b - attention)


@dataclass(frozen=True)
class Costs:
    """The cost model of one machine.

    Attributes:
        threads: of the CPU, at work on attention.
        shared_tokens: of a prefix common to all host rows; ``Rows.tokens`` of host rows includes it.
        copying: whether copies run beside the steps and take host memory's bandwidth.

    What several modes ask for is looked up once on each surface; curves are as quick as the looking up.
    """

    tables: Tables
    threads: int
    corrections: Corrections = field(default_factory=Corrections)
    shared_tokens: int = 0
    copying: bool = False
    _attention: dict[tuple[float, float], float] = field(default_factory=dict, compare=False, repr=False)
    _cpu: dict[tuple[float, float, float], float] = field(default_factory=dict, compare=False, repr=False)

    def cpu_layer(self, rows: Rows, together: bool = True) -> float:
        """Seconds of the hand-off of one layer. ``together``: rows sit at one layer and read a common prefix once."""
        return self._cpu_layer(rows.count, rows.tokens, self.shared_tokens if together else 0)

    def _cpu_layer(self, count: float, tokens: float, shared: float) -> float:
        if count <= 0:
            return 0.0
        key = count, tokens, shared
        if (seconds := self._cpu.get(key)) is None:
            if shared:
                shared = shared if count > 1 else 0
                tokens = max(tokens - shared * count, 0)
            tables = self.tables
            seconds = tables.cpu_attention.at(count, tokens, self.threads, shared) * self.corrections.cpu
            if self.copying:
                seconds *= tables.host_bandwidth / tables.host_bandwidth_copying
            self._cpu[key] = seconds
        return seconds

    def linear(self, tokens: float) -> float:
        return self.tables.linear.at(tokens) * self.corrections.linear

    def device_attention(self, rows: Rows) -> float:
        if rows.count <= 0:
            return 0.0
        key = rows.count, rows.tokens
        if (seconds := self._attention.get(key)) is None:
            seconds = self.tables.device_attention.at(rows.count, rows.tokens) * self.corrections.attention
            self._attention[key] = seconds
        return seconds

    def handoffs(self, rows: Rows) -> float:
        """Seconds per step that the device spends on handing rows over in all layers."""
        if rows.count <= 0:
            return 0.0
        return self.tables.layers * self.tables.handoff.at(rows.count) * self.corrections.overhead

    def slot_handoffs(self, slots: float) -> float:
        """The same of a deferred step, which has so many slot rows whoever sits there."""
        return self.tables.layers * self.tables.slot_handoff.at(slots) * self.corrections.overhead

    def gpu_only(self, device: Rows) -> StepCost:
        return StepCost(
            linear=self.linear(device.count),
            attention=self.device_attention(device),
            overhead=self.tables.step_overhead * self.corrections.overhead,
        )

    def sync(self, device: Rows, host: Rows) -> StepCost:
        """One batch; in each layer the device waits for the CPU."""
        cpu = self.tables.layers * self.cpu_layer(host)
        return StepCost(
            linear=self.linear(device.count + host.count),
            attention=self.device_attention(device),
            overhead=self.tables.step_overhead * self.corrections.overhead + self.handoffs(host),
            wait=cpu,
            cpu=cpu,
        )

    def pipelined(self, device: Rows, lane_a: Rows, lane_b: Rows) -> StepCost:
        """Two lanes. In each layer either lane's hand-off has the time of the other lane's linear layers and of the
        device's attention, and both together have all of the device's time: see ``lanes_wait``."""
        layers = self.tables.layers
        linear_a, linear_b = self.linear(device.count + lane_a.count), self.linear(lane_b.count)
        attention = self.device_attention(device)
        cpu_a, cpu_b = layers * self.cpu_layer(lane_a), layers * self.cpu_layer(lane_b)
        return StepCost(
            linear=linear_a + linear_b,
            attention=attention,
            overhead=(self.tables.step_overhead + self.tables.lane_overhead) * self.corrections.overhead
            + self.handoffs(lane_a)
            + self.handoffs(lane_b),
            wait=lanes_wait(linear_a, linear_b, attention, cpu_a, cpu_b),
            cpu=cpu_a + cpu_b,
        )

    def deferred(self, device: Rows, slots: float, cohort: Rows) -> StepCost:
        """One batch; in each layer one cohort is handed over and has a whole step until it is waited for.

        Args:
            slots: slot rows of the batch: it holds all of them, whether a row sits there or not.
            cohort: host rows at one layer, on average over the layers; less than one row means layers without any.
        """
        layers = self.tables.layers
        linear = self.linear(device.count + slots)
        attention = self.device_attention(device)
        overhead = self.tables.step_overhead * self.corrections.overhead + self.slot_handoffs(slots)
        rows = max(cohort.count, 1)
        cpu = layers * min(cohort.count, 1) * self.cpu_layer(Rows(rows, rows * cohort.mean), together=False)
        return StepCost(
            linear=linear,
            attention=attention,
            overhead=overhead,
            wait=max(cpu - linear - attention - overhead, 0),
            cpu=cpu,
        )

    def prefill(self, tokens: float, past: float, lane_b: Rows = NO_ROWS) -> StepCost:
        """A step that prefills, with host rows in a second lane or without.

        Args:
            tokens: new tokens of all prompts.
            past: tokens before them, of all prompts.
        """
        tables, factor = self.tables, self.corrections
        prefill = (tables.linear.at(tokens) + tables.prefill_attention.at(tokens, past)) * factor.prefill
        overhead = (tables.step_overhead + tables.eager_overhead) * factor.overhead
        if lane_b.count <= 0:
            return StepCost(prefill=prefill, overhead=overhead)
        cpu = tables.layers * self.cpu_layer(lane_b)
        return StepCost(
            prefill=prefill,
            linear=self.linear(lane_b.count),
            overhead=overhead + tables.lane_overhead * factor.overhead + self.handoffs(lane_b),
            wait=max(cpu - prefill, 0),
            cpu=cpu,
        )

    def load_back(self, tokens: float) -> float:
        """Seconds to copy the KV of a prefix to the device."""
        return self.tables.to_device.at(tokens)

    # -- how many host rows ------------------------------------------------------------------------------------

    def rows_within(self, seconds: float, mean_tokens: float, most: int, together: bool = True) -> int:
        """How many host rows of this length the CPU attends to in so many seconds of one layer, at most ``most``."""
        shared = self.shared_tokens if together else 0
        low, high = 0, most + 1  # low fits, high does not: what lies between is unknown
        low_seconds, high_seconds = 0.0, 0.0
        guess = most
        while low < guess < high:
            needed = self._cpu_layer(guess, guess * mean_tokens, shared)
            if needed <= seconds:
                low, low_seconds = guess, needed
            else:
                high, high_seconds = guess, needed
            # The time is nearly proportional to the rows: a straight line finds the place in a few looks.
            rise = high_seconds - low_seconds
            guess = low + int((seconds - low_seconds) * (high - low) / rise) if rise > 0 else (low + high) // 2
            if guess <= low:
                guess = low + 1
            elif guess >= high:
                guess = high - 1
        return low

    def lanes(self, device: Rows, mean_tokens: float, most: int) -> tuple[int, int]:
        """Host rows of lanes A and B that keep the CPU busy without making the device wait, at most ``most`` in all:
        about the same in either, as ``lanes.second_lane`` has it."""
        layers = self.tables.layers
        attention = self.device_attention(device)
        linear_a, linear_b = self.linear(device.count), self.linear(1)  # or more, with rows
        each = min(linear_a + linear_b + attention, 2 * (min(linear_a, linear_b) + attention)) / 2
        lane_b = self.rows_within(each / layers, mean_tokens, most // 2)
        # What one row more in lane A takes may be there where two were too many.
        room = linear_a + linear_b + attention - layers * self.cpu_layer(Rows(lane_b, lane_b * mean_tokens))
        room = min(room, linear_b + attention)
        lane_a = self.rows_within(room / layers, mean_tokens, min(lane_b + 1, most - lane_b))
        return lane_a, lane_b

    def slots(self, seconds: float, mean_tokens: float, most: int) -> int:
        """Slots that keep the CPU busy for a step of so many seconds and no longer, at most ``most``."""
        return self.rows_within(seconds / self.tables.layers, mean_tokens, most, together=False)
