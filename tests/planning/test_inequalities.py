"""The closed forms: exact at the boundary, and the same verdict as the comparison of rates they were derived from."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction as F

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_neo.planning import inequalities as q
from sglang_neo.planning.costs import Costs, Rows, lanes_wait
from sglang_neo.planning.inequalities import Terms
from tests.planning.machines import ideal

positive = st.fractions(F(1, 1000), F(1000), max_denominator=1000)
terms = st.builds(Terms, positive, positive, positive, positive, st.integers(1, 100))

# T = 10 ms, t = 5 ms: (6) has the right side 2 * 2 + 3 + 1/2 = 15/2.
BALANCED = Terms(F(15), F(10, 1000), F(5, 1000), F(400), 32)


def test_pipelined_equals_gpu_only_exactly_at_the_boundary_of_6() -> None:
    assert BALANCED.device_rate / BALANCED.host_rate == F(15, 2)
    assert q.pipelined_rate(BALANCED) == q.gpu_only_rate(BALANCED) == 1000
    inequality = q.pipelined_beats_gpu_only(BALANCED)
    assert inequality.left == inequality.right and not inequality.holds
    assert q.pipelined_beats_gpu_only(replace(BALANCED, host_rate=F(401))).holds
    assert not q.pipelined_beats_gpu_only(replace(BALANCED, host_rate=F(399))).holds


def test_as_many_host_rows_as_the_device_loses_are_the_boundary_of_a_short_queue() -> None:
    assert q.pipelined_rate(BALANCED, F(10)) == q.gpu_only_rate(BALANCED)
    assert not q.pipelined_beats_gpu_only_with(BALANCED, F(10)).holds
    assert q.pipelined_beats_gpu_only_with(BALANCED, F(10) + F(1, 10**9)).holds


def test_a_prefill_in_lane_a_has_its_own_boundary() -> None:
    prefill = F(45, 1000)
    boundary = (prefill + F(5, 1000)) * (prefill + F(15, 1000)) / (F(5, 1000) * F(10, 1000))
    at = replace(BALANCED, host_rate=BALANCED.device_rate / boundary)
    assert not q.pipelined_prefill_beats_mixed(at, prefill).holds
    assert q.pipelined_prefill_beats_mixed(replace(at, host_rate=at.host_rate + F(1, 10**9)), prefill).holds


def test_deferred_equals_pipelined_exactly_at_its_boundary() -> None:
    at = replace(BALANCED, host_rate=F(600))
    slots = (q.pipelined_rate(at) - q.gpu_only_rate(at)) * F(15, 1000)
    assert q.deferred_rate(at, slots) == q.pipelined_rate(at)
    assert not q.deferred_beats_pipelined(at, slots).holds
    assert q.deferred_beats_pipelined(at, slots + F(1, 10**9)).holds


def test_deferred_must_bring_more_than_handing_over_costs() -> None:
    # X0 = 1000 tokens/s and 1 ms of hand-offs: one token lost per step.
    assert q.deferred_rate(BALANCED, F(1), F(1, 1000)) == q.gpu_only_rate(BALANCED)
    assert not q.deferred_beats_gpu_only(BALANCED, F(1), F(1, 1000)).holds
    assert q.deferred_beats_gpu_only(BALANCED, F(101, 100), F(1, 1000)).holds


@given(terms)
def test_6_is_the_comparison_of_x1_and_x0(t: Terms) -> None:
    assert q.pipelined_beats_gpu_only(t).holds == (q.pipelined_rate(t) > q.gpu_only_rate(t))
    assert q.pipelined_beats_gpu_only(t) == replace(
        q.pipelined_prefill_beats_mixed(t, t.linear), name="pipelined beats gpu_only", right_is="2T/t + 3 + t/T"
    ), "a prefill that takes as long as a decode pass is no special case"


@given(terms, positive)
def test_a_short_queue_compares_x1_and_x0(t: Terms, rows: F) -> None:
    verdict = q.pipelined_beats_gpu_only_with(t, rows).holds
    assert verdict == (q.pipelined_rate(t, rows) > q.gpu_only_rate(t))


@given(terms, positive)
def test_with_a_prefill_it_compares_one_pass_of_both_with_two_lanes(t: Terms, prefill: F) -> None:
    one = t.device_rows / (prefill + t.attention)
    seconds = prefill + t.linear + t.attention
    two = (t.device_rows + t.host_rate * seconds) / seconds
    assert q.pipelined_prefill_beats_mixed(t, prefill).holds == (two > one)


@given(terms, positive, positive)
def test_deferred_compares_x2_with_both(t: Terms, slots: F, handoff: F) -> None:
    assert q.deferred_beats_pipelined(t, slots).holds == (q.deferred_rate(t, slots) > q.pipelined_rate(t))
    verdict = q.deferred_beats_gpu_only(t, slots, handoff).holds
    assert verdict == (q.deferred_rate(t, slots, handoff) > q.gpu_only_rate(t))


@given(terms, positive)
def test_where_6_fails_deferred_wins_with_any_slot(t: Terms, slots: F) -> None:
    assume(not q.pipelined_beats_gpu_only(t).holds)
    assert q.deferred_beats_pipelined(t, slots).left <= 0
    assert q.deferred_beats_pipelined(t, slots).holds


@given(positive, positive, positive, positive, positive)
def test_a_lane_beside_a_prefill_pays_if_the_whole_is_faster(
    prefill: F, lane: F, host_rows: F, rate: F, decode: F
) -> None:
    # The same prefill and then decoding until equal times have passed, with the lane and without it.
    with_lane = host_rows + rate * decode
    without = rate * (decode + lane)
    assert q.lane_beside_prefill_pays(rate, host_rows, lane).holds == (with_lane > without)


def test_bounds_have_units() -> None:
    # 30 rows per second of attention over 10 + 5 ms.
    t = Terms(15, 10e-3, 5e-3, 400, 31)
    bounds = q.deferred_slots(t, host_rows=64, rows_that_fit=320, graph_slots=16)
    assert bounds == {"CPU": pytest.approx(6), "host memory": 10, "queue": 2, "graph": 16}
    assert q.pipelined_rows(t, 64, 320) == {"CPU": pytest.approx(10), "host memory": 320, "queue": 64}
    assert q.deferred_tpot(t, host_rows=64, slots=2) == pytest.approx(32 * 15e-3)
    assert q.deferred_tpot(t, host_rows=128, slots=2) == pytest.approx(2 * 32 * 15e-3)
    assert q.pipelined_tpot(t, resident=30, host_rows=10) == pytest.approx(3 * 25e-3)
    # 100 MB a row: 116 GB/s are 1160 rows/s, 61 GB/s beside copies 610.
    assert q.host_rate_within(1000, 116e9, 0, 1e8) == 1000
    assert q.host_rate_within(1000, 116e9, 55e9, 1e8) == pytest.approx(610)
    assert q.host_rate_within(1000, 50e9, 55e9, 1e8) == 0


@given(terms)
def test_whoever_has_no_time_or_rows_is_refused(t: Terms) -> None:
    for name in ("device_rows", "linear", "attention", "host_rate"):
        with pytest.raises(ValueError, match="positive"):
            replace(t, **{name: 0})


@given(
    st.integers(1, 64),
    st.integers(100, 4000),
    st.floats(1e-3, 50e-3),
    st.floats(1e-9, 1e-6),
    st.floats(1e-9, 1e-6),
    st.integers(1, 80),
    st.integers(1, 192),  # with the device's rows no more than a pass of constant time takes
)
def test_the_cost_model_gives_the_same_rates_where_the_assumptions_hold(
    rows: int, tokens: int, linear: float, device: float, cpu: float, layers: int, host: int
) -> None:
    costs = Costs(ideal(layers, linear, device, cpu), threads=8)
    t = Terms(rows, linear, rows * tokens * device, 1 / (layers * tokens * cpu), layers)
    on_device = Rows(rows, rows * tokens)
    assert rows / costs.gpu_only(on_device).seconds == pytest.approx(q.gpu_only_rate(t))
    lane_a, lane_b = costs.lanes(on_device, tokens, host)
    step = costs.pipelined(on_device, Rows(lane_a, lane_a * tokens), Rows(lane_b, lane_b * tokens))
    assert step.wait == pytest.approx(0, abs=1e-9), "no more rows than the CPU has time for"
    assert (rows + lane_a + lane_b) / step.seconds == pytest.approx(q.pipelined_rate(t, lane_a + lane_b))
    if lane_a + lane_b < host:  # full: one row more in either lane and the device waits
        assert lane_a + lane_b + 2 > q.pipelined_host_rows(t) * (1 - 1e-9)
    slots = costs.slots(costs.gpu_only(on_device).seconds, tokens, host)
    step = costs.deferred(on_device, slots, Rows(slots, slots * tokens))
    assert step.wait == pytest.approx(0, abs=1e-9)
    assert (rows + slots) / step.seconds == pytest.approx(q.deferred_rate(t, slots))
    if slots < host:
        assert slots + 1 > t.host_rate * (t.linear + t.attention) * (1 - 1e-9)


times = st.floats(0, 10)


@given(times, times, times, times, times)
def test_two_lanes_wait_as_their_stream_does(
    linear_a: float, linear_b: float, attention: float, cpu_a: float, cpu_b: float
) -> None:
    """Event by event over many layers: the device in stream order, one CPU that takes hand-offs as they come."""
    layers = 300
    device = cpu = 0.0
    answered = {"a": 0.0, "b": 0.0}
    for layer in range(layers):
        for lane, linear, takes, own in (("a", linear_a, cpu_a, attention), ("b", linear_b, cpu_b, 0.0)):
            device = max(device, answered[lane]) + linear  # its answer of the layer before, and its projections
            cpu = answered[lane] = max(cpu, device) + takes  # handed over
            device += own
        if layer == layers // 2:
            begin = device
    seconds = (device - begin) / (layers - 1 - layers // 2)
    alone = linear_a + linear_b + attention
    assert seconds - alone == pytest.approx(lanes_wait(linear_a, linear_b, attention, cpu_a, cpu_b), abs=0.15)
