"""A model folder with random weights of real size from a config.json alone.

    python -m bench.random_model CONFIG OUT [--layers N] [--std 0.02] [--seed 7]

SGLang's dummy weights lie within 1e-3 of zero: attention then hardly matters, and wrong KV would not show. Here
matrices are normal with a standard deviation of ``--std`` and norms are ones. There is no tokenizer: serve it with
--skip-tokenizer-init. Weights are made on the GPU if there is one, and written in shards as they are made.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

SHARD_BYTES = 2 << 30


def write(config: Path, out: Path, layers: int | None = None, std: float = 0.02, seed: int = 7) -> Path:
    """Writes the folder ``out``, which must not exist; returns it. bfloat16."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = json.loads(config.read_text())
    if layers is not None:
        settings["num_hidden_layers"] = layers
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    size = count = total = 0

    def flush() -> None:
        nonlocal shard, size, count
        if shard:
            count += 1
            name = f"model-{count:05}.safetensors"
            save_file(shard, out / name, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(shard, name))
            shard, size = {}, 0

    for name, shape in shapes.items():
        if len(shape) >= 2:
            value = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) * std
        else:
            value = (
                torch.ones(shape, dtype=torch.bfloat16) if "norm" in name else torch.zeros(shape, dtype=torch.bfloat16)
            )
        shard[name] = value.cpu().contiguous()
        size += value.numel() * 2
        total += value.numel() * 2
        if size >= SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="a config.json of a causal language model")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--layers", type=int, help="instead of the config's number")
    parser.add_argument("--std", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    if not args.config.is_file():
        print(f"error: {args.config} does not exist", file=sys.stderr)
        return 2
    if args.out.exists():
        print(f"error: {args.out} exists already", file=sys.stderr)
        return 2
    write(args.config, args.out, args.layers, args.std, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
