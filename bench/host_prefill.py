"""Prompts computed straight into host memory: one that is larger than the device pool, and a burst beside device rows.

    python -m bench.host_prefill MODEL --out FILE [--pool 13600] [--prompt 20000] [--answer 32] [--burst 200]
                                 [--device-rows 8] [--device-prompt 1400] [--device-answer 280] [--device cuda]
                                 [--backend triton] [--page-size 1] [--dtype bfloat16]

1. Plain SGLang with a device pool that holds the long prompt answers it: the reference.
2. Ours with a device pool of ``--pool`` tokens answers it: tokens up to the first difference, their log-probabilities,
   and the device memory that the prefill took beyond what was there, in both.
3. Ours decodes device rows alone; beside a burst of prompts that have no room on the device, metered; and beside the
   same burst unmetered. Compared is the time per output token of the device rows.

Exit codes: 0; 1 if log-probabilities differ by more than ``--noise``, the prompt did not go to the host, or device rows
are slowed by more than 10 percent beside the metered burst (p99 of their time per output token); 2: bad input.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.record import provenance
from sglang_neo.planning.metering import Meter
from tests.harness.inprocess import InProcessScheduler, Request, Result

ALLOWED_SLOWDOWN = 1.10


def prompt(rng: random.Random, tokens: int, vocabulary: int) -> list[int]:
    return [rng.randrange(3, vocabulary) for _ in range(tokens)]


class PeakMemory:
    """Bytes allocated on the GPU at most, beyond what was before; zero elsewhere."""

    def __enter__(self) -> PeakMemory:
        self.extra = 0
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *exception: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.extra = torch.cuda.max_memory_allocated() - self._before


def answer(scheduler: InProcessScheduler, request: Request) -> tuple[Result, dict[str, Any]]:
    """The answer after a warm-up, the seconds it took and the device memory."""
    scheduler.run([Request("warm-up", request.prompt, 4)])
    scheduler.flush()
    with PeakMemory() as memory:
        begin = time.perf_counter()
        result = scheduler.run([request])[request.name]
        seconds = time.perf_counter() - begin
    scheduler.flush()
    return result, {"seconds": round(seconds, 3), "peak_extra_bytes": memory.extra}


def compare(expected: Result, got: Result) -> dict[str, Any]:
    """How far the answers agree, and how much the log-probabilities of equal tokens differ."""
    same = next(
        (i for i, (a, b) in enumerate(zip(expected.tokens, got.tokens, strict=False)) if a != b), len(expected.tokens)
    )
    differences = [abs(a - b) for a, b in zip(expected.logprobs[:same], got.logprobs[:same], strict=True)]
    gap = abs(expected.top_logprobs[same][0] - expected.top_logprobs[same][1]) if same < len(got.tokens) else None
    return {
        "equal_tokens": same,
        "of": len(expected.tokens),
        "reference_gap_at_first_difference": gap,
        "largest_logprob_difference": max(differences, default=None),
    }


class TokenTimes:
    """``on_step``: when each of some requests got its tokens."""

    def __init__(self, names: set[str]):
        self._names = names
        self._times: dict[str, list[float]] = {name: [] for name in names}

    def __call__(self, scheduler: Any, step: int) -> None:
        now = time.perf_counter()
        for req in scheduler.running_batch.reqs:
            if req.rid in self._names and len(req.output_ids) > len(self._times[req.rid]):
                self._times[req.rid].append(now)

    def summary(self) -> dict[str, Any]:
        """Milliseconds per output token of a request, and between two tokens."""
        per_token = sorted((t[-1] - t[0]) / (len(t) - 1) * 1e3 for t in self._times.values() if len(t) > 1)
        gaps = [(b - a) * 1e3 for t in self._times.values() for a, b in itertools.pairwise(t)]
        return {
            "tpot_ms_p50": statistics.median(per_token),
            "tpot_ms_p99": per_token[min(len(per_token) - 1, int(0.99 * len(per_token)))],
            "longest_gap_ms": max(gaps),
        }


def measure_burst(scheduler: InProcessScheduler, args: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    placement, manager = scheduler.scheduler.placement, scheduler.scheduler.token_manager
    found: dict[str, Any] = {}
    for kind, meter in (("warm-up", None), ("alone", None), ("metered", placement.meter), ("unmetered", Meter(1e9))):
        rng = random.Random(3)
        rows = [
            Request(f"row{i}", prompt(rng, args.device_prompt, vocabulary), args.device_answer)
            for i in range(args.device_rows)
        ]
        burst = [
            Request(f"burst{i:03}", prompt(rng, args.burst_prompt, vocabulary), 1, arrive=args.device_rows + 20)
            for i in range(args.burst)
        ]
        if meter is not None:
            placement.meter = meter
        times, before = TokenTimes({row.name for row in rows}), manager.prefilled_tokens
        scheduler.run(rows if meter is None else rows + burst, times)
        scheduler.flush()
        if kind != "warm-up":
            found[kind] = {**times.summary(), "host_prompt_tokens": manager.prefilled_tokens - before}
    for kind in ("metered", "unmetered"):
        found[kind]["slowdown_p99"] = found[kind]["tpot_ms_p99"] / found["alone"]["tpot_ms_p99"]
    return found


def run(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """What was measured, and what is wrong with it."""
    vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
    common: dict[str, Any] = {
        "device": args.device,
        "dtype": args.dtype,
        "attention_backend": args.backend,
        "page_size": args.page_size,
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "disable_prefill_cuda_graph": True,
        "max_running_requests": 256,
        "chunked_prefill_size": args.chunk,
    }
    if args.device == "cuda":
        common["cuda_graph_max_bs_decode"] = 16
    long = Request("long", prompt(random.Random(1), args.prompt, vocabulary), args.answer)
    large = -(-(args.prompt + args.answer + 512) // args.page_size) * args.page_size
    with InProcessScheduler("plain", args.model, **common, max_total_tokens=large) as scheduler:
        expected, plain = answer(scheduler, long)
    pool = args.pool // args.page_size * args.page_size
    with InProcessScheduler("neo", args.model, **common, max_total_tokens=pool, **args.host) as scheduler:
        manager = scheduler.scheduler.token_manager
        got, ours = answer(scheduler, long)
        to_host = manager.prefilled_tokens
        state = scheduler.scheduler.neo_state()
        burst = measure_burst(scheduler, args, vocabulary)
    found = {
        **provenance(),
        "device_pool_tokens": pool,
        "host_pool_tokens": state["host_kv"]["total_tokens"],
        "staging": state["host_prefill"],
        "long_prompt": {"tokens": args.prompt, "plain": plain, "ours": ours, "compared": compare(expected, got)},
        "burst": {"prompts": args.burst, "tokens_each": args.burst_prompt, "device_rows": args.device_rows, **burst},
    }
    wrong = []
    compared = found["long_prompt"]["compared"]
    worst, gap = compared["largest_logprob_difference"], compared["reference_gap_at_first_difference"]
    if worst is None or worst > args.noise or (gap is not None and gap > args.noise):
        wrong.append(f"the long prompt's answer differs: {compared}")
    if to_host < 2 * args.prompt:  # a warm-up before
        wrong.append(f"only {to_host} tokens of prompts went straight to the host")
    if burst["metered"]["slowdown_p99"] > ALLOWED_SLOWDOWN:
        wrong.append(f"device rows take {burst['metered']['slowdown_p99']:.2f} times as long beside the metered burst")
    return found, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    for name, default in (
        ("pool", 13600),
        ("prompt", 20000),
        ("answer", 32),
        ("chunk", 8192),
        ("burst", 200),
        ("burst-prompt", 900),
        ("device-rows", 8),
        ("device-prompt", 1400),
        ("device-answer", 280),
        ("page-size", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--noise", type=float, default=0.4, help="of log-probabilities")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", default="triton", help="SGLang's --attention-backend")
    parser.add_argument("--host-kv-size", type=float, help="GB of host memory for KV; default: as the server's")
    args = parser.parse_args()
    if not (args.model / "config.json").is_file():
        print(f"error: {args.model} is no model's folder", file=sys.stderr)
        return 2
    args.host = {} if args.host_kv_size is None else {"neo_host_kv_size": args.host_kv_size}
    found, wrong = run(args)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: found[key] for key in ("staging", "long_prompt", "burst")}, indent=1))
    for line in wrong:
        print(f"FAILED: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
