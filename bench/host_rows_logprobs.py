"""Are requests that decode from host memory as exact as the GPU's own noise? On a CUDA machine.

    python -m bench.host_rows_logprobs MODEL --out FILE [--rows 64] [--input-len 512] [--output-len 128] [--pool 26400]

Three servers get the same prompts: gpu-only with triton (the reference), gpu-only with flashinfer, and ours with
triton and a device pool too small for them, so that most decode from host memory. In bf16 answers part at near-ties;
up to there, the log-probabilities of the chosen tokens are compared. Two plain attention backends show the noise; host
rows must show no more. With ``--storm N``, the small server then gets N more requests, a fifth of which vanish at some
moment, and afterwards both its pools must be as they were.

``--exact`` is for fp32: no noise to compare with, every answer must equal the reference's token for token. One that
leaves it where the reference's two best tokens are within TIE is reported, and allowed: there the order of summation
decides. (triton's products are in TF32 unless TRITON_F32_DEFAULT=ieee.) ``--text`` makes prompts of real text.

Exit codes: 0; 1 if host rows differ more than the two backends do, or did not happen; 2 for bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

from bench.host_kv_quality import windows
from bench.record import provenance
from bench.servers import NEO, PLAIN, Server, ServerPool, ServerSpec, generate_body, wait_until

#: Tokens, their log-probabilities, and by how much each was ahead of, or behind, the best other one.
Answer = tuple[list[int], list[float], list[float]]
TIE = 1e-3


def answers(server: Server, prompts: list[list[int]], output_len: int) -> list[Answer]:
    def ask(prompt: list[int]) -> Answer:
        result = server.generate(
            input_ids=prompt,
            max_new_tokens=output_len,
            ignore_eos=True,
            return_logprob=True,
            top_logprobs_num=2,
            timeout=300,
        )
        meta = result["meta_info"]
        gaps = [best[0] - second[0] for best, second, *_ in meta["output_top_logprobs"]]
        return result["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]], gaps

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, prompts))


def compare(reference: list[Answer], got: list[Answer]) -> dict[str, Any]:
    """Differences of log-probabilities over the tokens before the first that differs."""
    differences, common, gaps = [], [], []
    for (tokens, logprobs, ahead), (other_tokens, other_logprobs, _) in zip(reference, got, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(tokens, other_tokens, strict=True)) if a != b), len(tokens))
        common.append(same)
        gaps += ahead[same : same + 1]
        differences += [abs(a - b) for a, b in zip(logprobs[:same], other_logprobs[:same], strict=True)]
    ordered = sorted(differences)
    return {
        "requests": len(reference),
        "compared_tokens": len(differences),
        "equal_requests": sum(same == len(answer[0]) for same, answer in zip(common, reference, strict=True)),
        "mean": statistics.fmean(differences),
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[int(len(ordered) * 0.99)],
        "max": ordered[-1],
        "gaps_where_they_part": sorted(gaps),
    }


def storm(server: Server, count: int, vocabulary: int) -> dict[str, Any]:
    """``count`` streaming requests, every fifth of them dropped by its client; both pools before and after."""
    before = server.info()["neo"]

    def ask(i: int) -> bool:
        rng = random.Random(i)
        ids = [rng.randrange(3, vocabulary) for _ in range(rng.randrange(16, 600))]
        body = generate_body(input_ids=ids, max_new_tokens=rng.randrange(8, 160), ignore_eos=True, stream=True)
        leave_at = rng.randrange(0, 60) if i % 5 == 0 else None
        with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=300) as answer:
            for n, _ in enumerate(answer.iter_lines()):
                if n == leave_at:
                    return False
        return answer.status_code == 200

    with ThreadPoolExecutor(128) as pool:
        ended = sum(pool.map(ask, range(count)))
    # A dropped request is noticed at its next token; then the radix cache is emptied, so that free means free.
    wait_until(lambda: server.post("/flush_cache", {}).status_code == 200, 120, "an idle server", every=1)
    after = server.info()["neo"]
    return {
        "requests": count,
        "ended": ended,
        "dropped": count - ended,
        "host_tokens": after["host_tokens_total"] - before["host_tokens_total"],
        "migrations": after["migrations"],
        "device_kv": after["device_kv"],
        "host_kv": after["host_kv"],
        "lost": {pool: after[pool]["total_tokens"] - after[pool]["free_tokens"] for pool in ("device_kv", "host_kv")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--pool", type=int, default=26400, help="tokens of the small device pool")
    parser.add_argument("--vocabulary", type=int, default=128000)
    parser.add_argument("--logs", type=Path, default=Path("logs-logprobs"))
    parser.add_argument("--storm", type=int, default=0, metavar="N", help="more requests, a fifth of them dropped")
    parser.add_argument("--noise-backend", default="flashinfer")
    parser.add_argument("--exact", action="store_true", help="answers must be equal; no noise is measured")
    parser.add_argument(
        "--text", type=Path, nargs="+", metavar="FILE", help="prompts are pieces of it; default: random"
    )
    parser.epilog = "What follows -- goes to every server."
    argv = sys.argv[1:]
    split = argv.index("--") if "--" in argv else len(argv)
    args, flags = parser.parse_args(argv[:split]), argv[split + 1 :]
    if not (args.model / "config.json").is_file():
        print(f"error: {args.model} is no model", file=sys.stderr)
        return 2
    rng = random.Random(1)
    if args.text:
        prompts = windows(args.model, args.text, args.rows, args.input_len)
    else:
        prompts = [[rng.randrange(3, args.vocabulary) for _ in range(args.input_len)] for _ in range(args.rows)]
    tokens = args.rows * (args.input_len + args.output_len + 64)
    common = (
        *("--skip-tokenizer-init", "--grammar-backend", "none", "--sampling-backend", "pytorch"),
        *("--disable-prefill-cuda-graph", "--cuda-graph-max-bs", str(args.rows), "--disable-radix-cache"),
        *("--max-running-requests", str(args.rows), "--context-length", "4096", *flags),
    )
    runs = {
        "triton": (PLAIN, ("--attention-backend", "triton", "--max-total-tokens", str(tokens))),
        "noise": (PLAIN, ("--attention-backend", args.noise_backend, "--max-total-tokens", str(tokens))),
        # Prompts go to the host as fast as they come: how many rows decode there matters here, not how fast.
        "host": (
            NEO,
            (
                *("--attention-backend", "triton", "--max-total-tokens", str(args.pool)),
                *("--neo-mode", "sync", "--neo-host-prefill-rate", str(args.rows * args.input_len)),
            ),
        ),
    }
    if args.exact:
        del runs["noise"]
    args.logs.mkdir(parents=True, exist_ok=True)
    got: dict[str, list[Answer]] = {}
    neo: dict[str, Any] = {}
    stormed: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, (entry, own_flags) in runs.items():  # all at once: nothing here is about speed
            (args.logs / name).mkdir(exist_ok=True)
            print(f"{name}: {' '.join(own_flags)}", flush=True)
            spec = ServerSpec(args.model, (*common, *own_flags), entry)
            servers[name] = stack.enter_context(ServerPool(args.logs / name).starting(spec))
        for name, server in servers.items():
            server.wait_ready()
            print(f"{name}: ready", flush=True)
            got[name] = answers(server, prompts, args.output_len)
        neo = servers["host"].info()["neo"]
        if args.storm:
            print(f"storm: {args.storm} requests", flush=True)
            stormed = storm(servers["host"], args.storm, args.vocabulary)
            print(json.dumps(stormed), flush=True)
    noise_name, host_name = f"{args.noise_backend} against triton", "host rows against triton"
    compared = {
        name: compare(got["triton"], got[run])
        for name, run in ((noise_name, "noise"), (host_name, "host"))
        if run in got
    }
    result = {
        **provenance(),
        "model": args.model.name,
        "rows": args.rows,
        "input_len": args.input_len,
        "output_len": args.output_len,
        "device_pool_tokens": args.pool,
        **compared,
        "neo": neo,
        "storm": stormed,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, found in compared.items():
        print(f"{name}: {json.dumps(found)}")
    print(f"host rows: {neo['host_tokens_total']} of {args.rows * args.output_len} tokens, {neo['migrations']}")
    if stormed and any(stormed["lost"].values()):
        print(f"error: KV was lost: {stormed['lost']}", file=sys.stderr)
        return 1
    if neo["host_tokens_total"] < 0.2 * args.rows * args.output_len:
        print("error: hardly a request decoded from host memory", file=sys.stderr)
        return 1
    host = compared[host_name]
    if args.exact:
        wrong = [gap for gap in host["gaps_where_they_part"] if gap > TIE]
        if wrong:
            print(
                f"error: {len(wrong)} answers differ where the reference's two best tokens were apart", file=sys.stderr
            )
        return int(bool(wrong))
    noise = compared[noise_name]
    if host["mean"] > 1.2 * noise["mean"] or host["p99"] > 1.2 * noise["p99"]:
        print("error: host rows differ more from triton than the other backend does", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
