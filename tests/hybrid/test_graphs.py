"""Decode steps with host rows from captured graphs: exact, with the second set of graphs chosen when it must be."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.model_executor.cuda_graph_config import PhaseConfig

from sglang_neo.errors import UsageError
from sglang_neo.hybrid.deferred import DeferredEmission
from sglang_neo.hybrid.graphs import host_row_sizes
from tests.harness.exact import assert_exact
from tests.harness.graphs import capture_decode_steps
from tests.harness.inprocess import InProcessScheduler
from tests.harness.traffic import RandomMoves, random_requests, tokens


def test_sizes_for_host_rows() -> None:
    sglang = [1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 104, 112, 120, 128]
    sizes = host_row_sizes(sglang)
    assert sizes[0] == 1 and sizes[-1] == 128 and set(sizes) < set(sglang)
    for rows in range(1, 129):
        padded, best = (min(size for size in found if size >= rows) for found in (sizes, sglang))
        assert padded <= max(1.25 * rows, best), rows
    assert host_row_sizes([8]) == [8] and host_row_sizes([4, 2, 4]) == [2, 4]


@pytest.mark.parametrize(("arch", "page_size", "overlap"), [("llama", 1, True), ("qwen3", 64, False)])
def test_exact_from_graphs(
    tiny: Callable[..., Path], alone: Any, monkeypatch: pytest.MonkeyPatch, arch: str, page_size: int, overlap: bool
) -> None:
    requests = random_requests(seed=11)
    options: dict[str, Any] = {"page_size": page_size, "disable_overlap_schedule": not overlap}
    moves = RandomMoves(seed=4, rate=0.15)
    # Batches of 7 and 8 rows have no graph: they run eagerly between the others.
    with InProcessScheduler("neo", tiny(arch), **options) as scheduler:
        model_runner = scheduler.scheduler.tp_worker.model_runner
        backend = capture_decode_steps(model_runner, [1, 2, 3, 4, 6], monkeypatch)
        got = scheduler.run(requests, moves)
        steps = scheduler.scheduler.neo_metrics.counters.steps
    assert_exact(alone(arch, requests), tokens(got))
    replayed = Counter(key.variant_label for key in backend.replays)
    assert replayed["host-rows"] > 10 and replayed[None] > 0, replayed
    assert {key.size for key in backend.replays} <= {1, 2, 3, 4, 6}
    assert sum(replayed.values()) < sum(steps.values()), "larger batches were to run eagerly"


@pytest.mark.parametrize("overlap", [True, False])
def test_deferred_steps_from_graphs(
    tiny: Callable[..., Path], alone: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """One graph per size serves slots anywhere in its batch; sizes below the slots have none."""
    requests = random_requests(seed=11)
    options: dict[str, Any] = {"disable_overlap_schedule": not overlap, "neo_deferred_slots": 2}
    with InProcessScheduler("neo", tiny("qwen3"), neo_check_integrity=True, **options) as scheduler:
        backend = capture_decode_steps(scheduler.scheduler.tp_worker.model_runner, [1, 2, 3, 4, 6], monkeypatch)
        got = scheduler.run(requests, RandomMoves(seed=4, rate=0.08))
        steps = scheduler.scheduler.neo_metrics.counters.steps
    assert_exact(alone("qwen3", requests), tokens(got))
    replayed = Counter((key.variant_label, key.size) for key in backend.replays)
    deferred = {size: count for (variant, size), count in replayed.items() if variant == "host-rows"}
    assert sum(deferred.values()) > 10 and min(deferred) >= 2, replayed
    assert sum(deferred.values()) < steps["deferred"], "larger batches were to run eagerly"


def test_a_capture_in_which_residuals_are_not_exchanged_is_refused(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers of a replay are not looked at any more; what is captured need not be what ran eagerly at start."""
    own = DeferredEmission.residual_begins
    with InProcessScheduler("neo", tiny("llama"), neo_deferred_slots=2) as scheduler:
        monkeypatch.setattr(DeferredEmission, "residual_begins", lambda self, x: own(self, x.clone()))
        with pytest.raises(UsageError, match="layers 3 let rows change places, 0 residuals"):
            capture_decode_steps(scheduler.scheduler.tp_worker.model_runner, [2, 4], monkeypatch)


def test_a_graph_without_hand_offs_does_not_serve_host_rows(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Negative control: SGLang's own graphs, replayed for a batch with host rows."""
    from sglang_neo.hybrid.graphs import NeoDecodeCudaGraphRunner

    with InProcessScheduler("neo", tiny("llama")) as scheduler:
        model_runner = scheduler.scheduler.tp_worker.model_runner
        capture_decode_steps(model_runner, [1, 2, 3, 4], monkeypatch)
        monkeypatch.setattr(NeoDecodeCudaGraphRunner, "host_rows", lambda self, attention: contextlib.nullcontext())
        scheduler.run(random_requests(seed=11, count=3), RandomMoves(seed=4, rate=0.9), check=False)
        assert scheduler.scheduler.neo_state()["failed_steps"] > 0
    assert "a step handed over host rows of 3 layers" in caplog.text


def test_graphs_that_are_still_to_come_are_kept_out_of_the_kv_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    from sglang_neo.hybrid import graphs
    from sglang_neo.model_runner import NeoKVCacheConfigurator

    def args(decode: PhaseConfig, **more: Any) -> Any:
        config = SimpleNamespace(decode=decode)
        given = {"neo_mode": "sync", "neo_deferred_slots": 0, "attention_backend": "x", **more}
        return SimpleNamespace(cuda_graph_config=config, **given)

    monkeypatch.setattr(graphs, "gpu_only_reasons", lambda args: [])
    some = PhaseConfig(backend="full", bs=[1, 2, 4, 8])
    assert graphs.host_graph_bytes(args(some)) == 4 * (2 << 20)
    assert graphs.host_graph_bytes(args(some, attention_backend="flashinfer")) > graphs.host_graph_bytes(args(some))
    assert graphs.host_graph_bytes(args(some, neo_mode="gpu-only")) == 0
    lanes = graphs.host_graph_bytes(args(some, neo_mode="pipelined"))
    assert lanes > graphs.host_graph_bytes(args(some))
    assert graphs.host_graph_bytes(args(some, neo_mode="auto")) == lanes
    assert graphs.host_graph_bytes(args(some, neo_mode="auto", neo_deferred_slots=2)) == lanes + 4 * (2 << 20)
    assert graphs.host_graph_bytes(args(PhaseConfig(backend="disabled"))) == 0

    monkeypatch.setattr(KVCacheConfigurator, "_profile_available_bytes", lambda self, before: 100 << 20)
    monkeypatch.setattr(NeoKVCacheConfigurator, "_staging_bytes", lambda self, available: 0)
    for device, available in (("cuda", 92 << 20), ("cpu", 100 << 20)):
        configurator = object.__new__(NeoKVCacheConfigurator)
        configurator.device, configurator.server_args = device, args(some)
        assert configurator._profile_available_bytes(1) == available
