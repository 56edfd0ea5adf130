"""More than one scheduler process: data parallel, tensor parallel; and pages above one token.

The servers follow one another so that each is used for all that it is good for: the last test of each ends it badly,
and test_signals.py ends the last server well.
"""

from __future__ import annotations

import random
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.servers import Server, ServerPool, ServerSpec, check_told_in_one_line, generate_body, wait_until

TOKENS = 24


def prompts() -> list[list[int]]:
    """Token ids of the tiny model's vocabulary, of lengths around its pages."""
    source = random.Random(3)
    return [[source.randrange(3, 256) for _ in range(length)] for length in (1, 17, 63, 64, 65, 150)]


def greedy(server: Server, **request: object) -> list[list[int]]:
    """One request after the other, then all of them at once: the answers must be the same."""
    bodies = [dict(input_ids=ids, max_new_tokens=TOKENS, ignore_eos=True, **request) for ids in prompts()]
    alone = [server.generate(**body)["output_ids"] for body in bodies]
    with ThreadPoolExecutor() as pool:
        together = list(pool.map(lambda body: server.generate(**body)["output_ids"], bodies))
    assert together == alone
    assert all(len(tokens) == TOKENS for tokens in alone)
    assert len({tuple(tokens) for tokens in alone}) == len(bodies)
    return alone


@pytest.fixture(scope="module")
def dp_spec(tiny_spec: ServerSpec) -> ServerSpec:
    return tiny_spec.with_flags("--dp-size", "2")


@pytest.fixture(scope="module")
def tp_spec(tiny_spec: ServerSpec) -> ServerSpec:
    return tiny_spec.with_flags("--tp-size", "2")


@pytest.fixture(scope="module")
def reference(servers: ServerPool, dp_spec: ServerSpec) -> list[list[int]]:
    """What a single scheduler with pages of one token answers: the first data-parallel rank is one."""
    return greedy(servers.shared(dp_spec), routed_dp_rank=0)


def test_data_parallel_ranks_agree(servers: ServerPool, dp_spec: ServerSpec, reference: list[list[int]]) -> None:
    server = servers.shared(dp_spec)
    assert greedy(server, routed_dp_rank=1) == reference
    assert greedy(server) == reference  # spread over both


def test_data_parallel_server_info(servers: ServerPool, dp_spec: ServerSpec) -> None:
    info = servers.shared(dp_spec).info()
    block = info["neo"]
    assert block["dp_ranks"] == len(info["internal_states"]) == 2
    for state in info["internal_states"]:
        assert all(name.startswith("sglang_neo.") for name in state["neo"]["classes"].values())
        assert block["device_kv"]["total_tokens"] == 2 * state["neo"]["device_kv"]["total_tokens"]


def test_lost_data_parallel_rank_ends_the_server(servers: ServerPool, dp_spec: ServerSpec) -> None:
    """SGLang watches the controller alone: the rank's requests would wait for ever."""
    with servers.own(dp_spec) as server:
        ranks = server.children("sglang::scheduler")
        assert len(ranks) == 2
        ranks[1].kill()
        assert server.wait_exit() == 1
        server.check_gone()
        check_told_in_one_line(server.log(), ["ended unexpectedly"])


def test_tensor_parallel_equals_one_rank(servers: ServerPool, tp_spec: ServerSpec, reference: list[list[int]]) -> None:
    server = servers.shared(tp_spec)
    assert len(server.children("sglang::scheduler")) == 2
    assert greedy(server) == reference
    block = server.info()["neo"]
    assert block["dp_ranks"] == 1
    assert all(name.startswith("sglang_neo.") for name in block["classes"].values())


def test_killed_launcher_takes_its_workers_along(servers: ServerPool, tp_spec: ServerSpec) -> None:
    with servers.own(tp_spec) as server, ThreadPoolExecutor() as pool:
        # With work in flight, which the workers would go on with.
        body = generate_body(input_ids=[5, 6, 7], max_new_tokens=900, ignore_eos=True)
        request = pool.submit(lambda: server.post("/generate", body))
        wait_until(lambda: "Prefill batch" in server.log() and not request.done(), 30, "a request in flight")
        assert len(server.members()) >= 4  # launcher, two schedulers, detokenizer
        server.signal(signal.SIGKILL)
        assert server.wait_exit() == 128 + signal.SIGKILL
        server.check_gone()
        assert request.exception(30) is not None


def test_pages_of_64_tokens(servers: ServerPool, paged_spec: ServerSpec, reference: list[list[int]]) -> None:
    server = servers.shared(paged_spec)
    assert greedy(server) == reference
    pool = server.info()["neo"]["device_kv"]
    assert pool["page_size"] == 64
    # The prefix cache keeps whole pages: of the 150-token prompt, two at least are found again.
    again = server.generate(input_ids=prompts()[-1], max_new_tokens=2, ignore_eos=True)
    assert again["meta_info"]["cached_tokens"] == 128
