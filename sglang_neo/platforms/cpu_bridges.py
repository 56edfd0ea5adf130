"""What SGLang 0.5.17 does only on a GPU and the CPU reference device needs: replaced by plain PyTorch, in one place.

Each bridge names the SGLang attribute it replaces and why. ``install`` runs once per worker process through the
platform hook ``init_backend`` (sglang/srt/model_executor/model_runner.py, module level) and fails loudly if an
attribute is not where it was.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

_installed = False


class _Launcher:
    """Stands where a Triton kernel stood: ``kernel[grid](*args)`` calls ``function(*args)``."""

    def __init__(self, function: Callable[..., None]):
        self.function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.function


def _alloc_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    """Same contract as ``alloc_extend_kernel`` (sglang/kernels/ops/memory/allocator.py)."""
    from sglang.srt.mem_cache.allocator import alloc_extend_naive

    # The kernel may be launched before the caller finds out that the pages do not suffice; it then writes slots that
    # the caller throws away. The PyTorch form would fail on the short slice instead.
    pages = (seq_lens + page_size - 1) // page_size - (prefix_lens + page_size - 1) // page_size
    if int(pages.sum()) > len(free_pages):
        return
    alloc_extend_naive(prefix_lens, seq_lens, last_loc, free_pages, out_indices, page_size, "cpu")


def _alloc_decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    """Same contract as ``alloc_decode_kernel``: one new slot per row, on a new page where the last one is full."""
    new_page = (seq_lens - 1) % page_size == 0
    needed = int(new_page.sum())
    if needed > len(free_pages):
        return
    out_indices.copy_(last_loc + 1)
    out_indices[new_page] = free_pages[:needed] * page_size


def _allocate_token_bitmask(vocab_size: int, batch_size: int) -> torch.Tensor:
    """Unpinned: pinning needs a CUDA driver."""
    import xgrammar

    return xgrammar.allocate_token_bitmask(batch_size, vocab_size)


def _apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """SGLang refuses CPU tensors here; xgrammar has the operator."""
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)


# (module, attribute path, replacement)
_BRIDGES: tuple[tuple[str, str, Any], ...] = (
    ("sglang.srt.mem_cache.allocator.paged", "alloc_extend_kernel", _Launcher(_alloc_extend)),
    ("sglang.srt.mem_cache.allocator.paged", "alloc_decode_kernel", _Launcher(_alloc_decode)),
    ("sglang.srt.constrained.xgrammar_backend", "_allocate_token_bitmask", _allocate_token_bitmask),
    (
        "sglang.srt.constrained.xgrammar_backend",
        "XGrammarGrammarBackend.apply_vocab_mask",
        staticmethod(_apply_vocab_mask),
    ),
    (
        "sglang.srt.constrained.xgrammar_backend",
        "XGrammarGrammar.apply_vocab_mask",
        lambda self, logits, vocab_mask: _apply_vocab_mask(logits, vocab_mask),
    ),
)


def install() -> None:
    """Replace the attributes of ``_BRIDGES``. Raises RuntimeError if one does not exist."""
    global _installed
    if _installed:
        return
    for module_name, path, replacement in _BRIDGES:
        owner: Any = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent, None)
        if not hasattr(owner, name):
            raise RuntimeError(f"sglang_neo's CPU device: {module_name}.{path} does not exist in this SGLang")
        setattr(owner, name, replacement)
    _installed = True
