"""How host rows are spread over two lanes, and that there is a graph for every batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_neo.planning.lanes import LaneLimits, lane_a, lane_buckets, riding, second_lane

SIZES = [1, 2, 4, 8, 12, 16, 24, 32, 48]


@given(st.lists(st.integers(1, 5000), max_size=40))
def test_both_lanes_give_the_cpu_about_as_much(tokens: list[int]) -> None:
    b = second_lane(tokens, rows=len(tokens))
    assert b == 0 if len(tokens) < 2 else 0 < b < len(tokens)
    difference = abs(sum(tokens) - 2 * sum(tokens[len(tokens) - b :]))
    assert all(difference <= abs(sum(tokens) - 2 * sum(tokens[-other:])) for other in range(1, len(tokens)))


@given(st.lists(st.integers(1, 5000), min_size=2, max_size=48), st.integers(0, 46))
def test_with_graphs_there_is_one_for_every_batch(tokens: list[int], device_rows: int) -> None:
    rows = min(48, len(tokens) + device_rows)
    buckets = lane_buckets(SIZES, largest=48)
    b = second_lane(tokens[:rows], rows, buckets)
    a = lane_a(rows, b, buckets)
    assert b in SIZES and a is not None and rows - b <= a <= 48 - b


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40), st.floats(1, 20000))
def test_who_rides_is_within_the_limit_and_the_first_always_does(tokens: list[int], limit: float) -> None:
    chosen = riding(tokens, limit)
    total = sum(tokens[i] for i in chosen)
    assert chosen == sorted(set(chosen)) and chosen[0] == 0 and (total <= limit or chosen == [0])
    # Nobody waits for whom there is room.
    assert all(total + tokens[i] > limit for i in range(len(tokens)) if i not in chosen)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12), st.floats(1, 20000))
def test_everybody_rides_in_turn(tokens: list[int], limit: float) -> None:
    """Whoever has waited longest rides, so nobody waits for more steps than there are rows."""
    last = [0] * len(tokens)
    for step in range(1, 60):
        waiting = sorted(range(len(tokens)), key=lambda row: last[row])
        for i in riding([tokens[row] for row in waiting], limit):
            last[waiting[i]] = step
        assert step - min(last) <= len(tokens)


def test_limits_that_are_not_known_let_everybody_ride() -> None:
    assert riding([5000] * 9, LaneLimits().decode) == riding([5000] * 9, LaneLimits().beside(100)) == list(range(9))
    limits = LaneLimits(decode=1000, per_prompt_token=4)
    assert limits.beside(10) == 500 and limits.beside(1000) == 4000


def test_buckets_are_few_and_never_larger_than_the_largest_batch() -> None:
    buckets = lane_buckets(SIZES, largest=48)
    assert len(buckets) < 45 and all(a + b <= 48 and b <= a for a, b in buckets)
    assert lane_a(3, 2, [(2, 1)]) is None


def test_without_a_graph_that_fits_a_step_has_one_lane() -> None:
    assert second_lane([10, 10, 10], rows=9, buckets=[(2, 1), (2, 2)]) == 0
