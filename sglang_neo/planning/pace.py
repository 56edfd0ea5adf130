"""How many tokens of KV the CPU can attend to in a step in two lanes, measured while such steps run.

A step of S seconds in which the CPU had nothing to do for I of them tells what the CPU needed, S - I. For B of those I
seconds there could be nothing to do: before a step's first hand-off the device samples, and begins the next forward. In
the rest, the layers, S - B, the device did not wait as long as the CPU had anything to wait for, I > B; if it had not,
the device waited for the CPU, and needs less than S - B, nobody knows how much. So the limit is what the CPU does in
nearly all of the device's time for the layers.

As long as steps are bound by the CPU the limit falls by parts, and whether that pays is measured too: rows that wait
cost tokens, and where the CPU's time hardly depends on how many ride (another tenant has the memory, a row is held up)
nothing is gained for them. What did not pay is taken back, and not tried again for a while.
"""

from __future__ import annotations

import math

from sglang_neo.planning.lanes import LaneLimits


class Pace:
    """Pure arithmetic on what is measured; no clock."""

    #: Of the device's time, what the CPU is given to do. The rest absorbs steps that vary.
    BUSY = 0.95
    #: A CPU that waits for less than this share of the layers' time had the device wait for it.
    SATURATED = 0.02
    #: Steps bound by the CPU by which a limit is judged, and the part of it that is tried next.
    WINDOW, RETREAT = 16, 0.75
    #: A lower limit must not make fewer tokens per second than these times the higher one's; if it does, so many
    #: windows pass before the next try. Below 1: far above the right limit one rate is like the other.
    WORTH, PATIENCE = 0.98, 64
    #: The device's time for a prefill is taken for so much of what it was thought to be, after one that the CPU bounds.
    BEHIND = 0.9
    #: Weight of a new measurement, and the most times the old one that it counts for: now and then a step takes long
    #: for other reasons.
    WEIGHT, MOST = 0.25, 4.0

    def __init__(self) -> None:
        self._device: float | None = None  # seconds of the layers of a decode step
        self._prompt: float | None = None  # seconds of those of a prefill per token
        self._cpu: float | None = None  # seconds per token of KV, all layers
        self._tried: float | None = None  # the limit while steps are bound by the CPU
        self._higher: tuple[float, float] | None = None  # the limit before that, and its tokens per second
        self._patience = 0
        self._steps, self._made, self._seconds = 0, 0, 0.0  # of the window

    @property
    def limits(self) -> LaneLimits:
        if not self._cpu:
            return LaneLimits()
        per_second = self.BUSY / self._cpu
        decode = math.inf if self._device is None else per_second * self._device
        return LaneLimits(
            decode=decode if self._tried is None else self._tried,
            per_prompt_token=per_second * (self._prompt or 0.0),
        )

    def decoded(self, layers: float, idle: float, tokens: int, made: int, seconds: float) -> None:
        """A decode step in two lanes.

        Args:
            layers: seconds from its first hand-off to the end.
            idle: of them, those in which the CPU had nothing to do.
            tokens: of KV that it attended to, in each layer.
            made: new tokens of the step, device rows included.
            seconds: of the whole step.
        """
        self._cpu = self._mixed(self._cpu, max(layers - idle, 0.0) / tokens)
        if idle >= self.SATURATED * layers:
            self._device = self._mixed(self._device, layers)
            self._tried = self._higher = None
            self._patience = 0
            self._begin_window()
            return
        if self._tried is None:
            self._tried = min(self.limits.decode, float(tokens))
            self._begin_window()
        self._steps, self._made, self._seconds = self._steps + 1, self._made + made, self._seconds + seconds
        if self._steps == self.WINDOW:
            self._judge(self._tried, self._made / self._seconds)
            self._begin_window()

    def _judge(self, limit: float, rate: float) -> None:
        if self._patience > 0:
            self._patience -= 1
        elif self._higher is not None and rate < self.WORTH * self._higher[1]:
            self._tried, self._patience, self._higher = self._higher[0], self.PATIENCE, None
        else:
            self._higher = limit, rate
            self._tried = self.RETREAT * limit

    def _begin_window(self) -> None:
        self._steps, self._made, self._seconds = 0, 0, 0.0

    def prefilled(self, layers: float, idle: float, tokens: int, prompt_tokens: int) -> None:
        """A prefill of so many tokens with host rows in lane B; the rest as of a decode step."""
        self._cpu = self._mixed(self._cpu, max(layers - idle, 0.0) / tokens)
        took = layers / prompt_tokens
        if idle >= self.SATURATED * layers:
            self._prompt = self._mixed(self._prompt, took)
        else:
            self._prompt = self.BEHIND * (took if self._prompt is None else min(took, self._prompt))

    def _mixed(self, known: float | None, new: float) -> float:
        return new if known is None else known + self.WEIGHT * (min(new, self.MOST * known) - known)
