"""How evenly a plan's items keep workers busy, computed from the plan alone."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import pytest

from cpu_kernels.attention import HostPool, Plan, Tuning
from cpu_kernels.probe import Memory

PAGE = 64
#: What a run of tokens of one KV head, and an item, costs before its first token, as a number of tokens: about what was
#: measured (docs/kernels.md).
RUN_COST = ITEM_COST = 16


@pytest.fixture(scope="module")
def memory() -> Memory:
    """For pools that nobody reads."""
    return Memory(HostPool.bytes_needed(1, 600, 8, 16))


def shares(memory: Memory, lengths: Sequence[int], kv_heads: int, threads: int, **tuning: int) -> list[tuple[int, int]]:
    """Of every item, in the order in which workers take them: runs of tokens, and tokens in all."""
    counts = [-(-n // PAGE) for n in lengths]
    pool = HostPool(memory.address, 1, sum(counts), kv_heads, 16)
    tables = [list(range(sum(counts[:i]), sum(counts[: i + 1]))) for i in range(len(counts))]
    plan = Plan(pool, lengths, tables, kv_heads, threads=threads, tuning=Tuning(**tuning))
    assert sum(tokens for _, tokens in plan.native.shares) == sum(lengths) * kv_heads
    return plan.native.shares


def efficiency(items: Sequence[tuple[int, int]], speeds: Sequence[float]) -> float:
    """The time of a plan that were divided evenly at no cost, by the time until the last worker is done.

    Args:
        speeds: of the workers; whoever is free first takes the next item.
    """
    free = [(0.0, worker) for worker in range(len(speeds))]
    end = 0.0
    for runs, tokens in items:
        at, worker = heapq.heappop(free)
        at += (ITEM_COST + RUN_COST * runs + tokens) / speeds[worker]
        end = max(end, at)
        heapq.heappush(free, (at, worker))
    return sum(tokens for _, tokens in items) / sum(speeds) / end


def rows(count: int) -> list[int]:
    rng = random.Random(count)
    return [rng.randint(900, 1100) for _ in range(count)]


@pytest.mark.parametrize("threads", [8, 12, 13, 14, 15])
@pytest.mark.parametrize(
    ("lengths", "by_heads"),
    [
        pytest.param(rows(8), {8: 0.938, 2: 0.86, 1: 0.82}, id="8 rows"),
        pytest.param(rows(12), {8: 0.945, 2: 0.89, 1: 0.845}, id="12 rows"),
        pytest.param(rows(24), {8: 0.96, 2: 0.92, 1: 0.89}, id="24 rows"),
        pytest.param([8000, 100], {8: 0.94, 2: 0.89, 1: 0.83}, id="8000 and 100"),
        pytest.param([4000, 300, 200], {8: 0.915, 2: 0.81, 1: 0.77}, id="4000, 300, 200"),
        pytest.param([100, 6000, 50, 900], {8: 0.94, 2: 0.865, 1: 0.80}, id="100, 6000, 50, 900"),
    ],
)
def test_workers_end_together(memory: Memory, lengths: list[int], by_heads: dict[int, float], threads: int) -> None:
    for kv_heads, least in by_heads.items():
        reached = efficiency(shares(memory, lengths, kv_heads, threads), [1.0] * threads)
        assert reached >= least, f"{kv_heads} KV heads: {reached:.3f}"


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_a_slow_worker_is_evened_out(memory: Memory, kv_heads: int) -> None:
    """One of 13 that is a third slower, as where it shares its core, costs little more than what it does less."""
    speeds = [2 / 3] + [1.0] * 12
    items = shares(memory, rows(24), kv_heads, 13)
    assert efficiency(items, speeds) >= 0.95 * efficiency(items, [1.0] * 13)
    even = [(1, sum(tokens for _, tokens in items) // 13)] * 13
    assert efficiency(even, speeds) < 0.75, "one share each would not do"


def test_small_work_is_cut_into_few_items(memory: Memory) -> None:
    """Cuts are not free: where there is little to read, each worker gets one item."""
    assert len(shares(memory, [1000] * 4, 1, 13)) == 13
    assert len(shares(memory, [1000] * 8, 8, 13)) <= 6 * 13
    assert len(shares(memory, [1000] * 8, 8, 1)) == 1
    assert len(shares(memory, [20], 2, 13)) <= 2
