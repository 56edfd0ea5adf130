"""A forward that raises in the middle of the model: its step counts for nothing, whoever it was for, the server goes on
and no token is wrong. A request that cannot be computed fails alone; what no request is to blame for ends the server.
"""

from __future__ import annotations

import logging
import multiprocessing
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_neo import recovery
from sglang_neo.hybrid import host_attention
from sglang_neo.hybrid.host_attention import HostAttention
from sglang_neo.planning.placement import Rules
from sglang_neo.recovery import Recovery
from sglang_neo.scheduler import NeoScheduler
from sglang_neo.token_manager import NeoTokenManager, host_row
from tests.harness.exact import assert_exact
from tests.harness.inprocess import InProcessScheduler, Request, free_port
from tests.harness.traffic import RandomMoves, random_prompt, random_requests, tokens
from tests.test_scenarios import MODES, in_modes
from tests.test_tensor_parallel import OPTIONS, RANKS, answers_of

Tiny = Callable[..., Path]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)


def kind_of(batch: Any) -> str:
    if batch.forward_mode.is_extend():
        return "prompts-to-host" if host_row(batch.reqs[0]) is not None else "prompts"
    if batch.neo_step is not None:
        return "deferred"
    return "host-rows" if any(host_row(req) is not None for req in batch.reqs) else "device-rows"


class Faults:
    """The model raises in its second layer in steps that ``wanted`` picks; what a step has done by then, stays done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wanted: Callable[[Any], bool]):
        self.kinds: Counter[str] = Counter()
        self._armed = False
        own = NeoScheduler._run_batch

        def run_batch(scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._armed = wanted(batch)
            if self._armed:
                beside = scheduler.tp_worker.neo_beside is not None
                self.kinds["beside" if beside else kind_of(batch)] += 1
            try:
                return own(scheduler, batch, *args, **kwargs)
            finally:
                self._armed = False

        monkeypatch.setattr(NeoScheduler, "_run_batch", run_batch)

    def hook(self, scheduler: InProcessScheduler) -> None:
        """Into the model of a scheduler."""

        def maybe_raise(module: Any, args: Any) -> None:
            if self._armed:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate too much.")

        scheduler.scheduler.tp_worker.model_runner.model.model.layers[1].register_forward_pre_hook(maybe_raise)
        scheduler.forwards_may_raise = True


@pytest.fixture
def any_number(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of steps may raise."""
    monkeypatch.setattr(recovery, "_CHANCES", 1 << 30)
    monkeypatch.setattr(recovery, "_MOST_IN_A_ROW", 1 << 30)
    monkeypatch.setattr(host_attention, "_LAST_JOB_S", 0.3)
    yield


POOL: dict[str, Any] = {"max_total_tokens": 768, "max_running_requests": 16, "chunked_prefill_size": 160}


def crowd(seed: int) -> list[Request]:
    """With common prefixes, chunks, and one that only host memory has room for."""
    long = Request("long", random_prompt(random.Random(5), 800), 12)
    return [*random_requests(seed, count=14, longest=150), long]


def run_with_faults(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any], overlap: bool = True, seed: int = 1
) -> Faults:
    rng = random.Random(seed)
    faults = Faults(monkeypatch, lambda batch: rng.random() < 0.12)
    requests = crowd(seed)
    with InProcessScheduler("neo", tiny("llama"), disable_overlap_schedule=not overlap, **POOL, **mode) as scheduler:
        faults.hook(scheduler)
        scheduler.scheduler.placement.rules = Rules(pause_steps=2)
        got = scheduler.run(requests, RandomMoves(seed, rate=0.1))
        state = scheduler.scheduler.neo_state()
        scheduler.flush()
        for pool in ("device_kv", "host_kv"):
            usage = scheduler.scheduler.neo_state()[pool]
            assert usage["free_tokens"] == usage["total_tokens"], pool
    assert state["raised_steps"] == sum(faults.kinds.values()) > 10
    assert state["failed_steps"] == state["raised_steps"] + faults.kinds["beside"], "workers took it for another step"
    assert {result.finish for result in got.values()} == {"length"}
    assert_exact(alone("llama", requests), tokens(got))
    return faults


@in_modes("pipelined")
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_steps_that_raise(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, any_number: None, mode: dict[str, Any], overlap: bool
) -> None:
    """Of every kind: prompts and decodes, with rows of one pool, the other or both."""
    seen: Counter[str] = Counter()
    for seed in range(1, 4):
        with monkeypatch.context() as patch:
            seen += run_with_faults(tiny, alone, patch, mode, overlap, seed).kinds
    of_mode = {"pipelined": "beside", "deferred": "deferred"}.get(mode.get("neo_mode", ""), "host-rows")
    of_mode = "deferred" if "neo_deferred_slots" in mode else of_mode
    assert {"prompts", "prompts-to-host", "device-rows", of_mode} <= set(seen), seen


@pytest.mark.parametrize("options", [{"neo_mode": "gpu-only"}, {"neo_mode": "auto", "neo_deferred_slots": 2}], ids=str)
def test_steps_that_raise_in_other_modes(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, any_number: None, options: dict[str, Any]
) -> None:
    rng = random.Random(3)
    faults = Faults(monkeypatch, lambda batch: rng.random() < 0.12)
    requests = random_requests(7, count=10)
    with InProcessScheduler("neo", tiny("llama"), **POOL, **options) as scheduler:
        faults.hook(scheduler)
        got = scheduler.run(requests)
    assert sum(faults.kinds.values()) > 5
    assert_exact(alone("llama", requests), tokens(got))


#: What keeps that which a step has half done from the answers.
SAFEGUARDS: dict[str, tuple[type, str, Any]] = {
    "the prompt's part is no prefix": (NeoTokenManager, "discard_part", lambda self, req: None),
    "nobody goes on from it": (Recovery, "restart", lambda self, batch: setattr(self, "_broken", False)),
    "workers forget it": (HostAttention, "_renew_service", lambda self: True),
}


@pytest.mark.parametrize("safeguard", SAFEGUARDS)
def test_without_its_safeguard(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, any_number: None, safeguard: str
) -> None:
    monkeypatch.setattr(*SAFEGUARDS[safeguard])
    mode = {**MODES["sync"], "neo_watchdog_timeout": 1.0}
    with pytest.raises((AssertionError, RuntimeError)):
        for seed in range(1, 4):
            with monkeypatch.context() as patch:
                run_with_faults(tiny, alone, patch, mode, seed=seed)


@in_modes("sync")
def test_a_request_that_cannot_be_computed_fails_alone(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]
) -> None:
    requests = [*random_requests(4, count=8), Request("poison", random_prompt(random.Random(1), 40), 20, arrive=6)]
    faults = Faults(monkeypatch, lambda batch: any(req.rid == "poison" for req in batch.reqs))
    told: list[Any] = []
    with InProcessScheduler("neo", tiny("llama"), **POOL, **mode) as scheduler:
        faults.hook(scheduler)
        monkeypatch.setattr(recovery, "end_early", _noting(recovery.end_early, told))
        got = scheduler.run(requests)
    assert got.pop("poison").finish == "abort" and sum(faults.kinds.values()) == 3
    [reason] = told
    assert reason["status_code"] == 500 and "CUDA out of memory" in reason["message"]
    assert_exact(alone("llama", requests[:-1]), tokens(got))


def _noting(own: Any, told: list[Any]) -> Any:
    def end_early(scheduler: Any, reqs: Any, **how: Any) -> None:
        own(scheduler, reqs, **how)
        told.extend(req.finished_reason.to_json() for req in reqs)

    return end_early


def test_what_raises_always_ends_the_server(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults(monkeypatch, lambda batch: True)
    with (
        caplog.at_level(logging.ERROR),
        InProcessScheduler("neo", tiny("llama")) as scheduler,
        pytest.raises(torch.OutOfMemoryError),
    ):
        faults.hook(scheduler)
        scheduler.run(random_requests(4, count=8))
    assert sum(faults.kinds.values()) == recovery._MOST_IN_A_ROW + 1
    assert "the server ends: the 9th in a row" in caplog.text


def lost_device(query: Callable[[], bool]) -> Recovery:
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=query))
    return Recovery(SimpleNamespace(device="cuda:0", forward_stream=stream), None, None, None)


def test_a_lost_device_ends_the_server(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """CUDA says of every later call what it said of the kernel that went wrong; or the stream never ends."""

    def refuses() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    idle = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: True))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: idle)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(recovery, "_RESET_TIMEOUT_S", 0.1)
    assert lost_device(lambda: True)._device_is_well()
    assert not lost_device(refuses)._device_is_well()
    assert not lost_device(lambda: False)._device_is_well()

    faults = Faults(monkeypatch, lambda batch: True)
    monkeypatch.setattr(Recovery, "_device_is_well", lambda self: False)
    with InProcessScheduler("neo", tiny("llama")) as scheduler, pytest.raises(torch.OutOfMemoryError):
        faults.hook(scheduler)
        scheduler.run(random_requests(4, count=2))
    assert sum(faults.kinds.values()) == 1 and "the server ends: the device is lost" in caplog.text


def test_a_rank_alone_ends_the_server(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others may wait for it in the middle of their forward. How it finds out: test_ranks.py."""
    faults = Faults(monkeypatch, lambda batch: True)
    monkeypatch.setattr(recovery, "meet", lambda runner, timeout_s: False)
    with InProcessScheduler("neo", tiny("llama")) as scheduler, pytest.raises(torch.OutOfMemoryError):
        faults.hook(scheduler)
        scheduler.run(random_requests(4, count=2))
    assert sum(faults.kinds.values()) == 1 and "the server ends: in another rank it did not" in caplog.text


def serve(rank: int, port: int, model: Path, requests: list[Request], found: Any) -> None:
    try:
        rng = random.Random(2)
        recovery._CHANCES = recovery._MOST_IN_A_ROW = 1 << 30
        options = {**OPTIONS, "neo_mode": "pipelined"}
        with (
            pytest.MonkeyPatch.context() as patch,
            InProcessScheduler("neo", model, rank=rank, port=port, **options) as scheduler,
        ):
            faults = Faults(patch, lambda batch: rng.random() < 0.15)
            faults.hook(scheduler)
            got = scheduler.run(requests, RandomMoves(seed=4, rate=0.05))
            found.put((rank, tokens(got), sum(faults.kinds.values())))
    except BaseException:
        found.put((rank, traceback.format_exc(), None))
        raise


@pytest.mark.slow
def test_ranks_go_on_together(tiny: Tiny, alone: Any) -> None:
    requests = random_requests(seed=6, count=10)
    context = multiprocessing.get_context("spawn")
    found: Any = context.Queue()
    port = free_port()
    ranks = [
        context.Process(target=serve, args=(rank, port, tiny("llama"), requests, found), daemon=True)
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    try:
        for _, got, faults in answers_of(ranks, found):
            assert faults is not None and faults > 2, got
            assert_exact(alone("llama", requests), got)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
