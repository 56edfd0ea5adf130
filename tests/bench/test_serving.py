"""The serving bench: workloads, measures, reports, and the whole driver once on the smallest workload."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from aiohttp import web

from bench.servers import error_lines, wait_until
from bench.serving import __main__ as serving
from bench.serving import client, report, selftest
from bench.serving.client import METRIC_NAMES, Answer, parse_metrics
from bench.serving.measures import decode_only, latencies, measure, percentile, server_side, steady_window
from bench.serving.workloads import Ask, WorkloadError, parse, parse_all
from tests.harness.models import REPO_ROOT

# -- workloads ----------------------------------------------------------------------------------------------------


def test_workloads_are_the_same_for_the_same_seed_only() -> None:
    [one], [two], [other] = (parse("backlog:prompt=20,output=5,count=3", 1000, seed) for seed in (1, 1, 2))
    assert one == two != other
    assert [len(ask.prompt) for ask in one.asks] == [20] * 3 and one.concurrency == 3
    assert all(len(set(ask.prompt)) > 10 for ask in one.asks), "never one token repeated"
    assert all(3 <= token < 1000 for ask in one.asks for token in ask.prompt)


def test_poisson_arrivals_have_their_rate() -> None:
    [workload] = parse("poisson:rate=50,prompt=1,output=1,count=2000", 100)
    times = [ask.at for ask in workload.asks]
    assert times == sorted(times) and times[0] == 0 and workload.concurrency is None
    assert 1999 / times[-1] == pytest.approx(50, rel=0.1)


def test_each_kind_of_workload() -> None:
    sweep = parse("sweep:rates=1/2.5,prompt=4,output=2,count=3", 100)
    assert [w.name.split(",")[0] for w in sweep] == ["poisson:rate=1", "poisson:rate=2.5"]
    grid = parse("grid:prompts=4/8,outputs=1/2,count=2", 100)
    assert [(len(w.asks[0].prompt), w.asks[0].output_tokens) for w in grid] == [(4, 1), (4, 2), (8, 1), (8, 2)]
    [trace] = parse("trace:count=50,speed=2,longest=500", 100)
    assert len(trace.asks) == 50 and trace.asks[10].at > trace.asks[1].at > 0
    assert all(1 <= len(ask.prompt) <= 500 for ask in trace.asks)
    [slow] = parse("trace:count=50,longest=500", 100)
    assert slow.asks[10].at == pytest.approx(2 * trace.asks[10].at)
    [lengths] = parse("lengths:count=20,rate=3", 100)
    assert len({len(ask.prompt) for ask in lengths.asks}) > 5
    [prefixes] = parse("prefixes:prefixes=2,prefix=30,suffix=5,output=1,count=6", 100)
    starts = [ask.prompt[:30] for ask in prefixes.asks]
    assert len(set(starts)) == 2 and len({ask.prompt for ask in prefixes.asks}) == 6
    [chat] = parse("chat:users=2,turns=3,prompt=5,output=1", 100)
    assert [ask.after for ask in chat.asks] == [None, None, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("marathon", "no workload 'marathon'"),
        ("backlog:prompts=5", "knows prompt, output"),
        ("backlog:prompt=zero", "zero"),
        ("backlog:prompt=0", "at least one token"),
        ("poisson:rate=0", "greater than 0"),
        ("trace:name=nothing", "there are azure_conv_2023, openai_summaries"),
        ("trace:name=openai_summaries", "no arrival times"),
        ("trace:count=1000000", "has 3000 requests"),
    ],
)
def test_a_workload_that_makes_no_sense(text: str, said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        parse_all([text], 100)


# -- measures -----------------------------------------------------------------------------------------------------


def answer(index: int, sent: float, first: float, step: float, tokens: int, on_host: int = 0) -> Answer:
    times = [first + i * step for i in range(tokens)]
    return Answer(index, 10, sent, times, on_host=[0] * (tokens - on_host) + [1] * on_host, output_ids=[5] * tokens)


def test_percentiles() -> None:
    assert percentile([4, 1, 3, 2], 0.5) == 2.5 and percentile([7], 0.99) == 7 and percentile([1, 2], 1.0) == 2


def test_latencies() -> None:
    found = latencies([answer(0, 1.0, 1.5, 0.1, 11), answer(1, 2.0, 2.7, 0.2, 11)])
    assert found["requests"] == 2
    assert found["ttft_s"]["mean"] == pytest.approx(0.6)
    assert found["tpot_s"]["mean"] == pytest.approx(0.15)
    assert found["end_to_end_s"]["p50"] == pytest.approx((1.5 + 2.7) / 2)
    assert latencies([])["ttft_s"] is None


def test_decode_only_is_requests_over_step_time() -> None:
    """Ten requests at 0.1 s a token, with one long pause for somebody's prefill: the pause does not count."""
    answers = [answer(i, 0.0, 1.0, 0.1, 100) for i in range(10)]
    for a in answers:
        a.token_times[50:] = [t + 5.0 for t in a.token_times[50:]]
    found = decode_only(answers)
    assert found["window_s"] == pytest.approx([1.0, 15.9])
    assert found["tokens_per_s"] == pytest.approx(100, rel=1e-6)
    sustained = measure(answers, 20.0, [])["sustained_tokens_per_s"]
    assert sustained == pytest.approx(1000 / 15.9)


def test_decode_only_of_requests_with_a_token_every_so_many_steps() -> None:
    """Steps of 0.1 s, every fifth with a prefill of 0.05 s before it; a deferred request has a token every ten: never
    without a prefill, yet 1 token a second is its part."""
    ends = [0.1 * i + 0.05 * (i // 5) for i in range(201)]
    answers = [dataclasses.replace(answer(i, 0.0, 0.0, 0.1, 0), token_times=list(ends)) for i in range(4)]
    deferred = ends[::10]
    answers.append(
        dataclasses.replace(answer(4, 0.0, 0.0, 0.1, 0), token_times=deferred, on_host=[0] + [1] * (len(deferred) - 1))
    )
    found = decode_only(answers)
    assert found["step_s"] == pytest.approx({"device": 0.1, "host": 1.1})
    assert found["requests"] == pytest.approx({"device": 4, "host": 1})
    assert found["tokens_per_s"] == pytest.approx(4 / 0.1 + 1, rel=1e-6)


def test_classes_are_told_apart() -> None:
    answers = [*(answer(i, 0.0, 1.0, 0.1, 50) for i in range(4)), answer(4, 0.0, 1.0, 0.4, 12, on_host=11)]
    found = measure(answers, 10.0, [])
    assert found["host"]["requests"] == 1 and found["device"]["requests"] == 4
    assert found["host_output_tokens"] == 11 and found["output_tokens"] == 212
    assert found["decode_only"]["step_s"] == pytest.approx({"device": 0.1, "host": 0.4})
    assert found["host"]["tpot_s"]["p50"] == pytest.approx(0.4)


def test_the_steady_window_leaves_out_the_ends() -> None:
    answers = [answer(i, 0.0, 1.0 + i, 1.0, 21) for i in range(10)]
    begin, end = steady_window(answers)
    assert begin == 8.0 and end == 23.0
    assert steady_window([]) == (0.0, 0.0)


def test_failures_are_counted() -> None:
    bad = Answer(3, 10, error="HTTP 500")
    found = measure([bad, answer(0, 0.0, 1.0, 0.1, 5)], 2.0, [])
    assert found["failed"] == 1 and found["errors"] == ["request 3: HTTP 500"] and found["all"]["requests"] == 1


def test_metrics_are_summed_over_ranks() -> None:
    page = (
        '# HELP sglang:num_running_reqs x\nsglang:num_running_reqs{tp_rank="0"} 3.0\n'
        'sglang:num_running_reqs{tp_rank="1"} 2.0\nsglang:neo_host_tokens_total{a="b"} 7\nsglang:other 5\n'
    )
    assert parse_metrics(page) == {"num_running_reqs": 5.0, "neo_host_tokens_total": 7.0}


def test_sglang_has_the_metrics_that_are_sampled() -> None:
    from sglang.srt.observability import metrics_collector

    source = inspect.getsource(metrics_collector)
    assert [n for n in METRIC_NAMES if not n.startswith("neo_") and f'"sglang:{n}"' not in source] == []


def test_counters_count_from_where_the_run_began() -> None:
    samples: list[dict[str, float]] = [
        {"time": 0.0, "neo_steps_total": 5.0, "token_usage": 0.2},
        {"time": 1.0, "neo_steps_total": 9.0, "token_usage": 0.4, "num_retracted_requests_total": 3.0},
    ]
    found = server_side(samples)
    assert found["neo_steps"] == 4 and found["num_retracted_requests"] == 3, "absent until it first counts"
    assert found["token_usage_mean"] == pytest.approx(0.3) and found["token_usage_max"] == 0.4


# -- reports ------------------------------------------------------------------------------------------------------


def result(factor: float = 1.0, jitter: float = 0.01) -> dict[str, Any]:
    runs = []
    for round_ in range(3):
        for variant, speed in (("plain", 1.0), ("neo", 1.2)):
            step = 0.1 / (speed * factor * (1 + jitter * (round_ - 1)))
            measures = measure([answer(i, 0.0, 1.0, step, 50) for i in range(4)], 10.0, [])
            samples = [{"time": float(i), "num_running_reqs": float(i)} for i in range(3)]
            for rate in ("1", "2"):
                workload = f"poisson:rate={rate},count=4"
                runs.append(
                    {
                        "workload": workload,
                        "variant": variant,
                        "round": round_,
                        "measures": measures,
                        "samples": samples,
                    }
                )
    return {"runs": runs}


def test_the_summary_has_ratios_to_the_first_variant() -> None:
    entries = {(e["variant"], e["figure"]): e for e in report.summary(result()["runs"])}
    assert entries["plain", "decode tok/s"]["ratio"] == 1.0
    assert entries["neo", "decode tok/s"]["ratio"] == pytest.approx(1.2)
    assert entries["neo", "decode tok/s"]["rounds"] == 3
    text = report.table(result()["runs"])
    assert "poisson:rate=1" in text and "x1.200" in text


def sweep(points: dict[str, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """Runs at rates 1, 2, ... of variants with these (E2E p99, tokens per second)."""
    base = measure([answer(0, 0.0, 1.0, 0.1, 5)], 10.0, [])
    return [
        {
            "workload": f"poisson:rate={i}",
            "variant": variant,
            "round": 0,
            "measures": {
                **base,
                "sustained_tokens_per_s": rate,
                "all": {**base["all"], "end_to_end_s": {"p50": 0.1, "p99": late, "mean": 0.1}},
            },
        }
        for variant, own in points.items()
        for i, (late, rate) in enumerate(own)
    ]


def test_throughput_at_equal_latency() -> None:
    runs = sweep(
        {
            "plain": [(2.0, 100.0), (4.0, 200.0), (9.0, 190.0)],
            "neo": [(1.0, 90.0), (3.0, 180.0), (5.0, 240.0), (20.0, 300.0)],
        }
    )
    found = [(p["e2e_p99_s"], p["first_tokens_per_s"]) for p in report.at_equal_latency(runs)]
    assert found == [(1.0, None), (3.0, 150.0), (5.0, 200.0), (20.0, 200.0)]
    text = report.table(runs)
    assert "3 s, 180.0 against 150.0, x1.200" in text and "the first variant has at least 2 s" in text
    failed = [runs[0] | {"measures": runs[0]["measures"] | {"all": {"end_to_end_s": None}}}, *runs[1:]]
    assert [p["variant"] for p in report.at_equal_latency(failed)] == ["neo"] * 4, "plain is the first all the same"
    assert report.at_equal_latency(sweep({"plain": [(2.0, 100.0)]})) == []
    assert report.at_equal_latency([run | {"workload": "backlog"} for run in runs]) == []


def test_the_table_has_latencies_by_class() -> None:
    answers = [*(answer(i, 0.0, 1.0, 0.1, 50) for i in range(4)), answer(4, 0.0, 2.0, 0.4, 12, on_host=11)]
    runs = [{"workload": "backlog", "variant": "neo", "round": 0, "measures": measure(answers, 10.0, [])}]
    lines = report.table(runs).splitlines()
    assert "    device: 4 requests, TTFT p50 1 p99 1, TPOT p50 0.1 p99 0.1, E2E p50 5.9 p99 5.9" in lines
    assert "    host: 1 requests, TTFT p50 2 p99 2, TPOT p50 0.4 p99 0.4, E2E p50 6.4 p99 6.4" in lines


def test_a_change_beyond_the_spread_is_found() -> None:
    assert report.compare(result(), result(1.01)) == []
    found = report.compare(result(), result(0.9))
    assert found and all("-" in line for line in found) and "decode tok/s" in found[-1]
    assert report.compare(result(jitter=0.1), result(0.9, jitter=0.1)) == [], "their rounds differ by as much"
    with pytest.raises(ValueError, match="in common"):
        report.compare(result(), {"runs": []})


def test_the_allowed_spread_can_be_stated(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name, each in (("a", result(jitter=0.1)), ("b", result(0.9, jitter=0.1)), ("even", result(jitter=0.01))):
        (tmp_path / name).write_text(json.dumps(each))
    a, b, even = (str(tmp_path / name) for name in ("a", "b", "even"))
    assert serving.main(["--compare", a, b]) == 0, "their rounds differ by as much"
    assert serving.main(["--compare", a, b, "--spread", "0.05"]) == 1
    assert serving.main(["--compare", a, b, "--spread", "0.2"]) == 0
    assert serving.main(["--compare", a, "--spread", "0.05"]) == 1
    assert "in 3 rounds" in capsys.readouterr().out
    assert serving.main(["--compare", even, "--spread", "0.05"]) == 0


def test_ratios_are_taken_within_a_round() -> None:
    """The first round of plain is missing: the others must not be divided by their neighbours."""
    runs = [run for run in result(jitter=0.3)["runs"] if (run["variant"], run["round"]) != ("plain", 0)]
    runs.sort(key=lambda run: run["variant"] != "plain")
    entries = {(e["variant"], e["figure"]): e for e in report.summary(runs)}
    assert entries["neo", "decode tok/s"]["ratio"] == pytest.approx(1.2)


def test_rounds_apart_by_more_than_the_stated_spread_are_found() -> None:
    """The rounds of ``result`` differ by twice its jitter."""
    assert report.uneven(result(jitter=0.02), 0.05) == []
    assert report.uneven(result(jitter=0.03), 0.05)


def test_plots(tmp_path: Path) -> None:
    names = {path.name for path in report.plots(result(), tmp_path)}
    assert names == {"load_latency.png", "ratios.png", "timeline_0.png", "timeline_1.png"}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)


# -- the driver ---------------------------------------------------------------------------------------------------


def test_a_run_is_sampled_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short it is: counters grow between the first and the last sample."""
    samples: list[float] = []

    async def note(session: object, url: str, found: object, start: float) -> None:
        samples.append(start)

    def sampled(url: str, workload: Any, timeout_s: float, sample_every_s: float) -> client.Run:
        return client.run(url, workload, timeout_s, sample_every_s=1000)

    monkeypatch.setattr(client, "_sample_once", note)
    monkeypatch.setattr(selftest, "run", sampled)
    selftest.measure(streams=1, tokens=2)
    assert len(samples) == 2


def test_after_the_time_limit_nothing_is_begun(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def of(self: serving.Servers, chosen: serving.Variant) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(serving.Servers, "of", of)
    out = tmp_path / "result.json"
    argv = [str(tiny("llama")), "--out", str(out), "--workload", "backlog:count=1", "--rounds", "2"]
    assert serving.main([*argv, "--time-limit", "0"]) == 0
    assert "0 of 4 runs" in capsys.readouterr().out
    assert json.loads(out.read_text())["runs"] == []
    assert serving.main(argv) == 2, "without the limit it would have started one"


def test_the_client_loses_nothing_at_full_speed() -> None:
    found = selftest.measure(streams=8, tokens=50)
    assert found["chunks_per_second"] > 0 and 0 < found["client_cpu_share"] <= 1.1


@contextlib.contextmanager
def stand_in(seconds: float, host_rows: bool = False) -> Iterator[tuple[str, list[int]]]:
    """A server of nothing but /generate, with a token every so many seconds: its address, and what those wanted who
    left before the end."""
    gone: list[int] = []

    async def generate(request: web.Request) -> web.StreamResponse:
        wanted = (await request.json())["sampling_params"]["max_new_tokens"]
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            for i in range(1, wanted + 1):
                event = {"output_ids": [7], "meta_info": {"completion_tokens": i, "neo_host_row": [int(host_rows)]}}
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                await asyncio.sleep(seconds)
        except ConnectionError:
            gone.append(wanted)
        return response

    async def serve() -> None:
        runner, port = await selftest.serve_generate(generate)
        told.put((asyncio.get_running_loop(), port))
        await stop.wait()
        await runner.cleanup()

    stop, told = asyncio.Event(), queue.Queue[tuple[asyncio.AbstractEventLoop, int]]()
    server = threading.Thread(target=lambda: asyncio.run(serve()))
    server.start()
    loop, port = told.get(timeout=30)
    try:
        yield f"http://127.0.0.1:{port}", gone
    finally:
        loop.call_soon_threadsafe(stop.set)
        server.join()


def test_a_run_whose_time_is_over_is_cut_off() -> None:
    """Three requests at once of a token every 10 ms: what came until then counts, latencies are of whole requests."""
    asks = (Ask((5,), 4), *[Ask((5, 6), 100_000)] * 5)
    workload = dataclasses.replace(parse("backlog:count=6,concurrency=3,seconds=1.5", 100)[0], asks=asks)
    with stand_in(0.01) as (url, gone):
        found = client.run(url, workload, 120, sample_every_s=0)
    assert found.seconds < 10 and [a.cut for a in found.answers] == [False, True, True, True]
    assert all(a.error is None and len(a.token_times) > 4 for a in found.answers[1:]), found.answers
    measures = measure(found.answers, found.seconds, [])
    assert measures["failed"] == 0 and measures["all"]["requests"] == 1
    assert measures["output_tokens"] == sum(len(a.token_times) for a in found.answers) > 16
    assert gone == [100_000] * 3, "their connections were closed"


def test_variants_with_other_flags_are_other_variants() -> None:
    a, b = (serving.variant(f"neo=--neo-host-kv-size {size}") for size in (4, 8))
    assert a.name != b.name and a.flags[-2:] == ("--neo-host-kv-size", "4")


def test_a_signal_ends_a_run_by_an_exception() -> None:
    """So that servers are stopped on the way out, also while the client's event loop runs."""

    async def killed() -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(20)

    before = signal.getsignal(signal.SIGTERM)
    begin = time.monotonic()
    with pytest.raises(SystemExit) as end, serving.stopped_by_signals():
        client._on_loop(killed())
    assert end.value.code == 128 + signal.SIGTERM and time.monotonic() - begin < 10
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU device: set CUDA_VISIBLE_DEVICES=''")
def test_a_stopped_bench_leaves_no_server(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("llama")
    command = [sys.executable, "-m", "bench.serving", str(model), "--out", str(tmp_path / "result.json")]
    command += ["--logs", str(tmp_path), "--", "--device", "cpu", "--skip-tokenizer-init"]

    def servers() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if "launch_server" in (line := " ".join(process.cmdline())) and str(model) in line:
                    found.append(process)
        return found

    bench = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=REPO_ROOT)
    try:
        wait_until(lambda: bool(servers()), 60, "a server")
        bench.terminate()
        _, said = bench.communicate(timeout=60)
    finally:
        bench.kill()
        left = servers()
        for process in left:
            process.kill()
    assert bench.returncode == 128 + signal.SIGTERM and error_lines(said) == ["error: stopped by SIGTERM"]
    assert left == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "MODEL and --out are needed"),
        (["nowhere", "--out", "x.json"], "nowhere is no model"),
        (["MODEL", "--out", "x.json", "--variant", "fast"], "no variant 'fast'"),
        (["MODEL", "--out", "x.json", "--workload", "marathon"], "no workload"),
        (["MODEL", "--out", "x.json", "--rounds", "0"], "--rounds"),
        (["MODEL", "--out", "x.json", "--variant", "neo", "--variant", "neo"], "given twice"),
        (["MODEL", "--out", "nowhere/x.json"], "nowhere is no folder"),
        (["--compare", "a.json", "b.json"], "a.json"),
    ],
)
def test_bad_input(tiny: Callable[..., Path], capsys: pytest.CaptureFixture, argv: list[str], said: str) -> None:
    assert serving.main([str(tiny("llama")) if part == "MODEL" else part for part in argv]) == 2
    [line] = error_lines(capsys.readouterr().err)
    assert said in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="for the CPU device: set CUDA_VISIBLE_DEVICES=''")
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_whole_driver(
    tiny: Callable[..., Path],
    tmp_path: Path,
    capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    real: bool,
) -> None:
    """With servers of its own, or stand-ins that are as fast as each other."""

    @contextlib.contextmanager
    def started(self: serving.Servers, chosen: serving.Variant) -> Iterator[Any]:
        with stand_in(0.002, host_rows=chosen.name != "plain") as (url, _):
            yield SimpleNamespace(url=url, info=dict, post=lambda path, body: None)

    if not real:
        monkeypatch.setattr(serving.Servers, "_started", started)
    variants = ["plain", "neo:sync"]  # auto would leave the CPU out
    out = tmp_path / "result.json"
    argv = [str(tiny("llama")), "--out", str(out), "--rounds", "1", "--together", "--logs", str(tmp_path / "logs")]
    argv += [part for name in variants for part in ("--variant", name)]
    argv += [
        "--workload",
        "backlog:prompt=60,output=24,count=8",
        "--workload",
        "chat:users=2,turns=2,prompt=9,output=5",
    ]
    argv += ["--warm-up", "backlog:prompt=8,output=2,count=2", "--plots", str(tmp_path / "plots")]
    flags = ["--device", "cpu", "--dtype", "float32", "--skip-tokenizer-init", "--max-total-tokens", "256"]
    code = serving.main([*argv, "--", *flags, "--skip-server-warmup"])
    assert code == 0, capfd.readouterr().err
    found = json.loads(out.read_text())
    assert {"machine", "date", "commit", "command", "versions", "runs", "summary"} <= set(found)
    runs = {(run["variant"], run["workload"].split(":")[0]): run for run in found["runs"]}
    assert set(runs) == {(v, w) for v in variants for w in ("backlog", "chat")}
    for (variant, workload), run in runs.items():
        measures = run["measures"]
        assert measures["failed"] == 0 and measures["output_tokens"] == (8 * 24 if workload == "backlog" else 4 * 5)
        on_host = variant != "plain" and (workload == "backlog" or not real)
        assert (measures["host_output_tokens"] > 0) == on_host, (variant, workload)
        assert measures["sustained_tokens_per_s"] > 0 and run["client"]["cpu_share"] < 1
    chat = runs[variants[0], "chat"]["measures"]
    assert chat["prompt_tokens"] == 2 * 9 + 2 * (9 + 5 + 9), "a turn has all before it in its prompt"
    assert not real or runs["neo:sync", "backlog"]["neo"]["host_tokens_total"] > 0
    host = runs["neo:sync", "backlog"]["measures"]
    assert host["host"]["requests"] + host["device"]["requests"] == 8 and host["host"]["tpot_s"]["p50"] > 0
    assert "x1.000" in capfd.readouterr().out


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_client_keeps_off_cores_that_servers_have_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    claimed = min(before)
    monkeypatch.setattr(serving, "claimed_cores", lambda: {claimed: 1})
    monkeypatch.setattr(serving, "worth_it", lambda usable, workers, ranks: True)
    with serving._out_of_the_way():
        assert os.sched_getaffinity(0) == before - {claimed}
    assert os.sched_getaffinity(0) == before
    monkeypatch.setattr(serving, "worth_it", lambda usable, workers, ranks: False)
    with serving._out_of_the_way():
        assert os.sched_getaffinity(0) == before
