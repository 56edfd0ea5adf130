"""Shared beginnings of page tables."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_neo.planning.cascade import SharedRun, shared_runs


def test_a_tree_of_prefixes() -> None:
    tables = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6], [7], [7], [8]]
    assert sorted(shared_runs(tables)) == [
        SharedRun([0, 1], 2, 3),
        SharedRun([0, 1, 2], 0, 2),
        SharedRun([3, 4], 0, 1),
    ]
    assert shared_runs([]) == [] == shared_runs([[], [1]])


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8))
def test_each_page_of_a_row_is_in_one_run_or_its_own(choices: list[list[int]]) -> None:
    # Pages as a radix tree has them: a page names all that stands before it.
    pages: dict[tuple[int, ...], int] = {}
    tables = [[pages.setdefault(tuple(c[: i + 1]), len(pages)) for i in range(len(c))] for c in choices]
    covered: dict[tuple[int, int], list[int]] = {}
    for rows, begin, end in shared_runs(tables):
        assert begin < end and len(rows) > 1
        for at in range(begin, end):
            assert len({tables[row][at] for row in rows}) == 1
            for row in rows:
                assert (row, at) not in covered
                covered[row, at] = rows
    for row, table in enumerate(tables):
        for at, page in enumerate(table):
            holders = [r for r, other in enumerate(tables) if page in other]
            assert covered.get((row, at), [row]) == holders
