"""The CPU side fails in the middle of serving: the server goes on, every answer is right, nothing is lost."""

from __future__ import annotations

import ctypes
import logging
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpu_kernels.workers import Job
from sglang_neo.planning.placement import Rules, pause_after
from tests.harness.exact import assert_exact
from tests.harness.inprocess import InProcessScheduler, Request
from tests.harness.traffic import RandomMoves, random_prompt, random_requests, tokens

Tiny = Callable[..., Path]

_LONGEST_STALL_S = 60.0
_RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p)


class Stall:
    """``on_step`` that stops every CPU worker once so many steps have had host rows, ``times`` times.

    For so many seconds, or until the watchdog has noticed: one stall is one failure then, on however slow a machine.
    """

    def __init__(self, after: int, seconds: float | None = None, times: int = 1):
        self.after, self.seconds, self.times = after, seconds, times
        self.stalls = self._seen = 0
        self._stall: threading.Thread | None = None

    def __call__(self, scheduler: Any, step: int) -> None:
        scheduler.token_manager.audit()
        if self._stall is not None and self._stall.is_alive():
            return
        self._seen += bool(scheduler.token_manager.host_rows())
        if self._seen < self.after or self.stalls == self.times:
            return
        pool, service = scheduler.placement.attention.workers, scheduler.placement.attention.service
        recovery, failed = scheduler.recovery, scheduler.recovery.failed_steps
        self.stalls, self._seen = self.stalls + 1, 0
        stopped = threading.Event()
        until = time.monotonic() + (_LONGEST_STALL_S if self.seconds is None else self.seconds)

        def noticed() -> bool:  # the fault may be over already, if the server was quick
            return service.status().fault is not None or recovery.failed_steps > failed

        def sleep(context: int, item: int, worker: int, following: int) -> None:
            stopped.set()
            while time.monotonic() < until and (self.seconds is not None or not noticed()):
                time.sleep(0.01)

        run = _RUN(sleep)
        job = Job(pool.threads, ctypes.cast(run, ctypes.c_void_p).value, keepalive=run)
        self._stall = threading.Thread(target=pool.run, args=(job,), kwargs={"participate": False})
        self._stall.start()
        assert stopped.wait(10)


def crowd(seed: int, count: int = 10, answer: int = 60) -> list[Request]:
    """More than the device pool of these tests holds, so some are host rows all the time."""
    rng = random.Random(seed)
    return [Request(f"r{i}", random_prompt(rng, rng.randrange(30, 60)), answer) for i in range(count)]


@pytest.mark.parametrize("overlap", [True, False])
def test_workers_that_stop_for_a_while(tiny: Tiny, alone: Any, caplog: pytest.LogCaptureFixture, overlap: bool) -> None:
    requests = crowd(seed=1)
    stall = Stall(after=8, times=2)
    options: dict[str, Any] = {"max_total_tokens": 512, "max_running_requests": 16, "neo_watchdog_timeout": 0.8}
    with (
        caplog.at_level(logging.ERROR),
        InProcessScheduler("neo", tiny("llama"), disable_overlap_schedule=not overlap, **options) as scheduler,
    ):
        scheduler.scheduler.placement.rules = Rules(pause_steps=4)
        got = scheduler.run(requests, stall)
        recovery = scheduler.scheduler.recovery
        state = scheduler.scheduler.neo_state()
    assert stall.stalls == 2
    assert_exact(alone("llama", requests), tokens(got))
    assert recovery.failed_steps >= 2 and recovery.restarted_reqs >= 2
    assert state["failed_steps"] == recovery.failed_steps and state["restarted_reqs"] == recovery.restarted_reqs
    told = [record.message for record in caplog.records if "CPU attention failed" in record.message]
    assert len(told) >= 2 and "no worker took" in told[0] and "Restarted" in told[0], caplog.text


def test_a_step_that_is_refused_runs_without_its_host_rows(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang_neo.hybrid.host_attention import HostAttention, StepRefused

    requests = crowd(seed=2)
    launch, calls = HostAttention.launch, [0]

    def refusing(self: HostAttention, *args: Any) -> int:
        calls[0] += 1
        if calls[0] in (5, 6, 20):
            monkeypatch.setattr(self.service, "submit", _refuse)
        try:
            return launch(self, *args)
        finally:
            monkeypatch.undo()
            monkeypatch.setattr(HostAttention, "launch", refusing)

    def _refuse(*args: Any) -> None:
        raise RuntimeError("no steps today")

    assert StepRefused is not None
    monkeypatch.setattr(HostAttention, "launch", refusing)
    with InProcessScheduler("neo", tiny("llama"), max_total_tokens=512, max_running_requests=16) as scheduler:
        scheduler.scheduler.placement.rules = Rules(pause_steps=2)
        got = scheduler.run(requests, lambda s, step: s.token_manager.audit())
        recovery = scheduler.scheduler.recovery
    assert calls[0] > 20 and recovery.failed_steps == 3
    assert_exact(alone("llama", requests), tokens(got))


@pytest.mark.parametrize(("seed", "page_size"), [(1, 1), (4, 16)])
def test_a_step_fails_when_the_one_behind_it_is_on_its_way(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, seed: int, page_size: int
) -> None:
    """As on a GPU, where launching a step does not wait for the CPU: both fail, with rows moving meanwhile."""
    from sglang_neo.hybrid.host_attention import HostAttention

    requests = random_requests(seed=22 + seed)
    rng, own, last_bad, pairs = random.Random(seed), HostAttention.failure, [0], [0]

    def failure(self: HostAttention, epoch: int) -> str | None:
        assert own(self, epoch) is None
        if epoch > last_bad[0] and rng.random() < 0.15:
            last_bad[0] = self.launched_epoch
            pairs[0] += last_bad[0] > epoch
        return "injected" if epoch <= last_bad[0] else None

    monkeypatch.setattr(HostAttention, "failure", failure)
    options: dict[str, Any] = {"max_total_tokens": 1024, "max_running_requests": 16, "page_size": page_size}
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        scheduler.scheduler.placement.rules = Rules(pause_steps=2)
        got = scheduler.run(requests, RandomMoves(seed=3, rate=0.2))
    assert pairs[0] > 0
    assert_exact(alone("llama", requests), tokens(got))


def test_wrong_tokens_are_published_where_a_failure_goes_unseen(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the stall does harm, and only the recovery keeps it from the answers."""
    from sglang_neo.hybrid.host_attention import HostAttention

    requests = crowd(seed=1)
    monkeypatch.setattr(HostAttention, "failure", lambda self, epoch: self.reset(60) and None)
    options: dict[str, Any] = {"max_total_tokens": 512, "max_running_requests": 16, "neo_watchdog_timeout": 0.8}
    with InProcessScheduler("neo", tiny("llama"), disable_overlap_schedule=True, **options) as scheduler:
        got = scheduler.run(requests, Stall(after=8))
    with pytest.raises(AssertionError):
        assert_exact(alone("llama", requests), tokens(got))


def test_pauses_grow_with_failures_in_a_row() -> None:
    rules = Rules(pause_steps=10)
    assert [pause_after(n, rules) for n in (1, 2, 3)] == [10, 20, 40]
    assert pause_after(100, rules) == pause_after(9, rules)
