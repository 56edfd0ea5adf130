"""Two safety nets under the planner that do not trust its tables: what pays is measured, and a late CPU gets no work.

*The guard* runs some steps gpu_only now and then while the CPU takes part, and compares tokens per second. If the CPU's
part does not pay twice in a row, it is left out for a while.

*The fail-safe* stops giving the CPU work when the device waits for it much longer than planned for some steps in a row:
other tenants, the wrong NUMA node, a throttled clock. It tries again later, twice as late after each failure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_neo.planning.correction import Measured
from sglang_neo.planning.costs import StepCost


@dataclass(frozen=True)
class GuardRules:
    #: Decode steps with the CPU after which it is left out to compare, and for how many steps then.
    probe_every: int = 384
    probe_steps: int = 4
    #: Seconds of such steps after which it is too, and the fewest that say anything: a slow step is dear.
    probe_after_s: float = 10.0
    probe_least: int = 16
    #: The CPU's part must give so much of gpu_only's rate; below that twice in a row it is left out.
    least_ratio: float = 0.99
    #: A step is late if the device waited longer than twice the planned wait and this fraction of its own work, planned
    #: or measured: a table may be wrong either way.
    late_fraction: float = 0.5
    #: So many late steps in a row, and the CPU gets no more work. Far below 10, the most that a user should notice.
    late_steps: int = 3
    #: Steps until it is tried again; twice as many after each further failure, at most ``longest_pause``.
    pause_steps: int = 64
    longest_pause: int = 8192
    #: Steps with the CPU in time after which earlier failures are forgotten.
    forgiven_after: int = 256


@dataclass(frozen=True)
class Guard:
    """State of both nets between two steps.

    Attributes:
        rate: tokens per second with the CPU, averaged over the last steps; 0 before any.
        since_probe, since_probe_s: decode steps with the CPU since it was last left out to compare, and their seconds.
        probe_left: steps of a comparison that are still to come.
        probe_tokens, probe_seconds: of the comparison under way.
        losses: comparisons in a row that the CPU's part lost.
        late: late steps in a row.
        pause_left: steps for which the CPU gets no work.
        failures: pauses in a row.
        in_time: steps with the CPU in time since the last pause.
    """

    rate: float = 0.0
    since_probe: int = 0
    since_probe_s: float = 0.0
    probe_left: int = 0
    probe_tokens: float = 0.0
    probe_seconds: float = 0.0
    losses: int = 0
    late: int = 0
    pause_left: int = 0
    failures: int = 0
    in_time: int = 0

    @property
    def closed(self) -> bool:
        """Whether the CPU gets no work in the next step."""
        return self.pause_left > 0

    @property
    def probing(self) -> bool:
        """Whether the next decode step is one to compare with: gpu_only, with all that the CPU has left as it is."""
        return self.probe_left > 0


def is_late(cost: StepCost, measured: Measured, rules: GuardRules) -> bool:
    own = min(cost.device, max(0.0, measured.seconds - measured.wait))
    return measured.wait > 2 * cost.wait + rules.late_fraction * own


def after_step(
    guard: Guard, cost: StepCost, tokens: float, measured: Measured, rules: GuardRules, *, prefill: bool, probe: bool
) -> tuple[Guard, str | None]:
    """The guard after a step, and one line if it changed its mind.

    Args:
        tokens: that the step brought its rows forward, those of rows in flight counted by layers.
        prefill: whether the step carried a prefill; such steps say nothing about decoding.
        probe: whether the step was one to compare with.
    """
    if guard.pause_left:
        left = guard.pause_left - 1
        line = None if left else "the CPU is given work again"
        return replace(guard, pause_left=left), line
    if probe:
        return _after_probe(guard, tokens, measured, rules)
    if cost.cpu <= 0:
        return guard, None
    if is_late(cost, measured, rules):
        if guard.late + 1 < rules.late_steps:
            return replace(guard, late=guard.late + 1), None
        waited, own = measured.wait * 1e3, cost.device * 1e3
        return _paused(guard, rules, f"the device waited {waited:.1f} ms for it in a step of {own:.1f} ms of its own")
    in_time = guard.in_time + 1
    guard = replace(guard, late=0, in_time=in_time, failures=0 if in_time >= rules.forgiven_after else guard.failures)
    if prefill or measured.seconds <= 0:
        return guard, None
    rate = tokens / measured.seconds
    rate = rate if not guard.rate else guard.rate + (rate - guard.rate) / 32
    since, seconds = guard.since_probe + 1, guard.since_probe_s + measured.seconds
    if since < rules.probe_every and (since < rules.probe_least or seconds < rules.probe_after_s):
        return replace(guard, rate=rate, since_probe=since, since_probe_s=seconds), None
    guard = replace(guard, rate=rate, since_probe=0, since_probe_s=0.0)
    return replace(guard, probe_left=rules.probe_steps, probe_tokens=0.0, probe_seconds=0.0), None


def _after_probe(guard: Guard, tokens: float, measured: Measured, rules: GuardRules) -> tuple[Guard, str | None]:
    left = guard.probe_left - 1
    guard = replace(
        guard,
        probe_left=left,
        probe_tokens=guard.probe_tokens + tokens,
        probe_seconds=guard.probe_seconds + measured.seconds,
    )
    if left or guard.probe_seconds <= 0:
        return guard, None
    alone = guard.probe_tokens / guard.probe_seconds
    if guard.rate >= rules.least_ratio * alone:
        return replace(guard, losses=0), None
    if guard.losses == 0:  # look again soon before believing it
        seven = rules.probe_every - rules.probe_every // 8
        return replace(guard, losses=1, since_probe=seven, since_probe_s=rules.probe_after_s * 7 / 8), None
    return _paused(guard, rules, f"{guard.rate:.0f} tokens/s with the CPU, {alone:.0f} without it")


def _paused(guard: Guard, rules: GuardRules, why: str) -> tuple[Guard, str]:
    steps = min(rules.pause_steps << min(guard.failures, 16), rules.longest_pause)
    paused = Guard(pause_left=steps, failures=guard.failures + 1)
    return paused, f"the CPU gets no work for {steps} steps: {why}"
