"""The exchange and parking of parking.py as triton kernels, for CUDA. Imported only there."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_neo.hybrid.parking import RECORDED_STEPS, Parked
from sglang_neo.hybrid.triton_exchange import _BLOCK, _rows_of


@triton.jit
def _fetch(inbox, incoming, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # volatile: the CPU rewrites this memory between two launches.
    tl.store(incoming + c, tl.load(inbox + c, mask=c < SIZE, volatile=True), mask=c < SIZE)


@triton.jit
def _send(outgoing, outbox, header, control, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    if tl.program_id(0) == 0:
        tl.store(header, tl.load(control))
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(outbox + c, tl.load(outgoing + c, mask=c < SIZE), mask=c < SIZE)


@triton.jit
def _hand_over(
    q, k, v, out, residual, positions, tickets, control, outgoing, incoming, residuals, parked_positions,
    parked_tickets, record, q_row, k_row, v_row, out_row, residual_row,
    S: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, V: tl.constexpr, HIDDEN: tl.constexpr, FIRST: tl.constexpr,
    RECORD: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.load(control + 1 + i).to(tl.int64)
    if row >= 0:
        c = part * BLOCK + tl.arange(0, BLOCK)
        is_q = c < Q
        is_k = (c >= Q) & (c < Q + K)
        is_v = (c >= Q + K) & (c < Q + K + V)
        from_q = tl.load(q + row * q_row + c, mask=is_q, other=0.0)
        from_k = tl.load(k + row * k_row + c - Q, mask=is_k, other=0.0)
        from_v = tl.load(v + row * v_row + c - Q - K, mask=is_v, other=0.0)
        x = tl.where(is_q, from_q, tl.where(is_k, from_k, from_v))
        tl.store(outgoing + i.to(tl.int64) * (Q + K + V) + c, x, mask=c < Q + K + V)
        answer = tl.load(incoming + i.to(tl.int64) * Q + c, mask=is_q)
        tl.store(out + row * out_row + c, answer, mask=is_q)
        arriving = tl.load(residual + row * residual_row + c, mask=c < HIDDEN)
        resuming = tl.load(residuals + i.to(tl.int64) * HIDDEN + c, mask=c < HIDDEN)
        tl.store(residuals + i.to(tl.int64) * HIDDEN + c, arriving, mask=c < HIDDEN)
        tl.store(residual + row * residual_row + c, resuming, mask=c < HIDDEN)
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
                arrived = record + ((tl.load(control) % KEPT) * 2 * S + i) * 2
                resumed = arrived + 2 * S
                tl.store(arrived, ticket)
                tl.store(arrived + 1, position.to(tl.int32))
                tl.store(resumed, parked_ticket)
                tl.store(resumed + 1, parked_position.to(tl.int32))


class TritonParking:
    """See ``sglang_neo.hybrid.parking.Parking``; the boxes are pinned host memory."""

    def fetch(self, parked: Parked) -> None:
        size = parked.inbox.numel()
        _fetch[(-(-size // _BLOCK),)](parked.inbox, parked.incoming, SIZE=size, BLOCK=_BLOCK)

    def hand_over(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        tickets: torch.Tensor,
        control: torch.Tensor,
        parked: Parked,
        first: bool,
    ) -> None:
        q, k, v, rows = _rows_of(q), _rows_of(k), _rows_of(v), out.view(out.shape[0], -1)
        slots, width = parked.outgoing.shape
        hidden = residual.shape[1]
        _hand_over[(slots, -(-max(width, hidden) // _BLOCK))](
            q, k, v, rows, residual, positions, tickets, control, parked.outgoing, parked.incoming, parked.residuals,
            parked.positions, parked.tickets, parked.record if parked.record is not None else control,
            q.stride(0), k.stride(0), v.stride(0), rows.stride(0), residual.stride(0),
            S=slots, Q=q.shape[1], K=k.shape[1], V=v.shape[1], HIDDEN=hidden, FIRST=first,
            RECORD=parked.record is not None, KEPT=RECORDED_STEPS, BLOCK=_BLOCK,
        )  # fmt: skip

    def send(self, parked: Parked, control: torch.Tensor) -> None:
        size = parked.outbox.numel()
        _send[(-(-size // _BLOCK),)](parked.outgoing, parked.outbox, parked.header, control, SIZE=size, BLOCK=_BLOCK)
