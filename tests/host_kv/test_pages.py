"""The page allocator: no page has two owners, and none is handed out before its epoch is over."""

from __future__ import annotations

import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from sglang_neo.host_kv.pages import HostPages


def counts(pages: HostPages) -> tuple[int, int, int]:
    return pages.free_count, pages.used_count, pages.waiting_count


def test_all_pages_once() -> None:
    pages = HostPages(5)
    assert pages.alloc(2) == [0, 1]
    assert pages.alloc(4) is None
    assert counts(pages) == (3, 2, 0)
    assert pages.alloc(3) == [2, 3, 4]
    assert pages.alloc(1) is None
    assert pages.alloc(0) == []


def test_pages_wait_for_their_epoch() -> None:
    pages = HostPages(4)
    held = pages.alloc(4)
    assert held is not None
    pages.free(held[:1], epoch=7)
    pages.free(held[1:2], epoch=5)
    pages.free(held[2:3])
    assert counts(pages) == (1, 1, 2)
    assert pages.release_up_to(4) == 0
    assert pages.alloc(2) is None
    assert pages.release_up_to(6) == 1
    assert counts(pages) == (2, 1, 1)
    assert pages.release_up_to(9) == 1
    assert counts(pages) == (3, 1, 0)
    pages.free(held[3:], epoch=8)  # already over
    assert counts(pages) == (4, 0, 0)


def test_an_earlier_epoch_takes_nothing_back() -> None:
    pages = HostPages(1)
    pages.free(pages.alloc(1) or [], epoch=3)
    pages.release_up_to(3)
    assert pages.release_up_to(1) == 0
    assert pages.released_epoch == 3


def test_pages_of_one_owner_follow_each_other_again() -> None:
    pages = HostPages(12)
    parts = [pages.alloc(3) for _ in range(4)]
    for part in (parts[2], parts[0], parts[3], parts[1]):
        pages.free(part or [])
    assert pages.alloc(12) == list(range(12))


@pytest.mark.parametrize(("bad", "why"), [([1, 1], "named twice"), ([1, 3], "free"), ([0, 9], "not one of the 4")])
def test_wrong_frees_are_refused_and_change_nothing(bad: list[int], why: str) -> None:
    pages = HostPages(4)
    assert pages.alloc(3) == [0, 1, 2]
    with pytest.raises(ValueError, match=why):
        pages.free(bad)
    assert counts(pages) == (1, 3, 0)
    pages.audit({"a": [0, 1, 2]})


def test_a_waiting_page_cannot_be_freed_again() -> None:
    pages = HostPages(2)
    pages.alloc(1)
    pages.free([0], epoch=2)
    with pytest.raises(ValueError, match="page 0 cannot be freed: it is waiting"):
        pages.free([0])


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError):
        HostPages(-1)
    with pytest.raises(ValueError):
        HostPages(1).alloc(-1)


def used(debug: bool = False) -> HostPages:
    """Pages 0 and 1 are a's, 2 is b's, 3 waits, 4 and 5 are free."""
    pages = HostPages(6, debug=debug)
    pages.alloc(2, "a")
    pages.alloc(1, "b")
    pages.free(pages.alloc(1, "b") or [], epoch=1)
    return pages


@pytest.mark.parametrize("debug", [False, True])
def test_a_sound_pool_passes(debug: bool) -> None:
    used(debug).audit({"a": [0, 1], "b": (2,)})


@pytest.mark.parametrize(
    ("owned", "message"),
    [
        ({"a": [0, 1], "b": [2, 0]}, "page 0 is owned by b, but is owned by a"),
        ({"a": [0, 1, 1], "b": [2]}, "page 1 is owned by a, but is owned by a"),
        ({"a": [0, 1], "b": [2, 4]}, "page 4 is owned by b, but is free"),
        ({"a": [0, 1], "b": [2, 3]}, "page 3 is owned by b, but is waiting for epoch 1"),
        ({"a": [0], "b": [2]}, "page 1 is lost"),
        ({"a": [0, 1], "b": [2, 6]}, "b owns host page 6, but the pool has 6"),
        ({"a": [0, 1], "b": [2, -1]}, "b owns host page -1"),
    ],
)
def test_the_audit_names_the_page(owned: dict[object, list[int]], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        used().audit(owned)


def test_with_debug_owners_are_known() -> None:
    pages = used(debug=True)
    assert pages.owner_of(1) == "a"
    with pytest.raises(KeyError):
        pages.owner_of(3)
    with pytest.raises(AssertionError, match="page 1 of a is owned by b"):
        pages.audit({"a": [0], "b": [2, 1]})
    with pytest.raises(AssertionError, match="page 1 is lost: allocated by a"):
        pages.audit({"a": [0], "b": [2]})
    with pytest.raises(RuntimeError):
        used().owner_of(1)


def test_the_audit_sees_a_damaged_free_list() -> None:
    pages = used()
    pages._free[0] = 4  # 5 has become a second 4
    with pytest.raises(AssertionError, match="page 4 is listed twice"):
        pages.audit({"a": [0, 1], "b": [2]})
    pages._free[0] = 17
    with pytest.raises(AssertionError, match="page 17 is free, but the pool has 6"):
        pages.audit({"a": [0, 1], "b": [2]})


def test_large_pools_are_quick() -> None:
    """50,000 pages in and out of order; the bound is loose, a quadratic allocator misses it by far."""
    begin = time.perf_counter()
    pages = HostPages(50_000)
    held = [pages.alloc(10) or [] for _ in range(5000)]
    for i in range(0, 5000, 2):
        pages.free(held[i], epoch=i)
    pages.release_up_to(5000)
    again = [pages.alloc(5) or [] for _ in range(5000)]
    assert pages.free_count == 0
    assert len({page for part in again for page in part}) == 25_000
    assert time.perf_counter() - begin < 2


class Machine(RuleBasedStateMachine):
    """Random use against a model made of sets."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pages = HostPages(24, debug=True)
        self.owned: dict[object, list[int]] = {}
        self.waiting: dict[int, int] = {}  # page -> epoch
        self.over = 0
        self.number = 0

    @rule(target=held, count=st.integers(0, 10))
    def alloc(self, count: int) -> int:
        self.number += 1
        free = 24 - len(self.waiting) - sum(map(len, self.owned.values()))
        got = self.pages.alloc(count, self.number)
        assert (got is None) == (count > free)
        if got is not None:
            assert len(set(got)) == count
            assert not set(got) & set(self.waiting), "handed out before its epoch was over"
            self.owned[self.number] = got
        return self.number

    @rule(owner=consumes(held), later=st.integers(-3, 5))
    def free(self, owner: int, later: int) -> None:
        pages = self.owned.pop(owner, [])
        epoch = self.over + later
        self.pages.free(pages, epoch)
        if later > 0:
            self.waiting.update(dict.fromkeys(pages, epoch))

    @rule(step=st.integers(-2, 4))
    def release(self, step: int) -> None:
        self.pages.release_up_to(self.over + step)
        self.over = max(self.over, self.over + step)
        self.waiting = {page: epoch for page, epoch in self.waiting.items() if epoch > self.over}

    @invariant()
    def sound(self) -> None:
        in_use = sum(map(len, self.owned.values()))
        assert counts(self.pages) == (24 - in_use - len(self.waiting), in_use, len(self.waiting))
        self.pages.audit(self.owned)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
