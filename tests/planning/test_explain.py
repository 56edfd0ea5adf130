"""``python -m sglang_neo.explain``: the mode that the planner would take, with its reasons."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_neo import explain
from sglang_neo.planning.costs import Costs, Rows
from sglang_neo.planning.planner import Limits, Memory, State, plan
from sglang_neo.planning.tables import Key, save
from tests.planning.machines import ideal, real

KEY = Key("8B bf16", "H200", "Xeon", 8, "0.1.0 amx", "0.5.17")
FAST = real(cpu_attention=ideal(cpu_per_token=1e-8).cpu_attention)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    save(tmp_path / "profile.json", KEY, FAST)
    return str(tmp_path / "profile.json")


@pytest.mark.parametrize("device_rows", [2, 8, 256])
def test_it_names_the_mode_that_the_planner_takes(
    profile: str, device_rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain.main([profile, "--device-rows", str(device_rows), "--host-rows", "40", "--best-effort"]) == 0
    text = capsys.readouterr().out
    there = State((1000,) * device_rows, (1000,) * 40, (), device_rows, 0)
    step = plan(there, Limits(threads=8, max_host_tpot=None), FAST, Memory(regret=1e9))
    assert f"-> {step.mode}" in text
    assert "queue 1.21" in text and "bound by: queue" in text
    assert "8B bf16 on H200" in text and "N_g/N_c" in text and "slots of a deferred step: CPU" in text


def test_bounds_and_modes_are_heeded(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main([profile, "--device-rows", "8", "--max-host-tpot", "20", "--mode", "deferred"]) == 0
    text = capsys.readouterr().out
    assert "pipelined  " not in text
    assert explain.main([profile, "--device-rows", "8", "--max-tpot", "7", "--mode", "pipelined"]) == 0
    text = capsys.readouterr().out
    assert "-> gpu_only" in text and "not possible: pipelined" in text


def test_it_says_why_the_fastest_mode_is_not_taken(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With eight host rows lanes are faster by less than device rows of half the speed are worth."""
    said = []
    for host_rows in ("9", "40"):
        args = ["--device-rows", "8", "--host-rows", host_rows, "--best-effort", "--mode", "pipelined"]
        assert explain.main([profile, *args]) == 0
        said.append(capsys.readouterr().out)
    assert "-> gpu_only" in said[0] and "pipelined is faster, but device rows take 1.95 times as long" in said[0]
    assert "-> pipelined" in said[1] and "is faster, but" not in said[1]


def test_the_terms_are_those_of_the_tables() -> None:
    costs = Costs(ideal(32, 10e-3, 1e-7, 1e-8), 8)
    t = explain.terms(costs, Rows(8, 8000), 1000, 100)
    assert (t.linear, t.attention) == (pytest.approx(10e-3), pytest.approx(0.8e-3))
    assert t.host_rate == pytest.approx(1 / (32 * 1000 * 1e-8))


def test_bad_input_is_one_line(tmp_path: Path, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main([str(tmp_path / "none.json")]) == 2
    assert explain.main([profile, "--host-rows", "0"]) == 2
    errors = capsys.readouterr().err.strip().split("\n")
    assert len(errors) == 2 and all(line.startswith("error: ") for line in errors)
