"""NeoModelRunner against the plain ModelRunner, and both against transformers, without a scheduler."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_neo import seams
from tests.harness.exact import Reference, assert_exact, first_difference
from tests.harness.inprocess import InProcessRunner, Request
from tests.harness.models import ARCHITECTURES, VOCAB_SIZE, tiny_model

Tiny = Callable[..., Path]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)

STEPS = 12


def prompts() -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 5, 33, 64, 130)]


def transformers_references(model: Path) -> dict[str, Reference]:
    """Greedy tokens and gaps from transformers, recomputing the whole sequence for each token."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    found = {}
    with torch.no_grad():
        for i, prompt in enumerate(prompts()):
            sequence, gaps = list(prompt), []
            for _ in range(STEPS):
                logits = reference(torch.tensor([sequence])).logits[0, -1]
                best = logits.topk(2)
                gaps.append(float(best.values[0] - best.values[1]))
                sequence.append(int(best.indices[0]))
            found[str(i)] = Reference(sequence[len(prompt) :], gaps)
    return found


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_plain_and_neo_compute_what_transformers_does(tiny: Tiny, arch: str) -> None:
    """So a folder's weights really are the ones that SGLang runs, and the reference of all other tests is right."""
    expected = transformers_references(tiny(arch))
    logits = {}
    for kind in ("plain", "neo"):
        with InProcessRunner(kind, tiny(arch)) as runner:  # type: ignore[arg-type]
            tokens, logits[kind] = runner.generate(prompts(), STEPS)
        assert_exact(expected, {str(i): row for i, row in enumerate(tokens)})
    torch.testing.assert_close(logits["neo"], logits["plain"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("page_size", [1, 64])
def test_batched_and_alone_agree(tiny: Tiny, page_size: int) -> None:
    with InProcessRunner("neo", tiny("llama"), page_size=page_size) as runner:
        alone = runner.references(prompts(), STEPS)
        tokens, _ = runner.generate(prompts(), STEPS)
        runner.model_runner.token_to_kv_pool_allocator.token_manager.audit()
    assert_exact(alone, {str(i): row for i, row in enumerate(tokens)})


def test_answers_do_not_depend_on_what_is_decoded_beside_them(tiny: Tiny) -> None:
    """Most tests compare with answers of a plain runner that were computed several at a time."""
    requests = [Request(str(i), prompt, STEPS - i) for i, prompt in enumerate(prompts())]
    with InProcessRunner("plain", tiny("llama"), max_total_tokens=256, max_running_requests=3) as runner:
        alone = runner.references(prompts(), STEPS)
        together = runner.answers(requests)
    assert_exact({name: together[name] for name in alone}, {n: r.tokens[: STEPS - int(n)] for n, r in alone.items()})
    for name, reference in together.items():
        assert reference.gaps == pytest.approx(alone[name].gaps[: len(reference.gaps)], abs=1e-4)


def test_the_worker_builds_our_classes(tiny: Tiny) -> None:
    def names(kind: Any) -> list[str]:
        with InProcessRunner(kind, tiny("llama")) as runner:
            objects = (
                runner.worker,
                runner.model_runner,
                runner.model_runner.kv_cache_configurator,
                runner.model_runner.token_to_kv_pool_allocator,
            )
            return [f"{type(o).__module__}.{type(o).__name__}" for o in objects]

    assert all(name.startswith("sglang_neo.") for name in names("neo"))
    assert all(name.startswith("sglang.") for name in names("plain"))
    assert seams.SUPPORTED_SGLANG == ("0.5.17",)


def test_smollm2_answers_sensibly(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    with InProcessRunner("neo", smollm2, max_total_tokens=512) as runner:
        [tokens], _ = runner.generate([prompt], 8)
    assert "Paris" in tokenizer.decode(tokens)


# -- the tiny models are worth testing with -------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tiny_models_attend(tiny: Tiny, arch: str) -> None:
    """Another token far back changes what comes next: with SGLang's dummy weights it would not."""
    rng = random.Random(4)
    prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(60)]
    changed = [*prompt[:10], 250 if prompt[10] != 250 else 251, *prompt[11:]]
    with InProcessRunner("plain", tiny(arch)) as runner:
        tokens, logits = runner.generate([prompt, changed], STEPS)
    assert (logits[0, 0] - logits[1, 0]).abs().max() > 0.05
    assert tokens[0] != tokens[1]
    assert len(set(tokens[0])) > 3, "the model repeats itself: such tokens show no fault"


def test_control_wrong_kv_changes_tokens(tiny: Tiny) -> None:
    def corrupt(model_runner: Any, step: int) -> None:
        if step == 3:
            slots = model_runner.req_to_token_pool.req_to_token[1, :30].long()
            model_runner.token_to_kv_pool.get_key_buffer(0)[slots] += 1.0

    prompt = prompts()[2]
    with InProcessRunner("neo", tiny("llama")) as runner:
        reference = runner.references([prompt], STEPS)["0"]
        [tokens], _ = runner.generate([prompt], STEPS, corrupt)
    difference = first_difference("0", reference, tokens)
    assert difference is not None and difference.position >= 3


def test_tiny_model_is_reproducible_and_seeded(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    def weights(folder: Path) -> dict[str, torch.Tensor]:
        return load_file(folder / "model.safetensors")

    first = tiny_model("llama", tmp_path / "a")
    assert tiny_model("llama", tmp_path / "a") == first
    again = weights(tiny_model("llama", tmp_path / "b"))
    other = weights(tiny_model("llama", tmp_path / "a", seed=8))
    for name, tensor in weights(first).items():
        assert torch.equal(tensor, again[name])
        assert not torch.equal(tensor, other[name])
        assert tensor.std() > 0.02, name
    smaller = tiny_model("llama", tmp_path / "a", num_hidden_layers=1)
    assert smaller != first and len(weights(smaller)) < len(again)
