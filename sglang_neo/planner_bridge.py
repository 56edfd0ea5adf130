"""The planner in the running scheduler: what it is asked before each step, how its plan is carried out, what it learns.

``sglang_neo.planning`` decides from frozen counts; here they are taken from SGLang's requests, and a plan becomes a
part of the running batch, prompts for the host, and rows that come back. Who may be prefilled to the device stays
SGLang's own decision, and who must leave it stays placement's: where the CPU does not take part, this is plain SGLang.

With tensor parallelism rank 0 plans and learns; the others get each plan from it. All else that is looked at here is
the same in all ranks.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_neo.batching import NeoScheduleBatch, host_rows_to_decode
from sglang_neo.deferral import Deferral
from sglang_neo.hybrid.host_attention import HostAttention
from sglang_neo.hybrid.pipelined import Lanes, PipelinedAttention
from sglang_neo.pipelining import lanes_of
from sglang_neo.placement import Placement, to_come
from sglang_neo.planning.correction import Measured, waited
from sglang_neo.planning.costs import MODES, Costs, Mode, Rows, StepCost
from sglang_neo.planning.placement import Rules
from sglang_neo.planning.planner import (
    Limits,
    Memory,
    Place,
    Prompt,
    State,
    StepPlan,
    after_step,
    draining_pays,
    load_back_pays,
    plan,
    rows_beside_prefill,
)
from sglang_neo.planning.tables import Tables
from sglang_neo.ranks import from_first_rank
from sglang_neo.token_manager import NeoTokenManager, host_row

logger = logging.getLogger(__name__)

#: Waiting prompts that the planner is shown.
SHOWN = 64


@dataclass(frozen=True)
class Launched:
    """A step as it was launched, until its result is there."""

    plan: StepPlan
    device: Rows
    host: Rows
    follows: bool  # whether the server had a step before it in hand: then the gap between the two counts
    number: int


@dataclass
class PlannerCounters:
    """Since the start."""

    changes: int = 0  # of the mode of decode steps
    pauses: int = 0  # in which the CPU gets no work
    discarded: int = 0  # rows that lost a token in mid-layer because the mode changed


def limits_of(scheduler: Any, attention: HostAttention, rules: Rules, deferral: Deferral | None) -> Limits:
    """What this server allows."""
    args, manager = scheduler.server_args, scheduler.token_manager
    left_out = [] if deferral is not None else ["deferred"]
    left_out += [] if isinstance(attention, PipelinedAttention) else ["pipelined"]
    chunk = scheduler.chunked_prefill_size or 0
    return Limits(
        threads=attention.workers.threads,
        modes=tuple(mode for mode in MODES if mode not in left_out),
        max_tpot=args.neo_max_tpot / 1e3 if args.neo_max_tpot else None,
        max_host_tpot=args.neo_max_host_tpot / 1e3,
        max_lane_rows=min(Limits.max_lane_rows, len(attention.inbox)),
        max_slots=deferral.slots if deferral is not None else 0,
        prefill_tokens=min(chunk, scheduler.max_prefill_tokens) if chunk > 0 else scheduler.max_prefill_tokens,
        device_page=manager.device_page_tokens,
        host_page=manager.host_page_tokens,
        rules=rules,
    )


class PlannerBridge:
    """Owned by the scheduler; keeps the planner's memory.

    Args:
        scheduler: SGLang's.
        tables: of its model runner, the same in all ranks.
        limits: see ``limits_of``.
        deferral: None: there is no deferred mode.
    """

    def __init__(self, scheduler: Any, tables: Tables, limits: Limits, placement: Placement, deferral: Deferral | None):
        self._scheduler, self._placement, self._deferral = scheduler, placement, deferral
        self._manager: NeoTokenManager = scheduler.token_manager
        self._runner = scheduler.tp_worker.model_runner
        self._attention: HostAttention = self._runner.neo_host.attention
        self.tables, self.limits = tables, limits
        self._without_slots = replace(limits, modes=tuple(mode for mode in limits.modes if mode != "deferred"))
        self.memory = Memory()
        self.counters = PlannerCounters()
        self._step = 0
        self._planned: StepPlan | None = None
        self._host_reqs: Sequence[Any] = ()  # in the order in which the plan names host rows
        self._counted = (0, 0)  # rows that the plan was made for
        #: Numbers of the steps under way that prefill to the host, and the seconds that device rows wait for them.
        self._held_up: dict[int, float] = {}
        self._idle = True
        self._last_span: Any = None
        self._seen_answers_ns = 0
        self.error = 0.0  # mean of |predicted / measured - 1| over the last steps
        placement.returns = False

    # -- what there is -----------------------------------------------------------------------------------------

    def _state(self, batch: Any) -> State:
        device, host, best_effort = [], [], 0
        for req in batch.reqs:
            if req.finished():
                continue
            row = host_row(req)
            if row is None:
                device.append(req)
            else:
                rank = self._placement.rank(req)
                host.append((-rank, row.turn or 0, req))
                best_effort += rank < 0
        host.sort(key=lambda entry: entry[:2])
        self._host_reqs = [req for _, _, req in host]
        self._counted = len(device), len(host)
        free = self._placement.device_free()
        manager = self._manager
        return State(
            device_rows=tuple([req.seqlen - 1 for req in device]),
            host_rows=tuple([row.tokens for req in self._host_reqs if (row := host_row(req)) is not None]),
            waiting=tuple(self._waiting()),
            device_free=free,
            host_free=manager.host_available(),
            device_total=manager.device_usage().total_tokens,
            device_reserved=free,  # SGLang has been asked already, and who waits has no room on the device
            host_reserved=self._growth(self._host_reqs),
            best_effort_host_rows=best_effort,
            cpu_lag=self._attention.service.lag() if self.memory.mode == "deferred" else 0,
        )

    def _waiting(self) -> list[Prompt]:
        scheduler, manager = self._scheduler, self._manager
        prompts = []
        chunked = scheduler.chunked_req
        if chunked is not None:
            place = "host" if host_row(chunked) is not None else "device"
            prompts.append(self._prompt(chunked, place))
        if scheduler.get_num_allocatable_reqs(len(scheduler.running_batch.reqs)) > 0:
            for req in itertools.islice(scheduler.waiting_queue, SHOWN):
                if len(req.origin_input_ids) + len(req.output_ids) > manager.staging_tokens:
                    break  # nobody overtakes it
                prompts.append(self._prompt(req, None))
        return prompts

    def _prompt(self, req: Any, place: Any) -> Prompt:
        tokens, past = len(req.origin_input_ids) + len(req.output_ids), len(req.prefix_indices)
        output = to_come(req)
        return Prompt(
            tokens=max(tokens - past, 1),
            past=past,
            room=tokens + output,
            output=output,
            best_effort=self._placement.rank(req) < 0,
            place=place,
        )

    def _growth(self, reqs: Sequence[Any]) -> int:
        """Tokens that SGLang reserves for the output to come of these requests."""
        ratio = self._scheduler.new_token_ratio_tracker.current
        return int(ratio * sum([to_come(req) for req in reqs]))

    # -- the plan ----------------------------------------------------------------------------------------------

    def _plan(self, batch: Any, admit: bool) -> StepPlan:
        state = self._state(batch)
        deferral = self._deferral
        there = deferral is not None and deferral.has_room(len(state.device_rows))
        limits = self.limits if there or deferral is None else self._without_slots
        first = self._runner.ps.tp_rank == 0
        memory = replace(
            self.memory,
            steps_since_departure=self._placement.steps_since_departure,
            host_prefill_debt=self.memory.host_prefill_debt + sum(self._held_up.values()),
        )
        mine = plan(state, limits, self.tables, memory, admit) if first else None
        made: StepPlan = from_first_rank(self._runner, mine)
        return made

    def begin_step(self) -> None:
        self._step += 1
        self._planned = None
        self._placement.planned_tokens = self._placement.planned_prompts = 0

    def before_admission(self, batch: Any) -> bool:
        """Plans the step if anybody waits. False: nobody is to be admitted to the device, since rows of the host, which
        came before, get the room."""
        if not (self._scheduler.waiting_queue or self._scheduler.chunked_req is not None):
            return True
        planned = self._planned = self._plan(batch, admit=True)
        if planned.prefill_to == "host" and not self._placement.paused:
            self._placement.planned_tokens = sum(planned.prefill)
            begun = self._scheduler.chunked_req is not None  # who goes on is the first of them
            self._placement.planned_prompts = len(planned.prefill) - begun
        return not planned.to_device

    def before_decode(self, batch: Any) -> None:
        """Plans a step that decodes, and brings rows back. ``batch``: the running one, filtered, with room to grow."""
        planned = self._planned
        counted = sum(host_row(req) is None for req in batch.reqs)
        if planned is None or planned.prefill or self._counted != (counted, len(batch.reqs) - counted):
            planned = self._planned = self._plan(batch, admit=False)
        for index in planned.to_device:
            req = self._host_reqs[index]
            if host_row(req) is not None and not req.finished() and self._placement.may_return(req):
                self._placement.move_to_device(req)
        if not (planned.to_device or planned.to_host):
            self._placement.exchange(batch)

    # -- decode steps ------------------------------------------------------------------------------------------

    def part(self, batch: NeoScheduleBatch) -> Any:
        """What the next decode step runs of the running batch, which has rows."""
        planned = self._planned
        assert planned is not None
        on_host = [i for i, req in enumerate(batch.reqs) if host_row(req) is not None]
        device = [i for i, req in enumerate(batch.reqs) if host_row(req) is None]
        rows = Rows(len(device), sum([batch.reqs[i].seqlen for i in device]))
        batch.forward_mode = ForwardMode.DECODE
        if not on_host:
            return self._whole(batch, replace(planned, mode="gpu_only"), rows, Rows(), in_lanes=False)
        mode: Mode = planned.mode
        if device and self._placement.paused:
            mode = "gpu_only"
        if not device and mode == "gpu_only":
            mode = "sync"  # somebody has to go on
        seats = planned.slots
        if self._deferral is not None and mode in ("sync", "pipelined"):
            riders = sum(1 for _ in self._deferral.riders())
            if riders and self._drains(planned, rows, riders):
                mode, seats = "deferred", 0
            elif riders:
                self._deferral.land()
                self.counters.discarded += riders
        if mode == "deferred" and self._deferral is not None:
            return self._deferred_part(batch, planned, rows, seats)
        if mode == "gpu_only":
            part = batch.part_of(device)
            part.neo_planned = self._launched(planned, mode, rows, Rows())
            return part
        chosen = self._taking_part(batch, on_host, planned.lane_a + planned.lane_b or len(on_host))
        host = Rows(len(chosen), sum([batch.reqs[i].seqlen for i in chosen]))
        planned = replace(planned, mode=mode)
        if len(chosen) == len(on_host):
            return self._whole(batch, planned, rows, host, in_lanes=mode == "pipelined")
        for i in chosen:
            self._manager.grow(batch.reqs[i])
        part = batch.part_of(sorted([*device, *chosen]))
        part.neo_lanes = self._lanes(part) if mode == "pipelined" else None
        part.neo_planned = self._launched(planned, mode, rows, host)
        return part

    def _whole(self, batch: Any, planned: StepPlan, device: Rows, host: Rows, in_lanes: bool) -> Any:
        batch.neo_in_parts = False
        batch.prepare_for_decode()
        batch.neo_lanes = self._lanes(batch) if in_lanes else None
        batch.neo_planned = self._launched(planned, planned.mode, device, host)
        return batch

    def _lanes(self, batch: Any) -> Lanes | None:
        return lanes_of(batch, self._runner.neo_lane_buckets)

    def _taking_part(self, batch: Any, on_host: Sequence[int], count: int) -> list[int]:
        """Those that have waited longest, as many as are planned; ascending."""

        def waiting_since(i: int) -> int:
            row = host_row(batch.reqs[i])
            return row.turn or 0 if row is not None else 0

        chosen = sorted(sorted(on_host, key=waiting_since)[:count])
        for i in chosen:
            row = host_row(batch.reqs[i])
            assert row is not None
            row.turn = self._step
        return chosen

    def _deferred_part(self, batch: NeoScheduleBatch, planned: StepPlan, device: Rows, seats: int) -> Any:
        assert self._deferral is not None
        part = self._deferral.next_part(batch, self._placement.paused, seats)
        step = part.neo_step
        if step is None:  # the CPU is behind, or slot rows had no room
            part.neo_planned = self._launched(planned, "gpu_only", device, Rows())
            return part
        for req in step.reqs:
            row = host_row(req)
            if row is not None:
                row.turn = self._step
        riders = list(self._deferral.riders())
        host = Rows(len(riders), sum([req.seqlen for req in riders]))
        part.neo_planned = self._launched(planned, "deferred", device, host)
        return part

    def _drains(self, planned: StepPlan, device: Rows, riders: int) -> bool:
        """Whether rows in mid-token had better come to their token before the mode changes."""
        seconds = self._costs().gpu_only(device).seconds
        rate = planned.tokens / planned.cost.seconds if planned.cost.seconds else 0.0
        drains = draining_pays(rate, device.count, riders, self.tables.layers, seconds)
        return bool(from_first_rank(self._runner, drains))

    def _costs(self) -> Costs:
        return Costs(self.tables, self.limits.threads, self.memory.corrections)

    def _launched(self, planned: StepPlan, mode: Mode, device: Rows, host: Rows) -> Launched:
        """What to expect of a step that may be another than was planned."""
        costs = self._costs()
        tokens = device.count + host.count
        if mode == "pipelined":
            half = Rows(host.count - host.count // 2, host.tokens / 2)
            cost = costs.pipelined(device, half, Rows(host.count // 2, host.tokens / 2))
        elif mode == "deferred":
            cohorts = self.tables.layers + 1
            cohort = Rows(host.count / cohorts, host.tokens / cohorts)
            cost = costs.deferred(device, self.limits.max_slots, cohort)
            tokens = device.count + cohort.count
        elif mode == "sync":
            cost = costs.sync(device, host)
        else:
            cost = costs.gpu_only(device)
        probe = planned.probe and mode == "gpu_only"
        step = replace(planned, mode=mode, cost=cost, tokens=tokens, prefill=(), prefill_to=None, probe=probe)
        return Launched(step, device, host, not self._idle, self._step)

    # -- prefills ----------------------------------------------------------------------------------------------

    def prefilling(self, batch: Any, running: Any) -> None:
        """A step that SGLang has put together of prompts. ``running``: the batch that decodes, of which host rows may
        do so beside it: ``batch.neo_beside`` names them."""
        tokens, past = batch.extend_num_tokens, sum(batch.prefix_lens or [])
        to_host = bool(batch.reqs) and host_row(batch.reqs[0]) is not None
        place: Place = "host" if to_host else "device"
        beside, cost = self._beside(running, tokens, past, place)
        batch.neo_beside = beside
        step = StepPlan(
            mode="pipelined" if beside else "gpu_only",
            decode_mode=self.memory.mode,
            cost=cost,
            tokens=len(beside),
            device_rows=0,
            lane_b=len(beside),
            prefill=(tokens,),
            prefill_to=place,
            held_up=self._counted[0],
            standing=len(self._manager.host_rows()),
            regret=self.memory.regret,
        )
        if to_host and step.held_up:
            self._held_up[self._step] = cost.seconds
        batch.neo_planned = Launched(step, Rows(), Rows(), not self._idle, self._step)

    def _beside(self, running: Any, tokens: int, past: int, place: Place) -> tuple[Sequence[Any], StepCost]:
        """Requests of the running batch that decode in lane B of a prefill, and what the step costs."""
        costs, planned, limits = self._costs(), self._planned, self.limits
        alone = costs.prefill(tokens, past)
        there = limits.lane_beside(place, self._counted[0]) and not self._placement.paused
        if not there or planned is None or (self._deferral is not None and any(True for _ in self._deferral.riders())):
            return (), alone
        on_host = host_rows_to_decode(running)
        if not on_host:
            return (), alone
        rows, cost = 0, alone
        if self._runner.ps.tp_rank == 0 and not self.memory.guard.closed and planned.decode_mode != "deferred":
            rate = planned.rate or (planned.tokens / planned.cost.seconds if planned.cost.seconds else 0.0)
            host = Rows(len(on_host), sum([running.reqs[i].seqlen for i in on_host]))
            rows, cost = rows_beside_prefill(costs, limits, rate, host, tokens, past)
        rows = from_first_rank(self._runner, rows)
        if not rows:
            return (), alone
        return [running.reqs[i] for i in self._taking_part(running, on_host, rows)], cost

    def loading_back_pays(self, tokens: int, past: int, hit: int) -> bool:
        """Whether a host hit is to be copied to the device; by the tables alone, which are the same in all ranks."""
        return load_back_pays(Costs(self.tables, self.limits.threads), tokens, past, hit)

    def launching(self, batch: Any) -> None:
        """``batch``: what runs next; None: nothing."""
        self._idle = batch is None
        if batch is None:
            self._last_span = None

    # -- learning ----------------------------------------------------------------------------------------------

    def processed(self, result: Any) -> None:
        """To be told of every result that has been processed."""
        launched: Launched | None = getattr(result, "neo_planned", None)
        span = getattr(result, "neo_span", None)
        if launched is None or span is None:
            return
        # A step that failed has no result, but those after it have.
        self._held_up = {number: s for number, s in self._held_up.items() if number > launched.number}
        last, self._last_span = self._last_span, span
        if self._runner.ps.tp_rank != 0:
            return
        step, handed_over = launched.plan, getattr(result, "neo_launched", None)
        if handed_over is not None and handed_over.refused is None and handed_over.mode != step.mode:
            step = replace(step, mode="sync", cost=self._costs().sync(launched.device, launched.host))
        if step.prefill and step.lane_b:
            beside = getattr(result, "neo_beside", None)
            if beside is None or beside.result.neo_launched.refused is not None:
                return  # it did not run as it was meant to
        measured = self._measured(step, span.measured(last if launched.follows else None))
        if measured.seconds <= 0:
            return
        self.error += (abs(step.cost.seconds / measured.seconds - 1) - self.error) / 64
        before = self.memory
        self.memory, lines = after_step(before, step, measured, self.limits)
        self.counters.changes += self.memory.mode != before.mode
        self.counters.pauses += self.memory.guard.closed and not before.guard.closed
        for line in lines:
            logger.info(f"sglang_neo planner: {line}")

    def _measured(self, step: StepPlan, measured: Measured) -> Measured:
        """With what the device's stream cannot tell: the CPU's work from the service's account since the last result,
        and the waits that follow from it."""
        if not self._attention.stream.capturable:
            return measured
        answers = self._attention.service.status().answer_ns
        cpu, self._seen_answers_ns = (answers - self._seen_answers_ns) / 1e9, answers
        cpu = min(cpu, measured.seconds)  # two hand-offs may be in hand at once
        return replace(measured, cpu=cpu, wait=waited(step.mode, step.cost, cpu) if step.cost.cpu else 0.0)

    # -- what it says about itself -----------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """For ``/server_info`` and ``sglang_neo.explain``: plain JSON values."""
        running = self._scheduler.running_batch.reqs
        return {
            "mode": self.memory.mode,
            "corrections": asdict(self.memory.corrections),
            "guard": asdict(self.memory.guard),
            "counters": asdict(self.counters),
            "error": self.error,
            "device_rows": [req.seqlen - 1 for req in running if host_row(req) is None],
            "host_rows": [row.tokens for req in running if (row := host_row(req)) is not None],
            "waiting": len(self._scheduler.waiting_queue),
            "host_free": self._manager.host_available(),
            "device_free": self._placement.device_free(),
            "limits": {
                "threads": self.limits.threads,
                "modes": list(self.limits.modes),
                "max_tpot": self.limits.max_tpot,
                "max_host_tpot": self.limits.max_host_tpot,
                "max_slots": self.limits.max_slots,
                "max_lane_rows": self.limits.max_lane_rows,
            },
            "tables": asdict(self.tables),
        }
