"""What int8 host KV costs in quality: perplexity and log-probabilities of real text, on the CPU device.

    python -m bench.host_kv_quality MODEL --out FILE [--text FILE ...] [--windows 12] [--prompt 64] [--length 448]

The text is cut into windows. Each begins as a prompt; then the model is made to go on with the text itself, decoding
token by token with its KV on the device, in host memory as it is, or in host memory as int8, and the log-probability
that it gives to each true token is kept. Everything but the choice of the next token is the real server's path.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from bench.record import provenance

DEFAULT_TEXT = ("README.md", "docs/architecture.md", "docs/kernels.md")


def windows(model: Path, files: list[Path], count: int, length: int) -> list[list[int]]:
    """``count`` pieces of ``length`` tokens, one after the other. ValueError if there is less text."""
    from transformers import AutoTokenizer

    text = "\n\n".join(file.read_text() for file in files)
    ids: list[int] = AutoTokenizer.from_pretrained(model)(text)["input_ids"]
    if len(ids) < count * length:
        raise ValueError(f"{len(ids)} tokens of text are fewer than {count} windows of {length}: give more text")
    return [ids[i * length : (i + 1) * length] for i in range(count)]


class Forced:
    """In place of a model runner's ``sample``: the text's own next token, whose log-probability is kept."""

    def __init__(self, runner: Any, texts: dict[int, list[int]]):
        self.sample, self.texts = runner.sample, texts  # by request slot
        self.logprobs: dict[int, list[float]] = {slot: [] for slot in texts}

    def __call__(self, logits_output: Any, forward_batch: Any) -> Any:
        import torch

        logprobs = torch.log_softmax(logits_output.next_token_logits.float(), dim=-1)
        self.sample(logits_output, forward_batch)  # fills in what the scheduler wants beside the token
        decode = forward_batch.forward_mode.is_decode()
        ends = (forward_batch.positions + 1 if decode else forward_batch.seq_lens).tolist()
        tokens = []
        for row, (slot, end) in enumerate(zip(forward_batch.req_pool_indices.tolist(), ends, strict=True)):
            text = self.texts[slot]
            token = text[min(end, len(text) - 1)]
            if end < len(text):
                self.logprobs[slot].append(float(logprobs[row, token]))
            tokens.append(token)
        return torch.tensor(tokens)


def run(model: Path, texts: list[list[int]], prompt: int, dtype: str, where: str) -> list[list[float]]:
    """Log-probabilities of the tokens after the prompt, per window. ``where``: device, host or int8."""
    from tests.harness.inprocess import InProcessScheduler, Request

    arguments: dict[str, Any] = {
        "dtype": dtype,
        "max_total_tokens": len(texts) * (len(texts[0]) + 64),
        "max_running_requests": len(texts),
        "disable_overlap_schedule": True,
        "disable_radix_cache": True,
        "chunked_prefill_size": -1,
        "max_prefill_tokens": 100000,
    }
    if where == "device":
        arguments["neo_mode"] = "gpu-only"
    elif where == "int8":
        arguments["neo_host_kv_dtype"] = "int8"
    requests = [Request(f"w{i:03}", text[:prompt], len(text) - prompt) for i, text in enumerate(texts)]

    def to_host(scheduler: Any, step: int) -> None:
        for req in scheduler.running_batch.reqs:
            if where != "device" and not req.finished() and getattr(req, "neo_host_row", None) is None:
                assert scheduler.placement.move_to_host(req)

    with InProcessScheduler("neo", model, **arguments) as scheduler:
        runner = scheduler.scheduler.tp_worker.model_runner
        # Slots are given out in order from 1, to the requests in order of arrival.
        forced = Forced(runner, {i + 1: text for i, text in enumerate(texts)})
        runner.sample = forced
        scheduler.run(requests, to_host)
        host_tokens = scheduler.scheduler.neo_metrics.counters.host_tokens
    assert (host_tokens > 0) == (where != "device")
    return list(forced.logprobs.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", default=[Path(name) for name in DEFAULT_TEXT])
    parser.add_argument("--windows", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a window that are its prompt")
    parser.add_argument("--length", type=int, default=448, help="tokens of a window")
    parser.add_argument("--dtype", default="bfloat16", help="of the model and its device KV")
    args = parser.parse_args()
    try:
        texts = windows(args.model, args.text, args.windows, args.length)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = {where: run(args.model, texts, args.prompt, args.dtype, where) for where in ("device", "host", "int8")}
    result: dict[str, Any] = {
        **provenance(),
        "model": args.model.name,
        "dtype": args.dtype,
        "text": [str(path) for path in args.text],
        "windows": args.windows,
        "prompt_tokens": args.prompt,
        "window_tokens": args.length,
    }
    flat = {where: [x for window in windows_ for x in window] for where, windows_ in found.items()}
    for where, logprobs in flat.items():
        differences = sorted(abs(a - b) for a, b in zip(logprobs, flat["device"], strict=True))
        result[where] = {
            "perplexity": math.exp(-statistics.fmean(logprobs)),
            "tokens": len(logprobs),
            "logprob_difference_mean": statistics.fmean(differences),
            "logprob_difference_p99": differences[int(0.99 * len(differences))],
        }
        print(f"{where:7} {json.dumps(result[where])}", flush=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
