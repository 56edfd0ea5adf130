"""Plans of single steps: what is chosen, what is bounded, who moves. Whole runs are simulated in tests/bench."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_neo.planning import inequalities as q
from sglang_neo.planning.correction import Measured
from sglang_neo.planning.costs import MODES, Costs, Mode, Rows
from sglang_neo.planning.guard import Guard, GuardRules
from sglang_neo.planning.planner import (
    Choice,
    Limits,
    Memory,
    Prompt,
    State,
    StepPlan,
    _choices,
    _coming_per_pass,
    after_step,
    compare,
    draining_pays,
    load_back_pays,
    plan,
)
from sglang_neo.planning.tables import Curve
from tests.planning.machines import ideal, real

FREE = 10**7
#: Prompts are taken whole, and modes compared by their tokens alone: the meter and the price are shown by themselves.
LIMITS = Limits(threads=8, max_host_tpot=None, max_slowdown=math.inf, tpot_price=0.0)
#: With eight device rows of 1,000 tokens every mode pays, given host rows enough.
TABLES = real(cpu_attention=ideal(cpu_per_token=1e-8).cpu_attention)


def state(device: int = 8, host: int = 0, tokens: int = 1000, **changes: object) -> State:
    """Rows of ``tokens`` each, nobody waiting, little room on the device."""
    there = State((tokens,) * device, (tokens,) * host, (), device_free=device * 4, host_free=FREE)
    return replace(there, **changes)  # type: ignore[arg-type]


def in_mode(mode: Mode, **changes: object) -> Memory:
    return replace(Memory(mode=mode), **changes)  # type: ignore[arg-type]


#: Whatever was lost before, the best mode is taken now.
FED_UP = Memory(regret=1e9)


def only(*modes: Mode, **changes: object) -> Limits:
    return replace(LIMITS, modes=("gpu_only", *modes), **changes)  # type: ignore[arg-type]


def test_without_host_rows_nothing_but_gpu_only() -> None:
    step = plan(state(), LIMITS, TABLES, Memory())
    assert (step.mode, step.device_rows, step.host_rows) == ("gpu_only", 8, 0)
    assert step.cost.seconds == Costs(TABLES, 8).gpu_only(Rows(8, 8000)).seconds


def test_a_plan_names_rows_that_are_there() -> None:
    step = plan(state(8, 40), only("pipelined"), TABLES, FED_UP)
    assert step.mode == "pipelined" and step.lane_a > 0 and step.lane_b > 0
    assert step.lane_a + step.lane_b <= 40
    assert step.cost.wait == pytest.approx(0, abs=1e-9)


def test_deferred_needs_rows_in_all_cohorts_to_fill_its_slots() -> None:
    few = plan(state(8, 33), only("deferred"), TABLES, FED_UP)
    many = plan(state(8, 330), only("deferred"), TABLES, FED_UP)
    assert (few.mode, few.slots, few.tokens) == ("deferred", 1, 9)
    assert many.slots > 2 and many.cost.wait == 0
    assert plan(state(8, 1), only("deferred"), TABLES, FED_UP).mode == "gpu_only", "a hand-off costs more than it gives"


def test_a_deferred_step_holds_all_slot_rows_however_few_sit_there() -> None:
    """What handing over costs the device is that of all slots, what the CPU works that of the rows which are there."""
    alone = plan(state(8), LIMITS, TABLES, Memory()).cost
    for max_slots in (4, 40):
        steps = [plan(state(8, n), only("deferred", max_slots=max_slots), TABLES, FED_UP) for n in (66, 99)]
        for step, rows in zip(steps, (2, 3), strict=True):
            assert (step.mode, step.slots, step.tokens) == ("deferred", rows, 8 + rows)
            handoffs = Costs(TABLES, 8).slot_handoffs(max_slots)
            assert step.cost.device == pytest.approx(alone.device + handoffs), (max_slots, rows)
        assert steps[1].cost.cpu == pytest.approx(1.5 * steps[0].cost.cpu)


def test_the_number_of_slots_is_bounded() -> None:
    assert plan(state(8, 3300), only("deferred", max_slots=2), TABLES, FED_UP).slots == 2


seeds = st.integers(0, 2**32)


@given(
    st.integers(1, 64),
    st.integers(64, 4000),
    st.floats(1e-3, 50e-3),
    st.floats(1e-9, 1e-6),
    st.floats(1e-9, 1e-6),
    st.integers(1, 80),
)
def test_with_rows_enough_the_planner_goes_by_the_inequalities(
    rows: int, tokens: int, linear: float, device: float, cpu: float, layers: int
) -> None:
    tables = ideal(layers, linear, device, cpu)
    limits = only("pipelined", max_lane_rows=10**6)
    t = q.Terms(rows, linear, rows * tokens * device, 1 / (layers * tokens * cpu), layers)
    step = plan(state(rows, 5000, tokens, host_free=10**12), limits, tables, FED_UP)
    least = q.pipelined_beats_gpu_only_with(t, step.lane_a + step.lane_b)
    if step.mode == "pipelined":
        assert least.holds
    else:
        whole = Costs(tables, 8).lanes(Rows(rows, rows * tokens), tokens, 5000)
        assert not q.pipelined_rate(t, sum(whole)) > q.gpu_only_rate(t) * (1 + 1e-9)


@pytest.mark.parametrize("other", ["deferred", "sync"])
def test_a_mode_stays_until_another_is_worth_the_price_of_a_change(other: Mode) -> None:
    there = state(8, 330)
    limits = only("pipelined", other)
    rates: dict[Mode, float] = {}
    for mode in ("pipelined", other):
        step = plan(there, only(mode), TABLES, in_mode(mode, regret=1e9))
        rates[mode] = step.tokens / step.cost.seconds
    price = 1.0
    if other == "deferred":
        step = plan(there, limits, TABLES, in_mode("deferred"))
        price += (step.tokens - step.device_rows) * (TABLES.layers + 1) / 2 / step.tokens
        assert price > 5
    loss = rates["pipelined"] / rates[other] - 1
    assert 0 < loss < 1, "the machine of this test"
    memory, modes = in_mode(other), []
    for _ in range(int(price / loss) + 2):
        step = plan(there, limits, TABLES, memory)
        modes.append(step.decode_mode)
        memory = replace(memory, mode=step.decode_mode, regret=step.regret)
    assert modes[0] == other and modes[-1] == "pipelined" and memory.regret == 0
    assert modes.count(other) == pytest.approx(price / loss, abs=1)
    assert plan(there, limits, TABLES, in_mode("pipelined", regret=1e9)).regret == 0, "nothing is lost in the best mode"


@given(
    st.integers(0, 40), st.integers(1, 600), st.integers(0, 64), st.integers(16, 4000), st.sampled_from([0, 16]), seeds
)
def test_what_is_looked_up_once_is_what_would_be_looked_up_anew(
    device: int, host: int, waiting: int, tokens: int, shared: int, seed: int
) -> None:
    """Modes share the times that they are made of; here each is worked out by itself."""
    draw = random.Random(seed)
    rows = tuple(draw.randint(tokens // 2 + 8, tokens * 2) for _ in range(host))
    there = state(device, 0, tokens, host_rows=rows, waiting=(Prompt(tokens, 0, 2 * tokens),) * waiting)
    there = replace(there, host_shared=shared)
    ours, mean = Rows(device, device * tokens), sum(rows) / host

    def fresh() -> Costs:
        return Costs(TABLES, LIMITS.threads, shared_tokens=shared)

    alone = Choice("gpu_only", fresh().gpu_only(ours), device)
    could, now = _choices(there, LIMITS, fresh(), ours, alone, "gpu_only")
    seconds = alone.cost.seconds / TABLES.layers
    slots = max(
        n for n in range(LIMITS.max_slots + 1) if fresh().cpu_layer(Rows(n, n * mean), together=False) <= seconds
    )
    for choice in (*could, *now):
        of = {n: Rows(n, n * mean) for n in (choice.lane_a, choice.lane_b, choice.slots)}
        if choice.mode == "sync":
            assert choice.cost == fresh().sync(ours, of[choice.lane_a])
        elif choice.mode == "pipelined":
            assert choice.cost == fresh().pipelined(ours, of[choice.lane_a], of[choice.lane_b])
            assert choice.resident == sum(fresh().lanes(ours, mean, LIMITS.max_lane_rows))
        elif choice.mode == "deferred":
            cohort = Rows(choice.host_tokens, choice.host_tokens * mean)
            assert choice.cost == fresh().deferred(ours, LIMITS.max_slots, cohort) and choice.slots <= slots
            assert choice.resident == slots * choice.cohorts
    assert {choice.mode for choice in could} == {choice.mode for choice in now}
    assert {choice.mode for choice in now} >= ({"gpu_only", "sync", "deferred"} if slots else {"gpu_only", "sync"})


def test_slower_device_rows_have_a_price() -> None:
    """Two passes bring more tokens per second, of which each device row has half as many: little more is not enough."""
    alone = plan(state(8), LIMITS, TABLES, Memory())
    x0 = alone.tokens / alone.cost.seconds
    gains = {}
    for host_rows in range(5, 40):
        step = plan(state(8, host_rows), only("pipelined"), TABLES, FED_UP)
        if step.mode == "pipelined":
            gains[host_rows] = step.tokens / step.cost.seconds / x0, step.cost.seconds / alone.cost.seconds
    assert min(gain for gain, _ in gains.values()) < 1.1
    for price in (0.2, 0.4):
        for host_rows, (gain, slower) in gains.items():
            step = plan(state(8, host_rows), only("pipelined", tpot_price=price), TABLES, FED_UP)
            assert (step.mode == "pipelined") == (gain > slower**price), (price, host_rows, gain, slower)
    assert Limits(threads=8).tpot_price == 0.2 and pytest.approx(1.15, abs=1e-2) == 2**0.2
    nobody = plan(state(0, 5), only("pipelined", tpot_price=5.0), TABLES, FED_UP)
    assert nobody.mode == "pipelined", "where no device row is, none is slowed down"


def test_a_mode_that_uses_up_what_another_makes_more_of_is_not_run_meanwhile() -> None:
    """Lanes would be faster with the rows there are; but the meter lets so few come that deferred mode makes more of
    them, once there are enough."""
    tables = real(cpu_attention=ideal(cpu_per_token=2e-8).cpu_attention)
    waiting = tuple(Prompt(1000, 0, 1200, best_effort=True, output=200) for _ in range(500))
    there = state(8, 20, waiting=waiting)

    def mode(there: State, *modes: Mode, **changes: object) -> Mode:
        return plan(there, only(*modes, max_slots=8, **changes), tables, FED_UP, admit=False).decode_mode

    def rate(mode: Mode) -> float:
        return next(c.rate for c in compare(there, only(mode, max_slots=8), tables) if c.mode == mode)

    assert rate("pipelined") > 1.3 * rate("deferred"), "with the rows that are there"
    assert mode(there, "pipelined", "deferred", max_slowdown=0.1) == "deferred"
    assert mode(there, "pipelined", "deferred") == "pipelined", "where others come at once, nothing is used up"
    assert mode(replace(there, waiting=()), "pipelined", "deferred", max_slowdown=0.1) == "pipelined", "nor is it kept"
    assert mode(there, "pipelined", max_slowdown=0.1) == "pipelined", "no mode makes more of them"


def test_what_a_prompt_asks_for_says_how_many_live_at_a_time_not_what_is_reserved_for_it() -> None:
    limits = only("deferred", max_slowdown=0.1)

    def waits(**prompt: object) -> State:
        waiting = tuple(Prompt(2000, best_effort=True, **prompt) for _ in range(300))  # type: ignore[arg-type]
        return state(8, 0, waiting=waiting)

    assert plan(waits(room=2010), limits, TABLES, Memory()).prefill_to is None
    assert plan(waits(room=2010, output=20_000), limits, TABLES, Memory()).prefill_to == "host"
    assert plan(waits(room=22_000, output=10), limits, TABLES, Memory()).prefill_to is None


def test_a_prompt_that_has_begun_counts_as_a_whole_one_for_what_the_meter_lets_come() -> None:
    costs = Costs(TABLES, 8)
    alone = Choice("gpu_only", costs.gpu_only(Rows(8, 8000)), 8)
    limits = replace(LIMITS, max_slowdown=0.1)
    whole = Prompt(1000, 0, 1200)
    part = Prompt(100, 900, 1200, place="host")
    cached = Prompt(100, 900, 1200)
    coming = [_coming_per_pass(state(8, 0, waiting=(p,)), limits, costs, alone) for p in (whole, part, cached)]
    assert coming[0] == coming[1] < coming[2]


# -- latency ----------------------------------------------------------------------------------------------------------


def test_device_rows_keep_their_bound() -> None:
    alone = Costs(TABLES, 8).gpu_only(Rows(8, 8000)).seconds
    free = plan(state(8, 40), only("pipelined"), TABLES, FED_UP)
    assert free.mode == "pipelined" and free.cost.seconds > 1.5 * alone
    bound = replace(only("pipelined"), max_tpot=1.2 * alone)
    assert plan(state(8, 40), bound, TABLES, Memory()).mode == "gpu_only"


def test_ordinary_rows_enter_host_memory_only_within_their_bound_best_effort_ones_without() -> None:
    ordinary = tuple(Prompt(1000, room=1200) for _ in range(300))
    limits = only("deferred", max_host_tpot=0.1)
    there = state(8, 0, waiting=ordinary)
    assert plan(there, limits, TABLES, Memory()).prefill == ()
    patient = replace(there, waiting=tuple(replace(prompt, best_effort=True) for prompt in ordinary))
    step = plan(patient, limits, TABLES, Memory())
    assert step.prefill_to == "host" and len(step.prefill) == 9
    assert plan(there, replace(limits, max_host_tpot=1.0), TABLES, Memory()).prefill_to == "host"


def test_a_mode_that_runs_is_not_left_for_a_bound_that_it_hardly_misses() -> None:
    limits = only("sync", "deferred", max_slots=4, tpot_price=3.0)  # a step that waits for the CPU is worth nothing
    tpot = compare(state(8, 99), limits, TABLES)[-1].host_tpot
    for over, held in ((0.99, True), (1.03, True), (1.08, False)):
        bounded = replace(limits, max_host_tpot=tpot / over)
        step = plan(state(8, 99), bounded, TABLES, in_mode("deferred", regret=1e9))
        assert (step.mode == "deferred") == held, over
        other = plan(state(8, 99), bounded, TABLES, in_mode("gpu_only", regret=1e9))
        assert (other.mode == "deferred") == (over < 1), "nor begun for one"


def test_rows_that_are_there_go_on_even_if_no_mode_keeps_their_bound() -> None:
    limits = only("pipelined", max_host_tpot=1e-3)
    assert plan(state(8, 40), limits, TABLES, FED_UP).mode == "pipelined"


# -- prefill ----------------------------------------------------------------------------------------------------------


def test_prompts_go_to_the_device_while_it_has_room() -> None:
    waiting = (Prompt(1000, room=1500), Prompt(1000, room=1500), Prompt(1000, room=1500))
    step = plan(state(8, waiting=waiting, device_free=3100), LIMITS, TABLES, Memory())
    assert (step.prefill, step.prefill_to, step.device_rows) == ((1000, 1000), "device", 0)
    held = replace(state(8, waiting=waiting, device_free=3100), device_reserved=200)
    assert plan(held, LIMITS, TABLES, Memory()).prefill == (1000,)


def test_a_prompt_is_cut_where_the_step_is_full_and_goes_on_where_it_began() -> None:
    waiting = (Prompt(6000, room=7000), Prompt(6000, room=7000))
    step = plan(state(0, waiting=waiting, device_free=FREE), LIMITS, TABLES, Memory())
    assert step.prefill == (6000, 2192)
    rest = (Prompt(3808, past=2192, room=7000, place="host"),)
    step = plan(state(8, waiting=rest, device_free=FREE), LIMITS, TABLES, Memory())
    assert (step.prefill, step.prefill_to) == ((3808,), "host")


def test_nobody_goes_to_a_host_that_does_not_pay_or_is_full_or_has_had_its_share() -> None:
    waiting = tuple(Prompt(1000, room=1200, best_effort=True) for _ in range(100))
    there = state(8, waiting=waiting)
    assert plan(there, LIMITS, TABLES, Memory()).prefill_to == "host"
    assert plan(there, only(), TABLES, Memory()).prefill == ()
    assert plan(replace(there, host_free=500), LIMITS, TABLES, Memory()).prefill == ()
    assert plan(replace(there, host_reserved=FREE), LIMITS, TABLES, Memory()).prefill == ()
    assert plan(there, LIMITS, TABLES, Memory(host_prefill_debt=1e-3)).prefill == ()
    assert plan(there, LIMITS, TABLES, Memory(guard=Guard(pause_left=5))).prefill == ()
    slow = real(cpu_attention=ideal(cpu_per_token=1e-3).cpu_attention)
    assert plan(there, LIMITS, slow, Memory()).prefill == ()


def test_no_more_prompts_go_to_the_host_than_the_mode_needs() -> None:
    waiting = tuple(Prompt(100, room=120) for _ in range(500))
    limits = only("pipelined", prefill_tokens=10**6, max_lane_rows=10**6)
    step = plan(state(8, 0, waiting=waiting), limits, TABLES, Memory())
    lanes = Costs(TABLES, 8).lanes(Rows(8, 8000), 100, 10**6)
    assert step.prefill_to == "host" and len(step.prefill) == math.ceil(1.25 * sum(lanes)), "a quarter in reserve"


def test_no_more_prompts_go_to_the_host_than_deferred_mode_has_seats() -> None:
    waiting = tuple(Prompt(100, room=120, best_effort=True) for _ in range(500))
    limits = only("deferred", prefill_tokens=10**6, max_slots=2)
    seats = 2 * (TABLES.layers + 1)
    for there in (0, seats // 2, seats - 1, seats, seats + 9):
        step = plan(state(8, there, 100, waiting=waiting), limits, TABLES, in_mode("deferred"))
        few = there <= seats / 1.25  # others are waited for, and all come together
        assert len(step.prefill) == (seats - there if few else 0), there


def test_host_rows_that_end_are_replaced_together() -> None:
    waiting = tuple(Prompt(100, room=120) for _ in range(500))
    limits = only("pipelined", max_lane_rows=20)
    memory = in_mode("pipelined")
    reserve = plan(state(8, 21, 100, waiting=waiting), limits, TABLES, memory)
    assert reserve.prefill == () and reserve.lane_a + reserve.lane_b == 20
    assert len(plan(state(8, 20, 100, waiting=waiting), limits, TABLES, memory).prefill) == 5


def test_a_short_step_is_asked_for_and_given_as_far_as_it_goes() -> None:
    waiting = (Prompt(8000, room=9000),)
    whole = plan(state(8, waiting=waiting, device_free=FREE), LIMITS, TABLES, Memory())
    part = plan(state(8, waiting=waiting, device_free=FREE), replace(LIMITS, max_tpot=0.03), TABLES, Memory())
    least = plan(state(8, waiting=waiting, device_free=FREE), replace(LIMITS, max_tpot=1e-6), TABLES, Memory())
    assert whole.prefill == (8000,) and part.prefill < whole.prefill and part.cost.seconds <= 0.03
    assert least.prefill == (LIMITS.host_page,), "it goes on all the same"


def test_a_lane_of_host_rows_rides_beside_a_prefill_if_that_pays() -> None:
    waiting = (Prompt(4000, room=5000),)
    there = state(8, 60, waiting=waiting, device_free=FREE)
    step = plan(there, only("pipelined"), TABLES, in_mode("pipelined"))
    assert step.mode == "pipelined" and step.lane_b > 45 and step.lane_a == 0
    assert step.cost.cpu == pytest.approx(step.cost.prefill, rel=0.2), "a long prefill is cut to what the CPU has to do"
    assert step.prefill < (4000,) and not step.to_device
    closed = plan(there, only("pipelined"), TABLES, in_mode("pipelined", guard=Guard(pause_left=3)))
    assert closed.lane_b == 0
    short = replace(there, waiting=(Prompt(64, room=100),))
    few = plan(short, only("pipelined"), replace(TABLES, lane_overhead=5e-3), in_mode("pipelined"))
    assert few.prefill == (64,) and few.lane_b == 0 and few.mode == "gpu_only", "the CPU has no time for many"
    deferred = plan(there, only("deferred"), TABLES, in_mode("deferred"))
    assert deferred.lane_b == 0 and deferred.decode_mode == "deferred"


def test_no_lane_rides_beside_a_prefill_that_the_meter_counts() -> None:
    """Its pass would take of the time in which prompts come to the host."""
    metered, memory = only("pipelined", max_slowdown=0.1), in_mode("pipelined")
    there = state(8, 60, waiting=(Prompt(4000, past=64, room=5000, place="host"),))
    step = plan(there, metered, TABLES, memory)
    assert (step.prefill_to, step.lane_b) == ("host", 0) and step.held_up == 8
    assert plan(there, only("pipelined"), TABLES, memory).lane_b > 0, "without a meter"
    assert plan(replace(there, device_rows=()), metered, TABLES, memory).lane_b > 0, "nobody is held up"
    to_device = replace(there, waiting=(Prompt(4000, room=5000),), device_free=FREE)
    assert plan(to_device, metered, TABLES, memory).lane_b > 0, "its own time"


def test_a_prefix_in_host_memory_is_loaded_back_if_that_is_faster_than_computing_it() -> None:
    waiting = (Prompt(2000, room=2500, host_hit=1500),)
    there = state(8, waiting=waiting, device_free=FREE)
    step = plan(there, LIMITS, TABLES, Memory())
    assert step.load_back and step.prefill == (500,)
    slow = replace(TABLES, to_device=replace(TABLES.to_device, seconds=(0.0, 10.0)))
    step = plan(there, LIMITS, slow, Memory())
    assert not step.load_back and step.prefill == (2000,)


# -- migrations -------------------------------------------------------------------------------------------------------


def test_the_newest_leave_when_the_device_cannot_grow() -> None:
    step = plan(state(8, device_free=7), LIMITS, TABLES, Memory())
    assert step.to_host == (7,) and step.device_rows == 7
    assert plan(state(8, device_free=8), LIMITS, TABLES, Memory()).to_host == ()
    assert plan(state(8, device_free=7), only(), TABLES, Memory()).to_host == (), "plain SGLang retracts"
    assert plan(state(1, device_free=0), LIMITS, TABLES, Memory()).to_host == (), "the last one stays"
    assert plan(state(8, device_free=7, host_free=64), LIMITS, TABLES, Memory()).to_host == ()
    small = replace(state(8, device_free=7), device_rows=(1000,) * 7 + (25,))
    assert plan(small, LIMITS, TABLES, Memory()).to_host == (7, 6)
    ending = replace(small, device_left=(4,) * 8)
    assert plan(ending, LIMITS, TABLES, Memory()).to_host == (7,), "nobody grows after its last token"


def test_host_rows_return_when_nobody_waits_and_there_is_room_to_stay() -> None:
    there = state(8, 3, device_free=1000 + 9 * 64)
    step = plan(there, LIMITS, TABLES, Memory())
    assert step.to_device == (0,)
    assert plan(replace(there, device_free=1000 + 9 * 64 - 1), LIMITS, TABLES, Memory()).to_device == ()
    assert plan(there, LIMITS, TABLES, Memory(steps_since_departure=3)).to_device == ()


def test_host_rows_that_do_not_pay_get_the_room_before_who_waits() -> None:
    there = state(8, 3, device_free=1500, waiting=(Prompt(100, room=150),))
    closed = Memory(guard=Guard(pause_left=5))
    step = plan(there, LIMITS, TABLES, closed)
    assert step.to_device and not step.prefill and step.mode == "gpu_only"
    paying = replace(there, host_rows=(1000,) * 40, waiting=(Prompt(100, room=150),) * 100)
    step = plan(paying, LIMITS, TABLES, Memory())
    assert step.prefill_to == "device" and not step.to_device
    stalled = plan(paying, LIMITS, TABLES, Memory(stalled=LIMITS.patience))
    assert stalled.to_device and not stalled.prefill, "nobody stands still for ever"


def test_rows_that_move_do_not_decode() -> None:
    there = state(2, 3, device_free=FREE)
    step = plan(there, only("sync"), TABLES, in_mode("sync"))
    assert len(step.to_device) == 2 and step.lane_a == 1


# -- safety nets ------------------------------------------------------------------------------------------------------


def test_a_closed_guard_a_comparison_and_a_lagging_cpu_mean_gpu_only() -> None:
    there = state(8, 60)
    memory = in_mode("pipelined")
    assert plan(there, LIMITS, TABLES, memory).mode != "gpu_only"
    closed = plan(there, LIMITS, TABLES, replace(memory, guard=Guard(pause_left=1)))
    assert (closed.mode, closed.decode_mode, closed.probe) == ("gpu_only", "gpu_only", False)
    probe = plan(there, LIMITS, TABLES, replace(memory, guard=Guard(probe_left=1)))
    assert probe.mode == "gpu_only" and probe.decode_mode != "gpu_only" and probe.probe
    late = plan(replace(there, cpu_lag=LIMITS.max_lag + 1), LIMITS, TABLES, memory)
    assert late.mode == "gpu_only" and late.decode_mode != "gpu_only" and not late.probe


def run(
    memory: Memory, there: State, limits: Limits, slowdown: float, steps: int
) -> tuple[Memory, list[StepPlan], list[str]]:
    """Steps on a machine whose CPU is slower than its tables say."""
    plans, lines = [], []
    for _ in range(steps):
        step = plan(there, limits, TABLES, memory)
        truth = step.cost.cpu / memory.corrections.cpu * slowdown
        # The lanes are full, so what the CPU takes longer than planned the device waits.
        wait = max(0.0, truth - (step.cost.cpu - step.cost.wait))
        measured = Measured(step.cost.device + wait, wait, truth)
        memory, said = after_step(memory, step, measured, limits)
        plans.append(step)
        lines += said
    return memory, plans, lines


def test_a_cpu_that_is_suddenly_late_gets_no_work_within_ten_steps_and_is_tried_again() -> None:
    limits = replace(only("pipelined"), guard=GuardRules(pause_steps=32))
    there = state(8, 60)
    memory, plans, _ = run(Memory(), there, limits, 1.0, 50)
    assert plans[-1].mode == "pipelined"
    memory, plans, lines = run(memory, there, limits, 10.0, 10)
    assert [p.mode for p in plans].count("pipelined") == limits.guard.late_steps
    assert plans[-1].mode == "gpu_only"
    assert len([line for line in lines if "no work for 32 steps" in line]) == 1
    memory, plans, lines = run(memory, there, limits, 10.0, 100)
    assert "the CPU is given work again" in lines and any("no work for 64 steps" in line for line in lines)
    memory, plans, lines = run(memory, there, limits, 1.0, 500)
    assert plans[-1].mode == "pipelined" and memory.guard.failures == 0, "and forgiven in the end"


def test_a_cpu_that_is_somewhat_slow_gets_less_work() -> None:
    limits = only("pipelined")
    there = state(8, 200)
    _, plans, _ = run(Memory(), there, limits, 1.0, 20)
    fast = plans[-1].host_rows
    memory, plans, lines = run(Memory(), there, limits, 1.4, 100)
    assert plans[-1].mode == "pipelined" and plans[-1].host_rows < fast / 1.25
    assert memory.corrections.cpu == pytest.approx(1.4, rel=0.05)
    assert lines == ["mode pipelined instead of gpu_only"]


@pytest.mark.parametrize("prompt", [40, 1000, 3000])
def test_host_prefills_take_their_share_of_device_rows_time_and_no_more(prompt: int) -> None:
    """Also of the steps of any request that is not very short, wherever it begins."""
    waiting = tuple(Prompt(prompt, room=prompt + 200, best_effort=True) for _ in range(64))
    limits = only("deferred", max_slowdown=0.10)
    memory = Memory()
    takes: list[float] = []  # seconds: negative where a prefill held the device rows up
    for _ in range(2000):
        step = plan(state(8, 0, waiting=waiting), limits, TABLES, memory)
        memory, _ = after_step(memory, step, Measured(step.cost.seconds), limits)
        takes.append(-step.cost.seconds if step.prefill_to == "host" else step.cost.seconds)

    def slowdown(part: list[float]) -> float:
        return -sum(t for t in part if t < 0) / sum(t for t in part if t > 0)

    assert 0.065 <= slowdown(takes) <= 0.075
    assert max(slowdown(takes[i : i + 200]) for i in range(0, 1800)) <= 0.10


def test_nobody_goes_to_the_host_if_the_meter_lets_too_few_come_for_a_mode_to_pay() -> None:
    """What matters is how many are there at a time: how long they live against how long their prefill takes."""
    for answer, prefill_to in ((10, None), (20_000, "host")):
        waiting = tuple(Prompt(2000, room=2000 + answer, best_effort=True) for _ in range(300))
        there = state(8, 0, waiting=waiting)
        for mode in ("pipelined", "deferred"):
            metered = only(mode, max_slowdown=0.10)  # type: ignore[arg-type]
            assert plan(there, metered, TABLES, Memory()).prefill_to == prefill_to, (mode, answer)
            assert plan(there, only(mode), TABLES, Memory()).prefill_to == "host"  # type: ignore[arg-type]
            alone = replace(there, device_rows=())
            assert plan(alone, metered, TABLES, Memory()).prefill_to == "host", "nobody is held up"


def test_what_nobody_waited_for_is_neither_saved_up_nor_owed() -> None:
    limits = only("deferred", max_slowdown=0.10)
    busy = plan(state(8), limits, TABLES, Memory())
    memory, _ = after_step(Memory(), busy, Measured(100.0), limits)
    assert memory.host_prefill_debt == 0, "an hour without such prompts gives none more of it"
    waiting = (Prompt(3000, room=3200),)
    step = plan(state(0, waiting=waiting, device_total=3000), limits, TABLES, Memory())
    assert (step.prefill, step.prefill_to, step.held_up) == ((3000,), "host", 0)
    memory, _ = after_step(Memory(host_prefill_debt=1.0), step, Measured(100.0), limits)
    assert memory.host_prefill_debt == 0


rows = st.lists(st.integers(1, 4000), max_size=40).map(tuple)
prompts = st.lists(
    st.builds(
        Prompt,
        st.integers(1, 9000),
        st.integers(0, 100),
        st.integers(0, 10_000),
        st.booleans(),
        st.none(),
        st.just(0),
    ),
    max_size=20,
).map(tuple)
modes = st.lists(st.sampled_from(MODES[1:]), unique=True).map(lambda chosen: ("gpu_only", *chosen))
guards = st.builds(Guard, pause_left=st.sampled_from([0, 3]), probe_left=st.sampled_from([0, 2]))


@given(rows, rows, prompts, st.integers(0, 50_000), st.integers(0, 500_000), modes, st.sampled_from(MODES), guards)
def test_any_plan_can_be_carried_out(
    device: tuple[int, ...],
    host: tuple[int, ...],
    waiting: tuple[Prompt, ...],
    device_free: int,
    host_free: int,
    allowed: tuple[Mode, ...],
    mode: Mode,
    guard: Guard,
) -> None:
    there = State(device, host, waiting, device_free, host_free)
    limits = replace(LIMITS, modes=allowed)
    step = plan(there, limits, TABLES, in_mode(mode, guard=guard))
    assert step.mode in allowed and step.decode_mode in allowed
    staying = len(host) - len(step.to_device)
    assert step.lane_a >= 0 and step.lane_b >= 0 and step.lane_a + step.lane_b <= staying
    assert step.slots <= limits.max_slots and (step.slots == 0 or host)
    assert len(set(step.to_host)) == len(step.to_host) and all(0 <= i < len(device) for i in step.to_host)
    assert not (step.to_host and step.to_device) and not (step.to_host and step.prefill)
    assert step.cost.seconds >= 0 and step.cost.wait >= 0
    if step.prefill:
        assert 0 < sum(step.prefill) <= limits.prefill_tokens and step.device_rows == 0
        assert all(n <= prompt.tokens for n, prompt in zip(step.prefill, waiting, strict=False))
        room = sum(prompt.room for prompt in waiting[: len(step.prefill)])
        assert room <= (device_free if step.prefill_to == "device" else host_free)
    else:
        assert step.device_rows == len(device) - len(step.to_host)
    if allowed == ("gpu_only",):
        assert step.mode == "gpu_only" and not step.to_host and step.prefill_to != "host"
    if guard.closed or (guard.probing and not step.prefill):
        assert step.mode == "gpu_only"


# -- what the server asks besides --------------------------------------------------------------------------------------


def test_a_step_that_cannot_prefill_is_planned_as_a_decode_step() -> None:
    waiting = (Prompt(500, room=700),)
    there = state(waiting=waiting, device_free=10_000)
    assert plan(there, LIMITS, TABLES, Memory()).prefill == (500,)
    step = plan(there, LIMITS, TABLES, Memory(), admit=False)
    assert (step.prefill, step.prefill_to, step.device_rows) == ((), None, 8)


def test_what_fits_the_host_only_is_served_there_whatever_it_gains() -> None:
    """With a CPU so slow that no mode pays, a request longer than the device's pool is prefilled and decoded all the
    same; one that would fit waits, or stands still, until there is room."""
    slow = real(cpu_attention=ideal(cpu_per_token=1e-3).cpu_attention)
    for room, place in ((9_000, None), (10_000, "host"), (20_000, "host")):
        there = state(waiting=(Prompt(5_000, room=room),), device_total=10_000)
        assert plan(there, LIMITS, slow, Memory()).prefill_to == place, room
    margin = LIMITS.rules.return_steps
    for tokens, host_rows in ((10_000 - margin, 0), (10_001 - margin, 1)):
        there = state(host=1, device_total=10_000, host_rows=(tokens,))
        assert plan(there, LIMITS, slow, FED_UP).host_rows == host_rows, tokens
    late = replace(Memory(), guard=Guard(pause_left=5))
    there = state(host=1, device_total=10_000, host_rows=(20_000,))
    assert plan(there, LIMITS, slow, late).host_rows == 0, "the fail-safe goes first"


def test_a_prompt_on_its_way_to_the_host_waits_for_its_share_of_the_time() -> None:
    there = state(waiting=(Prompt(5_000, past=1_000, room=7_000, place="host"),))
    assert plan(there, LIMITS, TABLES, Memory(host_prefill_debt=0.0)).prefill_to == "host"
    assert plan(there, LIMITS, TABLES, Memory(host_prefill_debt=1e-9)).prefill_to is None
    alone = replace(there, device_rows=())
    assert plan(alone, LIMITS, TABLES, Memory(host_prefill_debt=1.0)).prefill_to == "host"


def test_prompts_for_the_device_do_not_wait_behind_one_that_goes_to_the_host_in_chunks() -> None:
    first = Prompt(5_000, past=1_000, room=7_000, place="host")
    fits, long = Prompt(500, room=700), Prompt(20_000, room=30_000)
    there = state(waiting=(first, fits, fits, long, fits), device_free=2_000)
    for debt in (0.0, 1e-9):
        step = plan(there, LIMITS, TABLES, Memory(host_prefill_debt=debt))
        assert (step.prefill, step.prefill_to, step.overtaken) == ((500, 500), "device", 1)
    wide = replace(there, waiting=(first, fits, long, fits), device_free=50_000)
    assert plan(wide, LIMITS, TABLES, Memory()).prefill == (500,), "who needs chunks itself waits, and who is behind it"
    begun = Prompt(100, past=400, room=500, place="device")
    step = plan(replace(there, waiting=(first, begun), device_free=32), LIMITS, TABLES, Memory())
    assert (step.prefill, step.prefill_to, step.overtaken) == ((100,), "device", 1), "it has its room already"
    slow = real(cpu_attention=ideal(cpu_per_token=1e-3).cpu_attention)
    step = plan(replace(there, host_rows=(1000,)), LIMITS, slow, Memory(host_prefill_debt=1e-9))
    assert step.prefill == () and step.to_device == (0,), "but rows of the host that do not pay go first"


def test_draining_pays_exactly_until_the_new_mode_gives_more_meanwhile() -> None:
    device, under_way, layers, seconds = 8, 40, 10, 0.02
    rate = (device * layers + under_way) / (layers * seconds)
    assert not draining_pays(rate, device, under_way, layers, seconds)
    assert draining_pays(rate * (1 - 1e-9), device, under_way, layers, seconds)


def test_a_hit_is_copied_if_that_is_faster_than_computing_it() -> None:
    costs = Costs(TABLES, 8)
    saved = costs.prefill(2_000, 0).seconds - costs.prefill(1_000, 1_000).seconds
    for seconds, pays in ((saved * 0.99, True), (saved * 1.01, False)):
        copies = replace(TABLES, to_device=Curve((1,), (seconds,)))
        assert load_back_pays(Costs(copies, 8), 2_000, 0, 1_000) == pays
    assert not load_back_pays(costs, 2_000, 0, 0), "no hit"
