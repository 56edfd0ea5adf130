"""Pages of the host pool, made of and turned into token-major keys and values, by plain torch on any device.

The layout is the CPU kernels' (docs/kernels.md). A page holds ``T = page_tokens`` tokens of one KV head of one layer::

    K  [T][D]          then, int8 only, float32 scales [T]
    V  [T/g][D][g]     then, int8 only, float32 scales [T]      g = 4 / bytes of an element

What stands in a page here is what ``cpu_kernels.attention.HostPool.write`` writes, bit for bit, but for the payload of
NaNs where the element type changes. Tokens that a page does not have are zeros here and anything there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Element types of host pages by the kernels' names.
ELEMENT_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}


def element_dtype(name: str) -> torch.dtype:
    """The torch type of the kernels' element type ``name``. Raises ValueError for a name that they do not know."""
    if name not in ELEMENT_DTYPES:
        raise ValueError(f"host KV cannot be {name}; known element types: {', '.join(ELEMENT_DTYPES)}")
    return ELEMENT_DTYPES[name]


def value_group(name: str) -> int:
    """How many tokens' values stand side by side in a page: 1 (float32), 2 (16 bits) or 4 (int8)."""
    return 4 // element_dtype(name).itemsize


def page_bytes(name: str, page_tokens: int, head_dim: int) -> int:
    """Bytes of one page: K and V of ``page_tokens`` tokens of one head of one layer, with their scales."""
    size = element_dtype(name).itemsize
    return 2 * page_tokens * head_dim * size + (2 * page_tokens * 4 if name == "int8" else 0)


def page_count(tokens: int, page_tokens: int) -> int:
    """Pages that ``tokens`` tokens fill, the last one perhaps in part."""
    return -(-tokens // page_tokens)


@dataclass(frozen=True)
class PageParts:
    """The parts of a tensor of pages, as token-major views into it: writing to them writes the pages.

    ``...`` stands for the dimensions before [pages, kv_heads, page_bytes], a layer for instance. T = page_tokens.
    """

    k: torch.Tensor  # [..., pages, T, kv_heads, head_dim]
    v: torch.Tensor  # [..., pages, T / g, g, kv_heads, head_dim]
    k_scale: torch.Tensor | None  # [..., pages, T, kv_heads] float32; int8 only
    v_scale: torch.Tensor | None

    def zero_after(self, tokens: int) -> None:
        """Zeroes the values of the last page's tokens from index ``tokens`` on; for pages without scales."""
        group = self.v.shape[-3]
        whole, part = -(-tokens // group), tokens % group
        self.k[..., -1, tokens:, :, :].zero_()
        self.v[..., -1, whole:, :, :, :].zero_()
        if part:
            self.v[..., -1, tokens // group, part:, :, :].zero_()


def page_parts(pages: torch.Tensor, name: str, page_tokens: int, head_dim: int) -> PageParts:
    """The parts of ``pages``, a uint8 tensor [..., pages, kv_heads, page_bytes] with contiguous last dimension.

    Raises ValueError if the last dimension is not one page.
    """
    if pages.dtype != torch.uint8 or pages.shape[-1] != page_bytes(name, page_tokens, head_dim):
        raise ValueError(
            f"a page of {page_tokens} tokens of {name}, head_dim {head_dim}, is uint8 "
            f"[{page_bytes(name, page_tokens, head_dim)}], got {pages.dtype} [{pages.shape[-1]}]"
        )
    dtype, group = element_dtype(name), value_group(name)
    values = page_tokens * head_dim * dtype.itemsize
    half = pages.shape[-1] // 2
    k = pages[..., :values].view(dtype).unflatten(-1, (page_tokens, head_dim))
    v = pages[..., half : half + values].view(dtype).unflatten(-1, (page_tokens // group, head_dim, group))
    k_scale = v_scale = None
    if name == "int8":
        k_scale = pages[..., values:half].view(torch.float32).transpose(-1, -2)
        v_scale = pages[..., half + values :].view(torch.float32).transpose(-1, -2)
    # k: [..., P, H, T, D]; v: [..., P, H, T/g, D, g]
    return PageParts(k.transpose(-2, -3), v.movedim(-1, -2).movedim(-4, -2), k_scale, v_scale)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` [..., dim] in int8 steps: (float32 whole numbers -127..127 [..., dim], float32 scales [...]).

    scale = largest absolute value / 127, round to nearest even; NaN becomes 0. Operation by operation what the kernels'
    ``quantise`` (cpu_kernels/src/generic/pages.hpp) does.
    """
    x = x.float()
    # A tensor, not a number: torch divides a number by multiplying with a reciprocal, and on CUDA by a number likewise.
    top127 = torch.full((1,), 127.0, device=x.device)
    top = torch.nan_to_num(x.abs(), nan=0.0, posinf=float("inf")).amax(-1)
    inverse = torch.where(top > 0, torch.div(top127, top), 0.0)
    steps = (x * inverse.unsqueeze(-1)).clamp_(-127.0, 127.0).round_()
    return torch.nan_to_num_(steps, nan=0.0), torch.div(top, top127)


def store_tokens(parts: PageParts, k: torch.Tensor, v: torch.Tensor) -> None:
    """Writes k and v, [..., pages, T, kv_heads, head_dim] in any float type, into pages, converting or quantising."""
    if parts.k_scale is not None and parts.v_scale is not None:
        k, k_scale = quantise(k)
        parts.k_scale.copy_(k_scale)
        parts.k.copy_(k)
        del k, k_scale
        v, v_scale = quantise(v)
        parts.v_scale.copy_(v_scale)
        parts.v.copy_(v.view(parts.v.shape))
        return
    parts.k.copy_(k)
    parts.v.copy_(v.reshape(parts.v.shape))


def load_tokens(parts: PageParts, k: torch.Tensor, v: torch.Tensor) -> None:
    """The inverse: fills k and v, contiguous [..., pages, T, kv_heads, head_dim], in their own float type."""
    v = v.view(parts.v.shape)
    if parts.k_scale is None or parts.v_scale is None:
        k.copy_(parts.k)
        v.copy_(parts.v)
        return
    k.copy_(parts.k.float() * parts.k_scale.unsqueeze(-1))
    v_scale = parts.v_scale.unflatten(-2, parts.v.shape[-4:-2])
    v.copy_(parts.v.float() * v_scale.unsqueeze(-1))


def pack_pages(k: torch.Tensor, v: torch.Tensor, dtype: str, page_tokens: int) -> torch.Tensor:
    """Pages with the tokens of k and v.

    Args:
        k, v: [tokens, kv_heads, head_dim], float32, float16 or bfloat16, on any device.
        dtype: of the pages: bfloat16, float16, float32 or int8.
        page_tokens: tokens of a page; a multiple of 4.

    Returns:
        uint8 [pages, kv_heads, page_bytes] on the device of k; after the last token, zeros.

    Raises:
        ValueError: the shapes of k and v differ, or the element type is unknown.
    """
    if k.dim() != 3 or k.shape != v.shape:
        raise ValueError(f"k and v must be [tokens, kv_heads, head_dim], got {list(k.shape)} and {list(v.shape)}")
    tokens, heads, dim = k.shape
    count = page_count(tokens, page_tokens)
    pages = torch.empty(count, heads, page_bytes(dtype, page_tokens, dim), dtype=torch.uint8, device=k.device)
    if not count:
        return pages

    def padded(x: torch.Tensor) -> torch.Tensor:
        whole = x.new_zeros(count * page_tokens, heads, dim)
        whole[:tokens] = x
        return whole.view(count, page_tokens, heads, dim)

    store_tokens(page_parts(pages, dtype, page_tokens, dim), padded(k), padded(v))
    return pages


def unpack_pages(
    pages: torch.Tensor,
    tokens: int,
    dtype: str,
    page_tokens: int,
    head_dim: int,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``tokens`` tokens of pages.

    Args:
        pages: uint8 [pages, kv_heads, page_bytes].
        out_dtype: of the result; default: the pages', float32 for int8.

    Returns:
        k and v, [tokens, kv_heads, head_dim].

    Raises:
        ValueError: the pages hold fewer tokens, or are of another size.
    """
    parts = page_parts(pages, dtype, page_tokens, head_dim)
    if tokens > len(pages) * page_tokens:
        raise ValueError(f"{len(pages)} pages of {page_tokens} tokens do not hold {tokens} tokens")
    if out_dtype is None:
        out_dtype = torch.float32 if dtype == "int8" else element_dtype(dtype)
    k = torch.empty(parts.k.shape, dtype=out_dtype, device=pages.device)
    v = torch.empty_like(k)
    load_tokens(parts, k, v)
    return k.flatten(0, 1)[:tokens], v.flatten(0, 1)[:tokens]
