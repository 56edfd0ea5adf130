"""Prompts computed straight into host memory, on a GPU: what they answer, whatever the attention backend and page size.

bf16: two right runs part where the model was undecided; compared are log-probabilities up to there, as in
test_captured.py.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from sglang_neo.hybrid.prefill import PromptLayers
from tests.gpu.test_captured import HOST, Tiny, assert_alike, options
from tests.harness.inprocess import InProcessScheduler, Request
from tests.harness.traffic import random_prompt

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def prompts() -> list[Request]:
    """Longer than the device pool, and shorter; some with a beginning in common."""
    rng = random.Random(31)
    start = random_prompt(rng, 300)
    return [
        Request(f"r{i}", (start if i % 2 else []) + random_prompt(rng, rng.randrange(50, 500)), 20, arrive=3 * i)
        for i in range(8)
    ]


def plain_and_ours(tiny: Tiny, chunk: int, backend: str, page_size: int, overlap: bool = True) -> tuple[Any, Any]:
    model = tiny("llama", dtype="bfloat16", head_dim=64)
    settings = options(backend, "bfloat16", page_size)
    settings |= {"chunked_prefill_size": chunk, "disable_overlap_schedule": not overlap}
    with InProcessScheduler("plain", model, **settings) as scheduler:
        expected = scheduler.run(prompts())
    settings["max_total_tokens"] = 512
    with InProcessScheduler("neo", model, **settings, **HOST) as scheduler:
        got = scheduler.run(prompts(), lambda s, step: s.token_manager.audit())
        assert scheduler.scheduler.token_manager.prefilled_tokens > 1000
    return expected, got


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize(
    ("backend", "chunk"), [("triton", 256), ("triton", -1), ("flashinfer", 256), ("flashinfer", -1)]
)
def test_prompts_larger_than_the_device_pool(tiny: Tiny, backend: str, chunk: int, page_size: int) -> None:
    expected, got = plain_and_ours(tiny, chunk, backend, page_size)
    assert_alike(expected, got, least=60)


def test_without_overlap_scheduling(tiny: Tiny) -> None:
    expected, got = plain_and_ours(tiny, 256, "triton", 1, overlap=False)
    assert_alike(expected, got, least=60)


def test_a_missing_prefix_is_seen(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: nothing comes into the last layer."""
    bring = PromptLayers.bring

    def faulty(layers: PromptLayers, layer: int) -> None:
        if layer < layers._owner.layers - 1:
            bring(layers, layer)

    monkeypatch.setattr(PromptLayers, "bring", faulty)
    expected, got = plain_and_ours(tiny, 128, "triton", 1)
    with pytest.raises(AssertionError):
        assert_alike(expected, got, least=60)


def test_device_memory_of_a_prefill_does_not_grow_with_the_layers(tiny: Tiny) -> None:
    """What a prompt takes on the device beside its activations: staging that was there before."""
    rng = random.Random(32)
    peaks = []
    for layers in (3, 12):
        model = tiny("llama", dtype="bfloat16", head_dim=64, num_hidden_layers=layers)
        settings = options("triton", "bfloat16", 1) | {"max_total_tokens": 512, "chunked_prefill_size": 256}
        with InProcessScheduler("neo", model, **settings, **HOST) as scheduler:
            scheduler.run([Request("warm-up", random_prompt(rng, 700), 2)])
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            scheduler.run([Request("prompt", random_prompt(rng, 700), 2)])
            peaks.append(torch.cuda.max_memory_allocated() - before)
    token_bytes = 2 * 2 * 64 * 2  # K and V, KV heads, head_dim, bytes
    assert peaks[1] - peaks[0] < 700 * token_bytes, "less than one layer more of KV for nine more layers"
