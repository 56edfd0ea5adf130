"""Things that go wrong around requests in host memory: told in one line, no wrong token, nobody waits for ever."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cpu_kernels.workers import Job, JobFailed
from sglang_neo import timeline
from sglang_neo.host_kv.memory import HostMemory, HostMemoryError
from sglang_neo.hybrid import assemble
from sglang_neo.planning.placement import Rules
from tests.harness.exact import assert_exact
from tests.harness.inprocess import InProcessScheduler, Request
from tests.harness.traffic import RandomMoves, random_prompt, random_requests, tokens
from tests.test_recovery import crowd
from tests.test_scenarios import in_modes

Tiny = Callable[..., Path]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)

THREAD_EXIT = ctypes.cast(ctypes.CDLL(None).pthread_exit, ctypes.c_void_p).value


class Deaths:
    """``on_step``: every so many steps with host rows a worker thread ends in the middle of a job."""

    def __init__(self, every: int, times: int):
        self.every, self.times, self.deaths, self._seen = every, times, 0, 0

    def __call__(self, scheduler: Any, step: int) -> None:
        scheduler.token_manager.audit()
        workers = scheduler.placement.attention.workers
        self._seen += bool(scheduler.token_manager.host_rows()) and not workers.refusal  # the last death was noticed
        if self._seen < self.every or self.deaths == self.times:
            return
        self.deaths, self._seen = self.deaths + 1, 0
        with pytest.raises(JobFailed):
            workers.run(Job(1, THREAD_EXIT), participate=False)


@in_modes("deferred")
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_worker_thread_dies(
    tiny: Tiny, alone: Any, caplog: pytest.LogCaptureFixture, mode: dict[str, Any], overlap: bool
) -> None:
    """Others take its place; a request that only host memory can hold gets its answer too."""
    requests = [*crowd(seed=1), Request("long", random_prompt(random.Random(3), 600), 20)]
    deaths = Deaths(every=6, times=2)
    options: dict[str, Any] = {"max_total_tokens": 512, "max_running_requests": 16, "neo_watchdog_timeout": 5.0, **mode}
    options["disable_overlap_schedule"] = not overlap
    with caplog.at_level(logging.ERROR), InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        scheduler.scheduler.placement.rules = Rules(pause_steps=4)
        got = scheduler.run(requests, deaths)
        state = scheduler.scheduler.neo_state()
    assert deaths.deaths == 2 and state["failed_steps"] >= 2 and state["restarted_reqs"] >= 2, state
    assert state["cpu_seconds"]["busy"] > 0
    told = [record.message for record in caplog.records]
    assert sum("ended inside a job" in line and "new CPU attention threads" in line for line in told) == 2, told
    assert_exact(alone("llama", requests), tokens(got))


def test_host_memory_that_cannot_be_had(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*args: Any, **kwargs: Any) -> HostMemory:
        raise HostMemoryError("cannot pin host memory: operation not permitted")

    monkeypatch.setattr(assemble, "HostMemory", refused)
    requests = random_requests(seed=3)[:3]
    with caplog.at_level(logging.INFO), InProcessScheduler("neo", tiny("llama")) as scheduler:
        got = scheduler.run(requests)
        state = scheduler.scheduler.neo_state()
    assert state["active_mode"] == "gpu-only" and "cannot pin host memory" in state["gpu_only_reason"]
    assert any("sglang_neo: gpu-only: cannot pin host memory" in record.message for record in caplog.records)
    assert_exact(alone("llama", requests), tokens(got))


def test_less_host_memory_than_was_asked_for(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def limited(size: int, *args: Any, **kwargs: Any) -> HostMemory:
        if size > 3 << 20:
            raise HostMemoryError(f"cannot allocate {size} bytes")
        return HostMemory(size, *args, **kwargs)

    monkeypatch.setattr(assemble, "HostMemory", limited)
    requests = random_requests(seed=3)
    with (
        caplog.at_level(logging.WARNING),
        InProcessScheduler("neo", tiny("llama"), neo_host_kv_size=0.02) as scheduler,
    ):
        got = scheduler.run(requests, RandomMoves(1))
        assert 0 < scheduler.scheduler.neo_state()["host_kv"]["total_tokens"] < 0.02e9 / 768 / 4
    assert sum("Trying" in record.message for record in caplog.records) == 3
    assert_exact(alone("llama", requests), tokens(got))


@pytest.mark.parametrize("whose", ["ours", "sglang's"])
def test_a_full_disk_ends_the_profile_only(
    tiny: Tiny, alone: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if whose == "ours":
        monkeypatch.setattr(timeline, "write", full)
    else:
        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", full)
    answers: list[Any] = []

    def on_step(scheduler: Any, step: int) -> None:
        manager = scheduler.profiler_manager
        if step in (5, 20):
            assert manager._init_profile(str(tmp_path), None, None, ["CPU"], False, False, False, "profile").success
            assert manager._start_profile().success
        if step in (10, 25):
            answers.append(manager._stop_profile())

    requests = random_requests(seed=3)[:4]
    with InProcessScheduler("neo", tiny("llama")) as scheduler:
        got = scheduler.run(requests, on_step)
    assert [(a.success, "No space left on device" in a.message) for a in answers] == [(False, True)] * 2
    assert_exact(alone("llama", requests), tokens(got))
