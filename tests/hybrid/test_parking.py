"""A deferred layer's exchange: both implementations do the same. The triton kernels run in triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from sglang_neo.hybrid.exchange import NO_ROW
from sglang_neo.hybrid.parking import RECORDED_STEPS, Parked, Parking, TorchParking, parking_for

#: Rows of the batch, slots, query heads, KV heads, head_dim, hidden size; widths below and above what a program moves.
SHAPES = [(6, 2, 4, 2, 16, 64), (9, 3, 28, 4, 80, 2240)]


def check_parking(parking: Parking, batch: int, slots: int, q_heads: int, kv_heads: int, dim: int, hidden: int) -> None:
    generator = torch.Generator().manual_seed(batch)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    heads = q_heads, kv_heads, kv_heads
    packed = numbers(batch, sum(heads) * dim)
    q, k, v = packed.split([n * dim for n in heads], dim=1)  # as models do: rows of one wider tensor
    rows, number = list(range(batch - slots - 1, batch - 1)), 41
    entering = list(range(100, 100 + slots))
    control = torch.tensor([number, *rows, *entering], dtype=torch.int32)
    for first, recorded in ((True, True), (False, True), (False, False)):
        parked = Parked(
            outbox=numbers(slots, packed.shape[1]),
            inbox=numbers(slots, q_heads * dim),
            header=torch.zeros(16, dtype=torch.int32),
            outgoing=numbers(slots, packed.shape[1]),
            incoming=numbers(slots, q_heads * dim),
            residuals=numbers(slots, hidden),
            positions=torch.arange(50, 50 + slots),
            tickets=torch.arange(7, 7 + slots, dtype=torch.int32),
            record=torch.zeros(RECORDED_STEPS, 2, slots, 2, dtype=torch.int32) if recorded else None,
        )
        tickets = torch.arange(30, 30 + slots, dtype=torch.int32)
        out, positions = numbers(batch, q_heads, dim), torch.arange(batch)
        expected = out.clone()
        expected[rows] = parked.inbox.view(slots, q_heads, dim)
        residual, parked_before = numbers(batch, hidden), parked.residuals.clone()
        swapped = residual.clone()
        swapped[rows] = parked_before
        arrived, outbox_before = residual[rows], parked.outbox.clone()
        parking.fetch(parked)
        parking.hand_over(q, k, v, out, residual, positions, tickets, control, parked, first)
        assert torch.equal(out, expected) and torch.equal(residual, swapped)
        assert torch.equal(parked.residuals, arrived)
        assert torch.equal(parked.outbox, outbox_before) and not parked.header.any(), "the CPU may still read it"
        parking.send(parked, control)
        assert torch.equal(parked.outbox, packed[rows])
        assert parked.header.tolist() == [number] + [0] * 15
        arriving = entering if first else list(range(30, 30 + slots))
        assert parked.tickets.tolist() == arriving and tickets.tolist() == list(range(7, 7 + slots))
        assert parked.positions.tolist() == rows
        others = [i for i in range(batch) if i not in rows]
        assert positions[rows].tolist() == list(range(50, 50 + slots)) and positions[others].tolist() == others
        if parked.record is not None:
            record = parked.record[number % RECORDED_STEPS].tolist()
            assert record[0] == [[t, r] for t, r in zip(arriving, rows, strict=True)]
            assert record[1] == [[7 + i, 50 + i] for i in range(slots)]
            assert int(parked.record.count_nonzero()) == 4 * slots

        nowhere = torch.full_like(control, NO_ROW)
        changed = (out, residual, positions, tickets, parked.outgoing, parked.residuals, parked.positions)
        kept = [x.clone() for x in changed]
        parking.hand_over(q, k, v, out, residual, positions, tickets, nowhere, parked, False)
        assert all(map(torch.equal, changed, kept)), "while a graph is captured"


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_torch(shape: tuple[int, int, int, int, int, int]) -> None:
    check_parking(TorchParking(), *shape)
    assert isinstance(parking_for("cpu"), TorchParking)


def test_triton_kernels() -> None:
    """In a process of its own: triton decides at import whether it interprets."""
    script = """
        from sglang_neo.hybrid.triton_parking import TritonParking
        from tests.hybrid.test_parking import SHAPES, check_parking
        for shape in SHAPES:
            check_parking(TritonParking(), *shape)
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, env=environment, timeout=300)
