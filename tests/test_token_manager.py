"""Our slot allocators: SGLang's, with a token manager that finds a page with two owners."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

from sglang_neo.errors import UsageError
from sglang_neo.platforms import cpu_bridges
from sglang_neo.token_manager import (
    NeoPagedTokenToKVPoolAllocator,
    NeoTokenToKVPoolAllocator,
    PoolUsage,
    adopt,
)

SIZE = 640

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def bridges() -> None:
    cpu_bridges.install()  # the paged allocator's kernels


def build(page_size: int, size: int = SIZE, need_sort: bool = False) -> Any:
    common: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "kvcache": "the pool", "need_sort": need_sort}
    if page_size == 1:
        return NeoTokenToKVPoolAllocator(size, **common)
    return NeoPagedTokenToKVPoolAllocator(size, page_size, **common)


both = pytest.mark.parametrize("page_size", [1, 64])
sorted_or_not = pytest.mark.parametrize("need_sort", [False, True])


@both
@sorted_or_not
def test_alloc_and_free(page_size: int, need_sort: bool) -> None:
    allocator = build(page_size, need_sort=need_sort)
    manager = allocator.token_manager
    manager.audit()
    assert manager.device_usage() == PoolUsage(SIZE, SIZE, page_size)
    slots = [allocator.alloc(128) for _ in range(5)]
    assert all(len(part) == 128 for part in slots)
    assert len(torch.unique(torch.cat(slots))) == SIZE, "a slot was given out twice"
    assert int(torch.cat(slots).min()) >= page_size, "page 0 is the dummy page"
    assert manager.device_usage().free_tokens == 0
    assert allocator.alloc(page_size) is None
    manager.audit()
    for part in slots[::-1]:
        allocator.free(part)
        manager.audit()
    assert manager.device_usage().free_tokens == SIZE
    assert len(allocator.alloc(SIZE)) == SIZE, "freed slots can be had again"
    allocator.clear()
    manager.audit()
    assert manager.device_usage() == PoolUsage(SIZE, SIZE, page_size)


def test_usage_is_plain_data() -> None:
    usage = build(64).token_manager.device_usage()
    assert dataclasses.asdict(usage) == {"total_tokens": SIZE, "free_tokens": SIZE, "page_size": 64}
    assert all(type(value) is int for value in dataclasses.asdict(usage).values())


@both
@sorted_or_not
def test_audit_finds_a_double_free(page_size: int, need_sort: bool) -> None:
    allocator = build(page_size, need_sort=need_sort)
    slots = allocator.alloc(128)
    allocator.free(slots)
    allocator.token_manager.audit()
    allocator.free(slots[:page_size])
    with pytest.raises(AssertionError, match="free twice"):
        allocator.token_manager.audit()


@both
def test_audit_finds_the_dummy_page_and_pages_outside(page_size: int) -> None:
    allocator = build(page_size)
    allocator.alloc(128)
    allocator.free(torch.tensor([0]))
    with pytest.raises(AssertionError, match="outside"):
        allocator.token_manager.audit()

    allocator = build(page_size)
    allocator.free(torch.tensor([SIZE + page_size]))
    with pytest.raises(AssertionError, match=r"lie outside"):
        allocator.token_manager.audit()


@both
def test_audit_waits_for_the_end_of_a_group_of_frees(page_size: int) -> None:
    allocator = build(page_size)
    slots = allocator.alloc(256)
    allocator.free_group_begin()
    allocator.free(slots[:128])
    allocator.token_manager.audit()
    allocator.free(slots[128:])
    assert allocator.token_manager.device_usage().free_tokens == SIZE - 256
    allocator.free_group_end()
    allocator.token_manager.audit()
    assert allocator.token_manager.device_usage().free_tokens == SIZE


def test_audit_of_a_full_pool() -> None:
    allocator = build(1)
    allocator.alloc(SIZE)
    allocator.token_manager.audit()


@both
@sorted_or_not
def test_adopt_builds_ours_with_the_same_arguments(page_size: int, need_sort: bool) -> None:
    kvcache = object()
    common: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cpu", "kvcache": kvcache, "need_sort": need_sort}
    if page_size == 1:
        ours, plain = NeoTokenToKVPoolAllocator, TokenToKVPoolAllocator(SIZE, **common)
    else:
        ours, plain = NeoPagedTokenToKVPoolAllocator, PagedTokenToKVPoolAllocator(SIZE, page_size, **common)
    adopted: Any = adopt(plain)
    assert type(adopted) is ours
    assert adopted.get_kvcache() is kvcache
    for name in ("size", "page_size", "dtype", "device", "need_sort"):
        assert getattr(adopted, name) == getattr(plain, name), name
    assert adopted.token_manager.device_usage() == PoolUsage(SIZE, SIZE, page_size)


def test_adopt_refuses_other_allocators() -> None:
    class SpecialAllocator(TokenToKVPoolAllocator):
        pass

    special = SpecialAllocator(SIZE, dtype=torch.float32, device="cpu", kvcache=None, need_sort=False)
    foreign = SimpleNamespace(dtype=None, device="cpu", get_kvcache=lambda: None, need_sort=False)
    for allocator in (special, foreign, build(1), build(64)):
        with pytest.raises(UsageError, match=f"{type(allocator).__name__}, which sglang_neo does not extend"):
            adopt(allocator)


# -- random use of the paged allocator ------------------------------------------------------------------------


def pages_of(lengths: torch.Tensor, page_size: int) -> torch.Tensor:
    return (lengths + page_size - 1) // page_size


class Requests:
    """Requests that grow on a paged allocator as SGLang's do, with a record of who owns which slot."""

    def __init__(self, page_size: int, size: int):
        self.page_size = page_size
        self.allocator = build(page_size, size)
        self.owned: dict[int, list[int]] = {}
        self.started = 0
        self.free_before = size  # tokens free before the current step

    def start(self, length: int) -> None:
        self.owned[self.started] = []
        self.extend([self.started], [length])
        self.started += 1

    def extend(self, names: list[int], lengths: list[int]) -> None:
        before = torch.tensor([len(self.owned[name]) for name in names])
        after = before + torch.tensor(lengths)
        last = torch.tensor([self.owned[name][-1] if self.owned[name] else -1 for name in names])
        slots = self.allocator.alloc_extend(before, before, after, after, last, sum(lengths))
        new_pages = int((pages_of(after, self.page_size) - pages_of(before, self.page_size)).sum())
        assert (slots is None) == (new_pages * self.page_size > self.free_before), "pages refused, or overdrawn"
        self.add(names, [] if slots is None else slots.split(lengths))

    def decode(self, names: list[int]) -> None:
        after = torch.tensor([len(self.owned[name]) + 1 for name in names])
        last = torch.tensor([self.owned[name][-1] for name in names])
        slots = self.allocator.alloc_decode(after, after, last)
        self.add(names, [] if slots is None else slots.split(1))

    def finish(self, name: int) -> None:
        slots = self.owned.pop(name)
        if slots:
            self.allocator.free(torch.tensor(slots))

    def add(self, names: list[int], parts: Any) -> None:
        for name, part in zip(names, parts, strict=False):
            self.owned[name] += part.tolist()

    def step(self, rng: random.Random) -> None:
        self.free_before = self.allocator.available_size()
        growing = [name for name, slots in self.owned.items() if slots]
        action = rng.choice(["start", "start", "extend", "decode", "decode", "finish"])
        if action == "start":
            self.start(rng.randrange(1, 3 * self.page_size))
        elif action == "finish" and self.owned:
            self.finish(rng.choice(list(self.owned)))
        elif action == "decode" and growing:
            self.decode(rng.sample(growing, rng.randrange(1, len(growing) + 1)))
        elif action == "extend" and growing:
            names = rng.sample(growing, rng.randrange(1, len(growing) + 1))
            self.extend(names, [rng.randrange(1, 2 * self.page_size) for _ in names])

    def check(self) -> None:
        self.allocator.token_manager.audit()
        slots = [slot for owned in self.owned.values() for slot in owned]
        assert len(set(slots)) == len(slots), "a slot has two owners"
        free = {int(page) for page in self.allocator.free_pages}
        assert not free & {slot // self.page_size for slot in slots}, "a page is both owned and free"
        pages = sum(len({slot // self.page_size for slot in owned}) for owned in self.owned.values())
        assert len(free) + pages == self.allocator.size // self.page_size, "a page is lost"
        for owned in self.owned.values():  # token i of a request lies at place i % page_size of its page
            assert all(slot % self.page_size == i % self.page_size for i, slot in enumerate(owned))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(page_size=st.sampled_from([2, 4, 16, 64]), pages=st.integers(1, 24), seed=st.integers(0, 2**32))
def test_random_requests_never_share_a_slot(page_size: int, pages: int, seed: int) -> None:
    requests, rng = Requests(page_size, page_size * pages), random.Random(seed)
    for _ in range(40):
        requests.step(rng)
        requests.check()
    for name in list(requests.owned):
        requests.finish(name)
    requests.check()
    assert requests.allocator.available_size() == page_size * pages
