"""What the host's parts are made of, and where its threads run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cpu_kernels import tuning_files
from sglang_neo import affinity
from sglang_neo.hybrid.assemble import default_threads
from tests.harness.inprocess import InProcessScheduler

Tiny = Callable[..., Path]


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (4, 1, 3), (8, 1, 6), (16, 1, 13), (64, 4, 58)]
)
def test_cores_are_left_for_the_other_processes(cores: int, ranks: int, threads: int) -> None:
    assert default_threads(cores, ranks) == threads


def test_the_kernels_are_tuned_at_the_start(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measured where nothing was saved, and what was saved is what plans are made with."""
    monkeypatch.setenv(tuning_files.CALIBRATION_ENV, str(tmp_path))
    with InProcessScheduler("neo", tiny("llama")):
        found = tuning_files.find()
    assert found.calibration is not None, found.note
    assert tuning_files.load() == found.calibration.applied()


def where(tp_size: int = 1, **given: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"neo_share_cores": False, "device": "cuda", "tp_size": tp_size, "dp_size": 1, **given})


@pytest.mark.parametrize(
    ("args", "usable", "workers", "kept"),
    [
        (where(), 16, 13, True),
        (where(), 16, 14, True),
        (where(), 16, 15, False),  # scheduler, tokenizer and detokenizer on one core
        (where(tp_size=2), 16, 14, False),
        (where(tp_size=2), 16, 13, True),
        (where(), 16, 0, False),  # no core is claimed: the workers share theirs
        (where(device="cpu"), 16, 13, False),
        (where(neo_share_cores=True), 16, 13, False),
    ],
)
def test_who_keeps_off_the_cores_of_workers(
    args: Any, usable: int, workers: int, kept: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []
    # As in a process that keeps off them already.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(workers, usable)))
    monkeypatch.setattr(affinity, "keep_off", lambda cores, pids: calls.append((set(cores), list(pids))) or 1)
    with caplog.at_level(logging.INFO):
        affinity.leave_to_workers(args, range(workers), [1, 2])
    assert calls == ([(set(range(workers)), [1, 2])] if kept else [])
    assert ("left to the CPU attention threads" in caplog.text) == kept


def test_the_launcher_takes_all_processes_off_the_cores_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not off those of another server."""
    import psutil

    calls = []
    family = [SimpleNamespace(pid=11), SimpleNamespace(pid=12)]
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: family)
    monkeypatch.setattr(affinity, "claimed_cores", lambda: {3: 11, 4: 12, 5: 99})
    monkeypatch.setattr(affinity, "leave_to_workers", lambda *args: calls.append(args))
    args = where()
    affinity.leave_to_all_workers(args)
    assert calls == [(args, {3, 4}, [os.getpid(), 11, 12])]
    monkeypatch.setattr(affinity, "claimed_cores", lambda: {5: 99})
    affinity.leave_to_all_workers(args)
    assert len(calls) == 1
