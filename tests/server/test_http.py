"""The HTTP server with a real model: SGLang's endpoints, answered by our classes."""

from __future__ import annotations

import http.client
import importlib.util
import json
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

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
from sglang_neo import __version__
from tests.harness.exact import assert_exact
from tests.harness.inprocess import InProcessRunner
from tests.harness.streams import Streams

Knows = Callable[[str, str], bool]

CAPITAL = "The capital of France is"
PROMPTS = [
    CAPITAL,
    "def fibonacci(n):\n",
    "Once upon a time, in a village by the sea, there lived",
    "The three primary colours are red,",
]
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


def greedy_tokens(server: Server, prompts: list[str], count: int = 24) -> list[list[int]]:
    answers = [server.generate(text=text, max_new_tokens=count, ignore_eos=True) for text in prompts]
    return [answer["output_ids"] for answer in answers]


def requests_there(server: Server) -> int:
    """How many requests run or wait, as the scheduler reports it now and then."""
    answer = server.get("/v1/loads")
    assert answer.status_code == 200, answer.text
    [load] = answer.json()["loads"]
    return int(load["num_running_reqs"] + load["num_waiting_reqs"])


def wait_idle(server: Server) -> None:
    wait_until(lambda: requests_there(server) == 0, 30, "an idle server")


def check_all_slots_back(server: Server) -> None:
    """Every token slot is free, once what the prefix cache keeps is dropped."""

    def all_free() -> bool:
        if server.post("/flush_cache", {}).status_code != 200:  # refused while a request runs
            return False
        neo = server.info()["neo"]
        return all(neo[pool]["free_tokens"] == neo[pool]["total_tokens"] for pool in ("device_kv", "host_kv"))

    wait_until(all_free, 30, "all KV slots free after a flush")


@pytest.fixture
def client(neo: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{neo.url}/v1", api_key="none", max_retries=0)


def test_health(neo: Server) -> None:
    assert neo.get("/health").status_code == 200


def test_server_info_has_our_block(neo: Server, neo_mode: str) -> None:
    block = neo.info()["neo"]
    assert block["version"] == __version__
    assert block["sglang_version"] == "0.5.17"
    assert block["neo_mode"] == block["active_mode"] == ("sync" if neo_mode == "device" else neo_mode)
    assert (block["planner"] is not None) == (block["neo_mode"] == "auto")
    assert block["device"] == "cpu"
    assert block["dp_ranks"] == 1
    assert block["cpu_kernel_isa"]
    assert set(block["classes"]) == {"scheduler", "model_worker", "model_runner", "token_manager", "request_pool"}
    for role, name in block["classes"].items():
        assert name.startswith("sglang_neo."), f"{role} is {name}"
    assert block["device_kv"]["total_tokens"] > 0
    host, cache = block["host_kv"], block["host_cache"]
    assert host["total_tokens"] == host["free_tokens"] + cache["cached_tokens"] > 0


def test_generate_text_and_ids(neo: Server, knows: Knows, neo_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(neo_model)
    by_text = neo.generate(text=CAPITAL, max_new_tokens=8)
    by_ids = neo.generate(input_ids=tokenizer.encode(CAPITAL), max_new_tokens=8)
    assert knows("Paris", by_text["text"])
    assert by_ids["output_ids"] == by_text["output_ids"]
    assert by_text["text"] == tokenizer.decode(by_text["output_ids"])
    assert by_text["meta_info"]["completion_tokens"] == len(by_text["output_ids"]) == 8


def test_chat(client: openai.OpenAI, knows: Knows) -> None:
    answer = client.chat.completions.create(model="default", messages=QUESTION, temperature=0, max_tokens=24)
    assert knows("Paris", answer.choices[0].message.content or "")
    assert answer.usage is not None and answer.usage.completion_tokens > 0


def test_chat_stream_equals_plain_answer(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model="default", messages=QUESTION, temperature=0, max_tokens=24)
    stream = client.chat.completions.create(
        model="default", messages=QUESTION, temperature=0, max_tokens=24, stream=True
    )
    choices = [chunk.choices[0] for chunk in stream if chunk.choices]
    pieces = [choice.delta.content for choice in choices if choice.delta.content]
    assert len(pieces) > 1
    assert "".join(pieces) == plain.choices[0].message.content
    assert choices[-1].finish_reason == plain.choices[0].finish_reason


def test_concurrent_requests_share_a_prefix(neo: Server) -> None:
    prefix = "The following facts are about cities in Europe. " * 12  # pages of host memory have 64 tokens
    prompts = [prefix + "Berlin is the capital of", prefix + "Madrid is the capital of"]
    neo.post("/flush_cache", {})
    alone = []
    for prompt in prompts:
        alone.append(neo.generate(text=prompt, max_new_tokens=16, ignore_eos=True)["output_ids"])
        assert neo.post("/flush_cache", {}).status_code == 200

    # The second request is sent once the first one streams: it then runs beside it and finds the prefix cached.
    first_ids: list[int] = []
    started = threading.Event()

    def first() -> None:
        body = generate_body(text=prompts[0], max_new_tokens=32, ignore_eos=True, stream=True)
        with requests.post(f"{neo.url}/generate", json=body, stream=True, timeout=120) as answer:
            for event in stream_events(answer):
                first_ids[:] = event["output_ids"]
                started.set()

    with ThreadPoolExecutor() as pool:
        running = pool.submit(first)
        assert started.wait(60)
        second = neo.generate(text=prompts[1], max_new_tokens=16, ignore_eos=True)
        running.result(120)
    assert second["meta_info"]["cached_tokens"] > 40
    assert second["output_ids"] == alone[1]
    assert first_ids[:16] == alone[0]


def stream_events(answer: requests.Response) -> Any:
    """The JSON objects of a stream of server-sent events."""
    for line in answer.iter_lines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line[len(b"data: ") :])


def test_client_that_goes_away_frees_everything(neo: Server, knows: Knows) -> None:
    body = generate_body(text=CAPITAL, max_new_tokens=3000, ignore_eos=True, stream=True)
    with requests.post(f"{neo.url}/generate", json=body, stream=True, timeout=60) as answer:
        events = stream_events(answer)
        next(events)
        next(events)
        wait_until(lambda: requests_there(neo) == 1, 30, "one request reported")
    wait_idle(neo)
    check_all_slots_back(neo)
    assert knows("Paris", neo.generate(text=CAPITAL, max_new_tokens=4)["text"])


@pytest.mark.parametrize("at_last", ["reads", "goes"])
def test_a_client_that_does_not_read(neo: Server, knows: Knows, at_last: str) -> None:
    """More is answered than the buffers between hold: others are answered meanwhile, the request is computed to its end
    and everything is free while the client still stands there. If it reads at last, nothing of its answer is lost."""
    count = 80
    asked = generate_body(text=CAPITAL, max_new_tokens=count, ignore_eos=True, stream=True)
    asked |= {
        "return_logprob": True,
        "top_logprobs_num": 100,
        "return_text_in_logprobs": True,
    }  # 0.4 MB an event at last
    body = json.dumps(asked)
    head = (
        f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", neo.port))
        client.sendall((head + body).encode())
        wait_until(lambda: requests_there(neo) == 1, 30, "the request running")
        assert knows("Paris", neo.generate(text=CAPITAL, max_new_tokens=4)["text"])
        wait_until(lambda: requests_there(neo) == 0, 120, "the request computed to its end")
        check_all_slots_back(neo)
        if at_last == "reads":
            answer = http.client.HTTPResponse(client)
            answer.begin()
            lines = [line[len(b"data: ") :] for line in answer if line.startswith(b"data: ")]
            assert lines.pop().strip() == b"[DONE]"
            # While the client holds it up, SGLang joins what comes into one event.
            assert len(lines) < count * 3 // 4
            assert json.loads(lines[-1])["output_ids"] == greedy_tokens(neo, [CAPITAL], count)[0]
    wait_idle(neo)
    check_all_slots_back(neo)
    assert knows("Paris", neo.generate(text=CAPITAL, max_new_tokens=4)["text"])


def test_abort_request(neo: Server, knows: Knows) -> None:
    body = generate_body(text=CAPITAL, max_new_tokens=3000, ignore_eos=True, stream=True, rid="to-be-aborted")
    with requests.post(f"{neo.url}/generate", json=body, stream=True, timeout=60) as answer:
        events = stream_events(answer)
        next(events)
        assert neo.post("/abort_request", {"rid": "to-be-aborted"}).status_code == 200
        last = list(events)[-1]  # ends long before 3000 tokens
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["completion_tokens"] < 3000
    wait_idle(neo)
    check_all_slots_back(neo)
    assert knows("Paris", neo.generate(text=CAPITAL, max_new_tokens=4)["text"])


def test_metrics(neo: Server) -> None:
    before = metric(neo, "sglang:generation_tokens_total")
    neo.generate(text=CAPITAL, max_new_tokens=5, ignore_eos=True)
    wait_until(lambda: metric(neo, "sglang:generation_tokens_total") >= before + 5, 30, "the tokens counted")


def metric(server: Server, name: str) -> float:
    """The value of a counter in /metrics, summed over its labels; 0 if it is not there yet."""
    answer = server.get("/metrics")
    assert answer.status_code == 200
    values = [line.rsplit(" ", 1)[1] for line in answer.text.splitlines() if line.startswith(name)]
    return sum(map(float, values))


# -- what a request can ask for ----------------------------------------------------------------------------------------


def test_stop_strings(neo: Server) -> None:
    whole = neo.generate(text=CAPITAL, max_new_tokens=12, ignore_eos=True)["text"]
    stop = whole.split()[2][:4]
    cut = neo.generate(text=CAPITAL, max_new_tokens=12, ignore_eos=True, stop=[stop])
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_several_answers_to_one_request(neo: Server) -> None:
    body: dict[str, Any] = dict(text=CAPITAL, max_new_tokens=6, ignore_eos=True)
    alone = neo.generate(**body)["output_ids"]
    assert [answer["output_ids"] for answer in neo.generate(**body, n=3)] == [alone] * 3


def test_logprobs_and_penalties(neo: Server) -> None:
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "ignore_eos": True}
    answer = neo.generate(text=CAPITAL, max_new_tokens=8, **asked)
    meta = answer["meta_info"]
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert len(meta["input_token_logprobs"]) == meta["prompt_tokens"]
    for (chosen, token, _), best in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        assert (token, chosen) == (best[0][1], best[0][0]) and best[0][0] >= best[1][0], "greedy takes the best"
    once = neo.generate(text="one one one one one", max_new_tokens=8, ignore_eos=True, frequency_penalty=2.0)
    free = neo.generate(text="one one one one one", max_new_tokens=8, ignore_eos=True)
    assert len(set(once["output_ids"])) > len(set(free["output_ids"]))


def test_a_grammar_in_ebnf(neo: Server) -> None:
    answer = neo.generate(text=CAPITAL, max_new_tokens=8, ebnf='root ::= "Rome" | "Oslo, of all cities"')
    assert answer["text"] in ("Rome", "Oslo, of all cities")


def test_a_session_of_two_turns(neo: Server) -> None:
    session = neo.post("/open_session", {"capacity_of_str_len": 1000}).json()
    ask = {"max_new_tokens": 4, "ignore_eos": True}
    first = neo.generate(input_ids=[504, 3575, 282], session_params={"id": session, "rid": None}, **ask)
    turn = {"id": session, "rid": first["meta_info"]["id"]}
    second = neo.generate(input_ids=[827, 3300], session_params=turn, **ask)
    assert neo.post("/close_session", {"session_id": session}).status_code == 200
    whole = [504, 3575, 282, *first["output_ids"], 827, 3300]
    assert second["meta_info"]["prompt_tokens"] == len(whole)
    assert second["output_ids"] == neo.generate(input_ids=whole, **ask)["output_ids"]


@pytest.mark.parametrize("mode", ["in_place", pytest.param("retract", marks=pytest.mark.slow)])
def test_pause_and_continue(neo: Server, mode: str) -> None:
    alone = neo.generate(text=CAPITAL, max_new_tokens=12, ignore_eos=True)["output_ids"]
    seen: list[list[int]] = []

    def ask() -> None:
        body = generate_body(text=CAPITAL, max_new_tokens=12, ignore_eos=True, stream=True)
        with requests.post(f"{neo.url}/generate", json=body, stream=True, timeout=120) as answer:
            seen.extend(event["output_ids"] for event in stream_events(answer))

    with ThreadPoolExecutor() as pool:
        running = pool.submit(ask)
        wait_until(lambda: len(seen) >= 2, 60, "two tokens")
        assert neo.post("/pause_generation", {"mode": mode}).status_code == 200
        time.sleep(0.5)
        paused = len(seen)
        time.sleep(0.5)
        assert len(seen) == paused and not running.done()
        assert neo.post("/continue_generation", {}).status_code == 200
        running.result(120)
    assert seen[-1] == alone


# -- against plain SGLang ----------------------------------------------------------------------------------------------


def test_load_generator_of_sglang(
    neo: Server, neo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("datasets") is None:
        pytest.skip("sglang.benchmark.serving imports the package `datasets`, which is not installed")
    out = tmp_path / "result.jsonl"
    argv = [
        *("sglang.benchmark.serving", "--backend", "sglang", "--base-url", neo.url),
        *("--model", str(neo_model), "--dataset-name", "random-ids", "--num-prompts", "4", "--random-input-len", "16"),
        *("--random-output-len", "8", "--random-range-ratio", "1.0", "--max-concurrency", "2", "--seed", "1"),
        *("--output-file", str(out), "--disable-tqdm"),
    ]
    monkeypatch.setattr(sys, "argv", argv)
    runpy.run_module(
        "sglang.benchmark.serving", run_name="__main__"
    )  # as `python -m` does, with SGLang imported already
    result = json.loads(out.read_text().splitlines()[-1])
    assert result["completed"] == 4
    assert result["total_output_tokens"] == 4 * 8


def test_tokens_equal_plain_sglang(neo: Server, neo_model: Path) -> None:
    """SGLang's own model runner in this process, from the same text."""
    from transformers import AutoTokenizer

    ours = greedy_tokens(neo, PROMPTS)
    assert len({tuple(tokens) for tokens in ours}) == len(PROMPTS)
    tokenizer = AutoTokenizer.from_pretrained(neo_model)
    with InProcessRunner("plain", neo_model) as runner:
        references = runner.references([tokenizer.encode(text) for text in PROMPTS], 24)
    assert_exact(references, {str(i): tokens for i, tokens in enumerate(ours)})


@pytest.mark.slow  # the same server, plain, over HTTP
def test_tokens_equal_a_plain_server(servers: ServerPool, neo: Server) -> None:
    plain = ServerSpec(
        neo.spec.model,
        ("--dtype", "float32", "--device", "cpu", "--attention-backend", "torch_native", "--skip-server-warmup"),
        entry=PLAIN,
    )
    with servers.own(plain) as reference:
        assert "neo" not in reference.info()
        assert greedy_tokens(reference, PROMPTS) == greedy_tokens(neo, PROMPTS)


def test_where_they_were_decoded(neo: Server, neo_mode: str) -> None:
    """That the tests above were about what they seem to be."""
    block = neo.info()["neo"]
    if neo_mode == "device":
        assert block["host_tokens_total"] == 0
        return
    steps = dict(block["steps_total"])
    del steps["gpu_only"]  # SGLang's own requests for its health, the more the slower the machine
    in_mode = sum(steps.values()) if neo_mode == "auto" else steps[neo_mode]
    assert in_mode > 10 and sum(steps.values()) > 100, block
    assert block["host_tokens_total"] > 100, block


def test_sigterm_lets_requests_finish(servers: ServerPool, neo_spec: ServerSpec) -> None:
    """Near the end of this file: it ends the shared server. Other signals: test_signals.py."""
    with servers.own(neo_spec) as server:
        streams = Streams(server, tokens=[60, 60])
        assert not any(result.done() for result in streams.results)
        server.signal(signal.SIGTERM, group=True)
        assert [streams.ended_well(i) for i in range(2)] == [True, True], server.log_tail()
        check_clean_end(server, 0)


@pytest.mark.slow  # with data-parallel ranks: test_parallel.py
def test_lost_scheduler_ends_the_server(servers: ServerPool, neo_spec: ServerSpec) -> None:
    with servers.own(neo_spec) as server:
        streams = Streams(server, tokens=[3000])
        [scheduler] = server.children("sglang::scheduler")
        scheduler.kill()
        assert server.wait_exit() == 1
        server.check_gone()
        check_told_in_one_line(server.log(), ["ended unexpectedly"])
        assert not streams.ended_well(0)
