"""A profile of steps with host rows: the CPU's side is taken with SGLang's, on the same clock, and both merge."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cpu_kernels.workers import HandoffSpan, WorkerSpan
from sglang_neo import timeline
from tests.harness.inprocess import InProcessScheduler
from tests.harness.traffic import RandomMoves, random_requests

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)

SECOND = 10**9


def spans(trace: Any) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def test_the_cpus_side_as_a_trace() -> None:
    handoffs = [HandoffSpan(epoch=5, job=40, layer=2, lane=0, seen_ns=1000, done_ns=4000)]
    workers = [WorkerSpan(0, 3, 40, 1500, 3500), WorkerSpan(1, 1, 77, 100, 200)]
    trace = timeline.host_trace(handoffs, workers, unix_minus_monotonic_ns=7 * SECOND)
    handoff, worker, other = spans(trace)
    assert (handoff["name"], handoff["ts"], handoff["dur"]) == ("layer 2", 7_000_001.0, 3.0)
    assert worker["name"] == "layer 2" and worker["args"] == {"items": 3, "step": 5}, "joined by the job's number"
    assert other["name"] == "job" and other["tid"] != worker["tid"]
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert {"hand-offs", "worker 0", "worker 1"} < names


def test_traces_merge_on_one_clock() -> None:
    first = {"baseTimeNanoseconds": 5 * SECOND, "traceEvents": [{"ph": "X", "ts": 1.0}], "schemaVersion": 1}
    second = {"traceEvents": [{"ph": "X", "ts": 5_000_002.0}, {"ph": "M"}]}
    merged = timeline.merge([first, second])
    assert [e.get("ts") for e in merged["traceEvents"]] == [1.0, 2.0, None]
    assert merged["schemaVersion"] == 1 and len(first["traceEvents"]) == 1


def test_a_profile_of_a_scheduler(tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    moves = RandomMoves(seed=2)

    def on_step(scheduler: Any, step: int) -> None:
        moves(scheduler, step)
        manager = scheduler.profiler_manager
        if step == 15:
            assert manager._init_profile(str(tmp_path), None, None, ["CPU"], False, False, False, "profile").success
            assert manager._start_profile().success
        if step == 35:
            assert manager._stop_profile().success

    with InProcessScheduler("neo", tiny("llama")) as scheduler:
        scheduler.run(random_requests(seed=3), on_step)
        layers = scheduler.scheduler.placement.attention.geometry.layers
    out, image = tmp_path / "merged.json.gz", tmp_path / "step.png"
    assert timeline.main([str(tmp_path), "--out", str(out), "--picture", str(image)]) == 0, capsys.readouterr().err
    assert image.read_bytes().startswith(b"\x89PNG")
    with gzip.open(out, "rt") as file:
        merged = spans(json.load(file))
    host = [event for event in merged if event["pid"] == timeline.HOST_PID]
    handoffs = [event for event in host if event["tid"] == 0]
    by_step: dict[int, list[int]] = {}
    for event in handoffs:
        by_step.setdefault(event["args"]["step"], []).append(event["args"]["layer"])
    whole = [seen for seen in by_step.values() if len(seen) == layers]
    assert len(whole) > 5 and all(seen == list(range(layers)) for seen in whole), by_step
    workers = [event for event in host if event["tid"] > 0 and "step" in event["args"]]
    assert workers
    for event in workers:  # nobody works on a hand-off before it was given
        [given] = [h for h in handoffs if (h["args"]["step"], h["name"]) == (event["args"]["step"], event["name"])]
        assert given["ts"] <= event["ts"] and event["ts"] + event["dur"] <= given["ts"] + given["dur"] + 1e3
    # On the same clock: every hand-off lies within what torch's profiler saw of this process.
    own = [event for event in merged if event["pid"] != timeline.HOST_PID and "dur" in event]
    begin, end = min(e["ts"] for e in own), max(e["ts"] + e["dur"] for e in own)
    assert all(begin - 1e5 <= event["ts"] <= end + 1e5 for event in handoffs)


def test_without_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert timeline.main([str(tmp_path)]) == 2
    assert "no profile" in capsys.readouterr().err
