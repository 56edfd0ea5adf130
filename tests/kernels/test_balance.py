"""How evenly a plan's items keep workers busy, computed from the plan alone."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import pytest

from cpu_kernels import attention as attention_module
from cpu_kernels.attention import HostPool, Plan, Tuning
from cpu_kernels.isa import Isa
from cpu_kernels.probe import Memory

PAGE = 64
#: What a run of tokens of one KV head costs for each row, and an item, before its first token, as a number of tokens:
#: about what was measured (docs/kernels.md).
RUN_COST = ITEM_COST = 16
Items = Sequence[Sequence[tuple[int, int]]]  # of every item its runs: rows, tokens


@pytest.fixture(scope="module")
def memory() -> Memory:
    """For pools that nobody reads."""
    return Memory(HostPool.bytes_needed(1, 600, 8, 16))


def make_plan(
    memory: Memory, lengths: Sequence[int], kv_heads: int, threads: int, shared: int = 0, heads: int = 1
) -> Plan:
    """All rows share their first ``shared`` tokens; ``heads`` query heads per KV head."""
    common = shared // PAGE
    tables, used = [], common
    for n in lengths:
        own = -(-n // PAGE) - common
        tables.append([*range(common), *range(used, used + own)])
        used += own
    pool = HostPool(memory.address, 1, used, kv_heads, 16)
    groups = [(range(len(lengths)), shared)] if shared else None
    return Plan(pool, lengths, tables, kv_heads * heads, threads=threads, tuning=Tuning(), prefix_groups=groups)


def shares(memory: Memory, lengths: Sequence[int], kv_heads: int, threads: int) -> Items:
    """Of every item, in the order in which workers take them: rows and tokens of each run."""
    items = make_plan(memory, lengths, kv_heads, threads).native.shares
    assert sum(tokens for item in items for _, tokens in item) == sum(lengths) * kv_heads
    return items


def work(items: Items, heads: int = 1, balanced: int = 16) -> float:
    """Tokens, each as many times as more than ``balanced`` queries take longer than reading."""
    return sum(tokens * max(1.0, rows * heads / balanced) for item in items for rows, tokens in item)


def efficiency(
    items: Items, speeds: Sequence[float], heads: int = 1, partial: float = 0.0, balanced: int = 16
) -> float:
    """The time of a plan that were divided evenly at no cost, by the time until the last worker is done.

    Args:
        speeds: of the workers; whoever is free first takes the next item.
        partial: what a run costs for each query that it has beside others, as a number of tokens.
    """
    free = [(0.0, worker) for worker in range(len(speeds))]
    end = 0.0
    for item in items:
        at, worker = heapq.heappop(free)
        rows = sum(rows for rows, _ in item)
        at += (ITEM_COST + (RUN_COST + partial * heads) * rows + work([item], heads, balanced)) / speeds[worker]
        end = max(end, at)
        heapq.heappush(free, (at, worker))
    return work(items, heads, balanced) / sum(speeds) / end


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
    even = [[(1, round(work(items) / 13))]] * 13
    assert efficiency(even, speeds) < 0.75, "one share each would not do"


def test_small_work_is_cut_into_few_items(memory: Memory) -> None:
    """Cuts are not free: where there is little to read, each worker gets one item."""
    assert len(shares(memory, [1000] * 4, 1, 13)) == 13
    assert len(shares(memory, [1000] * 8, 8, 13)) <= 6 * 13
    assert len(shares(memory, [1000] * 8, 8, 1)) == 1
    assert len(shares(memory, [20], 2, 13)) <= 2


@pytest.mark.parametrize("threads", [12, 13, 14, 16])
@pytest.mark.parametrize(("isa", "most", "least"), [("scalar", 12e6, 0.86), ("amx_shim", 7e6, 0.65)])
def test_shared_prefixes_are_cut_seldom(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, isa: str, most: float, least: float, threads: int
) -> None:
    """Every cut leaves the sums of all rows that share; reading once more costs less than small pieces of many rows.
    Where arithmetic is fast, cuts are dearer by comparison, and fewer."""
    monkeypatch.setattr(attention_module, "choose_isa", lambda name=None: Isa(name or isa, "", ()))
    lengths, heads = [4096] * 64, 8
    plan = make_plan(memory, lengths, 8, threads, shared=4096, heads=heads)
    items = plan.native.shares
    assert sum(rows * tokens for item in items for rows, tokens in item) == sum(lengths) * 8
    partials = sum(rows for item in items for rows, _ in item) * heads * 128 * 4  # bytes, if head_dim were 128
    assert partials == plan.native.partials * heads * 128 * 4 < most, "one for each query: 2.1e6"
    read = sum(tokens for item in items for _, tokens in item) * 2 * 128 * 2
    assert read <= 2 * 4096 * 8 * 2 * 128 * 2, "a head's tokens are read for half of its rows, at least"
    balanced = 64 if isa == "amx_shim" else 16
    assert efficiency(items, [1.0] * threads, heads, partial=4.0, balanced=balanced) >= least


def test_one_worker_leaves_one_partial_result_a_query(memory: Memory) -> None:
    plan = make_plan(memory, [600] * 60, 4, 1, shared=512, heads=8)
    assert plan.native.partials == 2 * 60 * 4, "of the prefix and of the row's own tokens"
    assert sorted({rows for item in plan.native.shares for rows, _ in item}) == [1, 60]
