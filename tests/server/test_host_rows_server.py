"""Requests that decode from host memory, through a real server: one rank, and two that share every layer."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.servers import Server, ServerPool, ServerSpec

ROWS, TOKENS = 24, 120


def prompts() -> list[list[int]]:
    source = random.Random(9)
    return [[source.randrange(3, 256) for _ in range(source.randrange(20, 160))] for _ in range(ROWS)]


@pytest.fixture(scope="module")
def crowded_spec(tiny_spec: ServerSpec) -> ServerSpec:
    """A device pool for three or four of the requests, checked after every step."""
    return tiny_spec.with_flags("--max-total-tokens", "800", "--neo-check-integrity", "--enable-metrics")


def ask(server: Server, ids: list[int]) -> list[int]:
    tokens: list[int] = server.generate(input_ids=ids, max_new_tokens=TOKENS, ignore_eos=True)["output_ids"]
    return tokens


def answer_all(server: Server) -> list[list[int]]:
    """All at once."""
    with ThreadPoolExecutor(ROWS) as pool:
        return list(pool.map(lambda ids: ask(server, ids), prompts()))


def check_used_the_host(server: Server) -> None:
    info = server.info()
    neo = info["neo"]
    assert neo["host_tokens_total"] > ROWS * TOKENS / 4, neo
    assert neo["migrations"]["to_host"] > 5, neo
    assert neo["host_running_reqs"] == 0, "a request that has ended still has host memory"
    assert neo["host_kv"]["free_tokens"] == neo["host_kv"]["total_tokens"], neo["host_kv"]
    assert "KV cache pool is full. Retract" not in server.log(), server.log_tail()


@pytest.fixture(scope="module")
def alone(servers: ServerPool, crowded_spec: ServerSpec) -> list[list[int]]:
    """One request after the other: each has the device for itself."""
    server = servers.shared(crowded_spec)
    answers = [ask(server, ids) for ids in prompts()]
    assert server.info()["neo"]["host_tokens_total"] == 0
    return answers


def test_answers_do_not_depend_on_the_pool(
    servers: ServerPool, crowded_spec: ServerSpec, alone: list[list[int]]
) -> None:
    server = servers.shared(crowded_spec)
    assert answer_all(server) == alone
    check_used_the_host(server)


def test_metrics(servers: ServerPool, crowded_spec: ServerSpec, alone: list[list[int]]) -> None:
    server = servers.shared(crowded_spec)
    answer_all(server)
    neo, text = server.info()["neo"], server.get("/metrics").text

    def value(name: str, **labels: str) -> float:
        lines = [line for line in text.splitlines() if line.startswith(f"sglang:{name}{{")]
        lines = [line for line in lines if all(f'{key}="{want}"' in line for key, want in labels.items())]
        assert len(lines) == 1, (name, labels, [line for line in text.splitlines() if "neo_" in line])
        return float(lines[0].rsplit(" ", 1)[1])

    assert value("neo_host_tokens_total") == neo["host_tokens_total"] > 0
    assert value("neo_steps_total", mode="sync") == neo["steps_total"]["sync"] > 0
    assert value("neo_steps_total", mode="gpu_only") == neo["steps_total"]["gpu_only"] > 0
    assert value("neo_migrations_total", direction="to_host") == neo["migrations"]["to_host"]
    assert value("neo_cpu_busy_seconds_total") > 0
    assert value("neo_host_kv_total_tokens") == neo["host_kv"]["total_tokens"]
    value("neo_host_kv_used_tokens")
    value("neo_host_running_reqs")
    value("neo_cpu_wait_seconds_total")
    assert re.search(r"Host rows, #host-req: \d+, #host-token: \d+, host token usage: ", server.log())


def test_tensor_parallel_ranks_move_the_same_requests(
    servers: ServerPool, crowded_spec: ServerSpec, alone: list[list[int]]
) -> None:
    server = servers.shared(crowded_spec.with_flags("--tp-size", "2"))
    assert answer_all(server) == alone
    check_used_the_host(server)
