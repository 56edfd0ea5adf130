"""What the host's parts are made of."""

from __future__ import annotations

import pytest

from sglang_neo.hybrid.assemble import default_threads


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 1, 3), (8, 1, 6), (16, 1, 13), (64, 4, 58)]
)
def test_cores_are_left_for_the_other_processes(cores: int, ranks: int, threads: int) -> None:
    assert default_threads(cores, ranks) == threads
