"""Decode speed of two servers on one machine, interleaved: plain SGLang against sglang_neo.

Both servers run at once and take turns, so that whatever else the machine does hits both. One turn sends the same
batch of random prompts twice, once for 1 output token and once for N: the difference is N - 1 decode steps of the
whole batch, free of prefill and HTTP. The order of the two alternates from round to round.

    python bench/decode_speed.py --model-path models/SmolLM2-135M-Instruct --rows 4 --input-len 64 --output-len 65 \
        --rounds 7 --out result.json -- --dtype float32

Everything after ``--`` goes to both servers. The JSON has one ratio (neo / plain) per round, their median and spread.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import requests

from bench.record import provenance
from bench.servers import NEO, PLAIN, Server, ServerPool, ServerSpec

VARIANTS = ("plain", "neo")
ENTRIES = {"plain": PLAIN, "neo": NEO}


def generate(server: Server, prompts: list[list[int]], output_len: int) -> tuple[float, list[list[int]]]:
    """Seconds for the whole batch, and its output ids. Raises on any HTTP error."""
    body = {
        "input_ids": prompts,
        "sampling_params": {"max_new_tokens": output_len, "ignore_eos": True, "temperature": 0},
    }
    start = time.perf_counter()
    answer = requests.post(server.url + "/generate", json=body, timeout=600)
    seconds = time.perf_counter() - start
    answer.raise_for_status()
    outputs = [item["output_ids"] for item in answer.json()]
    if any(len(ids) != output_len for ids in outputs):
        raise RuntimeError(f"asked for {output_len} tokens, got {sorted({len(ids) for ids in outputs})}")
    return seconds, outputs


def decode_rate(server: Server, prompts: list[list[int]], output_len: int) -> tuple[float, list[list[int]]]:
    """Decode tokens per second of the batch, and its outputs."""
    short, _ = generate(server, prompts, 1)
    long, outputs = generate(server, prompts, output_len)
    return len(prompts) * (output_len - 1) / (long - short), outputs


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure(options: argparse.Namespace, server_args: list[str], logs: Path) -> dict[str, Any]:
    rng = random.Random(options.seed)
    flags = ("--disable-radix-cache", *server_args)
    rounds: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {}
        started: dict[str, float] = {}
        for kind in VARIANTS:  # one after the other: the second sizes its memory by what the first left
            (logs / kind).mkdir(parents=True, exist_ok=True)
            spec = ServerSpec(Path(options.model_path), flags, ENTRIES[kind])
            begin = time.monotonic()
            servers[kind] = stack.enter_context(ServerPool(logs / kind).starting(spec))
            servers[kind].wait_ready(options.start_timeout)
            started[kind] = time.monotonic() - begin
        print("ready in " + ", ".join(f"{kind}: {s:.1f} s" for kind, s in started.items()), flush=True)
        vocabulary = options.vocabulary
        for number in range(-options.warmup, options.rounds):
            prompts = [[rng.randrange(10, vocabulary) for _ in range(options.input_len)] for _ in range(options.rows)]
            order = VARIANTS if number % 2 == 0 else VARIANTS[::-1]
            results = {kind: decode_rate(servers[kind], prompts, options.output_len) for kind in order}
            rates = {kind: results[kind][0] for kind in VARIANTS}
            same = sum(a == b for a, b in zip(results["plain"][1], results["neo"][1], strict=True))
            ratio = rates["neo"] / rates["plain"]
            label = "warm-up" if number < 0 else f"round {number + 1}/{options.rounds}"
            print(
                f"{label}: plain {rates['plain']:.1f}, neo {rates['neo']:.1f} tokens/s, ratio {ratio:.4f}, "
                f"{same}/{options.rows} outputs equal",
                flush=True,
            )
            if number >= 0:
                rounds.append({"order": order, **rates, "ratio": ratio, "outputs_equal": same})
        info = servers["neo"].info()
    return {
        "what": "decode tokens/s, plain SGLang and sglang_neo interleaved",
        **provenance(),
        "config": {**vars(options), "server_args": server_args, "out": str(options.out)},
        "seconds_to_ready": started,
        "server_info_neo": info["neo"],
        "rounds": rounds,
        "tokens_per_s": {kind: spread([r[kind] for r in rounds]) for kind in VARIANTS},
        "ratio": spread([r["ratio"] for r in rounds]),
        "outputs_equal": sum(r["outputs_equal"] for r in rounds),
        "outputs": options.rows * len(rounds),
    }


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    split = argv.index("--") if "--" in argv else len(argv)
    own, server_args = argv[:split], argv[split + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--rows", type=int, default=4, help="requests in the batch")
    parser.add_argument("--input-len", type=int, default=64, help="prompt tokens per request")
    parser.add_argument("--output-len", type=int, default=65, help="output tokens per request, at least 2")
    parser.add_argument("--vocabulary", type=int, default=32000, help="prompts are drawn from token ids below this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=1, help="rounds that are not counted")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--start-timeout", type=float, default=600, help="seconds a server may take to start")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs (default: a temporary one)")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    options = parser.parse_args(own)
    if options.output_len < 2:
        parser.error("--output-len must be at least 2: one decode step is what is measured")
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(options, server_args, options.logs or Path(scratch))
    ratio = result["ratio"]
    print(f"ratio neo / plain: median {ratio['median']:.4f}, from {ratio['min']:.4f} to {ratio['max']:.4f}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
