"""The exchange of exchange.py as triton kernels, for CUDA. Imported only there."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Elements of a row that one program moves.
_BLOCK = 1024


@triton.jit
def _pack(
    q, k, v, control, outbox, header, q_row, k_row, v_row,
    Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.load(control + 1 + i).to(tl.int64)
    if (i == 0) & (part == 0):
        tl.store(header, tl.load(control))
    if row >= 0:
        c = part * BLOCK + tl.arange(0, BLOCK)
        is_q = c < Q
        is_k = (c >= Q) & (c < Q + K)
        is_v = (c >= Q + K) & (c < Q + K + V)
        from_q = tl.load(q + row * q_row + c, mask=is_q, other=0.0)
        from_k = tl.load(k + row * k_row + c - Q, mask=is_k, other=0.0)
        from_v = tl.load(v + row * v_row + c - Q - K, mask=is_v, other=0.0)
        x = tl.where(is_q, from_q, tl.where(is_k, from_k, from_v))
        tl.store(outbox + i.to(tl.int64) * (Q + K + V) + c, x, mask=c < Q + K + V)


@triton.jit
def _unpack(inbox, control, out, out_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    row = tl.load(control + 1 + i).to(tl.int64)
    if row >= 0:
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        # volatile: the CPU rewrites this memory between two launches.
        x = tl.load(inbox + i.to(tl.int64) * WIDTH + c, mask=c < WIDTH, volatile=True)
        tl.store(out + row * out_row + c, x, mask=c < WIDTH)


class TritonExchange:
    """See ``sglang_neo.hybrid.exchange.Exchange``; the boxes are pinned host memory."""

    def pack(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        control: torch.Tensor,
        outbox: torch.Tensor,
        header: torch.Tensor,
        capacity: int,
    ) -> None:
        q, k, v = _rows_of(q), _rows_of(k), _rows_of(v)
        width = outbox.shape[1]
        grid = (capacity, -(-width // _BLOCK))
        _pack[grid](
            q, k, v, control, outbox, header, q.stride(0), k.stride(0), v.stride(0),
            Q=q.shape[1], K=k.shape[1], V=v.shape[1], BLOCK=_BLOCK,
        )  # fmt: skip

    def unpack(self, inbox: torch.Tensor, control: torch.Tensor, out: torch.Tensor, capacity: int) -> None:
        rows = out.view(out.shape[0], -1)
        width = inbox.shape[1]
        grid = (capacity, -(-width // _BLOCK))
        _unpack[grid](inbox, control, rows, rows.stride(0), WIDTH=width, BLOCK=_BLOCK)


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    """``[batch, width]`` with adjacent elements in each row; a view wherever the model's tensor allows one."""
    flat = x.reshape(x.shape[0], -1)
    return flat if flat.stride(1) == 1 else flat.contiguous()
