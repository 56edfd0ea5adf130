"""More requests than a small device pool has room for, over HTTP: all at once, or coming and going."""

from __future__ import annotations

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from bench.servers import Server, generate_body, wait_until

#: Requests, and tokens of each answer. With ``SMALL_POOL`` there is room for three or four of them on the device.
CROWD, CROWD_TOKENS = 16, 80
SMALL_POOL = ("--max-total-tokens", "800")


def crowd_prompts() -> list[list[int]]:
    source = random.Random(9)
    return [[source.randrange(3, 256) for _ in range(source.randrange(20, 160))] for _ in range(CROWD)]


def ask_crowd(server: Server, workers: int, **request: object) -> list[dict[str, Any]]:
    """The answers of /generate, so many requests at once."""

    def ask(ids: list[int]) -> dict[str, Any]:
        return dict(server.generate(input_ids=ids, max_new_tokens=CROWD_TOKENS, ignore_eos=True, **request))

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(ask, crowd_prompts()))


def answer_crowd(server: Server, workers: int, **request: object) -> list[list[int]]:
    """The tokens of ``ask_crowd``."""
    return [answer["output_ids"] for answer in ask_crowd(server, workers, **request)]


def check_used_the_host(server: Server) -> None:
    neo = server.info()["neo"]
    steps = {mode: count for mode, count in neo["steps_total"].items() if mode != "gpu_only"}
    assert neo["host_tokens_total"] > CROWD * CROWD_TOKENS / 10 and steps[neo["active_mode"]] > 50, neo
    assert neo["host_prefill"]["computed_tokens"] > 200, neo
    assert neo["host_running_reqs"] == 0, "a request that has ended still has host memory"
    host, cached = neo["host_kv"], neo["host_cache"]["evictable_tokens"]
    assert host["free_tokens"] + cached == host["total_tokens"], neo
    assert "KV cache pool is full. Retract" not in server.log(), server.log_tail()


class Comings:
    """Requests of the crowd, twelve at a time: half of them are aborted or left in the middle of the answer."""

    def __init__(self, server: Server, seed: int):
        self._server, self._rng = server, random.Random(seed)
        self.counts: Counter[str] = Counter()
        #: Of those who stayed: which of the crowd, and the answer.
        self.answers: list[tuple[int, list[int]]] = []

    def run(self, count: int) -> None:
        plans = [
            (i, self._rng.choice(("stays", "stays", "is-aborted", "leaves")), self._rng.randrange(CROWD_TOKENS))
            for i in range(count)
        ]
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(lambda plan: self._come(*plan), plans))

    def _come(self, number: int, kind: str, after: int) -> None:
        body = generate_body(
            input_ids=crowd_prompts()[number % CROWD], max_new_tokens=CROWD_TOKENS, ignore_eos=True, stream=True,
            rid=(name := f"{kind}-{number:05}"),
        )  # fmt: skip
        tokens: list[int] = []
        with requests.post(f"{self._server.url}/generate", json=body, stream=True, timeout=300) as answer:
            for line in answer.iter_lines():
                if not line.startswith(b"data: {"):
                    continue
                tokens = json.loads(line[len(b"data: ") :])["output_ids"]
                if kind != "stays" and len(tokens) >= after:
                    if kind == "leaves":
                        break
                    self._server.post("/abort_request", {"rid": name})
                    after = CROWD_TOKENS + 1
        self.counts[kind] += 1
        if kind == "stays":
            self.answers.append((number % CROWD, tokens))

    def check_all_is_free(self) -> None:
        """After ``run``: everybody came to the end meant for them, nothing failed, and no KV is taken."""
        neo, total = self._server.info()["neo"], sum(self.counts.values())
        assert min(self.counts[kind] for kind in ("stays", "is-aborted", "leaves")) > total / 8, self.counts
        assert len(self.answers) == self.counts["stays"]
        wait_until(self._all_free, 60, "all KV free")
        assert neo["host_tokens_total"] > total * CROWD_TOKENS / 20, neo
        assert neo["failed_steps"] == neo["raised_steps"] == 0, neo

    def _all_free(self) -> bool:
        if self._server.post("/flush_cache", {}).status_code != 200:  # refused while a request runs
            return False
        neo = self._server.info()["neo"]
        return all(neo[pool]["free_tokens"] == neo[pool]["total_tokens"] for pool in ("device_kv", "host_kv"))
