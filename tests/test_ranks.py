"""Tensor-parallel ranks agree by the least of what they say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sglang_neo.ranks import least_of_all_ranks


def _rank(rank: int, rendezvous: str, numbers: list[int], found: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=len(numbers))
    group = SimpleNamespace(cpu_group=torch.distributed.group.WORLD)
    runner = SimpleNamespace(ps=SimpleNamespace(tp_size=len(numbers)), tp_group=group)
    found[rank] = least_of_all_ranks(runner, numbers[rank])
    torch.distributed.destroy_process_group()


def test_every_rank_gets_the_least(tmp_path: Path) -> None:
    numbers = [7, 3, 5]
    with torch.multiprocessing.Manager() as manager:
        found = manager.dict()
        torch.multiprocessing.spawn(_rank, (str(tmp_path / "store"), numbers, found), nprocs=len(numbers))
        assert dict(found) == {0: 3, 1: 3, 2: 3}


def test_one_rank_asks_nobody() -> None:
    assert least_of_all_ranks(SimpleNamespace(ps=SimpleNamespace(tp_size=1)), 9) == 9
