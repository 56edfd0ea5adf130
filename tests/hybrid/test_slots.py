"""How many slots deferred steps have where the user does not say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_neo.errors import UsageError
from sglang_neo.hybrid import slots
from tests.harness.inprocess import InProcessRunner

Tiny = Callable[..., Path]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)

#: Of the tiny model; a request slot for each row that passes through up to eight slots.
LAYERS, ROWS = 3, 32


def slots_of(tiny: Tiny, **options: Any) -> int:
    options = {"max_running_requests": ROWS, "neo_mode": "auto", **options}
    with InProcessRunner("neo", tiny("llama"), **options) as made:
        host = made.model_runner.neo_host
        assert host.attention is not host.deferred or options["neo_mode"] == "deferred"
        found = host.deferred.slots if host.deferred is not None else 0
        made.model_runner.neo_close()
    return int(found)


@pytest.mark.parametrize(
    ("rows_per_step", "mode", "expected"),
    [
        (5.9, "auto", 5),
        (100.0, "auto", ROWS // (LAYERS + 1)),
        (0.5, "auto", 0),
        (0.5, "deferred", 1),
    ],
)
def test_as_many_as_the_cpu_finishes_in_a_step_and_can_be_there(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, rows_per_step: float, mode: str, expected: int
) -> None:
    monkeypatch.setattr(slots, "ROW_TOKENS", 64)  # host memory has room for many
    monkeypatch.setattr(slots, "_step_seconds", lambda runner: 10e-3)
    monkeypatch.setattr(slots, "_row_seconds", lambda *_: 10e-3 / rows_per_step)
    assert slots_of(tiny, neo_mode=mode, neo_deferred_slots=None) == expected


def test_it_is_measured_and_what_the_user_says_goes_first(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def noted(measure: Callable[..., float]) -> Callable[..., float]:
        def run(*args: Any) -> float:
            seen.append(measure(*args))
            return seen[-1]

        return run

    monkeypatch.setattr(slots, "_step_seconds", noted(slots._step_seconds))
    monkeypatch.setattr(slots, "_row_seconds", noted(slots._row_seconds))
    assert slots_of(tiny, neo_deferred_slots=3) == 3 and slots_of(tiny, neo_deferred_slots=0) == 0 and not seen
    slots_of(tiny, neo_deferred_slots=None)
    assert len(seen) == 2 and all(1e-8 < seconds < 10 for seconds in seen), seen


def test_a_model_that_comes_out_differently_does_without_unless_it_was_asked_for(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def check_parity(*_: Any) -> None:
        raise UsageError("its logits are off")

    monkeypatch.setattr("sglang_neo.model_runner.check_parity", check_parity)
    monkeypatch.setattr("sglang_neo.hybrid.assemble.usual_slots", lambda *_: 2)
    assert slots_of(tiny, neo_deferred_slots=None) == 0
    assert "no deferred mode: its logits are off" in caplog.text
    with pytest.raises(UsageError, match="its logits are off"):
        slots_of(tiny, neo_deferred_slots=2)
