"""Deferred mode: host rows pass through slots, a layer per step; tokens exact against plain SGLang, nothing lost."""

from __future__ import annotations

import concurrent.futures
import ctypes
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_neo.deferral import AuditError
from sglang_neo.errors import UsageError
from sglang_neo.hybrid import deferred
from sglang_neo.hybrid.deferred import DeferredAttention, DeferredEmission
from sglang_neo.hybrid.host_attention import StepRefused
from sglang_neo.hybrid.parking import TorchParking
from sglang_neo.hybrid.streams import CpuFlagStream
from sglang_neo.planning.placement import Rules
from sglang_neo.token_manager import NeoTokenManager
from tests.harness.exact import assert_exact, first_difference
from tests.harness.inprocess import InProcessRunner, InProcessScheduler, Request
from tests.harness.models import ARCHITECTURES
from tests.harness.traffic import RandomMoves, random_options, random_prompt, random_requests, tokens
from tests.test_recovery import Stall, crowd

Tiny = Callable[..., Path]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)


@pytest.mark.parametrize(  # CI tries the others in mode auto (test_auto.py), which has steps of this kind among its own
    "arch",
    [pytest.param(arch, marks=[] if arch in ("llama", "mixtral") else pytest.mark.slow) for arch in ARCHITECTURES],
)
def test_exact_under_random_migrations(tiny: Tiny, alone: Any, arch: str) -> None:
    """From and to any layer, prefills between deferred steps, with and without overlap scheduling."""
    requests = random_requests(seed=3)
    i = list(ARCHITECTURES).index(arch)
    options: dict[str, Any] = {
        "page_size": (1, 64)[i % 2],
        "neo_deferred_slots": 1 + i % 4,
        "disable_overlap_schedule": i % 3 == 1,
        "neo_check_integrity": True,
    }
    moves = RandomMoves(seed=i, rate=0.1)
    with InProcessScheduler("neo", tiny(arch), **options) as scheduler:
        got = scheduler.run(requests, moves)
        moved = scheduler.scheduler.token_manager.migrations
        state = scheduler.scheduler.neo_state()
    assert state["active_mode"] == "deferred"
    assert moved.to_host > 5 and moved.to_device > 5 and moves.host_steps > 30, (moved, moves.host_steps)
    assert scheduler.steps and state["steps_total"]["deferred"] > 20, state["steps_total"]
    assert_exact(alone(arch, requests), tokens(got))


#: More of them: NEO_TEST_SEEDS=100 pytest tests/test_deferred.py -k random_workloads
SEEDS = range(int(os.environ.get("NEO_TEST_SEEDS", "2")))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_workloads(tiny: Tiny, alone: Any, seed: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(seed=100 + seed, count=rng.randrange(4, 11))
    moves = RandomMoves(seed, rate=rng.choice([0.02, 0.1, 0.5]))
    arch = rng.choice(list(ARCHITECTURES))
    options = random_options(rng, seed, pools=[512, 1024, 2048], pages=[1, 16, 32, 64])
    options |= {"neo_deferred_slots": rng.randrange(1, 6), "neo_check_integrity": True}
    print(f"seed {seed}: {arch}, {options}, moves at a rate of {moves.rate}")
    with InProcessScheduler("neo", tiny(arch), **options) as scheduler:
        got = scheduler.run(requests, moves)
    assert moves.host_steps > 0
    assert_exact(alone(arch, requests), tokens(got))


@pytest.mark.slow
def test_a_real_model(smollm2: Path) -> None:
    """Thirty layers: a host row has a token every 31 steps."""
    rng = random.Random(12)
    requests = [Request(f"r{i}", [rng.randrange(3, 49000) for _ in range(20 + 9 * i)], 4, arrive=i) for i in range(5)]
    with InProcessRunner("plain", smollm2) as runner:
        alone = runner.answers(requests)
    with InProcessScheduler("neo", smollm2, neo_deferred_slots=2, max_total_tokens=128) as scheduler:
        scheduler.scheduler.placement.rules = Rules(returns_per_step=0)
        got = scheduler.run(requests, lambda s, step: s.token_manager.audit())
        state = scheduler.scheduler.neo_state()
    assert state["host_tokens_total"] > 5 and state["active_mode"] == "deferred", state
    assert_exact(alone, tokens(got))


@pytest.mark.parametrize("bounded", [True, False])
def test_no_more_prompts_go_to_the_host_than_it_has_seats(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, bounded: bool
) -> None:
    """However fast they may come; and a control in which nobody counts the seats."""
    rng = random.Random(6)
    requests = [Request(f"r{i:02}", random_prompt(rng, 40), 24) for i in range(24)]
    options: dict[str, Any] = {"max_total_tokens": 256, "max_running_requests": 32, "neo_deferred_slots": 1}
    most = [0]
    begin = NeoTokenManager.begin_prefill

    def begin_prefill(manager: NeoTokenManager, req: Any, first_slot: int) -> None:
        begin(manager, req, first_slot)
        most[0] = max(most[0], len(manager.host_rows()))

    monkeypatch.setattr(NeoTokenManager, "begin_prefill", begin_prefill)
    with InProcessScheduler("neo", tiny("llama"), neo_host_prefill_rate=1000.0, **options) as scheduler:
        placement = scheduler.scheduler.placement
        seats, layers = placement.seats, scheduler.scheduler.deferral._cohorts.layers
        if not bounded:
            placement.seats = None
        got = scheduler.run(requests, lambda s, step: s.token_manager.audit())
    assert seats == layers + 1
    assert 1 <= most[0] <= seats if bounded else most[0] > seats
    assert_exact(alone("llama", requests), tokens(got))


@pytest.mark.slow
def test_grammars_belong_to_the_rows_that_leave(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = [("The capital is ", "[0-9]{3}[a-z]+"), ("Once upon a time ", ""), ("Call ", "[(][0-9]{30}[)]")]
    requests = [
        Request(f"r{i}", list(tokenizer.encode(text * 8)), 4, arrive=i, sampling={"regex": regex} if regex else {})
        for i, (text, regex) in enumerate(texts)
    ]
    options: dict[str, Any] = {"skip_tokenizer_init": False, "grammar_backend": "xgrammar"}
    with InProcessScheduler("plain", smollm2, **options) as scheduler:
        expected = scheduler.run(requests)
    moved: set[str] = set()

    def to_host(scheduler: Any, step: int) -> None:
        for req in scheduler.running_batch.reqs:
            if req.rid not in moved and not req.finished() and scheduler.placement.move_to_host(req):
                moved.add(req.rid)

    with InProcessScheduler("neo", smollm2, **options, neo_deferred_slots=1, neo_check_integrity=True) as scheduler:
        scheduler.scheduler.placement.rules = Rules(returns_per_step=0)
        got = scheduler.run(requests, to_host)
        state = scheduler.scheduler.neo_state()
    assert len(moved) == 3 and state["host_tokens_total"] >= 6, state
    assert_exact({name: result.reference() for name, result in expected.items()}, tokens(got))


@pytest.mark.parametrize("overlap", [True, False])
def test_more_host_rows_than_seats(tiny: Tiny, alone: Any, overlap: bool) -> None:
    """A device pool that holds three requests; the others pass through one slot, four at a time."""
    rng = random.Random(5)
    requests = [Request(f"r{i:02}", random_prompt(rng, 100), 20) for i in range(14)]
    options: dict[str, Any] = {"max_total_tokens": 512, "max_running_requests": 32, "neo_deferred_slots": 1}
    with InProcessScheduler("neo", tiny("llama"), disable_overlap_schedule=not overlap, **options) as scheduler:
        got = scheduler.run(requests, lambda s, step: s.token_manager.audit())
        state = scheduler.scheduler.neo_state()
    assert state["host_tokens_total"] > 25, state
    assert sum(result.retractions for result in got.values()) == 0
    assert_exact(alone("llama", requests), tokens(got))


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_device_row_at_all(tiny: Tiny, alone: Any, overlap: bool) -> None:
    """Steps of slot rows only, most of which give nobody a token."""
    requests = [Request("long", random_prompt(random.Random(6), 100), 60)]
    options: dict[str, Any] = {"max_total_tokens": 128, "neo_deferred_slots": 2}
    with InProcessScheduler("neo", tiny("llama"), disable_overlap_schedule=not overlap, **options) as scheduler:
        got = scheduler.run(requests)
    assert len(got["long"].tokens) == 60
    assert_exact(alone("llama", requests), tokens(got))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_aborts_leave_both_pools_as_they_were(tiny: Tiny, seed: int) -> None:
    rng = random.Random(seed)
    requests = []
    for i, arrive in enumerate(rng.choices(range(30), k=16)):
        abort = arrive + rng.randrange(1, 60) if rng.random() < 0.6 else None
        requests.append(Request(f"r{i:02}", random_prompt(rng, rng.randrange(1, 200)), 50, arrive=arrive, abort=abort))
    options: dict[str, Any] = {"max_total_tokens": 700, "max_running_requests": 16, "neo_deferred_slots": 2}
    with InProcessScheduler("neo", tiny("llama"), disable_overlap_schedule=seed == 1, **options) as scheduler:
        manager = scheduler.scheduler.token_manager
        before = manager.host_usage()
        got = scheduler.run(requests, RandomMoves(seed, rate=0.1))
        assert sum(result.finish == "abort" for result in got.values()) > 3
        assert manager.host_available() == before.total_tokens and not manager.host_rows()
        manager.audit()
        scheduler.flush()
        assert manager.host_usage() == before
        manager.audit()


def test_retraction_is_the_last_resort(tiny: Tiny, alone: Any) -> None:
    """Both pools full: SGLang's retraction, from any layer, and the answers stay right."""
    rng = random.Random(8)
    requests = [Request(f"r{i}", random_prompt(rng, 40), 100, arrive=i) for i in range(7)]
    five_pages = 5.01 * 64 * 2 * 2 * 16 * 3 * 4 / 1e9  # tokens, K and V, heads, head_dim, layers, bytes
    options: dict[str, Any] = {
        "max_total_tokens": 320,
        "max_running_requests": 16,
        "neo_host_kv_size": five_pages,
        "neo_deferred_slots": 2,
        "schedule_conservativeness": 0.05,  # so that admission gives more than there is room for
    }
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        manager = scheduler.scheduler.token_manager
        assert manager.host_usage().total_tokens == 4 * 64, "a page is nobody's"
        got = scheduler.run(requests, lambda s, step: s.token_manager.audit())
        assert manager.host_available() == 4 * 64
    assert sum(result.retractions for result in got.values()) > 0
    assert_exact(alone("llama", requests), tokens(got))


def test_sampling_belongs_to_the_rows_that_leave(tiny: Tiny) -> None:
    """Penalties, biases and stop tokens of every kind mixed, and log-probabilities; moved at random."""
    rng = random.Random(9)
    kinds: list[dict[str, Any]] = [
        {"frequency_penalty": 0.8},
        {"presence_penalty": 1.0},
        {"repetition_penalty": 1.3},
        {"stop_token_ids": list(range(40, 60))},
        {"logit_bias": {"17": 4.0}},
        {},
    ]
    requests = [
        Request(f"r{i:02}", random_prompt(rng, rng.randrange(5, 60)), 24, sampling=kinds[i % len(kinds)])
        for i in range(12)
    ]
    options: dict[str, Any] = {"max_running_requests": 20, "disable_overlap_schedule": True}
    with InProcessScheduler("plain", tiny("llama"), **options) as scheduler:
        expected = scheduler.run(requests)
    moves = RandomMoves(seed=5, rate=0.05)
    with InProcessScheduler("neo", tiny("llama"), **options, neo_deferred_slots=2) as scheduler:
        got = scheduler.run(requests, moves)
    assert moves.host_steps > 100
    assert_exact({name: result.reference() for name, result in expected.items()}, tokens(got))
    for name, result in expected.items():
        assert got[name].finish == result.finish
        torch.testing.assert_close(torch.tensor(got[name].logprobs), torch.tensor(result.logprobs), rtol=0, atol=1e-3)


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_waits_for_the_cpu_are_counted(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """At most what the device really waited for, which the CPU device knows; and no less when workers stand still."""
    waited = [0, 0.0]
    take = CpuFlagStream.take_flag

    def timed(stream: CpuFlagStream, address: int) -> None:
        late = ctypes.c_uint32.from_address(address).value == 0
        begin = time.perf_counter()
        take(stream, address)
        if late:
            waited[0], waited[1] = waited[0] + 1, waited[1] + time.perf_counter() - begin

    stall = Stall(after=8, seconds=0.5)
    # Nobody is on the device: while there are device rows, steps are not deferred when the CPU is behind.
    options: dict[str, Any] = {"max_total_tokens": 16, "neo_host_kv_size": 0.01, "neo_deferred_slots": 2}
    with InProcessScheduler("neo", tiny("llama"), disable_overlap_schedule=not overlap, **options) as scheduler:
        before = scheduler.scheduler.neo_state()["awaited"]
        monkeypatch.setattr(CpuFlagStream, "take_flag", timed)
        scheduler.run(crowd(seed=1, count=4, answer=20), stall)
        after = scheduler.scheduler.neo_state()["awaited"]
    assert stall.stalls == 1 and waited[0] >= 1 and waited[1] > 0.1
    handoffs, seconds = (after[name] - before[name] for name in ("handoffs", "seconds"))
    assert waited[0] <= handoffs and waited[1] < seconds + 0.05, (waited, handoffs, seconds)


# -- the CPU side fails -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_workers_that_stop_for_a_while(tiny: Tiny, alone: Any, overlap: bool) -> None:
    """Everybody in mid-token loses the token and is prefilled again; then deferred steps go on."""
    requests = crowd(seed=1)
    stall = Stall(after=8, times=2)
    options: dict[str, Any] = {
        "max_total_tokens": 512,
        "max_running_requests": 16,
        "neo_watchdog_timeout": 0.8,
        "neo_deferred_slots": 2,
        "neo_check_integrity": True,
        "disable_overlap_schedule": not overlap,
    }
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        scheduler.scheduler.placement.rules = Rules(pause_steps=4)
        got = scheduler.run(requests, stall)
        recovery = scheduler.scheduler.recovery
        state = scheduler.scheduler.neo_state()
    assert stall.stalls == 2 and recovery.failed_steps >= 2 and recovery.restarted_reqs >= 4
    assert state["steps_total"]["deferred"] > 5, state["steps_total"]
    assert_exact(alone("llama", requests), tokens(got))


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_that_are_refused(tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    requests = crowd(seed=2)
    launch, reset = DeferredAttention.launch_step, DeferredAttention.reset
    calls, poisoned = [0], [False]

    def refusing(self: DeferredAttention, *args: Any) -> int:
        calls[0] += 1
        poisoned[0] |= calls[0] in (5, 20)
        if poisoned[0]:
            raise StepRefused("no steps today")
        return launch(self, *args)

    def healing(self: DeferredAttention, *args: Any, **how: Any) -> bool:
        poisoned[0] = False
        return reset(self, *args, **how)

    options: dict[str, Any] = {"max_total_tokens": 512, "max_running_requests": 16, "neo_deferred_slots": 2}
    with InProcessScheduler("neo", tiny("llama"), disable_overlap_schedule=not overlap, **options) as scheduler:
        scheduler.scheduler.placement.rules = Rules(pause_steps=2)
        monkeypatch.setattr(DeferredAttention, "launch_step", refusing)
        monkeypatch.setattr(DeferredAttention, "reset", healing)
        got = scheduler.run(requests, lambda s, step: s.token_manager.audit())
        recovery = scheduler.scheduler.recovery
    assert calls[0] > 20 and recovery.failed_steps >= 2
    assert_exact(alone("llama", requests), tokens(got))


# -- negative controls: the comparisons above would see these faults --------------------------------------------------


HAND_OVER = TorchParking.hand_over


def no_residual(parking: Any, q: Any, k: Any, v: Any, out: Any, residual: torch.Tensor, *more: Any) -> None:
    HAND_OVER(parking, q, k, v, out, residual.clone(), *more)


def no_position(parking: Any, q: Any, k: Any, v: Any, out: Any, residual: Any, positions: Any, *more: Any) -> None:
    HAND_OVER(parking, q, k, v, out, residual, positions.clone(), *more)


def no_answer(parking: Any, q: Any, k: Any, v: Any, out: torch.Tensor, *more: Any) -> None:
    HAND_OVER(parking, q, k, v, out.clone(), *more)


def nothing(parking: Any, parked: Any) -> None:
    pass


def header_only(parking: Any, parked: Any, control: torch.Tensor) -> None:
    parked.header[:1] = control[:1]


FAULTS = [
    ("hand_over", no_residual),
    ("hand_over", no_position),
    ("hand_over", no_answer),
    ("fetch", nothing),
    ("send", header_only),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=[fault.__name__ for _, fault in FAULTS])
def test_a_broken_exchange_is_seen(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, name: str, fault: Any
) -> None:
    requests = random_requests(seed=3)
    with InProcessScheduler("neo", tiny("llama"), neo_deferred_slots=2) as scheduler:
        monkeypatch.setattr(TorchParking, name, fault)
        got = tokens(scheduler.run(requests, RandomMoves(1, rate=0.1)))
    differ = sum(first_difference(n, r, got[n]) is not None for n, r in alone("llama", requests).items())
    assert differ >= 4
    with pytest.raises(UsageError, match="LlamaForCausalLM does not come out the same in deferred mode"):
        InProcessScheduler("neo", tiny("llama"), neo_deferred_slots=2)


def test_a_residual_that_is_another_one_behind_attention_is_refused(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = DeferredEmission.residual_begins

    def of_a_copy(emission: DeferredEmission, residual: torch.Tensor) -> None:
        own(emission, residual.clone())

    monkeypatch.setattr(DeferredEmission, "residual_begins", of_a_copy)
    with pytest.raises(UsageError, match="layers 3 let rows change places, 0 residuals"):
        InProcessScheduler("neo", tiny("llama"), neo_deferred_slots=2)


def test_models_that_are_not_known_run_in_mode_sync(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deferred, "DEFERRABLE", ())
    requests = random_requests(seed=3)[:3]
    with caplog.at_level(logging.WARNING), InProcessScheduler("neo", tiny("llama"), neo_deferred_slots=2) as scheduler:
        got = scheduler.run(requests, RandomMoves(1, rate=0.3))
        state = scheduler.scheduler.neo_state()
    assert state["active_mode"] == "sync" and state["steps_total"]["deferred"] == 0 < state["steps_total"]["sync"]
    [line] = [record.message for record in caplog.records if "deferred" in record.message]
    assert "the layers of LlamaForCausalLM are not known" in line
    assert_exact(alone("llama", requests), tokens(got))


# -- work ahead of the layers and beside them -------------------------------------------------------------------------


class ThreadedFlagStream(CpuFlagStream):
    """What goes ahead of the layers and beside them runs in threads, a while late: as on a GPU, only the calls that the
    protocol has make anything wait for it."""

    def __init__(self, timeout_s: float, joins: bool = True):
        super().__init__(timeout_s)
        self._joins = joins
        self._ahead, self._beside = (concurrent.futures.ThreadPoolExecutor(1) for _ in range(2))
        self._last: concurrent.futures.Future[None] | None = None
        self._random = random.Random(5)
        self.late = 0

    def _later(self, work: Callable[[], None]) -> Callable[[], None]:
        delay = self._random.choice((0.0, 0.0, 0.001, 0.004))

        def run() -> None:
            time.sleep(delay)
            work()

        return run

    def ahead(self, works: Sequence[Callable[[], None]]) -> Sequence[Callable[[], None]]:
        futures = [self._ahead.submit(self._later(work)) for work in works]
        return [lambda future=future: self._wait(future) for future in futures]  # type: ignore[misc]

    def beside(self, work: Callable[[], None]) -> None:
        self._last = self._beside.submit(self._later(work))

    def join(self) -> None:
        if self._last is not None and self._joins:
            self._wait(self._last)

    def _wait(self, future: concurrent.futures.Future[None]) -> None:
        self.late += not future.done()
        future.result(60)


@pytest.mark.parametrize("joins", [True, False])
def test_work_ahead_of_the_layers_and_beside_them(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    """Exact, whatever takes its time; unless a step does not wait for the last one's, the negative control."""
    requests = random_requests(seed=3)
    with InProcessScheduler("neo", tiny("llama"), neo_deferred_slots=2) as scheduler:
        attention = scheduler.scheduler.placement.attention
        stream = ThreadedFlagStream(30.0, joins)
        monkeypatch.setattr(attention, "stream", stream)
        got = tokens(scheduler.run(requests, RandomMoves(1, rate=0.1)))
        steps, failed = scheduler.scheduler.neo_metrics.counters.steps, scheduler.scheduler.recovery.failed_steps
    if joins:
        assert steps["deferred"] > 20 and stream.late > 20 and failed == 0
        assert_exact(alone("llama", requests), got)
    else:
        differ = sum(first_difference(n, r, got[n]) is not None for n, r in alone("llama", requests).items())
        assert differ or failed


# -- the audit --------------------------------------------------------------------------------------------------------


def parked_in_other_slots(parking: Any, *args: Any) -> None:
    """Once, at one layer, two rows that arrive are parked in each other's place."""
    HAND_OVER(parking, *args)
    parked, first = args[-2], args[-1]
    if not first and len(set(parked.tickets.tolist())) > 1:
        for x in (parked.tickets, parked.positions):
            x.copy_(x.flip(0))


def positions_kept(parking: Any, *args: Any) -> None:
    positions, parked = args[5], args[-2]
    before, places = positions.clone(), parked.positions.clone()
    HAND_OVER(parking, *args)
    positions.copy_(before)
    parked.positions.copy_(places)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("fault", [parked_in_other_slots, positions_kept])
def test_the_audit_stops_a_step_that_went_wrong(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, fault: Any, overlap: bool
) -> None:
    options: dict[str, Any] = {"neo_deferred_slots": 2, "disable_overlap_schedule": not overlap}
    report = r"layer \d, slot \d: (r\d\d|nobody) (arrives|resumes) \(ticket \d+, position \d+\), but the device had"
    with (
        InProcessScheduler("neo", tiny("llama"), neo_check_integrity=True, **options) as scheduler,
        pytest.raises(AuditError, match=report),
    ):
        monkeypatch.setattr(TorchParking, "hand_over", fault)
        scheduler.run(random_requests(seed=3), RandomMoves(1, rate=0.2))
