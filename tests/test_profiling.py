"""The planner's tables as measured on a real model runner, and the file that keeps them."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_neo.planning.costs import Costs, Rows
from sglang_neo.planning.tables import Curve, read
from sglang_neo.profiling import measure, store
from sglang_neo.profiling.measure import along, sizes_up_to
from sglang_neo.profiling.trial import TrialError, Trials
from tests.harness.graphs import capture_decode_steps
from tests.harness.inprocess import InProcessRunner

Tiny = Callable[..., Path]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)


@pytest.fixture(scope="module")
def runner(model_directory: Path) -> Iterator[Any]:
    from tests.harness.models import tiny_model

    options: dict[str, Any] = {"neo_mode": "auto", "neo_deferred_slots": 2, "page_size": 16}
    with InProcessRunner("neo", tiny_model("llama", model_directory), **options) as made:
        yield made.model_runner
        made.model_runner.neo_close()


def test_sizes_are_fine_around_the_steps_of_graphs() -> None:
    assert sizes_up_to(20) == [1, 2, 4, 8, 16, 20]
    assert sizes_up_to(24, graphs=[1, 2, 4, 8, 12, 16, 24, 32]) == [1, 2, 3, 4, 5, 8, 9, 12, 13, 16, 17, 24]


def test_a_line_ends_where_runs_take_too_long() -> None:
    taken: list[int] = []

    def run(size: int) -> float:
        taken.append(size)
        return size * measure.CAP_S / 4

    points = along([1, 2, 4, 8, 16], 100, run, lambda: taken[-1] * measure.CAP_S / 4)
    assert taken == [1, 2, 4]
    assert points == pytest.approx({size: size * measure.CAP_S / 4 for size in (1, 2, 4, 8, 16)})
    assert along([5, 10], 4, run, lambda: 0.0) == {5: 0.0, 10: 0.0}, "nothing that could run"


class Machine:
    """In place of Trials: a machine whose times are a sum of parts of the work, and a clock of its own."""

    def __init__(self, slowness: float):
        self._slow, self.last, self.spent, self.runs = slowness, 0.0, 0.0, 0
        self.page, self.host_page, self.host_pages = 1, 64, 100_000
        self.device_tokens, self.most_rows, self.context, self.slots = 100_000, 256, 131_072, 8
        args = SimpleNamespace(chunked_prefill_size=8192, max_prefill_tokens=8192)
        self.runner = SimpleNamespace(server_args=args, decode_cuda_graph_runner=None)
        geometry = SimpleNamespace(layers=32, bytes_per_page=64 * 131072)
        self.attention = SimpleNamespace(geometry=geometry, workers=SimpleNamespace(threads=8))
        self.host = SimpleNamespace(pool=SimpleNamespace(geometry=geometry))

    def _took(self, seconds: float) -> float:
        self.last = self._slow * seconds
        repeated = 1 + min(int(0.04 / self.last), 9)
        self.spent, self.runs = self.spent + repeated * self.last, self.runs + 1
        return self.last

    def decode(self, rows: int, each: int) -> float:
        return self._took(5e-3 + 4e-5 * rows + 3e-8 * rows * each)

    def extend(self, lengths: list[int], past: int = 0) -> float:
        new = sum(lengths)
        return self._took(7e-3 + 4e-5 * new + sum(1e-9 * length * (past + length / 2) for length in lengths))

    def host_rows(self, rows: int, tokens: int, shared: int = 0) -> list[Any]:
        return [SimpleNamespace(tokens=max(1, tokens // rows) + shared, shared=shared)] * rows

    def handoffs(self, rows: list[Any]) -> float:
        shared = rows[0].shared
        own = sum(row.tokens - shared for row in rows)
        return self._took(32 * (2e-5 + 1e-6 * len(rows) + 4e-8 * (own + shared))) / 32

    def hybrid(self, device: int, rows: list[Any], in_lanes: bool) -> float:
        return self._took(6e-3 * (1 + in_lanes) + 4e-5 * len(rows))

    def deferred(self, device: int) -> float:
        return self._took(5e-3 + 4e-5 * (device + self.slots) + 32 * 2e-5)

    def to_host(self, tokens: int) -> float:
        return self._took(1e-4 + 3e-6 * tokens)

    to_device = to_host

    def copy_once(self, tokens: int) -> None:
        time.sleep(0.001)

    def sample(self, rows: int) -> float:
        return self._took(1e-4)


@pytest.mark.parametrize(
    ("takes", "found", "runs"),
    [
        ([0.3, 0.010, 0.009, 0.011, 0.012], 0.009, 5),  # the first was disturbed: it is measured as what it is
        ([0.3, 0.31], 0.3, 2),
        ([1.2], 1.2, 1),
        ([0.001] * 20, 0.001, 10),
    ],
)
def test_a_run_that_was_disturbed_does_not_count(takes: list[float], found: float, runs: int) -> None:
    trials: Any = Trials.__new__(Trials)
    trials._cuda, trials.spent, left = False, 0.0, list(takes)
    assert trials._least(lambda: left.pop(0)) == trials.last == found
    assert len(takes) - len(left) == runs and trials.spent == pytest.approx(runs * found)


@pytest.mark.parametrize("slowness", [1, 30, 100])
def test_a_slow_machine_is_measured_at_fewer_sizes(slowness: float, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    machine = Machine(slowness)
    tables = measure.Profile(machine, lambda: told.append(1)).tables()  # type: ignore[arg-type]
    assert machine.spent < 1.2 * measure.BUDGET_S, machine.runs
    assert len(told) == measure.Profile.STEPS

    costs, truth = Costs(tables, 8), Machine(slowness)
    for rows, each in ((4, 1000), (32, 300), (200, 100)):
        assert costs.gpu_only(Rows(rows, rows * each)).seconds == pytest.approx(truth.decode(rows, each), rel=0.35)
        cpu = truth.handoffs(truth.host_rows(rows, rows * each))
        assert costs.cpu_layer(Rows(rows, rows * each)) == pytest.approx(cpu, rel=0.35)
    assert costs.slot_handoffs(8) == pytest.approx(slowness * 32 * 2e-5, rel=0.35)
    for new, past in ((200, 0), (1000, 0), (4000, 500)):
        assert costs.prefill(new, past).seconds == pytest.approx(truth.extend([new], past), rel=0.35)

    monkeypatch.setattr(measure, "BUDGET_S", 1e9)
    whole = Machine(slowness)
    measure.Profile(whole).tables()  # type: ignore[arg-type]
    assert (machine.runs > 0.9 * whole.runs) == (slowness == 1), "where there is time, nearly all sizes are tried"


def test_measured_once_then_read(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table = runner.req_to_token_pool.req_to_token
    for anew in range(10):  # on a busy machine a run may be disturbed by more than its work takes
        tables = store.tables_for(runner, anew=bool(anew))
        costs = Costs(tables, runner.neo_host.attention.workers.threads)
        if costs.cpu_layer(Rows(4, 200000)) > costs.cpu_layer(Rows(4, 2000)):
            break
    assert not table.any(), "trials leave no lines behind"
    assert runner.neo_rows is None and runner.neo_launched is None
    [path] = (tmp_path / "sglang_neo").glob("profile-*.json")
    assert read(path) == (store.key_of(runner), tables)
    # A hundred times the work takes more time. Of differences between times nothing is certain on a busy machine.
    assert costs.linear(1) > 0 and costs.prefill(64, 0).seconds > 0
    assert costs.cpu_layer(Rows(4, 200000)) > costs.cpu_layer(Rows(4, 2000)) > 0
    assert tables.to_host.at(1024) > 0 and tables.to_device.at(1024) > 0
    assert tables.layers == runner.model_config.num_hidden_layers
    assert 1e5 < tables.host_bandwidth_copying <= tables.host_bandwidth < 1e13

    def never(*_: Any) -> Any:
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        patch.setattr(store, "Trials", never)
        assert store.tables_for(runner) == tables
        with pytest.raises(AssertionError, match="measured again"):
            store.tables_for(runner, anew=True)
    # Another machine's is refused in one line, and replaced.
    content = json.loads(path.read_text())
    content["key"]["cpu"] = "another one"
    path.write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING):
        store.tables_for(runner)
    [line] = [record.message for record in caplog.records if "was measured with" in record.message]
    assert "another one" in line and "\n" not in line
    assert read(path)[0] == store.key_of(runner)


class StreamEvent:
    """In place of torch.cuda.Event where the device works at once: the time at which all before it was done."""

    def __init__(self, enable_timing: bool):
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: StreamEvent) -> float:
        return 1e3 * (end.at - self.at)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_cpu_that_fails_is_no_profile(runner: Any, monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    trials = Trials(runner)
    trials._launches_ahead = ahead
    monkeypatch.setattr(torch.cuda, "Event", StreamEvent)
    rows = trials.host_rows(2, 100)
    with torch.inference_mode():
        assert trials.hybrid(1, rows, in_lanes=False) > 0
        monkeypatch.setattr(runner.neo_host.attention, "failure", lambda epoch: "out of order")
        with pytest.raises(TrialError, match="out of order"):
            trials.hybrid(1, rows, in_lanes=False)
    with pytest.raises(TrialError, match="out of order"):
        trials.handoffs(rows)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_launching_takes_is_hidden_where_steps_are_launched_ahead(
    runner: Any, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """A device that takes 20 ms for a step, and launches that take 5."""
    trials = Trials(runner)
    trials._launches_ahead = ahead
    monkeypatch.setattr(torch.cuda, "Event", StreamEvent)
    now, free = [0.0], [0.0]
    monkeypatch.setattr(StreamEvent, "record", lambda event: setattr(event, "at", free[0]))

    def arrive(at: float) -> None:
        now[0] = max(now[0], at)

    monkeypatch.setattr(StreamEvent, "synchronize", lambda event: arrive(event.at))
    monkeypatch.setattr(trials, "synchronize", lambda: arrive(free[0]))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def launch() -> None:
        now[0] += 0.005
        free[0] = max(free[0], now[0]) + 0.020

    assert trials.interval(launch) == pytest.approx(0.020 if ahead else 0.025)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_deferred_step_is_timed_with_nobody_in_its_slots(
    runner: Any, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    trials, attention = Trials(runner), runner.neo_host.deferred
    trials._launches_ahead = ahead
    monkeypatch.setattr(torch.cuda, "Event", StreamEvent)
    assert trials.slots == attention.slots > 0
    sizes: list[int] = []
    forward = runner.model.forward
    monkeypatch.setattr(
        runner.model, "forward", lambda ids, *args, **kwargs: (sizes.append(len(ids)), forward(ids, *args, **kwargs))[1]
    )
    before = attention.launched_epoch
    with torch.inference_mode():
        assert trials.deferred(2) > 0
    assert len(sizes) >= 2 and set(sizes) == {2 + attention.slots}
    assert attention.last_step == before + len(sizes) and attention.failure(attention.last_step) is None
    assert not any(memory.any() for memory in attention._parked_memory) and runner.neo_step is None
    assert runner.neo_launched is None and not runner.req_to_token_pool.req_to_token.any()
    # Where there are no deferred steps, nothing is asked of them.
    profile = measure.Profile(trials)
    trials.slots = 0
    assert profile._slot_handoff(Curve((1.0,), (1e-3,)), 3) is None


def test_steps_are_timed_as_they_will_run(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From graphs, here a stand-in for them: those without hand-offs, with them, and in two lanes."""
    monkeypatch.setattr(runner, "decode_cuda_graph_runner", None)
    monkeypatch.setattr(runner.neo_host.attention.stream, "capturable", False)
    backend = capture_decode_steps(runner, [1, 2, 4, 8], monkeypatch)
    with torch.inference_mode():
        profile = measure.Profile(Trials(runner))
        linear, _ = profile._linear()
        handoff, lane = profile._handoffs(linear, profile._cpu_attention(), runner.model_config.num_hidden_layers)
    assert {1, 2, 3, 4, 5, 8} <= set(linear.x), "both sides of each graph's size"
    labels = {key.variant_label for key in backend.replays}
    assert {None, "host-rows"} < labels and any((label or "").startswith("lane-b-") for label in labels), labels
    assert all(seconds >= 0 for seconds in handoff.seconds) and lane >= 0


@pytest.mark.parametrize("in_lanes", [False, True])
def test_launching_a_step_with_host_rows_sends_no_lists_to_the_device(
    runner: Any, monkeypatch: pytest.MonkeyPatch, in_lanes: bool
) -> None:
    """They would wait for the step before, and the launch, which is hidden behind it in a server, would count."""
    trials = Trials(runner)
    sent: list[int] = []
    on, forward = trials._on, runner.forward
    monkeypatch.setattr(trials, "_on", lambda *args: (sent.append(0), on(*args))[1])
    steps: list[tuple[int, torch.Tensor, list[int]]] = []

    def step(batch: Any) -> Any:
        lengths = batch.seq_lens.tolist()
        output = forward(batch)
        steps.append((len(sent), batch.seq_lens, lengths))
        return output

    monkeypatch.setattr(runner, "forward", step)
    with torch.inference_mode():
        trials.hybrid(2, trials.host_rows(4, 64), in_lanes)
    assert len(steps) >= 2 and len({made for made, *_ in steps}) == 1
    assert [lengths for *_, lengths in steps] == [[1, 1, 16, 16, 16, 16]] * len(steps), "each step finds what it should"
    assert len({tensor.data_ptr() for _, tensor, _ in steps}) == len(steps)
