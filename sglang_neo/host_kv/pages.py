"""Who owns which page of the host pool, and when a page that was given back may be handed out again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

_FREE, _USED, _WAITING = 0, 1, 2
_STATE_NAMES = ("free", "in use", "waiting")


class HostPages:
    """Allocator of pages 0 .. count - 1. A page is free, in use, or waiting.

    Worker threads may still write to a page that its owner has given up: a step that names it has been launched and is
    not over. Such a page is freed *under an epoch*, the number of the last launched step, and waits until
    ``release_up_to`` says that this step or a later one is over. Not thread-safe: the scheduler's thread alone uses it.

    Args:
        count: pages of the pool (each is one page of every layer and head).
        debug: keep who owns each page; costs a dictionary entry per page in use.
    """

    def __init__(self, count: int, *, debug: bool = False) -> None:
        if count < 0:
            raise ValueError(f"a pool cannot have {count} pages")
        self.count = count
        self.released_epoch = 0
        self._state = bytearray(count)
        # The end of the list is handed out first. In order (highest first), so that runs of consecutive pages go to
        # one owner: they are copied in one piece.
        self._free = list(range(count - 1, -1, -1))
        self._in_order = True
        self._waiting: dict[int, list[int]] = {}
        self._waiting_count = 0
        self._owners: dict[int, object] | None = {} if debug else None

    @property
    def free_count(self) -> int:
        """Pages that ``alloc`` can hand out now."""
        return len(self._free)

    @property
    def waiting_count(self) -> int:
        """Pages given back whose epoch is not over."""
        return self._waiting_count

    @property
    def used_count(self) -> int:
        """Pages in use: free + waiting + used = count."""
        return self.count - len(self._free) - self._waiting_count

    def alloc(self, count: int, owner: object = None) -> list[int] | None:
        """``count`` pages, consecutive ones where there are, or None (and nothing changes) if so many are not free.

        Raises ValueError for a negative count.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        free = self._free
        if count > len(free):
            return None
        if count > 1 and not self._in_order:
            free.sort(reverse=True)
            self._in_order = True
        split = len(free) - count
        pages = free[split:]
        del free[split:]
        pages.reverse()
        state = self._state
        for page in pages:
            state[page] = _USED
        if self._owners is not None:
            self._owners.update(dict.fromkeys(pages, owner))
        return pages

    def free(self, pages: Sequence[int], epoch: int = 0) -> None:
        """Gives pages back; they can be handed out again once ``epoch`` is over (at once if it is already).

        Raises ValueError, and changes nothing, if a page is not in use or outside the pool, or named twice.
        """
        state, count = self._state, self.count
        waits = epoch > self.released_epoch
        after = _WAITING if waits else _FREE
        for done, page in enumerate(pages):
            if not 0 <= page < count or state[page] != _USED:
                for undo in pages[:done]:
                    state[undo] = _USED
                why = _STATE_NAMES[state[page]] if 0 <= page < count else f"not one of the {count}"
                if page in pages[:done]:
                    why = "named twice"
                raise ValueError(f"host page {page} cannot be freed: it is {why}")
            state[page] = after
        if self._owners is not None:
            for page in pages:
                del self._owners[page]
        if waits:
            self._waiting.setdefault(epoch, []).extend(pages)
            self._waiting_count += len(pages)
        elif pages:
            self._put_back(pages)

    def release_up_to(self, epoch: int) -> int:
        """Every step up to ``epoch`` is over: pages freed under one of them become free. Returns how many did.

        An epoch before one already released changes nothing.
        """
        if epoch <= self.released_epoch:
            return 0
        self.released_epoch = epoch
        released = 0
        for over in sorted(e for e in self._waiting if e <= epoch):
            pages = self._waiting.pop(over)
            for page in pages:
                self._state[page] = _FREE
            self._put_back(pages)
            released += len(pages)
        self._waiting_count -= released
        return released

    def owner_of(self, page: int) -> object:
        """Who allocated a page that is in use. Raises KeyError if nobody did, RuntimeError unless ``debug`` is on."""
        if self._owners is None:
            raise RuntimeError("owners are known only with debug=True")
        return self._owners[page]

    def audit(self, owned: Mapping[object, Iterable[int]]) -> None:
        """Compares with what owners say they have; for tests, idle checks and debugging.

        Args:
            owned: owner -> its pages; together they must be exactly the pages in use. With ``debug``, the owners must
                be those that allocated (pages allocated without an owner may belong to anyone).

        Raises:
            AssertionError: naming the page that is owned twice, owned but free or waiting, owned by another than
                allocated it, lost (in use, and nobody has it), listed twice, or outside the pool.
        """
        place: dict[int, str] = {}
        listed = [("free", self._free), *((f"waiting for epoch {e}", p) for e, p in self._waiting.items())]
        for kind, pages in listed:
            for page in pages:
                assert 0 <= page < self.count, f"host page {page} is {kind}, but the pool has {self.count} pages"
                assert page not in place, f"host page {page} is listed twice: {place[page]}, and {kind}"
                place[page] = kind
        for owner, owners_pages in owned.items():
            for page in owners_pages:
                assert 0 <= page < self.count, f"{owner} owns host page {page}, but the pool has {self.count} pages"
                assert page not in place, f"host page {page} is owned by {owner}, but is {place[page]}"
                if self._owners is not None:
                    known = self._owners.get(page)
                    assert known is None or known == owner, f"host page {page} of {known} is owned by {owner}"
                place[page] = f"owned by {owner}"
        for page in range(self.count):
            if page not in place:
                owner = "" if self._owners is None else f" by {self._owners.get(page)}"
                raise AssertionError(f"host page {page} is lost: allocated{owner}, and owned by nobody")
        waiting = sum(map(len, self._waiting.values()))
        assert waiting == self._waiting_count, f"{waiting} pages wait, {self._waiting_count} are counted"

    def _put_back(self, pages: Sequence[int]) -> None:
        self._free.extend(reversed(pages))
        self._in_order = False
