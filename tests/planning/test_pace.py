"""The limit of host rows in lanes, measured: held against machines that are known."""

from __future__ import annotations

import math
import random

import pytest

from sglang_neo.planning.pace import Pace


class Machine:
    """In the layers of a step the device works for ``device`` seconds, the CPU for ``fixed`` and ``cpu`` per token;
    whoever is slower waits. For ``between`` seconds before that there is nothing for the CPU to do."""

    def __init__(self, device: float, cpu: float, noise: float = 0.03, fixed: float = 0.0, between: float = 0.004):
        self.device, self.cpu, self.noise, self.fixed, self.between = device, cpu, noise, fixed, between
        self._rng = random.Random(1)

    def step(self, tokens: float) -> tuple[float, float, float]:
        """Seconds of the layers, of which the CPU waited, of which the device waited."""
        parts = self.device, self.fixed + tokens * self.cpu
        device, cpu = (x * self._rng.uniform(1 - self.noise, 1 + self.noise) for x in parts)
        seconds = max(device, cpu)
        return seconds, seconds - cpu, seconds - device


DEVICE_ROWS, ROW_TOKENS = 12, 1000


def run(pace: Pace, machine: Machine, there: int, steps: int) -> tuple[float, float]:
    """Shares of the layers' time in which the CPU works and the device waits, in the last half of the steps."""
    total = worked = waited = 0.0
    for step in range(steps):
        tokens = min(there, pace.limits.decode)
        seconds, cpu_wait, device_wait = machine.step(tokens)
        made = DEVICE_ROWS + int(tokens) // ROW_TOKENS
        pace.decoded(seconds, cpu_wait, int(tokens), made, seconds + machine.between)
        if step >= steps // 2:
            total, worked, waited = total + seconds, worked + seconds - cpu_wait, waited + device_wait
    return worked / total, waited / total


@pytest.mark.parametrize("there", [12_000, 100_000, 2_000_000])
def test_the_cpu_works_nearly_all_the_time_and_the_device_hardly_waits(there: int) -> None:
    busy, waited = run(Pace(), Machine(device=0.070, cpu=0.070 / 13_000), there, 1200)
    assert waited < 0.03, (busy, waited)
    assert busy > 0.85, (busy, waited)


def test_a_load_that_changes_is_followed() -> None:
    pace, machine = Pace(), Machine(device=0.070, cpu=5e-6)
    run(pace, machine, 100_000, 800)
    before = pace.limits.decode
    machine.device = 0.020  # fewer device rows
    busy, waited = run(pace, machine, 100_000, 800)
    assert waited < 0.03 and busy > 0.85 and pace.limits.decode == pytest.approx(before * 2 / 7, rel=0.2)
    machine.device = 0.140
    busy, waited = run(pace, machine, 100_000, 800)
    assert waited < 0.03 and busy > 0.85 and pace.limits.decode == pytest.approx(before * 2, rel=0.2)
    machine.cpu = 10e-6  # another tenant
    busy, waited = run(pace, machine, 100_000, 800)
    assert waited < 0.03 and busy > 0.85 and pace.limits.decode == pytest.approx(before, rel=0.2)


@pytest.mark.parametrize(("fixed", "rides"), [(0.085, True), (0.0, False)])
def test_rows_wait_only_where_that_makes_more_tokens(fixed: float, rides: bool) -> None:
    """Twenty rows, more than the device's time has room for. Where the CPU takes nearly as long for fewer, all ride."""
    pace, there = Pace(), 20_000
    machine = Machine(device=0.070, cpu=(0.120 - fixed) / there, fixed=fixed)
    run(pace, machine, there, 1000)
    limits = []
    for _ in range(400):
        run(pace, machine, there, 1)
        limits.append(pace.limits.decode)
    riding = sum(min(limit, there) for limit in limits) / len(limits) / there
    assert riding > 0.95 if rides else 0.45 < riding < 0.65, (riding, limits[-1])


def test_one_long_step_changes_little() -> None:
    pace, machine = Pace(), Machine(device=0.070, cpu=5e-6)
    run(pace, machine, 10_000, 100)
    before = pace.limits.decode
    pace.decoded(5.0, 4.9, 10_000, 22, 5.0)
    assert pace.limits.decode < 2 * before
    run(pace, machine, 10_000, 30)
    assert pace.limits.decode == pytest.approx(before, rel=0.1)


def test_prefills_are_measured_by_themselves() -> None:
    pace = Pace()
    assert pace.limits.decode == math.inf and pace.limits.beside(100) == math.inf
    pace.prefilled(layers=0.4, idle=0.3, tokens=20_000, prompt_tokens=1000)
    assert pace.limits.decode == math.inf and pace.limits.per_prompt_token == pytest.approx(0.95 * 0.4e-3 / 5e-6)
    pace.decoded(layers=0.07, idle=0.02, tokens=10_000, made=22, seconds=0.08)
    assert pace.limits.decode == pytest.approx(0.95 * 0.07 / 5e-6)
    assert pace.limits.beside(1000) == pytest.approx(0.95 * 0.4 / 5e-6)
    assert pace.limits.beside(10) == pace.limits.decode / 2
