"""What a request can do beside being answered greedily, with every request in host memory from its prompt on.

The device pool has no room for any of them. What needs text (stop strings, grammars, n > 1) is asked of a server:
tests/server.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.exact import assert_exact
from tests.harness.inprocess import InProcessScheduler, Request, tokenized
from tests.harness.traffic import random_prompt, tokens
from tests.test_scenarios import in_modes

Tiny = Callable[..., Path]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)

PAGE = 64 * 2 * 2 * 16 * 3 * 4 / 1e9  # GB: tokens, K and V, heads, head_dim, layers, bytes
ON_HOST: dict[str, Any] = {"max_total_tokens": 16, "max_running_requests": 16, "neo_host_kv_size": 40 * PAGE}


def crowd(seed: int, count: int = 8, answer: int = 20, **more: Any) -> list[Request]:
    rng = random.Random(seed)
    return [Request(f"r{i}", random_prompt(rng, rng.randrange(20, 70)), answer, arrive=i, **more) for i in range(count)]


def check_all_on_host(scheduler: InProcessScheduler) -> None:
    manager = scheduler.scheduler.token_manager
    assert manager.device_usage().free_tokens == manager.device_usage().total_tokens == 16
    assert scheduler.scheduler.neo_metrics.counters.host_tokens > 0
    assert manager.migrations.to_host == manager.migrations.to_device == 0


@in_modes("deferred")
def test_sampling_and_logprobs(tiny: Tiny, mode: dict[str, Any]) -> None:
    kinds: list[dict[str, Any]] = [
        {"frequency_penalty": 0.8},
        {"presence_penalty": 1.0, "stop_token_ids": list(range(3, 100)), "ignore_eos": False},
        {"repetition_penalty": 1.3},
        {"stop_token_ids": list(range(40, 60)), "ignore_eos": False},
        {"logit_bias": {"17": 4.0}},
        {},
    ]
    rng = random.Random(9)
    requests = [
        Request(
            f"r{i:02}",
            random_prompt(rng, rng.randrange(20, 60)),
            24,
            sampling=kinds[i % len(kinds)],
            input_logprobs=i % 4 == 0,
        )
        for i in range(12)
    ]
    options: dict[str, Any] = {"disable_overlap_schedule": True}
    with InProcessScheduler("plain", tiny("llama"), **options) as scheduler:
        expected = scheduler.run(requests)
    with InProcessScheduler("neo", tiny("llama"), **{**options, **ON_HOST}, **mode) as scheduler:
        got = scheduler.run(requests)
        check_all_on_host(scheduler)
    assert_exact({name: result.reference() for name, result in expected.items()}, tokens(got))
    assert {result.finish for result in expected.values()} == {"length", "stop"}
    for name, result in expected.items():
        assert got[name].finish == result.finish
        for mine, its in ((got[name].logprobs, result.logprobs), (got[name].input_logprobs, result.input_logprobs)):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(its), rtol=0, atol=1e-3)


@in_modes("deferred")
@pytest.mark.parametrize("how", ["in_place", "retract"])
def test_pause_and_continue(tiny: Tiny, alone: Any, mode: dict[str, Any], how: str) -> None:
    """Twice, in mid-token of deferred rows; between the two nothing moves."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    requests, known = crowd(1), [0]

    def pause(scheduler: Any, step: int) -> None:
        scheduler.token_manager.audit()
        if step in (10, 22):
            scheduler.pause_generation(PauseGenerationReqInput(mode=how))
            known[0] = scheduler.neo_metrics.counters.host_tokens
        if step in (16, 28):
            assert scheduler.neo_metrics.counters.host_tokens == known[0] and scheduler._engine_paused
            scheduler.continue_generation(ContinueGenerationReqInput())

    with InProcessScheduler("neo", tiny("llama"), **ON_HOST, **mode) as scheduler:
        got = scheduler.run(requests, pause)
        check_all_on_host(scheduler)
        assert scheduler.steps > 28
    assert (sum(result.retractions for result in got.values()) > 0) == (how == "retract")
    assert_exact(alone("llama", requests), tokens(got))


@in_modes("deferred")
def test_requests_that_run_too_long_are_ended(tiny: Tiny, mode: dict[str, Any]) -> None:
    """SGLANG_REQ_RUNNING_TIMEOUT; in deferred mode most of them are in mid-token then."""
    from sglang.srt.environ import envs

    with (
        InProcessScheduler("neo", tiny("llama"), **ON_HOST, **mode) as scheduler,
        envs.SGLANG_REQ_RUNNING_TIMEOUT.override(0.5),
    ):
        got = scheduler.run(crowd(2, answer=900), lambda s, step: s.token_manager.audit())
        check_all_on_host(scheduler)
        scheduler.flush()
        assert scheduler.scheduler.token_manager.host_usage().free_tokens == (
            scheduler.scheduler.token_manager.host_usage().total_tokens
        )
    assert {result.finish for result in got.values()} == {"abort"}
    assert all(len(result.tokens) < 900 for result in got.values())


@in_modes("deferred")
def test_requests_that_share_an_id(tiny: Tiny, alone: Any, mode: dict[str, Any]) -> None:
    """Clients choose ids, and with several tokenizers nobody sees that two are the same."""
    requests = crowd(4, count=4)
    seen: dict[Any, None] = {}  # in their order
    together = [0]

    def again(scheduler: Any, step: int) -> None:
        scheduler.token_manager.audit()
        if step == 10:
            assert len(scheduler.token_manager.host_rows()) == 4
            scheduler.process_input_requests([tokenized(request) for request in requests])
        seen.update(dict.fromkeys(scheduler.running_batch.reqs))
        together[0] = max(together[0], len(scheduler.token_manager.host_rows()))

    with InProcessScheduler("neo", tiny("llama"), **ON_HOST, **mode) as scheduler:
        scheduler.run(requests, again)
        check_all_on_host(scheduler)
    expected = alone("llama", requests)
    assert len(seen) == 2 * len(requests) and together[0] > len(requests)
    for turn in range(2):
        got = {req.rid: list(req.output_ids) for req in (seen if turn else reversed(seen))}
        assert_exact(expected, got)


@in_modes("sync")
def test_requests_that_wait_too_long_are_ended(tiny: Tiny, mode: dict[str, Any]) -> None:
    """Host memory has room for two of them."""
    from sglang.srt.environ import envs

    requests = [Request(r.name, r.prompt, r.max_new_tokens, vanishes=True) for r in crowd(3, count=12, answer=60)]
    with (
        InProcessScheduler("neo", tiny("llama"), **{**ON_HOST, "neo_host_kv_size": 5.1 * PAGE}, **mode) as scheduler,
        envs.SGLANG_REQ_WAITING_TIMEOUT.override(0.05),
    ):
        got = scheduler.run(requests)
    ends = [result.finish for result in got.values()]
    assert ends.count("length") >= 1 and ends.count("abort") >= 1, ends


def test_a_streaming_session_that_cannot_fit_is_told_so(tiny: Tiny) -> None:
    """Its KV has to stay on the device; any other prompt of this length goes to the host."""
    from types import SimpleNamespace

    with InProcessScheduler("neo", tiny("llama"), **ON_HOST) as scheduler:
        s, aborted = scheduler.scheduler, []
        for streaming in (True, False):
            req = SimpleNamespace(
                session=SimpleNamespace(streaming=streaming),
                origin_input_ids=[5] * 40,
                sampling_params=SimpleNamespace(max_new_tokens=8, min_new_tokens=0),
                set_finish_with_abort=aborted.append,
            )
            s.init_req_max_new_tokens(req)
    assert len(aborted) == 1 and "40 tokens do not fit the GPU's KV pool of 16 tokens" in aborted[0]
