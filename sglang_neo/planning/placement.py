"""Which running requests keep their KV on the device and which in host memory.

Newest first out, oldest first back, as NEO does (arXiv 2411.01142, section 4): the requests that have waited least go
where decoding may be slower. A request comes back only to stay: there must be room for everybody on the device to grow,
and nobody must have left it a moment ago.

Before age comes *rank*, the request's priority: the lowest leave first, the highest come back first, and only for a
request of higher rank does one leave in the step in which another comes back. In deferred mode the seats are given by
the same order. Where nobody asks for priorities all ranks are 0.

Requests are given as ``Row``s in the order in which they began to run. All sizes are in tokens; a row's size is what it
occupies, whole pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A running request as the placement sees it."""

    index: int  # the caller's name for it
    device_tokens: int  # that it occupies, or would occupy, on the device
    host_tokens: int  # the same in host memory
    rank: int = 0  # the higher, the more it matters
    growth: int = 0  # device tokens of those needed that are for its own next steps: none if it leaves


@dataclass(frozen=True)
class Rules:
    """What keeps placement steady."""

    #: When the device runs out, make room for so many steps at once rather than for one, of a row as many as it has
    #: left at most.
    growth_steps: int = 16
    #: After a return every device row must have room to grow for so many steps.
    return_steps: int = 64
    #: Steps after a departure in which nobody returns.
    cooldown_steps: int = 32
    #: Rows that return in one step at most: each costs a copy that the step waits for.
    returns_per_step: int = 2
    #: Steps after a failure of the CPU side in which nobody leaves; doubled with each further failure in a row.
    pause_steps: int = 64

    def __post_init__(self) -> None:
        if self.growth_steps < 1 or self.return_steps < self.growth_steps:
            raise ValueError("growth_steps must be at least 1 and return_steps at least growth_steps")


def pause_after(failures: int, rules: Rules) -> int:
    """Steps in which nobody goes to the host after so many failures in a row (at least 1)."""
    return rules.pause_steps << min(failures - 1, 8)


def to_host(rows: Sequence[Row], needed: int, host_free: int, *, partly: bool) -> list[int]:
    """Who leaves the device so that ``needed`` more tokens are free there: of the lowest ranks the newest.

    Rows that host memory has no room for are passed over.

    Args:
        rows: device rows that can be moved, oldest first.
        host_free: tokens in free host pages.
        partly: whether to free what can be freed if it is not enough; otherwise nobody leaves then.

    Returns:
        Their indices, in the order in which they leave.
    """
    leaving: list[int] = []
    for row in sorted(reversed(rows), key=lambda row: row.rank):
        if needed <= 0:
            break
        if row.host_tokens <= host_free:
            leaving.append(row.index)
            needed -= row.device_tokens + row.growth
            host_free -= row.host_tokens
    return leaving if partly or needed <= 0 else []


def to_device(rows: Sequence[Row], device_rows: int, device_free: int, device_page: int, rules: Rules) -> list[int]:
    """Who comes back from host memory: of the highest ranks, the oldest that fit with room for all device rows to grow.

    Args:
        rows: host rows that can be moved, oldest first. A row that does not fit keeps younger ones waiting too.
        device_rows: how many rows are on the device now.
        device_free: tokens that are free or can be evicted there.
        device_page: tokens of a device page: a row grows by whole pages.
    """
    returning: list[int] = []
    growth = return_growth(device_page, rules)
    for row in sorted(rows, key=lambda row: -row.rank)[: rules.returns_per_step]:
        device_rows += 1
        device_free -= row.device_tokens
        if device_free < device_rows * growth:
            break
        returning.append(row.index)
    return returning


def return_growth(device_page: int, rules: Rules) -> int:
    """Tokens of room to grow that every device row must have after a return."""
    return -(-rules.return_steps // device_page) * device_page


def to_exchange(
    host_rows: Sequence[Row],
    device_rows: Sequence[Row],
    device_free: int,
    device_page: int,
    host_free: int,
    rules: Rules,
) -> tuple[int, list[int]] | None:
    """Who comes back although there is no room for it, and who of lower rank makes room; None if nobody does.

    Args:
        host_rows, device_rows: those that can be moved, oldest first.
        device_free: tokens that are free or can be evicted there.
        host_free: tokens in free host pages.
    """
    first = max(host_rows, key=lambda row: row.rank, default=None)  # of several the oldest
    if first is None:
        return None
    lower = [row for row in device_rows if row.rank < first.rank]
    # With the growth of all that are there now, some of whom will be gone.
    room = first.device_tokens + (len(device_rows) + 1) * return_growth(device_page, rules)
    leaving = to_host(lower, room - device_free, host_free, partly=False)
    return (first.index, leaving) if leaving else None


def to_admit(host_rows: int, seats: int) -> int:
    """How many more prompts may go to the host: as many as have a seat there.

    A row that has none would only wait, for as long as a whole row of others takes, where it might have had room on the
    device before.

    Args:
        host_rows: that are there, those in the middle of their prefill too.
        seats: that deferred mode has in all layers, or as many rows as lanes take.
    """
    return max(0, seats - host_rows)


def to_seat(waiting: Sequence[int], seated: Sequence[int], seats: int) -> tuple[list[int], list[int]]:
    """Who enters the slots of a deferred step.

    Args:
        waiting: ranks of the host rows without a seat, of those that have waited longest first.
        seated: of those whose seats are due to be given anew; they go before others of their rank.
        seats: how many there are.

    Returns:
        Indices into ``seated`` and into ``waiting``, each ascending.
    """
    everybody = [(-rank, False, i) for i, rank in enumerate(seated)] + [
        (-rank, True, i) for i, rank in enumerate(waiting)
    ]
    chosen = sorted(everybody)[:seats]
    return sorted(i for _, new, i in chosen if not new), sorted(i for _, new, i in chosen if new)
