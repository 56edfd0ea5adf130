"""Exactness on a GPU: fp32, CUDA graphs, the real model and a tiny one, tokens equal plain SGLang's in every mode.

SGLang's CUDA kernels of norms, activations and rotary embeddings know no fp32: its own torch forms of them take their
place, in the reference and in ours. Products are in full fp32 everywhere, where by default they are in TF32, whose
rounding changes with the size of the batch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.exact import Reference, assert_exact
from tests.harness.inprocess import InProcessScheduler, Request
from tests.harness.models import REPO_ROOT
from tests.harness.traffic import RandomMoves, random_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from tests.gpu.test_captured import HOST, options, replays  # noqa: E402

Tiny = Callable[..., Path]

MODES: dict[str, dict[str, Any]] = {
    "sync": {"neo_mode": "sync"},
    "deferred": {"neo_deferred_slots": 3},
    "pipelined": {"neo_mode": "pipelined"},
}
SETTINGS = options("triton", "float32", 1) | {
    "max_total_tokens": 2500,
    "max_running_requests": 24,
    "cuda_graph_max_bs_decode": 24,
}


@pytest.fixture(autouse=True, scope="module")
def full_fp32() -> Iterator[None]:
    from sglang.srt.layers.utils.multi_platform import MultiPlatformOp

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_F32_DEFAULT", "ieee")
        patch.setattr(MultiPlatformOp, "dispatch_forward", lambda self: self.forward_native)
        torch.set_float32_matmul_precision("highest")
        patch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
        yield


def real_requests(model: Path) -> list[Request]:
    from bench.host_kv_quality import windows

    rng = random.Random(5)
    text = [REPO_ROOT / "README.md", *sorted((REPO_ROOT / "docs").glob("*.md"))]
    pieces = windows(model, text, 32, 300)
    return [Request(f"w{i:02}", piece[: rng.randrange(60, 301)], 60, arrive=i // 2) for i, piece in enumerate(pieces)]


def tiny_requests() -> list[Request]:
    rng = random.Random(6)
    return [Request(f"r{i:02}", random_prompt(rng, rng.randrange(60, 300)), 40, arrive=i // 2) for i in range(32)]


@pytest.fixture(scope="module", params=["smollm2", "llama"])
def case(request: pytest.FixtureRequest) -> tuple[Path, list[Request], dict[str, Reference]]:
    """A model, requests, and plain SGLang's answers with room for all of them."""
    if request.param == "smollm2":
        model = request.getfixturevalue("smollm2")
        requests = real_requests(model)
    else:
        model, requests = request.getfixturevalue("tiny")("llama", head_dim=64), tiny_requests()
    with InProcessScheduler("plain", model, **SETTINGS | {"max_total_tokens": 16000}) as scheduler:
        answers = scheduler.run(requests)
    return model, requests, {name: answer.reference() for name, answer in answers.items()}


@pytest.mark.parametrize("mode", MODES)
def test_tokens_equal_plain_sglang(
    case: tuple[Path, list[Request], dict[str, Reference]], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, requests, expected = case
    moves = RandomMoves(seed=7, rate=0.02 if mode == "deferred" else 0.1)
    with InProcessScheduler(
        "neo", model, **SETTINGS, **HOST, **MODES[mode], neo_host_prefill_rate=1000.0, neo_check_integrity=True
    ) as scheduler:
        counts = replays(scheduler, monkeypatch)
        got = scheduler.run(requests, moves)
        counters = scheduler.scheduler.neo_metrics.counters
        steps, host_tokens = counters.steps, counters.host_tokens
    print(f"{model.name}, {mode}: steps {steps}, replays {dict(counts)}, {host_tokens} tokens of host rows")
    assert steps[mode] > 20 and sum(count for label, count in counts.items() if label) > 20, (steps, counts)
    # A row in deferred mode gets a token every layers + 1 steps.
    assert host_tokens > (30 if mode == "deferred" else 200), host_tokens
    assert_exact(expected, {name: result.tokens for name, result in got.items()})
