"""Deferred steps in the running scheduler: which part of the running batch the next decode step is.

A host row is an ordinary request of SGLang's running batch, as in mode sync. But it has a token only every so many
steps, so a decode step runs a *part* of that batch (``NeoScheduleBatch.part_of``): the device rows and the host rows
that *leave* the layers in it. These have logits, and SGLang samples, penalises, constrains, streams and ends them as in
any other step. The rows that *enter* are named in the part's ``neo_step``: they need no more than their newest token,
which SGLang relays by request slot, and its position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_neo.batching import NeoScheduleBatch
from sglang_neo.hybrid.deferred import DeferredAttention, DeferredStep
from sglang_neo.hybrid.parking import RECORDED_STEPS
from sglang_neo.planning.cohorts import Cohorts, Seat
from sglang_neo.planning.placement import to_seat
from sglang_neo.ranks import least_of_all_ranks
from sglang_neo.recovery import LaunchedHostRows, Recovery, end_early
from sglang_neo.token_manager import HostRow, NeoTokenManager, host_row


@dataclass(frozen=True, eq=False)
class Rider:
    """A host row on a seat. The request may lose the row, and come back with another, before the seat is looked at."""

    req: Any
    row: HostRow

    @property
    def there(self) -> bool:
        return host_row(self.req) is self.row


Seats = Sequence[Seat[Rider] | None]
#: What the device has in a slot without a row.
_NOBODY: Any = Seat(None, position=0, ticket=0)


@dataclass
class DeferralCounters:
    """Since the start."""

    steps: int = 0
    behind: int = 0  # decode steps that were not deferred because the CPU was behind


class AuditError(RuntimeError):
    """A row was somewhere else on the device than in the plan that the CPU worked by."""


def audit(expected: Sequence[tuple[Seats, Seats]], record: Sequence[Sequence[Sequence[Sequence[int]]]]) -> None:
    """Holds what a deferred step did on the device against what it was meant to do, as the CPU did it.

    Args:
        expected: by layer, who arrives and who resumes, by slot; rows discarded in mid-token are not looked at.
        record: by layer, for those two, by slot, ticket and position as the device had them.

    Raises:
        AuditError: naming every place where they differ.
    """
    wrong = []
    for layer, (meant, done) in enumerate(zip(expected, record, strict=True)):
        for what, seats, found in zip(("arrives", "resumes"), meant, done, strict=True):
            for slot, (ticket, position) in enumerate(found):
                seat = seats[slot] if slot < len(seats) else _NOBODY
                if seat is not None and (ticket, position) != (seat.ticket, seat.position):
                    who = seat.row.req.rid if seat.row is not None else "nobody"
                    wrong.append(
                        f"layer {layer}, slot {slot}: {who} {what} (ticket {seat.ticket}, position {seat.position}), "
                        f"but the device had ticket {ticket}, position {position}"
                    )
    if wrong:
        raise AuditError(f"a deferred step went wrong in {len(wrong)} places\n  " + "\n  ".join(wrong))


class Deferral:
    """Owned by the scheduler. Everything it decides on is the same in all tensor-parallel ranks, or agreed on.

    Args:
        scheduler: SGLang's.
        attention: of its model runner.
        manager: of host memory.
        rank: of a request, see ``sglang_neo.planning.placement``.
    """

    def __init__(
        self, scheduler: Any, attention: DeferredAttention, manager: NeoTokenManager, rank: Callable[[Any], int]
    ):
        self._scheduler, self._attention, self._manager, self._rank = scheduler, attention, manager, rank
        self._cohorts: Cohorts[Rider] = Cohorts(attention.geometry.layers, attention.slots)
        self._changed: set[int] = set()  # cohorts whose seats the device side has not been told of
        self._settled = 0  # the last step that was judged with nobody riding
        self._processed = 0  # the newest step whose result has been processed
        # For audits: who should be where in the steps whose results have not been processed yet.
        self._expected: deque[Any] = deque()
        self.counters = DeferralCounters()

    @property
    def slots(self) -> int:
        return self._attention.slots

    @property
    def seats(self) -> int:
        """Of all cohorts."""
        return self.slots * (self._cohorts.layers + 1)

    def has_room(self, device_rows: int) -> bool:
        """Whether a deferred step with so many device rows is within what SGLang's buffers are made for."""
        return device_rows + self.slots <= int(self._scheduler.tp_worker.model_runner.max_running_requests)

    def riders(self) -> Iterator[Any]:
        """The requests that are on their way through the layers or about to begin again."""
        cohorts = self._cohorts
        for rider in (*cohorts.mid_token(), *cohorts.boundary()):
            if rider.there:
                yield rider.req

    # -- the next decode step -----------------------------------------------------------------------------------

    def finish_aborted(self, batch: Any) -> None:
        """Ends host rows that were aborted, at once: SGLang would do it with their next token."""
        aborted = [req for req in batch.reqs if req.to_finish is not None and host_row(req) is not None]
        end_early(self._scheduler, aborted)

    def next_part(self, batch: NeoScheduleBatch, paused: bool, seats: int | None = None) -> Any:
        """What the next decode step runs of the running batch, which has rows.

        Args:
            paused: no deferred step unless there is nothing else to do.
            seats: that the cohort which enters may have; None: as many as there are slots.
        """
        self._changed |= self._cohorts.discard(lambda rider: not rider.there)
        on_host = [i for i, req in enumerate(batch.reqs) if host_row(req) is not None]
        device = [i for i, req in enumerate(batch.reqs) if host_row(req) is None]
        if not on_host:
            batch.neo_in_parts = False
            batch.prepare_for_decode()
            return batch
        batch.forward_mode = batch.forward_mode.DECODE
        if device and (paused or not self.has_room(len(device)) or self._behind()):
            return batch.part_of(device)
        return self._deferred(batch, on_host, device, self.slots if seats is None else seats)

    def land(self) -> None:
        """Everybody leaves the seats: tokens in mid-layer are thrown away, and begin anew in a step of another kind."""
        riders = [rider for rider in (*self._cohorts.mid_token(), *self._cohorts.boundary()) if rider.there]
        if not riders:
            return
        self._attention.wait_launched()  # the workers may be appending to the rows
        for rider in riders:
            rider.row.tokens, rider.row.mid_token = rider.row.tokens - rider.row.mid_token, False
        self._changed |= self._cohorts.discard(lambda rider: True)

    def _behind(self) -> bool:
        runner = self._scheduler.tp_worker.model_runner
        behind = not least_of_all_ranks(runner, int(not self._attention.behind()))
        self.counters.behind += behind
        return behind

    def _deferred(self, batch: NeoScheduleBatch, on_host: list[int], device: list[int], seats: int) -> NeoScheduleBatch:
        cohorts = self._cohorts
        self._enter([batch.reqs[i] for i in on_host], seats)
        index = {id(batch.reqs[i]): i for i in on_host}
        leaving = {
            index[id(seat.row.req)]: slot
            for slot, seat in enumerate(cohorts.seats(cohorts.leaving))
            if seat is not None and seat.row.there
        }
        for i in leaving:
            row = host_row(batch.reqs[i])
            assert row is not None
            row.mid_token = False
        part = batch.part_of(sorted([*device, *leaving]))
        place = {id(req): i for i, req in enumerate(part.reqs)}
        entering = [seat for seat in cohorts.seats(cohorts.entering) if seat is not None]
        part.neo_step = DeferredStep(
            changed={
                cohort: [seat.row.row if seat is not None else None for seat in cohorts.seats(cohort)]
                for cohort in self._changed
            },
            arriving=[cohorts.arriving(layer) for layer in range(cohorts.layers)],
            entering=[seat.row.req.req_pool_idx for seat in entering],
            positions=[seat.position for seat in entering],
            tickets=[seat.ticket for seat in entering],
            device_rows=[place[id(batch.reqs[i])] for i in device],
            leaving=[(place[id(batch.reqs[i])], slot) for i, slot in leaving.items()],
            tokens=self._scheduler.future_map.output_tokens_buf,
            reqs=[batch.reqs[i] for i in leaving],
            others=self.riders,
        )
        if self._attention.record is not None:
            self._expected.append(expected := cohorts.expected())
            for seat in (seat for arriving, _ in expected for seat in arriving):
                if seat is not None and seat.row.row.tokens - 1 != seat.position:
                    rid, tokens = seat.row.req.rid, seat.row.row.tokens
                    raise AuditError(f"{rid}: the CPU attends to {tokens} tokens for position {seat.position}")
        self._changed.clear()
        cohorts.advance()
        self.counters.steps += 1
        return part

    def _enter(self, reqs: list[Any], seats: int) -> None:
        """Seats the cohort whose turn it is: its own rows, then those that have waited longest; higher ranks first."""
        cohorts, rank = self._cohorts, self._rank
        due = cohorts.boundary()
        seated = {id(rider.req) for rider in (*cohorts.mid_token(), *due)}
        waiting = [Rider(req, row) for req in reqs if id(req) not in seated and (row := host_row(req)) is not None]
        stay, come = to_seat([rank(rider.req) for rider in waiting], [rank(rider.req) for rider in due], seats)
        rows = []
        for rider in (*(due[i] for i in stay), *(waiting[i] for i in come)):
            if not self._manager.can_grow([rider.req]):
                continue  # it gives its seat up, and waits for memory
            self._manager.grow(rider.req)
            rider.row.mid_token = True
            rows.append((rider, rider.row.tokens - 1))
        cohorts.enter(rows)
        self._changed.add(cohorts.entering)

    # -- results -------------------------------------------------------------------------------------------------

    def processed(self, result: Any) -> None:
        """To be told of every result that has been processed. Raises AuditError, see ``audit``."""
        launched: LaunchedHostRows | None = getattr(result, "neo_launched", None)
        if launched is None or launched.mode != "deferred":
            return
        self._processed = launched.launched_epoch
        record = self._attention.record
        if record is not None:
            expected = self._expected.popleft()
            if launched.refused is None:
                audit(expected, record[:, launched.launched_epoch % RECORDED_STEPS].tolist())

    def settle(self, recovery: Recovery) -> None:
        """Between two launches: once nobody rides any more, the last step is judged, on which no token will rest."""
        last = self._attention.last_step
        unsettled = self._settled < last == self._processed and not recovery.pending
        if unsettled and next(self.riders(), None) is None:
            self._settled = last
            recovery.settle(last)

    def clear(self) -> None:
        """After a failure, with the workers ready again: nobody rides."""
        self._cohorts.clear()
        self._changed.clear()
        self._settled = self._processed = 0
