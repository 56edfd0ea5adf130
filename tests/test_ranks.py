"""Tensor-parallel ranks agree, by the least of what they say (also of host memory) or by what the first one says."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_neo.host_kv.memory import HostMemory, HostMemoryError
from sglang_neo.host_kv.pool import HostKVGeometry
from sglang_neo.hybrid import assemble
from sglang_neo.ranks import from_first_rank, least_of_all_ranks, meet


def _run(rank: int, rendezvous: str, work: Callable[[int, Any], Any], count: int, found: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=count)
    group = SimpleNamespace(cpu_group=torch.distributed.group.WORLD, ranks=list(range(count)))
    found[rank] = work(rank, SimpleNamespace(ps=SimpleNamespace(tp_size=count), tp_group=group))
    torch.distributed.destroy_process_group()


def on_ranks(folder: Path, count: int, work: Callable[[int, Any], Any]) -> list[Any]:
    """What ``work(rank, runner)`` returns in each of so many processes; fails where one waits for ever."""
    with torch.multiprocessing.Manager() as manager:
        found = manager.dict()
        # Forked: what has been imported and patched here is there too.
        processes = torch.multiprocessing.start_processes(
            _run, (str(folder / "store"), work, count, found), nprocs=count, join=False, start_method="fork"
        )
        deadline = time.monotonic() + 60
        while not processes.join(1):
            if time.monotonic() > deadline:
                for process in processes.processes:
                    process.kill()
                pytest.fail("a rank waits for another one")
        return [found[rank] for rank in range(count)]


def test_every_rank_gets_the_least(tmp_path: Path) -> None:
    numbers = [7, 3, 5]
    assert on_ranks(tmp_path, 3, lambda rank, runner: least_of_all_ranks(runner, numbers[rank])) == [3, 3, 3]


def test_every_rank_gets_what_the_first_one_has(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 3, lambda rank, runner: from_first_rank(runner, {"mine": rank})) == [{"mine": 0}] * 3


def test_ranks_meet_or_know_that_one_is_missing(tmp_path: Path) -> None:
    assert on_ranks(tmp_path, 3, lambda rank, runner: meet(runner, 30.0)) == [True] * 3
    for missing in (0, 2):
        folder = tmp_path / str(missing)
        folder.mkdir()
        met = on_ranks(folder, 3, lambda rank, runner, who=missing: rank == who or meet(runner, 2.0))
        assert met == [rank == missing for rank in range(3)]


def test_one_rank_asks_nobody() -> None:
    assert meet(SimpleNamespace(ps=SimpleNamespace(tp_size=1)), 0.0)
    assert least_of_all_ranks(SimpleNamespace(ps=SimpleNamespace(tp_size=1)), 9) == 9
    assert from_first_rank(SimpleNamespace(ps=SimpleNamespace(tp_size=1)), "mine") == "mine"


#: A page has 2 MiB, as huge pages have: host memory comes in these.
GEOMETRY = HostKVGeometry(layers=2, kv_heads=8, head_dim=256, dtype="float32", page_tokens=64)
#: Host pages that a rank may have, of the twenty that are asked for; the second one of three is short of memory.
POOLS = {"less": (20, 7, 20), "none": (20, 0, 20)}


def pages_of(available: tuple[int, ...], rank: int, runner: Any) -> int | str:
    """Pages of this rank's host pool, or why it runs gpu-only."""

    def memory(wanted: int, *args: Any) -> HostMemory:
        size = min(wanted, available[rank] * GEOMETRY.bytes_per_page)
        if size == 0:
            raise HostMemoryError("no host memory")
        return HostMemory(size, pin=False, threads=1)

    assemble.largest_host_memory = memory  # type: ignore[assignment]
    runner.server_args = SimpleNamespace(
        neo_host_kv_dtype="auto", neo_host_kv_size=60.1 * GEOMETRY.bytes_per_page / 1e9, neo_host_kv_ratio=None,
        tp_size=3, dp_size=1,
    )  # fmt: skip
    device = SimpleNamespace(geometry=lambda dtype: GEOMETRY, bytes=1 << 30, device=torch.device("cpu"))
    try:
        memory_, pool = assemble._pool(runner, device)  # type: ignore[arg-type]
    except assemble.GpuOnly as reason:
        return str(reason)
    pages = pool.pages
    memory_.close()
    return pages


@pytest.mark.parametrize("kind", POOLS)
def test_ranks_with_different_host_memory_agree(tmp_path: Path, kind: str) -> None:
    found = on_ranks(tmp_path, 3, lambda rank, runner: pages_of(POOLS[kind], rank, runner))
    if kind == "less":
        assert found == [7, 7, 7]
    else:
        assert found == ["another rank has no host memory", "no host memory", "another rank has no host memory"]


@pytest.mark.parametrize("kind", POOLS)
def test_without_asking_they_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Negative control of the test above."""
    monkeypatch.setattr(assemble, "least_of_all_ranks", lambda runner, number: number)
    assert len(set(on_ranks(tmp_path, 3, lambda rank, runner: pages_of(POOLS[kind], rank, runner)))) == 2
