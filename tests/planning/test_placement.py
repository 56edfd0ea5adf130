"""The rules of placement, as pure functions: newest out, oldest back, never both, nothing thrashes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_neo.planning.placement import Row, Rules, to_device, to_exchange, to_host, to_seat

RULES = Rules(growth_steps=16, return_steps=64, cooldown_steps=32, returns_per_step=2)


def rows(*tokens: int) -> list[Row]:
    """Oldest first; 64-token host pages."""
    return [Row(i, n, -(-n // 64) * 64) for i, n in enumerate(tokens)]


def test_the_newest_leave_until_there_is_room() -> None:
    assert to_host(rows(100, 200, 300), 250, 10_000, partly=False) == [2]
    assert to_host(rows(100, 200, 300), 301, 10_000, partly=False) == [2, 1]
    assert to_host(rows(100, 200, 300), 0, 10_000, partly=False) == []


def test_a_row_that_leaves_needs_no_room_to_grow() -> None:
    growing = [replace(row, growth=16) for row in rows(600, 600, 70)]
    assert to_host(growing, 3 * 16, 10_000, partly=True) == [2]
    assert to_host(growing, 70 + 16, 10_000, partly=True) == [2]
    assert to_host(growing, 70 + 17, 10_000, partly=True) == [2, 1]


def test_a_row_that_host_memory_cannot_hold_is_passed_over() -> None:
    assert to_host(rows(100, 200, 3000), 150, 512, partly=False) == [1]


def test_all_or_nothing_unless_a_part_helps() -> None:
    assert to_host(rows(100, 200), 301, 10_000, partly=False) == []
    assert to_host(rows(100, 200), 301, 10_000, partly=True) == [1, 0]
    assert to_host(rows(100, 200), 301, 128, partly=True) == [0]
    assert to_host([], 1, 10_000, partly=True) == []


def test_the_oldest_come_back_and_only_to_stay() -> None:
    host = rows(100, 200, 50)
    assert to_device(host, 0, 100 + 64, 1, RULES) == [0]
    assert to_device(host, 0, 100 + 63, 1, RULES) == []
    assert to_device(host, 3, 300 + 5 * 64, 1, RULES) == [0, 1]
    assert to_device(host, 3, 10_000, 1, RULES) == [0, 1], "two a step at most"


def test_a_row_that_does_not_fit_keeps_younger_ones_waiting() -> None:
    assert to_device(rows(5000, 10), 0, 1000, 1, RULES) == []


def test_growth_is_counted_in_device_pages() -> None:
    assert to_device(rows(64), 1, 64 + 2 * 64, 64, RULES) == [0]
    assert to_device(rows(128), 1, 128 + 2 * 128 - 1, 128, RULES) == []


def test_rules_that_would_thrash_are_refused() -> None:
    with pytest.raises(ValueError, match="return_steps"):
        Rules(growth_steps=16, return_steps=8)


sizes = st.lists(st.integers(1, 500), max_size=12)


@given(sizes, st.integers(0, 3000), st.integers(0, 5000), st.booleans())
def test_departures_fit_host_memory_and_are_no_more_than_needed(
    tokens: list[int], needed: int, host_free: int, partly: bool
) -> None:
    all_rows = rows(*tokens)
    leaving = to_host(all_rows, needed, host_free, partly=partly)
    assert len(set(leaving)) == len(leaving) and leaving == sorted(leaving, reverse=True)
    assert sum(all_rows[i].host_tokens for i in leaving) <= host_free
    freed = [all_rows[i].device_tokens for i in leaving]
    assert sum(freed[:-1]) < max(needed, 1), "the last one was not needed"
    if not partly and leaving:
        assert sum(freed) >= needed


@given(sizes, st.integers(0, 8), st.integers(0, 3000), st.sampled_from([1, 16, 64]))
def test_whoever_returns_does_not_leave_again_for_want_of_growth(
    tokens: list[int], device_rows: int, device_free: int, page: int
) -> None:
    host = [Row(i, -(-n // page) * page, n) for i, n in enumerate(tokens)]
    back = to_device(host, device_rows, device_free, page, RULES)
    assert back == list(range(len(back)))
    if back:
        left = device_free - sum(host[i].device_tokens for i in back)
        growth = -(-RULES.return_steps // page) * page
        assert left >= (device_rows + len(back)) * growth
        # A departure needs room for growth_steps only, so nobody leaves for return_steps steps.
        assert to_host(host, max(0, growth * (device_rows + len(back)) - left), 10**6, partly=True) == []


def test_planning_needs_no_torch() -> None:
    code = "import sys, sglang_neo.explain; print(sorted(m for m in ('torch', 'sglang') if m in sys.modules))"
    # -S: site packages may import torch on their own account.
    out = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {sys.path[:1]!r} + ['.']; {code}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert out.stdout.strip() == "[]", out.stderr


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_the_lowest_ranks_leave_first_and_of_them_the_newest() -> None:
    rows = [Row(0, 10, 64, rank=-5), Row(1, 10, 64), Row(2, 10, 64, rank=-5), Row(3, 10, 64)]
    assert to_host(rows, 15, 1000, partly=True) == [2, 0]
    assert to_host(rows, 35, 1000, partly=True) == [2, 0, 3, 1]


def test_the_highest_ranks_come_back_first_and_of_them_the_oldest() -> None:
    rows = [Row(0, 10, 64, rank=-5), Row(1, 10, 64), Row(2, 10, 64)]
    assert to_device(rows, 0, 10_000, 1, Rules()) == [1, 2]
    assert to_device(rows, 0, 10_000, 1, Rules(returns_per_step=5)) == [1, 2, 0]


def test_rows_change_places_only_by_rank() -> None:
    rules = Rules(growth_steps=1, return_steps=1)
    host = [Row(0, 20, 64, rank=-5), Row(1, 20, 64), Row(2, 20, 64)]
    best_effort = [Row(3, 30, 64, rank=-5), Row(4, 30, 64, rank=-5)]
    assert to_exchange(host, best_effort, 5, 1, 1000, rules) == (1, [4])
    assert to_exchange(host, best_effort, 5, 1, 0, rules) is None, "host memory is full"
    assert to_exchange(host, [Row(3, 30, 64), Row(4, 30, 64)], 5, 1, 1000, rules) is None, "all alike"
    assert to_exchange(host[:1], [Row(3, 30, 64)], 5, 1, 1000, rules) is None, "the higher rank is there already"
    assert to_exchange([Row(1, 100, 64)], best_effort, 5, 1, 1000, rules) is None, "all of them would not do"
    assert to_exchange([], best_effort, 5, 1, 1000, rules) is None


def test_seats_go_by_rank_then_to_those_that_have_them_then_by_waiting() -> None:
    assert to_seat([0, 0, 0], [0, 0], 4) == ([0, 1], [0, 1])
    assert to_seat([0, 3], [0, 0], 2) == ([0], [1]), "one gives its seat up"
    assert to_seat([-5, -5], [0], 2) == ([0], [0])
    assert to_seat([], [1, 2], 4) == ([0, 1], [])
    assert to_seat([-5, 0], [], 1) == ([], [1])
