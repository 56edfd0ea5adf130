"""A soak: a server under random traffic for a while; memory of all its processes and both KV pools over time.

    python -m bench.soak MODEL MINUTES --out FILE [--plot FILE] [--clients 8] [--seed 1] [-- SERVER FLAGS]
    python -m bench.soak tiny 30 --out soak.json --plot soak.png -- --device cpu --max-total-tokens 800

MODEL is a folder, or ``tiny``: a Llama of three layers with random weights. Prompts are token ids, so a tokenizer is of
no use and left out. Each client sends one request after the other: prompts of all lengths, half of them with a common
beginning, streamed or not; some go away in the middle of an answer, some are aborted. One more client asks the same
question again and again, whose greedy answer must stay the same.

Exit codes: 0; 1 if a request failed, the answer changed, a step raised an error, memory grew, or KV was not all free at
the end; 2: bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import requests

from bench.record import provenance
from bench.servers import Server, ServerSpec, generate_body, wait_until

SAMPLE_SECONDS = 5.0
#: Growth from the second quarter of the time to the last that does not count: what caches and allocators do.
ALLOWED_GROWTH_MB = 40.0
#: A request that takes longer has failed.
PATIENCE_SECONDS = 300.0
CANARY: dict[str, Any] = {"input_ids": list(range(5, 45)), "max_new_tokens": 16, "ignore_eos": True}


@dataclass
class Traffic:
    """What the clients do and count; shared by their threads."""

    server: Server
    vocabulary: int
    longest: int  # tokens of a prompt
    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def client(self, number: int, seed: int) -> None:
        rng = random.Random(f"{seed} {number}")
        shared = [self._prompt(random.Random(f"{seed} shared {i}"), self.longest // 2) for i in range(4)]
        turn = 0
        while not self.over.is_set():
            turn += 1
            start = rng.choice(shared)[: rng.randrange(1, self.longest // 2)] if rng.random() < 0.5 else []
            prompt = start + self._prompt(rng, rng.randrange(1, self.longest // 2))
            body: dict[str, Any] = dict(input_ids=prompt, max_new_tokens=rng.choice((1, 8, 40, 120)), ignore_eos=True)
            kind = rng.choices(("whole", "streamed", "left", "aborted"), (4, 4, 2, 1))[0]
            try:
                self._ask(kind, body, f"{number}-{turn}", rng)
                self.counts[kind] += 1
            except Exception as error:  # of whatever kind: the soak goes on, and tells
                self.errors.append(f"{kind}: {error!r}"[:300])

    def canary(self) -> None:
        first = None
        while not self.over.wait(1.0):
            try:
                tokens = self.server.generate(PATIENCE_SECONDS, **CANARY)["output_ids"]
            except Exception as error:
                self.errors.append(f"canary: {error!r}"[:300])
                continue
            first = first or tokens
            self.counts["canary"] += 1
            if tokens != first:
                self.errors.append(f"the same question was answered by {tokens}, first by {first}")

    def _prompt(self, rng: random.Random, length: int) -> list[int]:
        return [rng.randrange(3, self.vocabulary) for _ in range(length)]

    def _ask(self, kind: str, body: dict[str, Any], name: str, rng: random.Random) -> None:
        if kind == "whole":
            assert len(self.server.generate(PATIENCE_SECONDS, **body)["output_ids"]) == body["max_new_tokens"]
            return
        stop_after = rng.randrange(0, 20) if kind in ("left", "aborted") else 1 << 30
        asked = generate_body(**body, stream=True, rid=name)
        url = f"{self.server.url}/generate"
        with requests.post(url, json=asked, stream=True, timeout=PATIENCE_SECONDS) as answer:
            assert answer.status_code == 200, answer.text
            events = 0
            for line in answer.iter_lines():
                events += line.startswith(b"data: {")
                if events > stop_after and kind == "left":
                    return
                if events == stop_after + 1 and kind == "aborted":
                    self.server.post("/abort_request", {"rid": name})


def role(process: psutil.Process) -> str:
    """``sglang::scheduler`` and the like; the launcher has no title of its own."""
    line = process.cmdline()
    title = " ".join(line)
    return title.split()[0] if title.startswith("sglang::") else "launcher" if "launch_server" in title else "other"


def sample(server: Server) -> dict[str, Any]:
    """RSS by process, in MB, and what the server says of its pools."""
    rss: defaultdict[str, float] = defaultdict(float)
    for process in server.members():
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            rss[role(process)] += process.memory_info().rss / 1e6
    neo = server.info()["neo"]
    device, host = neo["device_kv"], neo["host_kv"]
    return {
        "rss_mb": {name: round(mb, 1) for name, mb in rss.items()},
        "device_used_tokens": device["total_tokens"] - device["free_tokens"],
        "host_used_tokens": host["total_tokens"] - host["free_tokens"],
        "host_running_reqs": neo["host_running_reqs"],
    }


def growth(samples: list[dict[str, Any]]) -> dict[str, float]:
    """MB by process, from the median of the second quarter of the time to that of the last."""
    quarter = len(samples) // 4

    def median(part: list[dict[str, Any]], name: str) -> float:
        return statistics.median(s["rss_mb"].get(name, 0.0) for s in part)

    return {
        name: round(median(samples[-quarter:], name) - median(samples[quarter : 2 * quarter], name), 1)
        for name in samples[-1]["rss_mb"]
    }


def all_free(server: Server) -> bool:
    if server.post("/flush_cache", {}).status_code != 200:
        return False
    neo = server.info()["neo"]
    return all(neo[pool]["free_tokens"] == neo[pool]["total_tokens"] for pool in ("device_kv", "host_kv"))


def soak(server: Server, args: argparse.Namespace, vocabulary: int) -> tuple[dict[str, Any], list[str]]:
    """What was seen, and what is wrong with it."""
    traffic = Traffic(server, vocabulary, args.longest)
    threads = [threading.Thread(target=traffic.client, args=(i, args.seed)) for i in range(args.clients)]
    threads.append(threading.Thread(target=traffic.canary))
    for thread in threads:
        thread.start()
    samples: list[dict[str, Any]] = []
    begin = time.monotonic()
    try:
        while (at := time.monotonic() - begin) < args.minutes * 60:
            samples.append({"minute": round(at / 60, 3), **sample(server)})
            time.sleep(SAMPLE_SECONDS)
    finally:
        traffic.over.set()
        for thread in threads:
            thread.join()
    wrong = traffic.errors[:20]
    try:
        wait_until(lambda: all_free(server), 60, "all KV free")
    except AssertionError:
        wrong.append(f"KV is not all free at the end: {server.info()['neo']}")
    grown = growth(samples)
    wrong += [f"{name} grew by {mb} MB" for name, mb in grown.items() if mb > ALLOWED_GROWTH_MB]
    neo = server.info()["neo"]
    if neo["raised_steps"]:
        wrong.append(f"{neo['raised_steps']} steps raised an error, see the log")
    kept = ("device_kv", "host_kv", "host_tokens_total", "steps_total", "migrations", "host_prefill", "host_cache")
    found = {
        "requests": dict(traffic.counts),
        "errors": traffic.errors,
        "growth_mb": grown,
        "at_the_end": {
            name: neo[name] for name in (*kept, "failed_steps", "raised_steps", "restarted_reqs", "active_mode")
        },
        "samples": samples,
    }
    return found, wrong


def plot(found: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    samples = found["samples"]
    minutes = [s["minute"] for s in samples]
    figure, (memory, pools) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True)
    for name in samples[-1]["rss_mb"]:
        memory.plot(minutes, [s["rss_mb"].get(name) for s in samples], label=name)
    memory.set(ylabel="RSS, MB", ylim=(0, None))
    for pool in ("device", "host"):
        pools.plot(minutes, [s[f"{pool}_used_tokens"] for s in samples], label=f"{pool} pool, cached ones included")
    pools.set(ylabel="KV tokens", xlabel="minutes", ylim=(0, None))
    for axes in (memory, pools):
        axes.legend(loc="best", fontsize=8)
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("minutes", type=float)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--longest", type=int, default=200, help="tokens of the longest prompt")
    parser.add_argument("--seed", type=int, default=1)
    own, flags = sys.argv[1:], []
    if "--" in own:
        own, flags = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    if args.minutes * 60 < 8 * SAMPLE_SECONDS:
        parser.error(f"less than {8 * SAMPLE_SECONDS / 60:.1f} minutes show nothing")
    with tempfile.TemporaryDirectory() as folder:
        if args.model == "tiny":
            from tests.harness.models import tiny_model

            model = tiny_model("llama", Path(folder))
        else:
            model = Path(args.model)
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        server = Server(ServerSpec(model, ("--skip-tokenizer-init", *flags)), Path(folder) / "server.log")
        try:
            server.wait_ready()
            found, wrong = soak(server, args, vocabulary)
        finally:
            server.stop()
    result = {**provenance(), "model": args.model, "flags": flags, "minutes": args.minutes, **found}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        plot(found, args.plot)
    print(f"{sum(found['requests'].values())} requests {found['requests']}, growth in MB {found['growth_mb']}")
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
