"""Requests with images: positions have three axes there (M-RoPE), and those of an answer go on from what the image left
off at, which is not where its tokens end. Exact against plain SGLang, with rows moving between the pools.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import inprocess
from tests.harness.exact import assert_exact
from tests.harness.inprocess import InProcessScheduler, Request
from tests.harness.models import randomise
from tests.harness.traffic import RandomMoves, random_prompt, tokens

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)

IMAGE = 250  # the token that stands for a part of an image
FIRST, TOKENS, PATCHES = 4, 4, 16  # where an image begins in a prompt, and how much of each it has: 4 x 4 patches
PATCH_VALUES = 3 * 2 * 14 * 14


@pytest.fixture(scope="session")
def qwen2_vl(model_directory: Path) -> Path:
    """The folder of a tiny Qwen2-VL."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 1024,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "use_sliding_window": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2}
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE))
    randomise(model, 7)
    folder = model_directory / "qwen2-vl"
    model.float().save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["in_chans"] = 3  # by the name that SGLang reads
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def image(seed: int, prompt: int) -> Any:
    """What SGLang's processor makes of an image in a prompt of so many tokens."""
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        feature=torch.randn(PATCHES, PATCH_VALUES, generator=torch.Generator().manual_seed(seed)),
        offsets=[(FIRST, FIRST + TOKENS - 1)],
        model_specific_data={"image_grid_thw": torch.tensor([[1, 4, 4]])},
    )
    at, end = FIRST, FIRST + TOKENS
    positions = torch.arange(prompt).repeat(3, 1)
    positions[:, at:end] = at + torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]])
    positions[:, end:] -= 2  # two by two tokens take two positions
    delta = torch.tensor([[-2]])
    return MultimodalProcessorOutput([item], im_token_id=IMAGE, mrope_positions=positions, mrope_position_delta=delta)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Two of three with an image, of which some are the same."""
    rng, made, images = random.Random(1), [], {}
    for i in range(10):
        prompt = random_prompt(rng, rng.randrange(8, 60))
        if i % 3:
            prompt[FIRST:FIRST] = [IMAGE] * TOKENS
            images[f"r{i}"] = i % 4
        made.append(Request(f"r{i}", prompt, rng.randrange(6, 30), arrive=rng.randrange(12)))
    plain = inprocess.tokenized

    def tokenized(request: Request) -> Any:
        told = plain(request)
        if request.name in images:
            told.mm_inputs = image(images[request.name], len(request.prompt))
        return told

    monkeypatch.setattr(inprocess, "tokenized", tokenized)
    return made


@pytest.mark.parametrize("mode", ["pipelined", pytest.param("sync", marks=pytest.mark.slow)])
def test_images_are_exact_under_random_migrations(qwen2_vl: Path, requests: list[Request], mode: str) -> None:
    with InProcessScheduler("plain", qwen2_vl) as scheduler:
        expected = scheduler.run(requests)
    options = {"max_total_tokens": 256, "neo_host_kv_size": 0.01, "chunked_prefill_size": 32, "neo_mode": mode}
    moves = RandomMoves(seed=3, rate=0.15)
    with InProcessScheduler("neo", qwen2_vl, **options) as scheduler:
        got = scheduler.run(requests, moves)
        steps = scheduler.scheduler.neo_metrics.counters.steps
    assert steps[mode] > 5 and moves.host_steps > 20, steps
    assert_exact({name: result.reference() for name, result in expected.items()}, tokens(got))
