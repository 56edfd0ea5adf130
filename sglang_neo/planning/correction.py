"""Predicted against measured: small factors on the tables, learnt step by step.

Tables are measured once, with other loads than the ones to come, and machines change: clocks drop, neighbours read the
same memory. ``Proportional`` is the simplest learner that follows; another one may stand behind ``Learner``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log
from typing import Protocol

from sglang_neo.planning.costs import Corrections, Mode, StepCost


@dataclass(frozen=True)
class Measured:
    """What a step took, in seconds.

    Attributes:
        seconds: of the step.
        wait: of these, what the device waited for the CPU.
        cpu: what the CPU worked on the step's hand-offs, from ready to done, all layers. 0: not known.
    """

    seconds: float
    wait: float = 0.0
    cpu: float = 0.0


def waited(mode: Mode, cost: StepCost, cpu: float) -> float:
    """Seconds that the device must have waited in a step in which the CPU worked for ``cpu`` seconds, where that cannot
    be timed: what the CPU took longer than the device had other things to do."""
    meanwhile = {"sync": 0.0, "pipelined": cost.linear + cost.prefill + cost.attention}.get(mode, cost.device)
    return max(0.0, cpu - meanwhile)


class Learner(Protocol):
    def __call__(self, corrections: Corrections, cost: StepCost, measured: Measured) -> Corrections:
        """The corrections after a step that was predicted to cost ``cost`` with ``corrections``."""
        ...


@dataclass(frozen=True)
class Proportional:
    """Each table answers for the error of a step in proportion to its part in it.

    Attributes:
        rate: fraction of the error that is taken over from one step.
        forget: fraction of the CPU's correction that is forgotten in a step in which the CPU had nothing to do: a CPU
            that was found slow and got no more work would never be found fast again.
        least, most: of a factor. Beyond, the tables are wrong and the guard is there. A machine that was busy while it
            was profiled has times that are too long by much, none that are too short.
    """

    rate: float = 0.1
    forget: float = 0.002
    least: float = 0.05
    most: float = 4.0

    def __call__(self, corrections: Corrections, cost: StepCost, measured: Measured) -> Corrections:
        worked = measured.seconds - measured.wait
        changes = {}
        if cost.device > 0 and worked > 0:
            error = self._clip(log(worked / cost.device))
            shares = {
                name: getattr(cost, name) / cost.device for name in ("linear", "prefill", "attention", "overhead")
            }
            norm = sum(share * share for share in shares.values())
            for name, share in shares.items():
                if share:
                    changes[name] = self._moved(getattr(corrections, name), self.rate * error * share / norm)
        if cost.cpu > 0 and measured.cpu > 0:
            changes["cpu"] = self._moved(corrections.cpu, self.rate * self._clip(log(measured.cpu / cost.cpu)))
        elif cost.cpu <= 0:
            changes["cpu"] = corrections.cpu ** (1 - self.forget)
        return replace(corrections, **changes)

    @staticmethod
    def _clip(error: float) -> float:
        """One odd step (a collection of garbage, a page fault) must not count for more than a factor of two."""
        return min(max(error, -log(2)), log(2))

    def _moved(self, factor: float, by: float) -> float:
        return min(max(factor * exp(by), self.least), self.most)
