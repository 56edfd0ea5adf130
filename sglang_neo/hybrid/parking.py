"""What a deferred step does for its slot rows at one layer, on memory that stays where it is: exchange and parking.

The CPU's answers come to the device ahead of the layer (``fetch``). At its attention the row that arrives in a slot
leaves q, k, v, and the row that was parked there gets the answer in its place; with it the two change residuals
(``hand_over``): one short kernel between those of the layer. What was left goes to the CPU beside the layers behind it
(``send``). Which rows of the batch are slots stands in the *control* tensor, int32 ``[1 + 2 slots]`` on the device: the
step's number, where in the batch each slot is (``NO_ROW``: nowhere, while a graph is captured), and the ticket
(``sglang_neo.planning.cohorts``) of the row that enters there, 0 for none. Tickets go the way of the rows, so that
what really happened can be compared with the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

#: Steps whose record (``Parked.record``) is kept: one is written while the one before is read.
RECORDED_STEPS = 4


@dataclass(frozen=True)
class Parked:
    """The boxes and the parking places of one layer, by slot."""

    outbox: torch.Tensor  # [slots, width of q, k, v], pinned
    inbox: torch.Tensor  # [slots, width of q], pinned
    header: torch.Tensor  # int32 [>= 1], pinned
    outgoing: torch.Tensor  # as the outbox, on the device
    incoming: torch.Tensor  # as the inbox, on the device
    residuals: torch.Tensor  # [slots, hidden size]
    positions: torch.Tensor  # int64 [slots]
    tickets: torch.Tensor  # int32 [slots]
    #: int32 [RECORDED_STEPS, 2, slots, 2], pinned: ticket and position of who arrived and of who resumed; or None.
    record: torch.Tensor | None


class Parking(Protocol):
    def fetch(self, parked: Parked) -> None:
        """Copies the inbox to the device."""

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
        """Puts what was fetched into the slot rows of ``out`` and their ``q, k, v`` where ``send`` takes them from, and
        lets residuals, positions and tickets change places with the parked ones.

        Args:
            q, k, v, out: ``[batch, ...]``, any head layout.
            residual: ``[batch, hidden size]``.
            positions: int64 ``[batch]``, read by the layers that follow.
            tickets: int32 ``[slots]``, of the rows in the slots; at the ``first`` layer they are taken from control.
        """

    def send(self, parked: Parked, control: torch.Tensor) -> None:
        """Copies what rows have left to the outbox, and the step's number to the header."""


class TorchParking:
    """Plain torch, for the CPU device."""

    def fetch(self, parked: Parked) -> None:
        parked.incoming.copy_(parked.inbox)

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
        slots = len(parked.outbox)
        rows = control[1 : 1 + slots]
        there = rows >= 0
        at = rows[there].long()
        out.view(out.shape[0], -1).index_copy_(0, at, parked.incoming[there])
        parked.outgoing[there] = torch.cat([x.reshape(x.shape[0], -1).index_select(0, at) for x in (q, k, v)], dim=1)
        if first:
            tickets.copy_(control[1 + slots :])
        arriving = torch.stack([tickets[there], positions[at].int()], dim=1)
        resuming = torch.stack([parked.tickets[there], parked.positions[there].int()], dim=1)
        parked.tickets[there], tickets[there] = arriving[:, 0], resuming[:, 0]
        parked.positions[there], positions[at] = arriving[:, 1].long(), resuming[:, 1].long()
        if parked.record is not None:
            record = parked.record[int(control[0]) % RECORDED_STEPS]
            record[0, there], record[1, there] = arriving, resuming
        arrived = residual.index_select(0, at)
        residual.index_copy_(0, at, parked.residuals[there])
        parked.residuals[there] = arrived

    def send(self, parked: Parked, control: torch.Tensor) -> None:
        parked.outbox.copy_(parked.outgoing)
        parked.header[:1] = control[:1]


def parking_for(device: str) -> Parking:
    """The kind that fits the device ("cpu" or "cuda")."""
    if not device.startswith("cuda"):
        return TorchParking()
    from sglang_neo.hybrid.triton_parking import TritonParking

    return TritonParking()
