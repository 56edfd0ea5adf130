"""Factors that follow what was measured, and the two nets that do not trust them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_neo.planning.correction import Measured, Proportional, waited
from sglang_neo.planning.costs import Corrections, Costs, Rows, StepCost
from sglang_neo.planning.guard import Guard, GuardRules, after_step
from tests.planning.machines import real

LEARN = Proportional()
TABLES = real()
factors = st.floats(0.7, 1.6)


def truth(cost: StepCost, learnt: Corrections, true: Corrections) -> Measured:
    """What a step takes on a machine whose tables are off by ``true``, without waits."""
    parts = ("linear", "prefill", "attention", "overhead")
    seconds = sum(getattr(cost, name) / getattr(learnt, name) * getattr(true, name) for name in parts)
    return Measured(seconds, 0.0, cost.cpu / learnt.cpu * true.cpu)


@settings(max_examples=15, deadline=None)
@given(factors, factors, factors, factors)
def test_predictions_come_close_whatever_is_off(linear: float, prefill: float, attention: float, cpu: float) -> None:
    true = Corrections(linear, prefill, attention, cpu)
    learnt = Corrections()
    rows = Rows(8, 8000)
    for step in range(300):
        costs = Costs(TABLES, 8, learnt)
        cost = (
            costs.prefill(1000, 0) if step % 4 == 0 else costs.deferred(Rows(8 + step % 64, 64_000), rows.count, rows)
        )
        learnt = LEARN(learnt, cost, truth(cost, learnt, true))
    costs = Costs(TABLES, 8, learnt)
    for cost in (costs.prefill(1000, 0), costs.deferred(Rows(40, 64_000), rows.count, rows)):
        measured = truth(cost, learnt, true)
        assert cost.device == pytest.approx(measured.seconds, rel=0.03)
        assert measured.cpu == pytest.approx(cost.cpu, rel=0.03)


def test_waits_are_not_the_fault_of_the_device_tables() -> None:
    cost = Costs(TABLES, 8).gpu_only(Rows(8, 8000))
    learnt = LEARN(Corrections(), cost, Measured(cost.device + 1.0, wait=1.0))
    assert learnt.linear == pytest.approx(1) and learnt.attention == pytest.approx(1)


def test_one_odd_step_moves_little_and_factors_stay_in_bounds() -> None:
    cost = Costs(TABLES, 8).gpu_only(Rows(8, 8000))
    once = LEARN(Corrections(), cost, Measured(cost.device * 1000))
    assert 1 < once.linear < 1.1
    learnt = Corrections()
    for _ in range(1000):
        learnt = LEARN(learnt, cost, Measured(cost.device * 1000))
    assert learnt.linear == LEARN.most


def test_a_cpu_that_gets_no_work_is_thought_better_of_in_time() -> None:
    cost = Costs(TABLES, 8).gpu_only(Rows(8, 8000))
    learnt = Corrections(cpu=3.0)
    for _ in range(1000):
        learnt = LEARN(learnt, cost, Measured(cost.device))
    assert learnt.cpu == pytest.approx(1.0, abs=0.2)


# -- guard ------------------------------------------------------------------------------------------------------------

RULES = GuardRules(probe_every=40, probe_steps=4, pause_steps=16, longest_pause=64, forgiven_after=1000)
HYBRID = StepCost(linear=10e-3, cpu=5e-3)
ALONE = StepCost(linear=10e-3)


def drive(guard: Guard, steps: int, hybrid_rate: float, alone_rate: float) -> tuple[Guard, list[str], int]:
    """Steps of 10 ms whose tokens are given by rates. Returns the steps without the CPU too."""
    lines, alone = [], 0
    for _ in range(steps):
        cpu = not guard.closed and not guard.probing
        alone += not cpu
        tokens = (hybrid_rate if cpu else alone_rate) * 10e-3
        guard, line = after_step(
            guard, HYBRID if cpu else ALONE, tokens, Measured(10e-3), RULES, prefill=False, probe=guard.probing
        )
        lines += [line] if line else []
    return guard, lines, alone


def test_what_pays_is_left_alone_but_for_the_comparisons() -> None:
    guard, lines, alone = drive(Guard(), 4000, 1500, 1000)
    assert not lines and not guard.closed
    assert alone == pytest.approx(4000 * 4 / 44, abs=4)


def test_what_does_not_pay_is_left_out_after_two_comparisons_and_tried_again_ever_later() -> None:
    _, lines, _ = drive(Guard(), 40 + 4, 900, 1000)
    assert not lines, "one comparison may be bad luck"
    guard, lines, _ = drive(Guard(), 40 + 4 + 6 + 4, 900, 1000)
    assert guard.closed and lines == ["the CPU gets no work for 16 steps: 900 tokens/s with the CPU, 1000 without it"]
    _, lines, alone = drive(guard, 600, 900, 1000)
    assert [line.split(":")[0] for line in lines if ":" in line][:3] == [
        f"the CPU gets no work for {steps} steps" for steps in (32, 64, 64)
    ]
    assert alone > 300


def test_late_steps_must_come_in_a_row() -> None:
    guard = Guard()
    late = Measured(20e-3, wait=10e-3)
    for _ in range(50):
        for measured in (late, late, Measured(10e-3)):
            guard, line = after_step(guard, HYBRID, 10, measured, RULES, prefill=False, probe=False)
            assert line is None
    for _ in range(3):
        guard, line = after_step(guard, HYBRID, 10, late, RULES, prefill=False, probe=False)
    assert guard.closed
    assert line == "the CPU gets no work for 16 steps: the device waited 10.0 ms for it in a step of 10.0 ms of its own"


def test_late_steps_are_seen_however_long_a_wrong_table_says_the_device_works() -> None:
    """A machine that was busy when it was profiled: ten times too long."""
    wrong = StepCost(linear=100e-3, cpu=50e-3)
    guard = Guard()
    for _ in range(3):
        guard, line = after_step(guard, wrong, 10, Measured(30e-3, wait=20e-3), RULES, prefill=False, probe=False)
    assert guard.closed and line is not None


def test_slow_steps_are_compared_sooner() -> None:
    """400 steps of half a second would be minutes in which nobody asks whether they pay."""
    rules, guard, seconds = GuardRules(), Guard(), 0.0
    while not guard.probing:
        guard, _ = after_step(guard, HYBRID, 10, Measured(0.4), rules, prefill=False, probe=False)
        seconds += 0.4
    assert 10 <= seconds < 11
    steps = 0
    guard = Guard()
    while not guard.probing:
        guard, _ = after_step(guard, HYBRID, 10, Measured(2.0), rules, prefill=False, probe=False)
        steps += 1
    assert steps == rules.probe_least


def test_a_planned_wait_is_not_late() -> None:
    sync = StepCost(linear=10e-3, wait=30e-3, cpu=30e-3)
    guard = Guard()
    for _ in range(10):
        guard, line = after_step(guard, sync, 10, Measured(50e-3, 40e-3, 40e-3), RULES, prefill=False, probe=False)
        assert line is None and not guard.closed


def test_waits_that_cannot_be_timed_follow_from_the_cpus_time() -> None:
    cost = StepCost(linear=3.0, attention=2.0, overhead=1.0, cpu=4.0)
    assert waited("sync", cost, 4.0) == 4.0, "nothing else runs meanwhile"
    assert (waited("pipelined", cost, 5.0), waited("pipelined", cost, 7.0)) == (0.0, 2.0)
    assert (waited("deferred", cost, 6.0), waited("deferred", cost, 7.0)) == (0.0, 1.0)
