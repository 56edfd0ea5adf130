"""The PyTorch that stands for GPU-only pieces of SGLang on the CPU device."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_neo.platforms import cpu_bridges

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the bridges are for machines without a GPU")

PAGE_SIZES = st.sampled_from([1, 2, 3, 16, 64])
UNSET = -7


class Pages:
    """The contract of both kernels, written the plain way: token by token, a new page when the last one is full."""

    def __init__(self, free_pages: list[int], page_size: int):
        self.free, self.page_size = list(free_pages), page_size

    def grow(self, start: int, end: int, last_slot: int) -> list[int]:
        """Slots of the tokens ``start .. end - 1`` of a request whose token before them lies in ``last_slot``."""
        slots = []
        for position in range(start, end):
            last_slot = self.free.pop(0) * self.page_size if position % self.page_size == 0 else last_slot + 1
            slots.append(last_slot)
        return slots


def rows_strategy(max_new: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """(tokens that a request has, tokens that it gets) for each request of a batch."""
    return st.lists(st.tuples(st.integers(0, 200), st.integers(1, max_new)), min_size=1, max_size=6)


def last_slots(rows: list[tuple[int, int]], page_size: int) -> list[int]:
    """Where each request's last token lies: on a page of its own (1000, 1001, ...); -1 if it has none."""
    return [(1000 + i) * page_size + (have - 1) % page_size if have else -1 for i, (have, _) in enumerate(rows)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rows=rows_strategy(300), page_size=PAGE_SIZES, seed=st.integers(0, 1000))
def test_alloc_extend(rows: list[tuple[int, int]], page_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    free_pages = 1 + torch.randperm(4000, generator=generator)[:2000]  # enough, in no order
    last = last_slots(rows, page_size)
    pages = Pages(free_pages.tolist(), page_size)
    expected = [slot for (have, new), at in zip(rows, last, strict=True) for slot in pages.grow(have, have + new, at)]
    out = torch.full((sum(new for _, new in rows),), UNSET)
    cpu_bridges._alloc_extend(
        torch.tensor([have for have, _ in rows]),
        torch.tensor([have + new for have, new in rows]),
        torch.tensor(last),
        free_pages,
        out,
        8,
        page_size,
    )
    assert out.tolist() == expected


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rows=rows_strategy(1), page_size=PAGE_SIZES, seed=st.integers(0, 1000))
def test_alloc_decode(rows: list[tuple[int, int]], page_size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    free_pages = 1 + torch.randperm(50, generator=generator)
    last = last_slots(rows, page_size)
    pages = Pages(free_pages.tolist(), page_size)
    expected = [slot for (have, _), at in zip(rows, last, strict=True) for slot in pages.grow(have, have + 1, at)]
    out = torch.full((len(rows),), UNSET)
    seq_lens = torch.tensor([have + 1 for have, _ in rows])
    cpu_bridges._alloc_decode(seq_lens, torch.tensor(last), free_pages, out, 8, page_size)
    assert out.tolist() == expected


def test_too_few_pages_write_nothing_and_do_not_fail() -> None:
    """The caller finds out afterwards and drops the result, so the call has to come back."""
    out = torch.full((200,), UNSET)
    lens = torch.tensor([0]), torch.tensor([200])
    cpu_bridges._alloc_extend(*lens, torch.tensor([-1]), torch.tensor([1, 2, 3]), out, 1, 64)
    assert set(out.tolist()) == {UNSET}
    cpu_bridges._alloc_extend(*lens, torch.tensor([-1]), torch.tensor([1, 2, 3, 4]), out, 1, 64)
    assert out.tolist() == list(range(64, 264))

    out = torch.full((2,), UNSET)
    arguments = torch.tensor([65, 129]), torch.tensor([127, 191])
    cpu_bridges._alloc_decode(*arguments, torch.tensor([9]), out, 2, 64)
    assert out.tolist() == [UNSET, UNSET]


def test_a_launcher_stands_for_a_triton_kernel() -> None:
    calls: list[tuple[Any, ...]] = []
    kernel = cpu_bridges._Launcher(lambda *args: calls.append(args))
    kernel[(4,)](1, 2)
    assert calls == [(1, 2)]


def test_vocabulary_mask() -> None:
    """A bit per token, 32 to a word; what is not allowed becomes minus infinity."""
    mask = cpu_bridges._allocate_token_bitmask(vocab_size=70, batch_size=2)
    assert mask.shape == (2, 3) and not mask.is_pinned()
    mask.zero_()
    mask[0, 0] = 0b101
    mask[1, 2] = 1
    logits = torch.zeros(2, 70)
    cpu_bridges._apply_vocab_mask(logits, mask)
    assert [row.nonzero().flatten().tolist() for row in (logits == 0)] == [[0, 2], [64]]
    assert bool((logits[logits != 0] == -torch.inf).all())


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module that can be bridged without touching SGLang, with ``install`` as in a new process."""
    module: Any = types.ModuleType("bridged_module")
    module.function = lambda: "theirs"
    module.Class = type("Class", (), {"method": lambda self: "theirs"})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(cpu_bridges, "_installed", False)
    return module


def bridge(monkeypatch: pytest.MonkeyPatch, *paths: str) -> None:
    rows = tuple(("bridged_module", path, lambda *args: "ours") for path in paths)
    monkeypatch.setattr(cpu_bridges, "_BRIDGES", rows)


def test_install_replaces_once(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bridge(monkeypatch, "function", "Class.method")
    cpu_bridges.install()
    assert (stand_in.function(), stand_in.Class().method()) == ("ours", "ours")
    stand_in.function = lambda: "changed later"
    cpu_bridges.install()
    assert stand_in.function() == "changed later"


@pytest.mark.parametrize("path", ["nothing", "Class.nothing", "Nothing.method"])
def test_install_fails_loudly_where_sglang_has_changed(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    bridge(monkeypatch, path)
    with pytest.raises(RuntimeError, match=f"bridged_module.{path} does not exist in this SGLang"):
        cpu_bridges.install()
    with pytest.raises(RuntimeError):  # and again: a failed installation is not taken for a finished one
        cpu_bridges.install()


def test_the_real_bridges_are_in_place() -> None:
    from sglang.srt.constrained import xgrammar_backend
    from sglang.srt.mem_cache.allocator import paged

    cpu_bridges.install()
    assert isinstance(paged.alloc_extend_kernel, cpu_bridges._Launcher)
    assert isinstance(paged.alloc_decode_kernel, cpu_bridges._Launcher)
    assert xgrammar_backend._allocate_token_bitmask is cpu_bridges._allocate_token_bitmask
    logits, mask = torch.zeros(1, 32), torch.ones(1, 1, dtype=torch.int32)
    xgrammar_backend.XGrammarGrammarBackend.apply_vocab_mask(logits=logits, vocab_mask=mask)
    assert int((logits == 0).sum()) == 1
