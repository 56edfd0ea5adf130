"""More than one scheduler process, and requests that decode from host memory: data parallel, tensor parallel, pages.

The servers follow one another so that each is used for all that it is good for: the last test of each ends it.
"""

from __future__ import annotations

import os
import random
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.servers import (
    PLAIN,
    Server,
    ServerPool,
    ServerSpec,
    check_clean_end,
    check_told_in_one_line,
    generate_body,
    wait_until,
)
from tests.harness.crowd import CROWD, SMALL_POOL, Comings, answer_crowd, check_used_the_host
from tests.harness.streams import Streams

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


#: Checked after every step.
CROWDED = (*SMALL_POOL, "--neo-check-integrity", "--enable-metrics")


@pytest.fixture(scope="module")
def dp_spec(tiny_spec: ServerSpec) -> ServerSpec:
    return tiny_spec.with_flags("--dp-size", "2", *CROWDED, "--neo-mode", "sync")


#: In deferred mode ranks also agree on whether the CPU is behind, in mode auto on each plan.
TP_MODES = {
    "deferred": ("--neo-mode", "deferred", "--neo-deferred-slots", "4"),
    "sync": ("--neo-mode", "sync"),
    "pipelined": ("--neo-mode", "pipelined"),
    "auto": ("--neo-deferred-slots", "4"),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(mode, marks=[] if mode == "deferred" else pytest.mark.slow) for mode in TP_MODES],
)
def tp_mode(request: pytest.FixtureRequest) -> str:
    mode: str = request.param
    return mode


@pytest.fixture(scope="module")
def tp_spec(tiny_spec: ServerSpec, tp_mode: str) -> ServerSpec:
    return tiny_spec.with_flags("--tp-size", "2", *CROWDED, *TP_MODES[tp_mode])


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


_source = random.Random(10)
LONG = {"input_ids": [_source.randrange(3, 256) for _ in range(900)], "max_new_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def crowd_alone(servers: ServerPool, dp_spec: ServerSpec) -> list[list[int]]:
    """One request after the other on one rank: each has the device for itself."""
    server = servers.shared(dp_spec)
    answers = answer_crowd(server, 1, routed_dp_rank=0)
    assert server.info()["neo"]["host_tokens_total"] == 0
    return answers


@pytest.fixture(scope="module")
def long_alone(servers: ServerPool, dp_spec: ServerSpec, crowd_alone: list[list[int]]) -> list[int]:
    """The answer to a prompt larger than the device pool, on one rank."""
    tokens: list[int] = servers.shared(dp_spec).generate(**LONG, routed_dp_rank=0)["output_ids"]
    return tokens


def test_answers_do_not_depend_on_the_pool(
    servers: ServerPool, dp_spec: ServerSpec, crowd_alone: list[list[int]]
) -> None:
    server = servers.shared(dp_spec)
    assert answer_crowd(server, CROWD, routed_dp_rank=0) == crowd_alone
    check_used_the_host(server)


def test_metrics_of_host_rows(servers: ServerPool, dp_spec: ServerSpec, long_alone: list[int]) -> None:
    server = servers.shared(dp_spec)
    answer_crowd(server, CROWD, routed_dp_rank=1)
    neo, text = server.info()["neo"], server.get("/metrics").text

    def value(name: str, **labels: str) -> float:
        lines = [line for line in text.splitlines() if line.startswith(f"sglang:{name}{{")]
        lines = [line for line in lines if all(f'{key}="{want}"' in line for key, want in labels.items())]
        assert lines, (name, labels, [line for line in text.splitlines() if "neo_" in line])
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)  # of both ranks

    assert value("neo_host_tokens_total") == neo["host_tokens_total"] > 0
    assert value("neo_steps_total", mode="sync") == neo["steps_total"]["sync"] > 0
    assert value("neo_steps_total", mode="gpu_only") == neo["steps_total"]["gpu_only"] > 0
    assert value("neo_migrations_total", direction="to_host") == neo["migrations"]["to_host"]
    assert 0 < value("neo_host_prompt_tokens_total") <= neo["host_prefill"]["computed_tokens"]
    assert value("neo_cpu_busy_seconds_total") > 0
    # A token that a step computes for a request that has just ended is none.
    timed = value("neo_inter_token_latency_seconds_count", kind="host")
    assert 0.9 * neo["host_tokens_total"] < timed <= neo["host_tokens_total"]
    assert value("neo_inter_token_latency_seconds_count", kind="device") > 0
    assert value("neo_awaited_handoffs_total") == neo["awaited"]["handoffs"] == 0, "there are no deferred steps"
    value("neo_awaited_seconds_total")
    assert 0 < value("neo_handoffs_total") <= neo["handoffs"]["answered"]
    assert value("neo_handoff_tail_seconds_total") < value("neo_handoff_seconds_total") <= neo["handoffs"]["seconds"]
    assert value("neo_held_up_handoffs_total") <= neo["handoffs"]["held_up"]
    assert value("neo_host_kv_total_tokens") == neo["host_kv"]["total_tokens"]
    value("neo_host_kv_used_tokens")
    cache = neo["host_cache"]
    assert value("neo_host_cache_hit_tokens_total") <= cache["hit_tokens"]  # some after the last decode step
    assert value("neo_host_cache_evicted_tokens_total") == cache["evicted_tokens"]
    assert value("neo_host_cache_tokens") > 0
    value("neo_host_cache_evictable_tokens")
    value("neo_host_running_reqs")
    value("neo_cpu_wait_seconds_total")
    assert re.search(r"Host rows, #host-req: \d+, #host-token: \d+, host token usage: ", server.log())


def test_killed_launcher_takes_its_workers_along(servers: ServerPool, dp_spec: ServerSpec) -> None:
    """Those behind the data-parallel controller too."""
    with servers.own(dp_spec) as server, ThreadPoolExecutor() as pool:
        # With work in flight, which the workers would go on with.
        body = generate_body(input_ids=[5, 6, 7], max_new_tokens=900, ignore_eos=True)
        request = pool.submit(lambda: server.post("/generate", body))
        prefills = server.log().count("Prefill batch")
        wait_until(lambda: server.log().count("Prefill batch") > prefills, 30, "a request in flight")
        assert not request.done()
        assert len(server.members()) >= 5  # launcher, controller, two schedulers, detokenizer
        server.signal(signal.SIGKILL)
        assert server.wait_exit() == 128 + signal.SIGKILL
        server.check_gone()
        assert request.exception(30) is not None


@pytest.mark.slow  # in small processes: test_processes.py
def test_lost_data_parallel_rank_ends_the_server(servers: ServerPool, dp_spec: ServerSpec) -> None:
    """SGLang watches the controller alone: the rank's requests would wait for ever."""
    with servers.own(dp_spec) as server:
        ranks = server.children("sglang::scheduler")
        assert len(ranks) == 2
        ranks[1].kill()
        assert server.wait_exit() == 1
        server.check_gone()
        check_told_in_one_line(server.log(), ["ended unexpectedly"])


def test_tensor_parallel_equals_one_rank(
    servers: ServerPool, tp_spec: ServerSpec, tp_mode: str, reference: list[list[int]]
) -> None:
    server = servers.shared(tp_spec)
    assert len(server.children("sglang::scheduler")) == 2
    assert greedy(server) == reference
    block = server.info()["neo"]
    assert block["dp_ranks"] == 1 and block["active_mode"] == tp_mode
    assert all(name.startswith("sglang_neo.") for name in block["classes"].values())


@pytest.mark.slow  # without a server: test_tensor_parallel.py
def test_tensor_parallel_ranks_move_the_same_requests(
    servers: ServerPool, tp_spec: ServerSpec, tp_mode: str, crowd_alone: list[list[int]]
) -> None:
    server = servers.shared(tp_spec)
    assert answer_crowd(server, CROWD) == crowd_alone
    if tp_mode == "auto":  # whether it gains anything there is the planner's to say
        assert server.info()["neo"]["migrations"]["to_host"] > 0
        return
    check_used_the_host(server)


@pytest.mark.slow  # without a server: test_tensor_parallel.py
def test_tensor_parallel_ranks_take_a_prompt_larger_than_the_device_pool(
    servers: ServerPool, tp_spec: ServerSpec, long_alone: list[int]
) -> None:
    assert len(long_alone) == TOKENS and servers.shared(tp_spec).generate(**LONG)["output_ids"] == long_alone


#: NEO_TEST_ABORTS=1000 is the long version.
COMINGS = int(os.environ.get("NEO_TEST_ABORTS", "60"))


@pytest.mark.slow
@pytest.mark.timeout(max(600, 4 * COMINGS))
def test_tensor_parallel_ranks_agree_on_aborts(
    servers: ServerPool, tp_spec: ServerSpec, crowd_alone: list[list[int]]
) -> None:
    server = servers.shared(tp_spec)
    comings = Comings(server, seed=11)
    comings.run(COMINGS)
    wrong = [number for number, tokens in comings.answers if tokens != crowd_alone[number]]
    assert not wrong
    comings.check_all_is_free()


@pytest.mark.slow
def test_plain_tensor_parallel_ranks_answer_the_same(
    servers: ServerPool, tiny_spec: ServerSpec, reference: list[list[int]], crowd_alone: list[list[int]]
) -> None:
    """What the tests above compare with one rank of ours is plain SGLang's with two."""
    flags = ("--dtype", "float32", "--device", "cpu", "--attention-backend", "torch_native", "--tp-size", "2")
    plain = ServerSpec(
        tiny_spec.model, (*flags, "--skip-tokenizer-init", "--skip-server-warmup", "--max-total-tokens", "8192"),
        entry=PLAIN,
    )  # fmt: skip
    with servers.own(plain) as server:
        assert "neo" not in server.info()
        assert greedy(server) == reference
        assert answer_crowd(server, 4) == crowd_alone


def test_sigint_lets_requests_finish_and_a_second_one_does_not(servers: ServerPool, tp_spec: ServerSpec) -> None:
    """To every process at once, as a terminal's Ctrl-C."""
    with servers.own(tp_spec) as server:
        streams = Streams(server, tokens=[60, 950])
        server.signal(signal.SIGINT, group=True)
        assert streams.ended_well(0), server.log_tail()
        assert not streams.results[1].done()
        server.signal(signal.SIGINT)
        check_clean_end(server, 128 + signal.SIGINT)
        assert not streams.ended_well(1)


@pytest.mark.slow  # in one process: test_inprocess.py, test_host_rows.py
def test_pages_of_64_tokens(servers: ServerPool, paged_spec: ServerSpec, reference: list[list[int]]) -> None:
    server = servers.shared(paged_spec)
    assert greedy(server) == reference
    pool = server.info()["neo"]["device_kv"]
    assert pool["page_size"] == 64
    # The prefix cache keeps whole pages: of the 150-token prompt, two at least are found again.
    again = server.generate(input_ids=prompts()[-1], max_new_tokens=2, ignore_eos=True)
    assert again["meta_info"]["cached_tokens"] == 128
