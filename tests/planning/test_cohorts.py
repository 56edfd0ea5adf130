"""The bookkeeping of deferred mode against a device that really parks rows, one place per layer and slot."""

from __future__ import annotations

import random

import pytest

from sglang_neo.planning.cohorts import Cohorts


class Device:
    """What a deferred step does: at each layer the row in a slot and the one parked there change places."""

    def __init__(self, layers: int, slots: int):
        self.parked = [[0] * slots for _ in range(layers)]

    def step(self, entering: list[int]) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Tickets that arrive at and resume from each layer, and those that leave."""
        now, arrived, resumed = list(entering), [], []
        for parked in self.parked:
            arrived.append(list(now))
            now, parked[:] = list(parked), now
            resumed.append(list(now))
        return arrived, resumed, now


def tickets(cohorts: Cohorts[str], cohort: int) -> list[int]:
    """By slot, 0 for an empty one."""
    found = [0 if seat is None else seat.ticket for seat in cohorts.seats(cohort)]
    return found + [0] * (cohorts.slots - len(found))


@pytest.mark.parametrize("seed", range(30))
def test_random_joins_and_discards(seed: int) -> None:
    rng = random.Random(seed)
    layers, slots = rng.randrange(1, 7), rng.randrange(1, 5)
    cohorts: Cohorts[str] = Cohorts(layers, slots)
    device = Device(layers, slots)
    positions: dict[str, int] = {}
    entered: dict[str, int] = {}  # at which step with the token that it has in hand
    dead: set[int] = {0}
    names = 0
    for _ in range(200):
        if rng.random() < 0.3:  # a step of another kind, or none: nothing moves
            continue
        unwanted = {row for row in (*cohorts.mid_token(), *cohorts.boundary()) if rng.random() < 0.05}
        for cohort in range(layers + 1):
            dead |= {seat.ticket for seat in cohorts.seats(cohort) if seat is not None and seat.row in unwanted}
        cohorts.discard(unwanted.__contains__)
        assert not unwanted & {*cohorts.mid_token(), *cohorts.boundary()}
        rows = cohorts.boundary()
        while len(rows) < slots and rng.random() < 0.5:
            names += 1
            rows.append(f"r{names}")
            positions[rows[-1]] = rng.randrange(100)
        for row in rows:
            positions[row] += 1
            entered[row] = cohorts.time
        cohorts.enter([(row, positions[row]) for row in rows])
        arrived, resumed, left = device.step(tickets(cohorts, cohorts.entering))
        for layer in range(layers):
            for found, cohort in (
                (arrived[layer], cohorts.arriving(layer)),
                (resumed[layer], cohorts.resuming(layer)),
            ):
                alive = [0 if ticket in dead else ticket for ticket in found]
                assert alive == tickets(cohorts, cohort), (layer, cohorts.time)
        assert [0 if t in dead else t for t in left] == tickets(cohorts, cohorts.leaving)
        for seat in cohorts.seats(cohorts.leaving):
            if seat is not None:
                assert cohorts.time - entered[seat.row] == layers
                assert seat.position == positions[seat.row]
        leaving = [seat.row for seat in cohorts.seats(cohorts.leaving) if seat is not None]
        cohorts.advance()
        assert cohorts.boundary() == leaving, "who leaves is who enters next"
        assert len(cohorts) == len(list(cohorts.mid_token())) + len(leaving)


def test_a_row_has_a_token_every_layers_plus_one_steps() -> None:
    cohorts: Cohorts[str] = Cohorts(layers=3, slots=1)
    left = []
    for step in range(17):
        rows = cohorts.boundary() or ([("a")] if step == 2 else [])
        cohorts.enter([(row, step) for row in rows])
        left += [step for seat in cohorts.seats(cohorts.leaving) if seat is not None]
        cohorts.advance()
    assert left == [5, 9, 13]


def test_limits() -> None:
    cohorts: Cohorts[int] = Cohorts(2, 2)
    with pytest.raises(ValueError, match="3 rows"):
        cohorts.enter([(i, 0) for i in range(3)])
    with pytest.raises(ValueError, match="needs layers"):
        Cohorts(0, 1)
    cohorts.enter([(1, 0), (2, 0)])
    cohorts.advance()
    assert len(cohorts) == 2 and cohorts.discard(lambda row: row == 2) == {0}
    cohorts.clear()
    assert len(cohorts) == 0 and cohorts.time == 1
