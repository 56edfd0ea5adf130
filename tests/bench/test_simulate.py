"""The planner in whole simulated runs: nobody starves, auto is never worse, a late CPU is left out and comes back."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import evidence
from bench.machines import MACHINES, MODELS, tables
from bench.simulate import (
    AUTO,
    FIXED,
    NONE,
    Outcome,
    Perturbation,
    Point,
    Request,
    Server,
    _settled,
    backlog,
    grid_key,
    kept_points,
    limits_of,
    poisson,
    run_point,
    trace,
)
from sglang_neo.planning.costs import Mode
from sglang_neo.planning.planner import Limits, Place
from sglang_neo.planning.tables import Curve, tables_of

MODEL = "Llama-3.1-70B, 20 layers"
MACHINE = MACHINES["H200"]
TABLES = tables(MACHINE, MODELS[MODEL])
RESULTS = Path(evidence.__file__).parent / "results"
POOL = 8 * 700
OUTCOME = Outcome(1.0, 1.0, 1.0, 1, 0.0, 0, {}, 0.0, 0.0, 0.0, 0.0, 0.0)
HOST = 10**6


def server(
    requests: list[Request], modes: tuple[Mode, ...] = AUTO, perturbation: Perturbation = NONE, **more: object
) -> Server:
    limits = limits_of(TABLES, MACHINE.threads, HOST, modes, max_host_tpot=None, **more)
    return Server(requests, TABLES, limits, POOL, HOST, perturbation, seed=1)


def check(outcome: Outcome, requests: list[Request]) -> None:
    assert outcome.requests == len(requests)
    assert all(request.produced == request.output for request in requests)


@pytest.mark.parametrize("modes", [*FIXED.values(), AUTO], ids=[*FIXED, "auto"])
def test_all_are_served_and_the_same_run_gives_the_same_result(modes: tuple[Mode, ...]) -> None:
    outcomes = []
    for _ in range(2):
        requests = poisson(40, 40, 500, 60, seed=2)
        outcomes.append(server(requests, modes, Perturbation(), max_slowdown=math.inf).run())
        check(outcomes[-1], requests)
    assert outcomes[0] == outcomes[1]
    assert (outcomes[0].host_share > 0) == (modes != ("gpu_only",))


def test_predictions_are_exact_on_a_machine_that_is_as_its_tables_say() -> None:
    exact = server(backlog(40, 500, 60), ("gpu_only", "pipelined")).run()
    assert exact.error < 1e-3
    off = server(backlog(40, 500, 60), ("gpu_only", "pipelined"), Perturbation()).run()
    assert 1e-3 < off.error < 0.1


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.integers(1, 3000), st.integers(1, 80), st.booleans()), min_size=1, max_size=40
    ),
    st.sampled_from([*FIXED.values(), AUTO]),
    st.sampled_from([0.05, 0.25, None]),
    st.integers(0, 3),
)
def test_no_request_starves_in_either_pool(
    load: list[tuple[float, int, int, bool]], modes: tuple[Mode, ...], bound: float | None, seed: int
) -> None:
    requests = [Request(at, prompt, output, best_effort) for at, prompt, output, best_effort in sorted(load)]
    run = Server(
        requests,
        TABLES,
        limits_of(TABLES, MACHINE.threads, HOST, modes, max_host_tpot=bound, patience=256),
        POOL,
        HOST,
        Perturbation(bursts=(0.5, 0.5, 10.0)),
        seed,
    )
    outcome = run.run(until=120)
    check(outcome, requests)
    # 40 requests of at most 80 tokens, eight of them at a time at worst: far below what the slowest mode needs.
    assert run.step < 20_000


@pytest.mark.parametrize(
    ("prompt", "output", "load", "rows"),
    # The last: prompts for the device come past one that goes to the host in many chunks.
    [(512, 32, 2.0, 16.0), (900, 96, 1.5, 6.0), (2000, 32, 0.5, 4.0), (4096, 512, 2.0, 4.0)],
)
def test_auto_is_hardly_ever_worse_than_the_best_fixed_mode(prompt: int, output: int, load: float, rows: float) -> None:
    point = Point("H200", MODEL, prompt, output, load, "test", rows, seed=5)
    result = run_point(point, 4, Perturbation())
    assert result["auto_over_best"] >= 0.98, result


def test_auto_finds_the_mode_that_makes_most_of_what_the_meter_lets_come() -> None:
    """The machine of a run on an H200, by its tables: 20 layers of the 70B shape, twelve requests of 900 + 200 on the
    device and a backlog. Lanes would be faster with a few host rows, and have used them up before deferred mode, which
    leaves the device rows as they are, has enough. Hand-offs take what others of bench/results took, in deferred steps
    too, which had no table of their own then."""
    content = json.loads((RESULTS / "h200-serving-70b-20-auto.json").read_text())
    profiled = content["runs"][0]["neo"]["planner"]["tables"]
    handoff = Curve((1.0, 8.0, 64.0), (1e-5, 2e-5, 7e-5))
    known = replace(tables_of(profiled | {"slot_handoff": profiled["handoff"]}), handoff=handoff, slot_handoff=handoff)

    def serve(*modes: Mode) -> tuple[Outcome, float]:
        limits = Limits(13, ("gpu_only", *modes), max_slots=8, max_lane_rows=172)
        requests = backlog(400, 900, 200)
        outcome = Server(requests, known, limits, 13_600, 244_032, NONE, most_rows=172).run()
        return outcome, statistics.median(r.tpot for r in requests if r.tpot and not r.host_tokens)

    plain, tpot = serve()
    deferred, _ = serve("deferred")
    auto, slowed = serve(*AUTO[1:])
    assert deferred.throughput > 1.1 * plain.throughput
    assert auto.throughput >= 0.98 * deferred.throughput
    assert auto.steps["deferred"] > 10 * auto.steps["pipelined"]
    assert slowed < 1.15 * tpot, "the meter's tenth, and little more"


def test_points_of_the_grid_are_kept_and_not_run_again(tmp_path: Path) -> None:
    file = tmp_path / "points.jsonl"
    key = grid_key(2)
    assert kept_points(file, key) == []
    with file.open("a") as out:
        print(json.dumps({"seed": 7}), file=out)
    assert kept_points(file, key) == [{"seed": 7}]
    with pytest.raises(ValueError, match="another planner"):
        kept_points(file, grid_key(3))


def test_a_point_is_run_again_until_it_is_settled() -> None:
    def run(best: float, auto: float) -> dict[str, Outcome]:
        of = dict.fromkeys(FIXED, best) | {"gpu_only": 1.0, "auto": auto}
        return {name: replace(OUTCOME, throughput=throughput) for name, throughput in of.items()}

    assert _settled([run(1.001, 1.0)]), "no mode does anything else"
    assert not _settled([run(1.5, 1.5)]) and not _settled([run(1.5, 1.5)] * 2)
    assert _settled([run(1.5, 1.5)] * 2 + [run(1.5, 1.52)])
    assert _settled([run(1.5, 1.3)] * 2 + [run(1.5, 1.31)]), "as a miss"
    assert not _settled([run(1.5, 1.3), run(1.5, 1.5), run(1.5, 1.6)])
    quiet = Point("H200", MODEL, 512, 32, 0.3, "test", 4.0, seed=1)
    assert run_point(quiet, 0.1, Perturbation(), repeats=6)["runs"] == 1
    assert run_point(replace(quiet, load=2.0), 0.1, Perturbation(), repeats=2)["runs"] == 2


def test_a_burst_for_the_host_slows_device_rows_by_a_tenth_at_most() -> None:
    """On machines that are not as their tables say, beside requests of 260 tokens that fill the device."""

    def slowest(prompt: int, seed: int, modes: tuple[Mode, ...], **more: float) -> float:
        """Seconds per token of the device rows'."""
        requests = backlog(8, 440, 260)
        requests += [Request(0.5, prompt, 100, best_effort=True) for _ in range(200)]
        limits = limits_of(TABLES, MACHINE.threads, HOST, modes, max_host_tpot=None, **more)
        outcome = Server(requests, TABLES, limits, POOL, HOST, Perturbation(bursts=(0, 0, 1)), seed).run()
        assert (outcome.host_share > 0.05) == (len(modes) > 1)
        return max(request.tpot or math.inf for request in requests[:8])

    for prompt in (60, 1000):
        for seed in range(3):
            plain = slowest(prompt, seed, ("gpu_only",))
            assert slowest(prompt, seed, ("gpu_only", "deferred")) <= 1.10 * plain, (prompt, seed)
        assert slowest(prompt, 0, ("gpu_only", "deferred"), max_slowdown=math.inf) > 1.10 * plain, "it is the meter"


def test_a_cpu_that_others_burn_is_left_out_and_comes_back() -> None:
    # From 4 s to 8 s the CPU is twenty times slower.
    requests = backlog(160, 500, 100)
    run = server(requests, ("gpu_only", "pipelined"), Perturbation(bursts=(0, 0, 1), slow=((4.0, 8.0, 20.0),)))
    outcome = run.run()
    check(outcome, requests)
    paused = [line for line in outcome.changes if "the CPU gets no work" in line]
    assert paused and 4.0 <= float(paused[0].split()[0]) < 8.0
    assert any("given work again" in line for line in outcome.changes)
    late = [float(line.split()[0]) for line in outcome.changes if "mode pipelined" in line]
    assert late[-1] > 8.0, "and it works again afterwards"
    plain = server(backlog(160, 500, 100), ("gpu_only",), NONE).run()
    assert outcome.throughput > 0.95 * plain.throughput


@pytest.mark.parametrize("modes", [AUTO, FIXED["pipelined"]], ids=["auto", "pipelined"])
def test_memory_that_others_read_for_a_while_costs_the_gain_and_no_more(modes: tuple[Mode, ...]) -> None:
    """Tables of a machine whose memory was fast; from 40 s to 80 s the CPU takes 1.7 times as long, as between two runs
    on an H200 an hour apart. Few requests at once and no meter, so that lanes are best while memory is fast."""

    class Timed(Server):
        def run(self, until: float = math.inf) -> Outcome:
            self.tokens: list[tuple[float, int]] = []
            return super().run(until)

        def _give_token(self, requests: Iterable[Request], place: Place) -> None:
            requests = list(requests)
            self.tokens.append((self._now, len(requests)))
            super()._give_token(requests, place)

        def rate(self, start: float, end: float) -> float:
            return sum(count for now, count in self.tokens if start <= now < end) / (end - start)

    known = tables(replace(MACHINE, host_bandwidth=125e9), MODELS[MODEL])

    def serve(modes: tuple[Mode, ...]) -> tuple[Timed, Outcome]:
        limits = limits_of(known, MACHINE.threads, HOST, modes, max_slowdown=math.inf)
        slower = Perturbation(bursts=(0, 0, 1), slow=((40.0, 80.0, 1.7),))
        run = Timed(backlog(600, 900, 200), known, limits, 13_600, HOST, slower, seed=3, most_rows=36)
        return run, run.run()

    plain = serve(FIXED["gpu_only"])[0].rate(10, 110)
    run, outcome = serve(modes)
    assert min(run.rate(10, 40), run.rate(85, 110)) > 1.2 * plain, "before, and when it is over"
    assert min(run.rate(start, start + 12) for start in (43, 55, 67)) > 0.98 * plain
    at = [(float(line.split()[0]), line) for line in outcome.changes]
    assert any(40 < now < 43 and "instead of pipelined" in line for now, line in at), "noticed"
    assert any(80 < now < 83 and "mode pipelined" in line for now, line in at), "and seen to be over"


def test_the_model_of_the_machine_meets_what_was_measured() -> None:
    found = evidence.calibration()
    assert found["mean_absolute_error"] < 0.05
    assert max(abs(line["error"]) for line in found["calibration"]) < 0.15


def test_what_it_was_not_fitted_to_is_met_in_gains_rather_than_in_tokens() -> None:
    found = {(line["kind"], line["what"]): line["error"] for line in evidence.held_out()["held_out"]}
    assert len(found) == 12
    gains = [abs(error) for (kind, _), error in found.items() if kind == "gain"]
    assert max(abs(error) for error in found.values()) < 0.16 and max(gains) < 0.07, found


def test_gains_grow_with_the_host_as_published() -> None:
    claims = [claim for claim in evidence.PUBLISHED if claim.paper == "NEO" and claim.case.startswith("A10G")]
    gains = [evidence._ratio(claim, backlog(80, 1000, 200)) for claim in (claims[0], claims[-1])]
    assert claims[0].high < claims[-1].high and 1.0 <= gains[0] < gains[1]


def test_traces_are_read() -> None:
    requests = trace("azure_conv_2023", 5, speed=2.0)
    assert [request.arrival for request in requests][:2] == [0.0, pytest.approx(4.31 / 2)]
    assert (requests[0].prompt, requests[0].output) == (374, 44)
    assert trace("openai_summaries", 3)[2].prompt == 349


def test_the_command_prints_json() -> None:
    command = [sys.executable, "-m", "bench.simulate", "--grid", "--small", "--requests", "0.1", "--time-limit", "0.01"]
    out = subprocess.run([*command, "--json", "-"], capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(out.stdout)
    assert found["points"] == 24 and len(found["grid"]) >= 1
    assert all(point["auto_over_best"] > 0 for point in found["grid"])
