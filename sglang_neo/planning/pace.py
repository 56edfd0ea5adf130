"""How many tokens of KV the CPU can attend to in a step in two lanes, measured while such steps run.

A step of S seconds in which the CPU had nothing to do for I of them tells what the CPU needed, S - I. For B of those I
seconds there could be nothing to do: before a step's first hand-off the device samples, and begins the next forward. In
the rest, the layers, S - B, the device did not wait as long as the CPU had anything to wait for, I > B; if it had not,
the device waited for the CPU, and needs less than S - B, nobody knows how much. So the limit is what the CPU does in
nearly all of the device's time for the layers. It falls by a part as long as they are bound by the CPU, and is measured
again as soon as they are not.
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
    #: The device's time is taken for so much of what it was thought to be, after a step that the CPU bounds.
    RETREAT = 0.9
    #: Weight of a new measurement, and the most times the old one that it counts for: now and then a step takes long
    #: for other reasons.
    WEIGHT, MOST = 0.25, 4.0

    def __init__(self) -> None:
        self._device: float | None = None  # seconds of the layers of a decode step
        self._prompt: float | None = None  # seconds of those of a prefill per token
        self._cpu: float | None = None  # seconds per token of KV, all layers

    @property
    def limits(self) -> LaneLimits:
        if not self._cpu:
            return LaneLimits()
        per_second = self.BUSY / self._cpu
        return LaneLimits(
            decode=math.inf if self._device is None else per_second * self._device,
            per_prompt_token=per_second * (self._prompt or 0.0),
        )

    def decoded(self, layers: float, idle: float, tokens: int) -> None:
        """A decode step in two lanes.

        Args:
            layers: seconds from its first hand-off to the end.
            idle: of them, those in which the CPU had nothing to do.
            tokens: of KV that it attended to, in each layer.
        """
        self._device = self._time(self._device, 1, layers, idle, tokens)

    def prefilled(self, layers: float, idle: float, tokens: int, prompt_tokens: int) -> None:
        """A prefill of so many tokens with host rows in lane B; the rest as of a decode step."""
        self._prompt = self._time(self._prompt, prompt_tokens, layers, idle, tokens)

    def _time(self, known: float | None, amount: int, layers: float, idle: float, tokens: int) -> float | None:
        """The device's time per ``amount``, with what a step tells of it."""
        self._cpu = self._mixed(self._cpu, max(layers - idle, 0.0) / tokens)
        took = layers / amount
        if idle >= self.SATURATED * layers:
            return self._mixed(known, took)
        return self.RETREAT * (took if known is None else min(took, known))

    def _mixed(self, known: float | None, new: float) -> float:
        return new if known is None else known + self.WEIGHT * (min(new, self.MOST * known) - known)
