"""Model folders for tests: tiny ones written here, and the small real one that `make setup` converts.

SGLang's dummy weights are within 1e-3 of zero: attention then moves no logit, and any two runtimes agree, right or
wrong. So the tiny models get weights of real size, and they get them as safetensors in a folder, so that every
process that loads the folder (plain SGLang, sglang_neo, each rank of a parallel server) has the same ones.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

REPO_ROOT = Path(__file__).resolve().parents[2]

#: Converted by `make setup` (bench/get_smollm2.py). Llama architecture; 3 KV heads, so it cannot be split over 2 ranks.
SMOLLM2 = REPO_ROOT / "models" / "SmolLM2-135M-Instruct"

#: Architectures that tiny_model knows: name -> (transformers' model_type, settings on top of _COMMON).
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {"use_sliding_window": False}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2}),
}

VOCAB_SIZE = 256

#: Query and KV heads are even, so that two tensor-parallel ranks can share them.
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_model(arch: str, directory: Path, seed: int = 7, dtype: str = "float32", **overrides: Any) -> Path:
    """The folder of a tiny model with random weights of real size; written once per directory.

    There is no tokenizer: give servers ``--skip-tokenizer-init`` and talk to them in token ids (3 .. VOCAB_SIZE - 1).

    Args:
        arch: a key of ARCHITECTURES.
        directory: where folders are kept; the same arguments give the same folder again.
        seed: of the weights. Another seed is another model, for negative controls.
        dtype: of the stored weights.
        overrides: settings of the model's config, e.g. ``num_hidden_layers=1``.
    """
    model_type, settings = ARCHITECTURES[arch]
    suffix = "".join(f"-{key}={value}" for key, value in sorted(overrides.items()))
    folder = Path(directory) / f"{arch}-seed{seed}-{dtype}{suffix}"
    if folder.is_dir():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**_COMMON, **settings, **overrides})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    model.to(getattr(torch, dtype))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        partial = Path(scratch) / folder.name
        model.save_pretrained(partial)
        # transformers' defaults for generation would end a test's request at a token of its choice.
        (partial / "generation_config.json").unlink(missing_ok=True)
        try:
            partial.rename(folder)
        except OSError:  # another process was faster; its folder is the same
            if not folder.is_dir():
                raise
    return folder


def randomise(model: Any, seed: int) -> None:
    """Set every parameter of ``model`` from ``seed``: matrices normal and scaled by fan-in, norms around 1.

    Twice the scale that keeps variance constant: attention scores then differ enough between tokens to matter, and
    logits spread over several units, so that near-ties stay rare.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)

    def normal(shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" in name:
                parameter.copy_(normal(parameter.shape))
            elif parameter.dim() >= 2:
                parameter.copy_(normal(parameter.shape) * 2 / parameter.shape[-1] ** 0.5)
            elif "norm" in name:
                parameter.copy_(1 + 0.2 * normal(parameter.shape))
            else:
                parameter.copy_(0.2 * normal(parameter.shape))


def cut_copy(model: Path, out: Path, layers: int) -> Path:
    """A copy of the folder ``model`` with the first layers alone; its answers are text, and make no sense."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((model / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    [weights] = model.glob("*.safetensors")
    gone = tuple(f"model.layers.{i}." for i in range(layers, config["num_hidden_layers"]))
    kept = {name: tensor for name, tensor in load_file(weights).items() if not name.startswith(gone)}
    save_file(kept, out / weights.name, metadata={"format": "pt"})
    return out


def perturbed_copy(model: Path, out: Path, tensor: str, scale: float) -> Path:
    """A copy of the folder ``model`` in which one tensor is multiplied by ``scale``; for negative controls."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, out)
    [weights] = out.glob("*.safetensors")
    tensors = load_file(weights)
    tensors[tensor] = tensors[tensor] * scale
    save_file(tensors, weights, metadata={"format": "pt"})
    return out
