"""Who is where in deferred mode: rows that pass through the slots of deferred steps, in closed forms of a step count.

A deferred step's batch has S slot rows. A host row *enters* one with its newest token, hands q, k, v to the CPU at
layer 0 and is parked there. In the next deferred step it *resumes* at layer 0 with the CPU's answer, goes on to layer
1, and is parked there; so it *leaves* with logits L steps after it entered (L layers) and enters again in the step
after that. At each layer the row that arrives takes the place of the one that resumes: there is one place to park per
layer and slot.

The rows that entered in one step stay together, a *cohort*; L + 1 of them rotate. With ``time`` the number of deferred
steps so far, that is of the next one:

    enters                        time           mod (L + 1)
    arrives at layer l            time - l       mod (L + 1)
    resumes at layer l            time - l - 1   mod (L + 1)
    leaves, after the last layer  time - L       mod (L + 1)

Steps that are not deferred do not count, and change nothing here or on the device. Only the cohort that enters next is
between two tokens; the others are in mid-token. A row that is discarded there leaves its seat empty until its cohort
enters again, when seats are given anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Row = TypeVar("Row")


@dataclass(frozen=True)
class Seat(Generic[Row]):
    """A row on its way through the layers with one token."""

    row: Row
    position: int  # of the token in its sequence
    ticket: int  # names this row's way with this token, from 1


class Cohorts(Generic[Row]):
    """The seats of all cohorts: a list per cohort, by slot; None where a row was discarded.

    Args:
        layers: of the model, at least 1.
        slots: rows that a cohort can have, at least 1.
    """

    def __init__(self, layers: int, slots: int):
        if layers < 1 or slots < 1:
            raise ValueError(f"deferred mode needs layers and slots, got {layers} and {slots}")
        self.layers, self.slots = layers, slots
        self.time = 0
        self._tickets = 0
        self._seats: list[list[Seat[Row] | None]] = [[] for _ in range(layers + 1)]

    # -- which cohort, in the next deferred step ----------------------------------------------------------------

    @property
    def entering(self) -> int:
        return self.time % (self.layers + 1)

    def arriving(self, layer: int) -> int:
        return (self.time - layer) % (self.layers + 1)

    def resuming(self, layer: int) -> int:
        return (self.time - layer - 1) % (self.layers + 1)

    @property
    def leaving(self) -> int:
        return (self.time - self.layers) % (self.layers + 1)

    # -- who ----------------------------------------------------------------------------------------------------

    def seats(self, cohort: int) -> Sequence[Seat[Row] | None]:
        """By slot; slots beyond its end are empty."""
        return self._seats[cohort]

    def boundary(self) -> list[Row]:
        """The rows that are between two tokens: of the cohort that enters next."""
        return [seat.row for seat in self._seats[self.entering] if seat is not None]

    def mid_token(self) -> Iterator[Row]:
        """The rows whose newest token has gone through a part of the layers."""
        for cohort, seats in enumerate(self._seats):
            if cohort != self.entering:
                yield from (seat.row for seat in seats if seat is not None)

    def __len__(self) -> int:
        return sum(seat is not None for seats in self._seats for seat in seats)

    def discard(self, unwanted: Callable[[Row], bool]) -> set[int]:
        """Empties the seats of such rows, wherever they are; returns the cohorts that had one."""
        changed = set()
        for cohort, seats in enumerate(self._seats):
            for slot, seat in enumerate(seats):
                if seat is not None and unwanted(seat.row):
                    seats[slot] = None
                    changed.add(cohort)
        return changed

    def clear(self) -> None:
        """Discards everybody."""
        for seats in self._seats:
            seats.clear()

    def expected(self) -> list[tuple[list[Seat[Row] | None], list[Seat[Row] | None]]]:
        """By layer, who should arrive and who should resume in the next step, by slot; to be held against a record."""
        return [
            (list(self._seats[self.arriving(layer)]), list(self._seats[self.resuming(layer)]))
            for layer in range(self.layers)
        ]

    # -- a step -------------------------------------------------------------------------------------------------

    def enter(self, rows: Sequence[tuple[Row, int]]) -> None:
        """Seats the rows that enter in the next step, with the position of each one's token; the first in slot 0.

        They replace the entering cohort: rows of ``boundary`` that are not among them are out. Raises ValueError if
        there are more rows than slots.
        """
        if len(rows) > self.slots:
            raise ValueError(f"{len(rows)} rows cannot enter {self.slots} slots")
        seats: list[Seat[Row] | None] = []
        for row, position in rows:
            self._tickets += 1
            seats.append(Seat(row, position, self._tickets))
        self._seats[self.entering] = seats

    def advance(self) -> None:
        """A deferred step has been launched."""
        self.time += 1
