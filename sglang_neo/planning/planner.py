"""The plan of one step: mode, rows, prefill, migrations.

``plan`` is a pure function of what is there (``State``), what is allowed (``Limits``), what was measured (``Tables``)
and what was learnt (``Memory``); ``after_step`` is the pure function that learns. Whoever runs the steps keeps the
memory.

It goes for tokens per second: of the modes within the bounds, the one whose step is predicted to bring the rows forward
most per second. docs/planner.md derives when that is which; ``inequalities.py`` gives the reasons in closed form.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Literal, NamedTuple

from sglang_neo.planning import guard as guards
from sglang_neo.planning import placement
from sglang_neo.planning.correction import Learner, Measured, Proportional
from sglang_neo.planning.costs import MODES, Corrections, Costs, Mode, Rows, StepCost
from sglang_neo.planning.guard import Guard, GuardRules
from sglang_neo.planning.inequalities import lane_beside_prefill_pays
from sglang_neo.planning.metering import Meter
from sglang_neo.planning.tables import Tables

Place = Literal["device", "host"]

#: Rows that leave the device in one step at most, or return to it.
MOVED_AT_ONCE = 64

#: Of ``Limits.max_slowdown``, what host-bound prefills are planned to take. The rest is for what is not known before:
#: a request that meets one at its start, times that are corrected later, the hand-offs in its other steps.
PLANNED_SLOWDOWN = 0.7

#: A host-bound prefill takes at most the share of so many steps at once, so that a short answer does not meet a long
#: prompt whole; and so many tokens at least, for fewer would not keep a GPU busy.
STEPS_AT_ONCE, LEAST_AT_ONCE = Meter.STEPS_AT_ONCE, Meter.LEAST_AT_ONCE

#: By so much a mode that runs may miss the bound of ordinary host rows before it is left for another: predictions are
#: not better than that, and to go back and forth costs tokens that are under way.
BOUND_ERROR = 0.05

#: Host rows in reserve, as a part of those that lanes take in turns. In deferred mode a row without a seat would wait
#: for long, so the seats are all there are, and as many of them the reserve. A host-bound prefill waits until the
#: reserve is gone, or until it costs no more than ``PREFILL_WASTE`` beyond what its tokens cost in a full one.
RESERVE, PREFILL_WASTE = 0.25, 0.05

_LEARNER = Proportional()


@dataclass(frozen=True)
class Limits:
    """What the server allows; fixed while it runs."""

    threads: int  # of the CPU, for attention
    modes: tuple[Mode, ...] = MODES  # gpu_only among them; alone, host memory is not used at all
    max_tpot: float | None = None  # seconds per token of a device row
    max_host_tpot: float | None = 0.25  # seconds per token of an ordinary host row; best-effort ones have no bound
    max_lane_rows: int = 256  # host rows in the lanes of one step
    max_slots: int = 64  # slot rows of a deferred step, all of which it always holds
    lane_beside_prefill: bool = True  # whether host rows can decode in a lane of their own beside a prefill
    max_lag: int = 8  # hand-offs that the CPU may be behind at a launch
    prefill_tokens: int = 8192  # new tokens of one prefill step
    device_page: int = 1  # tokens
    host_page: int = 64  # tokens
    max_slowdown: float = 0.10  # of device rows by prefills of host-bound prompts, as a part of their time without
    margin: float = 0.03  # by which the CPU's part must be faster than none
    tpot_price: float = 0.2  # a mode whose step takes s times as long for device rows must bring s ** this more tokens
    patience: int = 2048  # steps that host rows stand still before they get the next room on the device
    rules: placement.Rules = field(default_factory=placement.Rules)
    guard: GuardRules = field(default_factory=GuardRules)

    def __post_init__(self) -> None:
        if "gpu_only" not in self.modes:
            raise ValueError("gpu_only is what the planner falls back to: modes must contain it")

    def lane_beside(self, place: Place, held_up: int) -> bool:
        """Whether host rows may decode in a lane beside a prefill for which so many device rows wait.

        Not beside one that the meter counts: the lane's pass through the weights would take of the time in which
        prompts come to the host, and a prompt brings a row's whole answer for it, the lane one token of each row.
        """
        metered = place == "host" and held_up > 0 and not math.isinf(self.max_slowdown)
        return "pipelined" in self.modes and self.lane_beside_prefill and not metered

    @cached_property
    def crowded(self) -> placement.Rules:
        """The rules while others wait: the room would not stay free anyway, and a copy is cheaper than the prefill that
        it stands for."""
        return replace(self.rules, return_steps=self.rules.growth_steps, returns_per_step=MOVED_AT_ONCE)


@dataclass(frozen=True)
class Prompt:
    """A waiting request, or one of which a part has been prefilled."""

    tokens: int  # still to prefill, without what the device's prefix cache has
    past: int = 0  # before them: cached or prefilled
    room: int = 0  # tokens that it is to have in the pool it goes to, output as far as reserved included
    best_effort: bool = False
    place: Place | None = None  # where its first part went
    host_hit: int = 0  # of ``tokens``, a prefix that host memory holds
    output: int | None = None  # tokens that it asks for; None: what ``room`` leaves for them


@dataclass(frozen=True)
class State:
    """What is there before a step. Rows are their KV tokens; sizes are tokens."""

    device_rows: tuple[int, ...]  # oldest first
    host_rows: tuple[int, ...]  # those first that have waited longest for a token
    waiting: tuple[Prompt, ...]  # in order of admission; some hundred are enough
    device_free: int  # free, or evictable
    host_free: int
    device_total: int = 1 << 60  # tokens of the device's pool
    device_left: tuple[int, ...] = ()  # tokens that each device row may still get at most; empty: not known
    device_reserved: int = 0  # of what is free, for the output to come of rows that are there
    host_reserved: int = 0
    best_effort_host_rows: int = 0
    host_shared: int = 0  # prefix common to all host rows
    cpu_lag: int = 0  # hand-offs that the CPU is behind
    copying: bool = False  # whether copies between the pools are under way


@dataclass(frozen=True)
class StepPlan:
    """One step. Rows that move do not decode in it."""

    mode: Mode
    decode_mode: Mode  # of decode steps now; differs from ``mode`` in a prefill step or one to compare with
    cost: StepCost  # predicted
    tokens: float  # that it brings its rows forward, those of rows in flight counted by layers
    device_rows: int  # that decode
    lane_a: int = 0  # host rows beside the device rows: in lane A, or in the one batch of a sync step
    lane_b: int = 0  # host rows in lane B; both lanes take the first of ``State.host_rows``
    slots: int = 0  # of a deferred step, that rows may enter
    prefill: tuple[int, ...] = ()  # new tokens of the first waiting prompts
    prefill_to: Place | None = None
    overtaken: int = 0  # waiting prompts before those
    held_up: int = 0  # device rows that wait meanwhile
    load_back: bool = False  # whether the first prompt's host hit is copied to the device instead of computed again
    to_host: tuple[int, ...] = ()  # indices into ``State.device_rows``
    to_device: tuple[int, ...] = ()  # indices into ``State.host_rows``
    probe: bool = False  # gpu_only only to compare
    rate: float = 0.0  # tokens per second of the best decode step, which waits behind a prefill
    standing: int = 0  # host rows that are there and do not take part
    regret: float = 0.0  # steps' worth of tokens lost since ``decode_mode`` is no longer the fastest

    @property
    def host_rows(self) -> int:
        """That take part."""
        return self.lane_a + self.lane_b + self.slots


@dataclass(frozen=True)
class Memory:
    """What the planner carries from step to step."""

    mode: Mode = "gpu_only"  # of decode steps
    regret: float = 0.0
    steps_since_departure: int = 1 << 30
    stalled: int = 0  # steps in a row in which there were host rows and none took part
    host_prefill_debt: float = 0.0  # seconds that host-bound prefills have taken before their time
    corrections: Corrections = field(default_factory=Corrections)
    guard: Guard = field(default_factory=Guard)


class Choice(NamedTuple):
    """A mode with its rows, and what to expect of it."""

    mode: Mode
    cost: StepCost
    tokens: float
    lane_a: int = 0
    lane_b: int = 0
    slots: int = 0
    resident: int = 0  # host rows that it needs to go on like this
    host_tpot: float = 0.0  # seconds
    host_tokens: float = 0.0  # of ``tokens``, those of host rows
    cohorts: int = 1  # steps that a host row's token takes
    slower: float = 1.0  # times that its step takes for device rows, raised to ``Limits.tpot_price``

    @property
    def rate(self) -> float:
        seconds = self.cost.seconds
        return self.tokens / seconds if seconds > 0 else 0.0

    @property
    def worth(self) -> float:
        """What modes are chosen by: tokens per second, less for slower device rows."""
        return self.rate / self.slower


_worth = operator.attrgetter("worth")


def plan(state: State, limits: Limits, tables: Tables, memory: Memory, admit: bool = True) -> StepPlan:
    """The plan of the next step. ``admit``: False if no waiting request can be prefilled now."""
    host = len(limits.modes) > 1
    leaving = _leaving(state, limits) if host else ()
    device = Rows(
        len(state.device_rows) - len(leaving), sum(state.device_rows) - sum(state.device_rows[i] for i in leaving)
    )
    costs = Costs(tables, limits.threads, memory.corrections, state.host_shared, state.copying)
    alone = Choice("gpu_only", costs.gpu_only(device), device.count)
    could, now = [alone], [alone]
    if host and (state.host_rows or state.waiting) and not memory.guard.closed:
        could, now = _choices(state, limits, costs, device, alone, memory.mode)
    best = max(now, key=_worth)
    current, regret = _held(best, now, memory)
    if len(now) > 1 and alone in (best, current) and _captive(state, limits):
        now = now[1:]
        current, regret = _held(max(now, key=_worth), now, memory)
    goal = max(could, key=_worth)
    pays = (
        goal.mode != "gpu_only" and goal.worth > alone.worth * (1 + limits.margin) and memory.stalled < limits.patience
    )

    prompts, place = (
        _admitted(state, limits, costs, memory, goal if pays else alone, bool(leaving)) if admit else ((), None)
    )
    overtaken = 0
    in_chunks = admit and not leaving and state.waiting and state.waiting[0].place == "host"
    if in_chunks and (others := _overtaking(state, limits, blocked=bool(state.host_rows) and not pays)):
        prompts, place, overtaken = others, "device", 1
    if prompts:
        assert place is not None
        if current.mode == memory.mode:
            regret = memory.regret  # nothing is lost in a prefill, whatever mode decode steps have
        open_to_cpu = not memory.guard.closed and state.cpu_lag <= limits.max_lag
        step = _prefill(state, limits, costs, current, regret, open_to_cpu, prompts, place)
        return replace(step, overtaken=overtaken) if overtaken else step
    returning: tuple[int, ...] = ()
    # If others wait, the room goes to somebody at once: to the host rows, who came first, unless they do well there.
    settled = memory.steps_since_departure >= limits.rules.cooldown_steps
    if state.host_rows and not leaving and (not pays if state.waiting else settled):
        returning = _returning(state, limits)
    # A comparison, or a CPU that has fallen behind: this step goes without it, and what it has in hand waits.
    chosen = alone if memory.guard.probing or state.cpu_lag > limits.max_lag else current
    staying = len(state.host_rows) - len(returning)
    lane_b = min(chosen.lane_b, staying)
    lane_a = min(chosen.lane_a, staying - lane_b)
    return StepPlan(
        mode=chosen.mode,
        decode_mode=current.mode,
        cost=chosen.cost,
        tokens=chosen.tokens,
        device_rows=int(device.count),
        lane_a=lane_a,
        lane_b=lane_b,
        slots=chosen.slots,
        to_host=leaving,
        to_device=returning,
        probe=memory.guard.probing,
        standing=0 if chosen.slots else staying - lane_a - lane_b,
        regret=regret,
    )


def _captive(state: State, limits: Limits) -> bool:
    """Whether a host row is too long ever to come back to the device: it goes on in host memory or not at all."""
    return bool(state.host_rows) and max(state.host_rows) + limits.rules.return_steps > state.device_total


def compare(state: State, limits: Limits, tables: Tables, corrections: Corrections | None = None) -> list[Choice]:
    """The modes that could run the next decode step, gpu_only first, with their rows and what to expect of them."""
    costs = Costs(tables, limits.threads, corrections or Corrections(), state.host_shared, state.copying)
    device = Rows(len(state.device_rows), sum(state.device_rows))
    alone = Choice("gpu_only", costs.gpu_only(device), device.count)
    if len(limits.modes) == 1 or not state.host_rows:
        return [alone]
    return _choices(state, limits, costs, device, alone, "gpu_only")[1]


# -- mode --------------------------------------------------------------------------------------------------------------


def _choices(
    state: State, limits: Limits, costs: Costs, device: Rows, alone: Choice, running: Mode
) -> tuple[list[Choice], list[Choice]]:
    """What could run with waiting requests in host memory too, and what can run now."""
    resident = len(state.host_rows)
    first = state.waiting[0].tokens + state.waiting[0].past if state.waiting else 0
    mean = sum(state.host_rows) / resident if resident else first
    fitting = resident + int(max(state.host_free - state.host_reserved, 0) // max(mean, limits.host_page))
    reachable = min(resident + len(state.waiting), fitting)
    menu = _Menu(limits, costs, device, mean, alone.cost.seconds)

    ordinary = resident > state.best_effort_host_rows
    tpot = limits.max_tpot and max(limits.max_tpot, alone.cost.seconds)
    now = menu.modes(resident, resident)
    if tpot:
        now = [choice for choice in now if choice.cost.seconds <= tpot]
    if ordinary and limits.max_host_tpot and now:
        # If none keeps the bound, the nearest: these rows are there, and standing still would be worse.
        bound = max(limits.max_host_tpot, min([choice.host_tpot for choice in now]))
        now = [choice for choice in now if choice.host_tpot <= bound * (1 + (choice.mode == running) * BOUND_ERROR)]
    more = min(reachable, max(limits.max_lane_rows, menu.slots * menu.cohorts))  # beyond, nothing changes
    could, coming = now, 0.0
    if more > resident:
        # The meter may let fewer come than have ended by then: a row in lanes lives for two passes per token, one in
        # deferred mode for a step per layer.
        coming = _coming_per_pass(state, limits, costs, alone)
        could = menu.modes(min(more, resident + int(coming * 2)), min(more, resident + int(coming * menu.cohorts)))
        if tpot:
            could = [choice for choice in could if choice.cost.seconds <= tpot]
    if limits.max_host_tpot and (ordinary or (state.waiting and not state.waiting[0].best_effort)):
        could = [choice for choice in could if choice.host_tpot <= limits.max_host_tpot]
    if more > resident and could:
        goal = max(could, key=_worth)
        now = [choice for choice in now if choice.mode == goal.mode or not _spends(choice, goal, alone, coming)]
    return [alone, *could], [alone, *now]


def _spends(choice: Choice, goal: Choice, alone: Choice, coming: float) -> bool:
    """Whether a mode uses up host rows that another one makes more of.

    If the meter lets tokens of host rows come more slowly than a mode gives them, it is not time that is scarce but
    they: what counts then is not the tokens per second that a mode has more than gpu_only, but how many of these it has
    per token of a host row. Lanes have few, for they take as many tokens from device rows as a second pass costs; in
    deferred mode nearly all are gained. So rows are kept for it, even if lanes would be faster for the moment.

    Args:
        coming: tokens of host rows that the meter lets come per pass of the device rows.
    """
    if goal.worth <= alone.worth or choice.host_tokens * alone.cost.seconds <= coming * choice.cost.seconds:
        return False

    def gained(of: Choice) -> float:
        return (of.rate - alone.rate) * of.cost.seconds / of.host_tokens

    return gained(choice) < gained(goal)


def _coming_per_pass(state: State, limits: Limits, costs: Costs, alone: Choice) -> float:
    """Prompts that the meter lets go to the host while one like the first gets all its tokens, at a pass each: so many
    tokens of host rows come per pass."""
    if not state.device_rows or math.isinf(limits.max_slowdown):
        return 1e9
    # One of which a part is in host memory takes no less than it would whole.
    first = state.waiting[0]
    tokens, past = (first.tokens, first.past) if first.place is None else (first.tokens + first.past, 0)
    output = first.room - first.tokens - first.past if first.output is None else first.output
    lives = max(output, 1) * alone.cost.seconds
    takes = costs.prefill(tokens, past).prefill
    return PLANNED_SLOWDOWN * limits.max_slowdown * lives / takes if takes > 0 else 1e9


class _Menu:
    """The modes that need the CPU, with host rows of ``mean`` tokens each beside these device rows.

    Args:
        alone: seconds of a step of the device rows only.
    """

    def __init__(self, limits: Limits, costs: Costs, device: Rows, mean: float, alone: float):
        self._limits, self._costs, self._device, self._mean, self._alone = limits, costs, device, mean, alone
        modes = limits.modes
        #: Host rows per lane, and slots, that keep the CPU busy.
        self.lanes = costs.lanes(device, mean, limits.max_lane_rows) if "pipelined" in modes else (0, 0)
        self.slots = costs.slots(alone, mean, limits.max_slots) if "deferred" in modes else 0
        self.cohorts = costs.tables.layers + 1
        #: What steps cost depends on the rows that take part, of which there are often enough whoever else comes.
        self._known: dict[tuple[Mode, float], StepCost] = {}

    def modes(self, in_lanes: int, in_slots: int) -> list[Choice]:
        """Those that are possible with so many host rows in lanes (or in a sync step), or so many in slots."""
        found: list[Choice] = []
        if in_lanes > 0 and "sync" in self._limits.modes:
            found.append(self._sync(in_lanes))
        if in_lanes > 0 and self.lanes != (0, 0):
            found.append(self._pipelined(in_lanes))
        if in_slots > 0 and self.slots:
            found.append(self._deferred(in_slots))
        return found

    def _slower(self, cost: StepCost) -> float:
        if not self._device.count or self._alone <= 0:
            return 1.0
        return float((cost.seconds / self._alone) ** self._limits.tpot_price)

    def _sync(self, rows: int) -> Choice:
        count = min(rows, self._limits.max_lane_rows)
        if (cost := self._known.get(("sync", count))) is None:
            cost = self._known["sync", count] = self._costs.sync(self._device, Rows(count, count * self._mean))
        tpot = cost.seconds * max(1, rows / count)
        slower = self._slower(cost)
        return Choice("sync", cost, self._device.count + count, count, 0, 0, count, tpot, count, 1, slower)

    def _pipelined(self, rows: int) -> Choice:
        full, mean = sum(self.lanes), self._mean
        count = min(rows, full)
        lane_a, lane_b = count - count // 2, count // 2
        if (cost := self._known.get(("pipelined", count))) is None:
            cost = self._costs.pipelined(self._device, Rows(lane_a, lane_a * mean), Rows(lane_b, lane_b * mean))
            self._known["pipelined", count] = cost
        tpot = cost.seconds * max(1, rows / count)
        slower = self._slower(cost)
        return Choice("pipelined", cost, self._device.count + count, lane_a, lane_b, 0, full, tpot, count, 1, slower)

    def _deferred(self, rows: int) -> Choice:
        cohorts = self.cohorts
        count = min(self.slots, -(-rows // cohorts))
        entering = min(count, rows / cohorts)  # tokens per step: cohorts may have empty places
        if (cost := self._known.get(("deferred", entering))) is None:
            cohort = Rows(entering, entering * self._mean)
            cost = self._known["deferred", entering] = self._costs.deferred(
                self._device, self._limits.max_slots, cohort
            )
        tpot = cost.seconds * max(cohorts, rows / count)
        tokens, seats = self._device.count + entering, self.slots * cohorts
        return Choice("deferred", cost, tokens, 0, 0, count, seats, tpot, entering, cohorts, self._slower(cost))


def _held(best: Choice, now: Sequence[Choice], memory: Memory) -> tuple[Choice, float]:
    """The mode of before until what it has lost against the best pays for a change, and that loss, in steps.

    Whoever changes as soon as the loss reaches the price of changing loses at most twice what perfect foresight would.
    A better mode that is cheap to change to need not wait for the best one.
    """
    before = next((choice for choice in now if choice.mode == memory.mode), None)
    if before is None or before is best or before.worth <= 0:
        return best, 0.0
    regret = memory.regret + best.worth / before.worth - 1
    better = [c for c in now if c.worth > before.worth and regret >= _price(before, c)]
    return (max(better, key=_worth), 0.0) if better else (before, regret)


def _price(before: Choice, after: Choice) -> float:
    """Of a change of mode, in steps: about one, and what is lost of tokens that are under way.

    Rows of deferred mode are between two layers, half a token done on average. gpu_only leaves them there; lanes take
    rows only whole.
    """
    if before.mode == "deferred" and after.mode != "gpu_only":
        return 1 + before.host_tokens * before.cohorts / 2 / before.tokens
    return 1


# -- rows that move ----------------------------------------------------------------------------------------------------


def _pages(tokens: float, page: int) -> int:
    return int(-(-tokens // page) * page)


def _leaving(state: State, limits: Limits) -> tuple[int, ...]:
    """Device rows that go to the host so that the others can grow: the newest."""
    rows = len(state.device_rows)
    if state.device_free >= rows * limits.device_page:
        return ()
    steps = limits.rules.growth_steps
    growth = [_pages(steps, limits.device_page)] * rows
    if state.device_left:
        growth = [_pages(min(steps, left), limits.device_page) for left in state.device_left]
    needed = sum(growth) - state.device_free
    newest: list[placement.Row] = []
    freed = 0
    for i in range(rows - 1, max(0, rows - 1 - MOVED_AT_ONCE), -1):  # the oldest stays
        tokens = state.device_rows[i]
        pages = _pages(tokens, limits.device_page), _pages(tokens + 1, limits.host_page)
        newest.append(placement.Row(i, *pages, growth=growth[i]))
        freed += newest[-1].device_tokens + growth[i]
        if freed >= needed:
            break
    return tuple(placement.to_host(newest[::-1], needed, state.host_free, partly=True))


def _returning(state: State, limits: Limits) -> tuple[int, ...]:
    """Host rows that come back, those first that have waited longest."""
    rules = limits.crowded if state.waiting else limits.rules
    if state.device_free < placement.return_growth(limits.device_page, rules) * (len(state.device_rows) + 1):
        return ()  # nobody fits
    rows: list[placement.Row] = []
    free = state.device_free
    for i, tokens in enumerate(islice(state.host_rows, rules.returns_per_step)):
        rows.append(placement.Row(i, _pages(tokens, limits.device_page), _pages(tokens, limits.host_page)))
        free -= rows[-1].device_tokens
        if free < 0:  # nobody from here on fits
            break
    back = placement.to_device(rows, len(state.device_rows), state.device_free, limits.device_page, rules)
    return tuple(back)


# -- prefill -----------------------------------------------------------------------------------------------------------


def _admitted(
    state: State, limits: Limits, costs: Costs, memory: Memory, goal: Choice, leaving: bool
) -> tuple[tuple[Prompt, ...], Place | None]:
    """The first waiting prompts that this step prefills, and where their KV goes.

    In order of arrival: a prompt goes to the device if it has room there, to the host if that pays and more host rows
    are wanted, and otherwise waits, and with it those behind it.
    """
    if not state.waiting or leaving:
        return (), None
    resident = len(state.host_rows)
    # Host rows that do not pay get the next room: they came before whoever waits.
    blocked = resident > 0 and goal.mode == "gpu_only"
    # Some in reserve: rows end, and until others have been prefilled the lanes should not run empty.
    seats = goal.resident if goal.cohorts > 1 else math.ceil(goal.resident * (1 + RESERVE))
    wanted = placement.to_admit(resident, seats)
    device_free = state.device_free - state.device_reserved
    host_free = state.host_free - state.host_reserved
    due = memory.host_prefill_debt <= 0 or not state.device_rows
    most = limits.prefill_tokens
    prompts: list[Prompt] = []
    place: Place | None = None
    tokens = 0
    for prompt in state.waiting:
        if tokens >= most:
            break
        footprint = _pages(max(prompt.room, prompt.tokens + prompt.past), limits.host_page)
        if prompt.place == "host" and not due:
            break
        if prompt.place is not None:
            where = prompt.place
        elif not blocked and prompt.room <= device_free:
            where = "device"
        elif (
            (wanted > 0 or prompt.room >= state.device_total)  # it can run in host memory only
            and footprint <= host_free
            and due
        ):
            where = "host"
        else:
            break
        if place is not None and where != place:
            break
        if place is None and where == "host":
            most = _host_prefill_tokens(state, limits, costs)
        place = where
        if where == "device":
            device_free -= prompt.room
        else:
            host_free -= footprint
            wanted -= 1
        prompts.append(prompt)
        tokens += prompt.tokens
    if place == "host" and prompts[0].place is None and len(prompts) < len(state.waiting) and state.device_rows:
        # Host rows end one by one. To replace each at once would cost a small prefill each, most of it overhead.
        few = resident > seats / (1 + RESERVE)
        whole = costs.prefill(most, 0).seconds / most
        if few and costs.prefill(tokens, 0).seconds > (1 + PREFILL_WASTE) * whole * tokens:
            return (), None
    return tuple(prompts), place


def _overtaking(state: State, limits: Limits, blocked: bool) -> tuple[Prompt, ...]:
    """Prompts for the device behind one that goes to the host in chunks, of which the next may have to wait: they do
    not wait with it, unless they need chunks themselves."""
    free, tokens = state.device_free - state.device_reserved, 0
    prompts: list[Prompt] = []
    for prompt in state.waiting[1:]:
        if prompt.place is None and (blocked or prompt.room > free or tokens + prompt.tokens > limits.prefill_tokens):
            break
        free -= prompt.room
        tokens += prompt.tokens
        prompts.append(prompt)
    return tuple(prompts)


def _host_prefill_tokens(state: State, limits: Limits, costs: Costs) -> int:
    """New tokens of one host-bound prefill at most: as many as take the share of ``STEPS_AT_ONCE`` steps."""
    most = limits.prefill_tokens
    if not state.device_rows:
        return most
    step = costs.gpu_only(Rows(len(state.device_rows), sum(state.device_rows))).seconds
    seconds = PLANNED_SLOWDOWN * limits.max_slowdown * STEPS_AT_ONCE * step
    while most > LEAST_AT_ONCE and costs.prefill(most, 0).seconds > seconds:
        most = max(most // 2, LEAST_AT_ONCE)
    return most


def _prefill(
    state: State,
    limits: Limits,
    costs: Costs,
    current: Choice,
    regret: float,
    open_to_cpu: bool,
    prompts: Sequence[Prompt],
    place: Place,
) -> StepPlan:
    """A step that prefills; host rows decode in lane B beside it if that pays."""
    first = prompts[0]
    load_back = place == "device" and load_back_pays(costs, first.tokens, first.past, first.host_hit)
    hit = first.host_hit if load_back else 0
    most = _host_prefill_tokens(state, limits, costs) if place == "host" else limits.prefill_tokens
    chunks = _chunks((prompt.tokens - (hit if prompt is first else 0) for prompt in prompts), most)
    past = sum(prompt.past for prompt in prompts[: len(chunks)]) + hit
    cost = costs.prefill(sum(chunks), past)
    if limits.max_tpot and state.device_rows:
        # The step cannot be shorter than a short prefill; one page of tokens always goes on.
        while cost.seconds > limits.max_tpot and sum(chunks) > limits.host_page:
            chunks = _chunks(chunks, max(sum(chunks) // 2, limits.host_page))
            cost = costs.prefill(sum(chunks), past)
    lane_b, rate = 0, max(current.rate, _full_rate(state, costs))
    lanes = limits.lane_beside(place, len(state.device_rows))
    # In deferred mode host rows are between two layers and take no part in lanes.
    if state.host_rows and lanes and open_to_cpu and current.mode != "deferred":
        chunks, lane_b, cost = _beside_prefill(state, limits, costs, rate, chunks, past, cost)
    return StepPlan(
        mode="pipelined" if lane_b else "gpu_only",
        decode_mode=current.mode,
        cost=cost,
        tokens=lane_b,
        device_rows=0,
        lane_b=lane_b,
        prefill=chunks,
        prefill_to=place,
        held_up=len(state.device_rows),
        load_back=load_back,
        rate=rate,
        standing=len(state.host_rows) - lane_b,
        regret=regret,
    )


def load_back_pays(costs: Costs, tokens: float, past: float, hit: float) -> bool:
    """Whether the part ``hit`` of ``tokens`` that a prompt has before it, which host memory holds, had better be copied
    to the device than computed again."""
    whole, rest = costs.prefill(tokens, past), costs.prefill(tokens - hit, past + hit)
    return hit > 0 and costs.load_back(hit) < whole.seconds - rest.seconds


def draining_pays(rate: float, device_rows: float, under_way: int, layers: int, seconds: float) -> bool:
    """Whether a change from deferred mode had better let the rows that are under way come to their token.

    Draining takes a deferred step per layer, in which the device rows get a token each and all that is under way gets
    done; a change at once has the new mode's tokens in that time, and throws away what is done already. What is done
    and what is to be done of a token are one together.

    Args:
        rate: tokens per second of the new mode.
        under_way: host rows between two layers.
        seconds: of a deferred step.
    """
    return device_rows * layers + under_way > rate * layers * seconds


def _full_rate(state: State, costs: Costs) -> float:
    """Tokens per second of device rows once those that wait and have room on the device decode there too."""
    count, tokens, free = len(state.device_rows), sum(state.device_rows), state.device_free - state.device_reserved
    for prompt in state.waiting:
        if prompt.place != "host":
            free -= prompt.room
            if free < 0:
                break
            count += 1
            tokens += prompt.tokens + prompt.past
    return count / costs.gpu_only(Rows(count, tokens)).seconds


def _beside_prefill(
    state: State, limits: Limits, costs: Costs, rate: float, chunks: tuple[int, ...], past: int, cost: StepCost
) -> tuple[tuple[int, ...], int, StepCost]:
    """Host rows that decode in lane B beside a prefill, if that pays, and the prefill of that step.

    A long prefill is cut so that the CPU, which attends to each row once per step, has something to do all the time.

    Args:
        rate: tokens per second of the best decode step.
        cost: of the prefill alone.
    """
    host = Rows(len(state.host_rows), sum(state.host_rows))
    most = min(host.count, limits.max_lane_rows)
    whole = sum(chunks)
    busy = costs.tables.layers * costs.cpu_layer(Rows(most, most * host.mean))
    cut = max(int(whole * busy / cost.prefill), limits.host_page)
    for tokens in (cut, whole) if cut < whole else (whole,):
        # A part of the prefill may cost more than its share of the whole: that is the lane's fault too.
        rows, both = rows_beside_prefill(costs, limits, rate, host, tokens, past, cost.seconds * tokens / whole)
        if rows:
            return _chunks(chunks, tokens), rows, both
    return chunks, 0, cost


def rows_beside_prefill(
    costs: Costs, limits: Limits, rate: float, host: Rows, tokens: float, past: float, alone: float | None = None
) -> tuple[int, StepCost]:
    """How many of these host rows decode in lane B beside a prefill, 0 if that does not pay, and what the step costs.

    Args:
        rate: tokens per second of the best decode step.
        tokens, past: as for ``Costs.prefill``.
        alone: seconds that the prefill is worth without a lane; default: what it takes.
    """
    cost = costs.prefill(tokens, past)
    most = int(min(host.count, limits.max_lane_rows))
    rows = costs.rows_within(cost.prefill / costs.tables.layers, host.mean, most)
    both = costs.prefill(tokens, past, Rows(rows, rows * host.mean))
    added = both.seconds - (cost.seconds if alone is None else alone)
    return (rows, both) if rows and lane_beside_prefill_pays(rate, rows, added).holds else (0, cost)


def _chunks(tokens: Iterable[int], most: int) -> tuple[int, ...]:
    """Of each prompt's tokens what fits in ``most`` in all, in order."""
    chunks = []
    for count in tokens:
        if most <= 0:
            break
        chunks.append(min(count, most))
        most -= chunks[-1]
    return tuple(chunks)


# -- learning ----------------------------------------------------------------------------------------------------------


def after_step(
    memory: Memory, step: StepPlan, measured: Measured, limits: Limits, learner: Learner = _LEARNER
) -> tuple[Memory, tuple[str, ...]]:
    """The memory after a step, and one line for each change of mind.

    Args:
        step: that was run, as planned before it.
        measured: what it took.
    """
    lines = []
    prefill = bool(step.prefill)
    guard, line = guards.after_step(
        memory.guard, step.cost, step.tokens, measured, limits.guard, prefill=prefill, probe=step.probe
    )
    if line:
        lines.append(line)
    corrections = memory.corrections
    if not guards.is_late(step.cost, measured, limits.guard):  # what is late is no measure of the tables
        corrections = learner(corrections, step.cost, measured)
    if step.decode_mode != memory.mode:
        lines.append(f"mode {step.decode_mode} instead of {memory.mode}")
    return (
        Memory(
            mode=step.decode_mode,
            regret=step.regret,
            steps_since_departure=0 if step.to_host else memory.steps_since_departure + 1,
            stalled=memory.stalled + 1 if step.standing and not step.host_rows else 0,
            host_prefill_debt=_debt(memory.host_prefill_debt, step, measured.seconds, limits),
            corrections=corrections,
            guard=guard,
        ),
        tuple(lines),
    )


def _debt(debt: float, step: StepPlan, seconds: float, limits: Limits) -> float:
    """Of host-bound prefills, after a step that took so long. What they take from device rows is paid back by the time
    that these rows have without them, theirs in plain SGLang too: their own steps, and prefills to the device. Unused
    time is not saved up: a request that comes then has no part in it."""
    if step.prefill_to == "host":
        return debt + seconds if step.held_up else 0.0
    if not (step.held_up or step.device_rows):
        return 0.0  # nobody was held up, and whoever comes next was not there
    return max(0.0, debt - PLANNED_SLOWDOWN * limits.max_slowdown * seconds)
