"""The exchange and parking of parking.py as triton kernels, for CUDA. Imported only there."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_neo.hybrid.parking import RECORDED_STEPS, Parked
from sglang_neo.hybrid.triton_exchange import _BLOCK, _rows_of


@triton.jit
def _hand_over(
    q, k, v, out, positions, tickets, control, outbox, inbox, header, parked_positions, parked_tickets, record,
    q_row, k_row, v_row, out_row,
    S: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, FIRST: tl.constexpr, RECORD: tl.constexpr,
    KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    part = tl.program_id(1)
    number = tl.load(control)
    row = tl.load(control + 1 + i).to(tl.int64)
    if (i == 0) & (part == 0):
        tl.store(header, number)
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
        # volatile: the CPU rewrites this memory between two launches.
        answer = tl.load(inbox + i.to(tl.int64) * Q + c, mask=is_q, volatile=True)
        tl.store(out + row * out_row + c, answer, mask=is_q)
        if part == 0:
            ticket = tl.load(control + 1 + S + i) if FIRST else tl.load(tickets + i)
            position = tl.load(positions + row)
            parked_ticket = tl.load(parked_tickets + i)
            parked_position = tl.load(parked_positions + i)
            tl.store(parked_tickets + i, ticket)
            tl.store(parked_positions + i, position)
            tl.store(tickets + i, parked_ticket)
            tl.store(positions + row, parked_position)
            if RECORD:
                arrived = record + ((number % KEPT) * 2 * S + i) * 2
                resumed = arrived + 2 * S
                tl.store(arrived, ticket)
                tl.store(arrived + 1, position.to(tl.int32))
                tl.store(resumed, parked_ticket)
                tl.store(resumed + 1, parked_position.to(tl.int32))


@triton.jit
def _swap(x, parked, control, x_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    row = tl.load(control + 1 + i).to(tl.int64)
    if row >= 0:
        c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        arriving = tl.load(x + row * x_row + c, mask=c < WIDTH)
        resuming = tl.load(parked + i.to(tl.int64) * WIDTH + c, mask=c < WIDTH)
        tl.store(parked + i.to(tl.int64) * WIDTH + c, arriving, mask=c < WIDTH)
        tl.store(x + row * x_row + c, resuming, mask=c < WIDTH)


class TritonParking:
    """See ``sglang_neo.hybrid.parking.Parking``; the boxes are pinned host memory."""

    def hand_over(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        positions: torch.Tensor,
        tickets: torch.Tensor,
        control: torch.Tensor,
        parked: Parked,
        first: bool,
    ) -> None:
        q, k, v, rows = _rows_of(q), _rows_of(k), _rows_of(v), out.view(out.shape[0], -1)
        slots, width = parked.outbox.shape
        _hand_over[(slots, -(-width // _BLOCK))](
            q, k, v, rows, positions, tickets, control, parked.outbox, parked.inbox, parked.header,
            parked.positions, parked.tickets, parked.record if parked.record is not None else control,
            q.stride(0), k.stride(0), v.stride(0), rows.stride(0),
            S=slots, Q=q.shape[1], K=k.shape[1], V=v.shape[1], FIRST=first, RECORD=parked.record is not None,
            KEPT=RECORDED_STEPS, BLOCK=_BLOCK,
        )  # fmt: skip

    def swap(self, x: torch.Tensor, parked: torch.Tensor, control: torch.Tensor) -> None:
        slots, width = parked.shape
        _swap[(slots, -(-width // _BLOCK))](x, parked, control, x.stride(0), WIDTH=width, BLOCK=_BLOCK)
