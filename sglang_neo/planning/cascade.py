"""Which rows of a hand-off begin with the same pages, so that these are read once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class SharedRun(NamedTuple):
    """Pages ``begin`` to ``end`` of several rows are the same."""

    rows: list[int]
    begin: int
    end: int


def shared_runs(tables: Sequence[list[int]]) -> list[SharedRun]:
    """All runs of pages that two rows or more have in common, from the first page on: a tree's branches, each with the
    rows that go through it.

    Args:
        tables: per row the pages that others may have too, in order.
    """
    found: list[SharedRun] = []
    branches = [(list(range(len(tables))), 0)]
    while branches:
        rows, begin = branches.pop()
        by_page: dict[int, list[int]] = {}
        for row in rows:
            if len(tables[row]) > begin:
                by_page.setdefault(tables[row][begin], []).append(row)
        for together in by_page.values():
            if len(together) > 1:
                ends = sorted(tables[row] for row in together)  # if the outermost two agree, so do all between
                end = _parting(ends[0], ends[-1])
                found.append(SharedRun(together, begin, end))
                branches.append((together, end))
    return found


def _parting(a: list[int], b: list[int]) -> int:
    """How many pages two tables begin with in common."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
