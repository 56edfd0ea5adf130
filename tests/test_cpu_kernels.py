"""cpu_kernels: what the CPU can do, which instruction set is chosen, and what the user is told."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

import cpu_kernels
from cpu_kernels import ISA_ENV, choose_isa, features, isas
from cpu_kernels.info import describe
from tests.harness.models import REPO_ROOT

ALL = {name: True for isa in isas() for name in isa.required}


@pytest.fixture(autouse=True)
def no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ISA_ENV, raising=False)


def run_info(override: str | None = None) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != ISA_ENV}
    if override is not None:
        env[ISA_ENV] = override
    return subprocess.run(
        [sys.executable, "-m", "cpu_kernels.info"], env=env, cwd=REPO_ROOT, capture_output=True, text=True, timeout=60
    )


def test_the_table_is_well_formed() -> None:
    names = [isa.name for isa in isas()]
    assert names == ["amx", "avx512_bf16", "avx512", "avx2", "neon", "scalar"]
    assert isas()[-1].required == (), "the last row must fit every machine"
    assert all(isa.description for isa in isas())
    assert all(isinstance(here, bool) for here in features().values())
    assert set(cpu_kernels.__all__) <= set(dir(cpu_kernels))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the names are those of x86-64")
def test_every_required_feature_is_one_that_is_looked_for() -> None:
    looked_for = set(features())
    for isa in isas():
        if isa.name != "neon":
            assert set(isa.required) <= looked_for, isa.name


@pytest.mark.skipif(platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="asks Linux on x86-64")
def test_features_agree_with_the_operating_system() -> None:
    [line, *_] = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")]
    flags = set(line.split(":")[1].split())
    ours = features()
    for name in ("avx2", "fma", "f16c", "avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"):
        assert ours[name] == (name in flags), name
    for name in ("amx_tile", "amx_bf16", "amx_int8"):  # the kernel may list them and still not hand out the tiles
        assert name in flags or not ours[name], name


def test_the_best_present_is_chosen() -> None:
    assert choose_isa(present=ALL).name == "amx"
    assert choose_isa(present={**ALL, "amx_tile": False}).name == "avx512_bf16"
    assert choose_isa(present={**ALL, "avx512_bf16": False}).name == "avx512"
    assert choose_isa(present={**ALL, "avx512f": False}).name == "avx2"
    assert choose_isa(present={"neon": True}).name == "neon"
    assert choose_isa(present={}).name == "scalar"
    assert choose_isa() == choose_isa(present=features())


def test_missing_lists_what_lacks() -> None:
    [avx2] = [isa for isa in isas() if isa.name == "avx2"]
    assert avx2.missing({"avx2": True, "fma": False}) == ("fma", "f16c")
    assert avx2.missing(ALL) == ()


def test_override_by_environment_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_ENV, "avx2")
    assert choose_isa(present=ALL).name == "avx2"
    assert choose_isa("scalar", present=ALL).name == "scalar", "the argument goes before the environment"
    monkeypatch.setenv(ISA_ENV, "")
    assert choose_isa(present=ALL).name == "amx", "an empty variable is none"


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setenv(ISA_ENV, "sse9")
    with pytest.raises(ValueError, match=r"unknown instruction set 'sse9'; known: amx, .*scalar.*CPU_KERNELS_ISA"):
        choose_isa("sse9" if how == "argument" else None, present=ALL)


def test_unsupported_is_refused_and_never_replaced_by_another() -> None:
    with pytest.raises(ValueError, match=r"'avx2' needs fma, f16c, which this machine lacks"):
        choose_isa("avx2", present={"avx2": True})


def test_info_reports_the_choice() -> None:
    run = run_info()
    assert run.returncode == 0, run.stderr
    assert run.stdout.rstrip("\n") == describe()
    assert f"chosen    {choose_isa().name} (override: {ISA_ENV})" in run.stdout
    assert f"{len(os.sched_getaffinity(0))} usable cores" in run.stdout
    present = features()
    for isa in isas():
        [line] = [line for line in run.stdout.splitlines() if line.startswith(f"  {isa.name} ")]
        assert line.endswith("available") == (not isa.missing(present))


def test_info_takes_the_override() -> None:
    run = run_info("scalar")
    assert run.returncode == 0
    assert "chosen    scalar" in run.stdout


def test_info_with_a_bad_override_says_so_and_exits_with_2() -> None:
    run = run_info("nonsense")
    assert run.returncode == 2
    assert run.stdout == ""
    assert run.stderr.startswith("error: unknown instruction set 'nonsense'")
    assert run.stderr.count("\n") == 1


def test_the_library_needs_neither_torch_nor_sglang() -> None:
    # Compared with before: the environment's start may itself have imported sglang_neo's bridge for torchvision.
    script = "import sys; before = set(sys.modules); import cpu_kernels; print(*sorted(set(sys.modules) - before))"
    run = subprocess.run([sys.executable, "-c", script], cwd=REPO_ROOT, capture_output=True, text=True, timeout=60)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert "cpu_kernels" in loaded, run.stderr
    assert not loaded & {"torch", "sglang", "sglang_neo", "numpy"}
