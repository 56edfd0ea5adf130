"""The tools: bench, calibration, info, and what they stand on. Nothing here asserts how fast anything is."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu_kernels import _probe, anchors, bench, calibration, cases, info, machine, plot, tuning_files
from cpu_kernels.attention import HostPool, Plan, Tuning
from cpu_kernels.isa import choose_isa
from cpu_kernels.probe import Memory, ReadProbe, Threads, worker_threads
from tests.kernels import reference

REPO_ROOT = Path(__file__).parents[2]
TINY = ["--shape", "4,2,64", "--repetitions", "3", "--budget", "200"]


@pytest.fixture(autouse=True)
def small_and_hermetic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine with next to no cache, and no calibration but this test's own."""
    monkeypatch.setattr(machine, "last_level_cache_bytes", lambda: 1 << 20)
    monkeypatch.setattr(bench, "_REPETITION_S", 1e-3)
    monkeypatch.setenv(tuning_files.CALIBRATION_ENV, str(tmp_path / "calibration"))
    monkeypatch.setattr(sys, "argv", ["bench"])
    tuning_files._loaded.clear()
    yield
    tuning_files._loaded.clear()


# ---- bench


def test_bench_writes_the_whole_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, lengths = tmp_path / "results.json", tmp_path / "lengths.json"
    lengths.write_text("[1, 50, 100, 130]")
    args = ["--lengths", str(lengths), "--json", str(target), *TINY]
    wanted = ["--cases", "3x70", "shared:4x64", "copies:4x64", "ragged"]
    assert bench.main([*wanted, "--dtypes", *bench.DTYPES, "--threads", "1", "2", *args]) == 0
    document = json.loads(target.read_text())
    assert document["command"].startswith("python -m cpu_kernels.bench")
    assert {"cpu", "cores", "l3_bytes", "memory_bytes"} <= set(document["machine"])
    assert {"date", "commit", "versions", "calibration", "probes", "skipped", "ratios", "walked_bytes"} <= set(document)
    assert document["shape"] == {"q_heads": 4, "kv_heads": 2, "head_dim": 64}
    ours = [r for r in document["results"] if r["backend"] == "cpu_kernels"]
    assert {(r["case"], r["dtype"], r["threads"]) for r in ours} == {
        (case, dtype, threads) for case in wanted[1:] for dtype in bench.DTYPES for threads in (1, 2)
    }
    for r in document["results"]:
        for key in ("gb_per_s", "fraction", "probe_gb_per_s", "tokens_per_s", "median_ms", "tokens", "rows"):
            assert r[key] > 0, (key, r)
        assert r["spread"] >= 0 and r["repetitions"] == 3
        assert 0 <= r["error"] <= r["error_bound"]
        assert r["fraction_min"] <= r["fraction"] <= r["fraction_max"]
        assert (r["isa"] is None) == (r["backend"] != "cpu_kernels")
    assert {r["backend"] for r in document["results"]} >= set(anchors.SDPA)
    shared = next(r for r in ours if r["case"] == "shared:4x64")
    assert shared["tokens"] == 4 * 64 and shared["bytes_per_layer"] == 64 * 2 * 2 * 64 * 2
    assert any(line["what"].startswith("shared prefix") for line in document["ratios"])
    out = capsys.readouterr().out
    assert sum(line.startswith("3x70 ") for line in out.splitlines()) >= len(bench.DTYPES) * 2


def test_walks_at_least_four_times_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "last_level_cache_bytes", lambda: 4 << 20)
    _, options = bench.parse(["--cases", "1x64", "--dtypes", "bf16", "--threads", "1", "--no-compare", *TINY])
    with worker_threads() as make_threads:
        session = bench.Session(options, make_threads, float("inf"))
        assert session.memory.bytes >= 16 << 20
        runner = session.runner(options.entries[0])
    assert runner.layers * runner.bytes >= 16 << 20


def test_less_memory_than_wanted_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_memory", lambda: 4 << 20)
    _, options = bench.parse(["--cases", "1x64", "--dtypes", "bf16", "--threads", "1", "--no-compare", *TINY])
    document = bench.run(options)
    assert document["walked_bytes"] == 2 << 20
    assert len([line for line in document["remarks"] if "2 MiB used: half of what is available" in line]) == 1


def test_a_busy_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    _, options = bench.parse(["--cases", "1x64", "--dtypes", "bf16", "--threads", "1", "--no-compare", *TINY])
    for load, said in ((0.0, False), (64.0 * machine.usable_cores(), True)):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, load, load))
        document = bench.run(options)
        assert document["machine"]["load_before"] == load
        assert any("the machine is busy" in line for line in document["remarks"]) == said


class WrongScale(Plan):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, scale=0.01, **options)


class WrongPages(Plan):
    def __init__(self, pool: HostPool, lengths: Any, tables: Any, q_heads: int, **options: Any) -> None:
        last = tables[-1].copy()
        last[0] = (last[0] + 1) % pool.pages
        super().__init__(pool, lengths, [*tables[:-1], last], q_heads, **options)


class WrongIsa(Plan):
    @property
    def ran(self) -> set[str]:
        return {"another"}


@pytest.mark.parametrize("wrong", [WrongScale, WrongPages, WrongIsa])
@pytest.mark.parametrize("dtype", ["bf16", "int8-fast"])
def test_a_wrong_answer_gets_no_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, wrong: type, dtype: str
) -> None:
    monkeypatch.setattr(bench, "Plan", wrong)
    target = tmp_path / "results.json"
    args = ["--cases", "4x200", "--dtypes", dtype, "--threads", "1", *TINY, "--json", str(target)]
    assert bench.main(args) == 1
    said = capsys.readouterr()
    assert "error: wrong answer: 4x200" in said.err
    assert not [line for line in said.out.splitlines() if line.startswith("4x200")]
    assert not target.exists()


def test_a_wrong_answer_of_others_gets_no_number_either(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    right = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *args, **options: right(*args, **options) * 1.1
    )
    assert bench.main(["--cases", "2x64", "--dtypes", "bf16", "--threads", "1", *TINY]) == 1
    said = capsys.readouterr()
    assert anchors.SDPA[0] in said.err
    assert not [line for line in said.out.splitlines() if anchors.SDPA[0] in line]


def test_what_does_not_fit_the_budget_is_listed_as_skipped() -> None:
    _, options = bench.parse(["--cases", "2x64", "--dtypes", "bf16", "--threads", "1", *TINY[:-1], "1e-3"])
    document = bench.run(options)
    assert document["results"] == []
    assert len(document["skipped"]) == len(options.entries)
    assert {s["reason"] for s in document["skipped"]} == {"the time is up (--budget)"}


def test_others_that_are_not_installed_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(anchors.importlib.util, "find_spec", lambda name: None)
    assert bench.main(["--cases", "2x64", "3x64", "--dtypes", "bf16", "fp16", "--threads", "1", *TINY]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "not installed" in line]
    assert sorted(lines) == [
        f"{anchors.GGML} skipped: llama_cpp is not installed",
        *(f"{name} skipped: torch is not installed" for name in sorted(anchors.SDPA)),
    ]


def test_absolute_paths_do_not_enter_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--json", "/somewhere/private/results.json"])
    _, options = bench.parse(["--cases", "1x64", "--dtypes", "bf16", "--threads", "1", "--no-compare", *TINY])
    assert "private" not in json.dumps(bench.run(options))


def test_the_default_covers_what_it_should() -> None:
    _, options = bench.parse([])
    ours = [e for e in options.entries if e.backend == "cpu_kernels"]
    assert {e.case.name for e in ours if e.dtype == "bfloat16"} == set(bench.CASES)
    assert {e.dtype for e in ours} == set(bench.DTYPES)
    assert {e.threads for e in ours} == {1, machine.usable_cores()}
    assert {e.backend for e in options.entries} == {"cpu_kernels", *anchors.SDPA, anchors.GGML}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--cases", "64*1024"], "unknown case '64*1024'"),
        (["--cases", "0x10"], "unknown case"),
        (["--dtypes", "fp8"], "unknown element type 'fp8'"),
        (["--isa", "sse9"], "unknown instruction set 'sse9'"),
        (["--threads", "0"], "threads must be at least 1"),
        (["--shape", "32,8"], "shape must be"),
        (["--shape", "34,2,64"], "q_heads must be 1 to 16 times"),
        (["--repetitions", "2"], "repetitions must be at least 3"),
        (["--budget", "0"], "budget must be positive"),
        (["--json", "/nonexistent/folder/x.json"], "the folder does not exist"),
        (["--lengths", "/nonexistent.json"], "No such file"),
        (["--tuning", "speed=9"], "unknown field of Tuning 'speed'"),
        (["--tuning", "prefetch_tiles=x"], "--tuning prefetch_tiles=x: not a number"),
        (["--tuning", "prefetch_hint=t9"], "prefetch_hint must be one of"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(args) == 2
    said = capsys.readouterr()
    assert words in said.err and said.err.startswith("error: ") and said.err.count("\n") == 1
    assert said.out == ""


def test_plot_without_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert bench.main(["--plot", "x.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_plot_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "plot.png"
    args = ["--cases", "2x64", "1x64", "--dtypes", "bf16", "int8", "--threads", "1", "2", *TINY]
    assert bench.main([*args, "--plot", str(target)]) == 0
    assert target.read_bytes().startswith(b"\x89PNG")


# ---- cases


def test_the_reference_of_the_bench_agrees_with_the_one_of_the_tests() -> None:
    shape = cases.Shape(6, 2, 32)
    data = cases.Data(Memory(8 << 20), 8 << 20, shape, "float32", 1)
    case = cases.Case("x", (1, 63, 64, 65, 300))
    pages = cases.case_pages(case)
    tables = cases.random_tables(case, pages)
    pool, layer = data.view(pages), 2
    q = np.random.default_rng(0).standard_normal((5, 6, 32)).astype(np.float32)
    keys, values = [], []
    for n, table in zip(case.lengths, tables, strict=True):
        places = np.array([int(table[t // 64]) * 64 + t % 64 for t in range(n)])
        k, v = np.empty((n, 2, 32), np.float32), np.empty((n, 2, 32), np.float32)
        pool.read(layer, places, k, v)
        keys.append(k)
        values.append(v)
    want, _ = reference.attention(q, keys, values, 32**-0.5)
    got = data.reference(q, case.lengths, tables, layer * pages)
    np.testing.assert_allclose(got, want, atol=1e-12)


def test_broken_quantisation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = HostPool.read

    def shifted(self: HostPool, layer: int, places: Any, k: Any, v: Any, **options: Any) -> None:
        right(self, layer, places, k, v, **options)
        k += 0.05

    monkeypatch.setattr(HostPool, "read", shifted)
    with pytest.raises(cases.WrongAnswer, match="int8 pages"):
        cases.Data(Memory(4 << 20), 4 << 20, cases.Shape(2, 1, 64), "int8", 1)


def test_the_ragged_default_is_fixed_and_a_file_is_spread_evenly() -> None:
    assert cases.ragged() == cases.ragged()
    assert len(cases.ragged().lengths) == 64 and 1 <= min(cases.ragged().lengths) < max(cases.ragged().lengths)
    assert sorted(cases.ragged([5, 1, 3], rows=3).lengths) == [1, 3, 5]


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("[3, 1, 2]", [3, 1, 2]),
        ('[{"prompt": 7, "max_tokens": 2}, {"prompt": 9}]', [7, 9]),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15,374,44\n2023-11-16 18:16,396,109\n", [374, 396]),
        ("12\n13\n", [12, 13]),
        ("id,length\n0,5\n\n1,6\n", [5, 6]),
    ],
)  # fmt: skip
def test_lengths_files(tmp_path: Path, text: str, lengths: list[int]) -> None:
    path = tmp_path / "lengths"
    path.write_text(text)
    assert cases.read_lengths(path) == lengths


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[1, 2", "not JSON"),
        (b'{"lengths": [1]}', "a JSON list is needed"),
        (b"[1, 0]", "entry 2: a length of at least 1 is needed, not 0"),
        (b"[1, 2.5]", "entry 2"),
        (b"[true]", "entry 1"),
        (b"[null]", "entry 1"),
        (b"[[1]]", "entry 1"),
        (b'[{"tokens": 3}]', "entry 1"),
        (b"[99999999999]", "entry 1"),
        (b"[]", "no lengths"),
        (b"", "no lengths"),
        (b"a,b\n1,2\n", "none of the columns"),
        (b"length\n5\nmany\n", "entry 2"),
        (b"id,length\n5\n", "entry 1"),
        (b"\xff\xfe\x00", "not a text file"),
    ],
)
def test_a_bad_lengths_file_is_one_clear_line(
    tmp_path: Path, content: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.txt"
    path.write_bytes(content)
    assert bench.main(["--lengths", str(path), "--cases", "ragged"]) == 2
    said = capsys.readouterr().err
    assert str(path) in said and words in said and said.count("\n") == 1


# ---- probe


def test_the_probe_reads_on_through_the_memory() -> None:
    memory = Memory(8 << 20, threads=2)
    for threads in (1, 2):
        with worker_threads() as make_threads:
            probe = ReadProbe(memory, make_threads(threads), 4 << 20)
            assert probe.pass_bytes == 4 << 20 and set(probe.tried) >= {"16-byte loads", "16-byte loads, 4 streams"}
            assert probe.name in probe.tried and probe.gb_per_s() > 0
            assert {probe._at, (probe.gb_per_s(), probe._at)[1]} == {4 << 20, 8 << 20}


@pytest.mark.parametrize("threads", [1, 3])
def test_memory_is_filled_to_its_end(threads: int) -> None:
    pattern = bytes(range(1, 252))
    memory = Memory(2 << 20, pattern, threads)
    assert memory.bytes == 2 << 20 and memory.address % (2 << 20) == 0
    whole = (pattern * (memory.bytes // len(pattern) + 1))[: memory.bytes]
    assert bytes(memory.view()) == whole
    memory.fill(b"\0", threads, 1 << 20)
    assert bytes(memory.view(0, 1 << 20)) == bytes(1 << 20) and bytes(memory.view(1 << 20)) == whole[1 << 20 :]


def test_bad_read_jobs_are_refused() -> None:
    good = Memory(2 << 20)
    for variant, address, size, chunk in (
        (99, good.address, 1 << 20, 1 << 18),
        (0, 0, 1 << 20, 1 << 18),
        (0, good.address + 1, 1 << 20, 1 << 18),
        (0, good.address, 1 << 10, 1 << 18),
        (0, good.address, 1 << 20, 1000),
    ):
        with pytest.raises(ValueError):
            _probe.ReadJob(variant, address, size, chunk)
    job = _probe.ReadJob(len(_probe.variants()) - 1, good.address, (1 << 20) + 5, 1 << 18)
    assert job.bytes == 1 << 20
    with pytest.raises(ValueError):
        job.run(0)


def test_threads_run_every_item_once() -> None:
    rows = 5
    pool = HostPool(np.zeros(HostPool.bytes_needed(1, 8, 2, 64), np.uint8), 1, 8, 2, 64)
    plan = Plan(pool, [10] * rows, [[i] for i in range(rows)], 4, threads=2, tuning=Tuning(min_thread_tokens=1))
    q = np.zeros((rows, 4, 64), np.uint16)
    out = np.full_like(q, 0xFFFF)
    job = plan.job(0, q, out)
    with worker_threads() as make_threads:
        for threads in (Threads(1), Threads(2), make_threads(2), make_threads(1)):
            out[:] = 0xFFFF
            assert threads.seconds(job, job) > 0
            assert not out.any()


def test_measuring_threads_are_pinned_only_while_they_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    usable = os.sched_getaffinity(0)
    seen: list[set[int]] = []

    class Look:
        address = 0

        def run(self, threads: int) -> None:
            seen.append(os.sched_getaffinity(0))

    with worker_threads() as make_threads:
        make_threads(1).seconds(Look())
        assert os.sched_getaffinity(0) == usable
        for count in (len(usable), len(usable) + 1):
            threads = make_threads(count)
            cores = threads.pool.cores if threads.pool else ()
            if count <= len(usable):
                assert {*cores, threads.core} == usable and seen[0] == {threads.core}
            else:
                assert cores == () and threads.core is None, "more threads than cores: left to the system"


# ---- calibration

Saver = Callable[..., Path]


@pytest.fixture
def saved() -> Saver:
    """Saves a calibration of this machine with the given fields of Tuning; its path."""

    def save(**tuning: Any) -> Path:
        return tuning_files.save(
            tuning_files.Calibration(
                machine.cpu_id(), choose_isa().name, tuning_files.build_id(), 2, "2030-01-01", 0.5, tuning
            )
        )

    return save


def test_calibration_measures_saves_and_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert calibration.main(["--threads", "2", "--dry-run"]) == 0
    assert tuning_files.load() is None and not (tmp_path / "calibration").exists()
    tuning_files._loaded.clear()
    result = calibration.calibrate(threads=2, seconds=0.05)
    assert {"prefetch_hint", "prefetch_tiles", "min_thread_tokens", "prefix_min_rows"} <= set(result.tuning)
    assert all(trial.microseconds > 0 for trial in result.tried)
    path = calibration.save(result)
    assert path.parent == tmp_path / "calibration" and [p.name for p in path.parent.iterdir()] == [path.name]
    assert tuning_files.load() == result.applied()
    assert tuning_files.find().calibration == result
    text = calibration.table(result)
    assert "prefetch_hint" in text and "chosen:" in text
    assert "chosen:" in capsys.readouterr().out


def test_one_thread_has_no_threshold_between_threads() -> None:
    assert "min_thread_tokens" not in calibration.calibrate(threads=1, seconds=0.02).tuning


def test_thresholds_between_kernels_are_measured_where_they_mean_something(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = choose_isa().name
    for name in ("DOT_ISAS", "TILE_ISAS"):
        monkeypatch.setattr(calibration, name, ())
    assert not {"dot_min_queries", "tile_min_queries"} & set(calibration.calibrate(isa, 1, seconds=0).tuning)
    for name in ("DOT_ISAS", "TILE_ISAS"):
        monkeypatch.setattr(calibration, name, (isa,))
    result = calibration.calibrate(isa, 1, seconds=0)
    assert {"dot_min_queries", "tile_min_queries"} <= set(result.tuning)
    assert all(1 <= result.tuning[name] <= 17 for name in ("dot_min_queries", "tile_min_queries"))
    assert {trial.what for trial in result.tried} >= {"dot_min_queries", "tile_min_queries"}
    result.applied()


def test_plans_use_what_was_saved(saved: Saver) -> None:
    pool = HostPool(np.zeros(HostPool.bytes_needed(1, 16, 1, 64), np.uint8), 1, 16, 1, 64)

    def partials(**options: Any) -> int:
        return Plan(pool, [1024], [range(16)], 1, threads=4, **options).native.partials

    assert partials() == partials(tuning=Tuning()) > 0
    saved(min_split_tokens=1024)
    assert partials() == 0
    assert partials(tuning=Tuning()) > 0


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda p: change(p, build="0" * 16), "measured with another build"),
        (lambda p: change(p, cpu="another"), "measured on another CPU"),
        (lambda p: change(p, isa="another"), "of another instruction set"),
        (lambda p: change(p, format=99), "another format"),
        (lambda p: change(p, tuning={"prefetch_hint": "t9"}), "corrupt"),
        (lambda p: change(p, tuning={"prefetch_tiles": 3}), "corrupt"),
        (lambda p: change(p, tuning={"min_split_tokens": "many"}), "corrupt"),
        (lambda p: change(p, tuning={"min_split_tokens": True}), "corrupt"),
        (lambda p: change(p, tuning={"min_split_tokens": 2**40}), "corrupt"),
        (lambda p: change(p, tuning={"no_such_field": 1}), "corrupt"),
        (lambda p: change(p, tuning=[1]), "corrupt"),
        (lambda p: change(p, tried=[{"what": 1}]), "corrupt"),
        (lambda p: p.write_text("{"), "corrupt"),
        (lambda p: p.write_text("[]"), "another format"),
        (lambda p: p.write_text("[" * 100_000), "corrupt"),
        (lambda p: p.write_bytes(b"\xff\xfe"), "cannot be read"),
        (lambda p: (p.unlink(), p.mkdir()), "cannot be read"),
    ],
)
def test_what_does_not_hold_here_is_ignored_with_one_line(
    saved: Saver, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], Any], words: str
) -> None:
    path = saved(prefetch_hint="nta")
    assert tuning_files.load() == Tuning(prefetch_hint="nta")
    tuning_files._loaded.clear()
    spoil(path)
    with caplog.at_level(logging.INFO):
        assert tuning_files.load() is None
        assert tuning_files.load() is None
    assert len(caplog.records) == 1 and words in caplog.text and str(path) in caplog.text
    assert words in info.describe()


def test_calibration_can_be_switched_off(saved: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(prefetch_hint="nta")
    monkeypatch.setenv(tuning_files.CALIBRATION_ENV, "off")
    assert tuning_files.load() is None
    assert calibration.ensure() == Tuning()
    assert "switched off" in info.describe()
    with pytest.raises(ValueError, match="switched off"):
        saved()


def test_where_results_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(tuning_files.CALIBRATION_ENV)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning_files.directory() == tmp_path / "cpu_kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning_files.directory() == tmp_path / ".cache" / "cpu_kernels"
    names = {p.name for isa in ("avx2", "scalar") if (p := tuning_files.file_of(isa))}
    monkeypatch.setattr(machine, "cpu_id", lambda: "Another CPU/../..")
    assert (
        (other := tuning_files.file_of("avx2"))
        and other.name not in names
        and other.parent == tmp_path / ".cache/cpu_kernels"
    )
    assert len(names) == 2  # fmt: skip


def test_a_write_that_fails_leaves_what_was_there(saved: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(prefetch_hint="t2")
    before = path.read_text()

    def fail(*_: Any) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="no space"):
            saved(prefetch_hint="nta")
    assert path.read_text() == before
    assert list(path.parent.iterdir()) == [path]


def test_ensure_measures_once_even_if_it_cannot_save(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    measured = []

    def calibrate(isa: str | None = None, threads: int | None = None) -> tuning_files.Calibration:
        measured.append(isa)
        name = choose_isa(isa).name
        return tuning_files.Calibration(
            machine.cpu_id(), name, tuning_files.build_id(), 1, "2030-01-01", 0.1, {"prefetch_hint": "t2"}
        )

    monkeypatch.setattr(calibration, "calibrate", calibrate)
    (tmp_path / "calibration").write_text("a file where the folder should be")
    assert calibration.ensure().prefetch_hint == "t2"
    assert calibration.ensure().prefetch_hint == "t2"
    assert len(measured) == 1 and "was not saved" in caplog.text


def test_of_two_that_start_together_one_measures(monkeypatch: pytest.MonkeyPatch, saved: Saver) -> None:
    """The other one waits, and takes what was saved meanwhile."""
    monkeypatch.setattr(calibration, "calibrate", lambda *_: pytest.fail("measured a second time"))
    where = tuning_files.directory()
    assert where is not None
    found: list[Tuning] = []
    other = threading.Thread(target=lambda: found.append(calibration.ensure()))
    with calibration._turn(where):
        other.start()
        other.join(0.2)
        assert other.is_alive()
        saved(prefetch_hint="nta")
    other.join(60)
    assert [tuning.prefetch_hint for tuning in found] == ["nta"]


def test_bad_arguments_of_calibration_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert calibration.main(["--isa", "sse9"]) == 2
    assert calibration.main(["--threads", "0"]) == 2
    assert capsys.readouterr().err.count("error: ") == 2


# ---- info


def test_info_says_what_matters(saved: Saver) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "cpu_kernels.info"], cwd=REPO_ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    for word in ("machine ", "cores ", "caches ", "memory ", "huge pages", "features ", "chosen ", "NUMA", "none yet"):
        assert word in run.stdout
    assert "prefetch_hint=t1" in run.stdout
    saved(prefetch_hint="nta")
    text = info.describe()
    assert "prefetch_hint=nta" in text and "measured 2030-01-01" in text


def test_the_machine_is_described_without_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_read", lambda path: None)
    assert machine.cpu_name() and machine.cpu_id()
    assert machine.cache_bytes(3) == 0 and machine.huge_pages() == "unknown"
    assert machine.available_memory() > 0


def test_caches_are_counted_once_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for cpu in range(4):
        for index, (level, kind, size, shared) in enumerate(
            ((1, "Data", "32K", str(cpu)), (1, "Instruction", "64K", str(cpu)), (2, "Unified", "1M", f"{cpu // 2}"),
             (3, "Unified", "8192K", "0-3"))
        ):  # fmt: skip
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, value in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(f"{value}\n")
    monkeypatch.setattr(machine, "_CPU", tmp_path)
    assert [machine.cache_bytes(level) for level in (1, 2, 3)] == [4 * 32 << 10, 2 << 20, 8 << 20]


def test_addresses_of_memory_are_the_mapping_itself() -> None:
    memory = Memory(2 << 20, b"\x05")
    memory.view()[7] = 9
    assert ctypes.c_ubyte.from_address(memory.address + 7).value == 9
