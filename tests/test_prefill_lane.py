"""Pipelined mode, host rows that decode beside a prefill: tokens exact against plain SGLang, and they do not wait."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_neo.hybrid.host_attention import StepRefused
from sglang_neo.hybrid.pipelined import PipelinedAttention
from sglang_neo.pipelining import Pipelining
from sglang_neo.planning.placement import Rules
from tests.harness.exact import assert_exact, first_difference
from tests.harness.inprocess import InProcessScheduler, Request
from tests.harness.traffic import random_prompt, tokens
from tests.test_recovery import Stall

Tiny = Callable[..., Path]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)

OPTIONS: dict[str, Any] = {
    "neo_mode": "pipelined",
    "max_total_tokens": 512,
    "max_running_requests": 16,
    "chunked_prefill_size": 64,
    "neo_check_integrity": True,
}
#: Penalties, stop tokens and log-probabilities are those of the rows of each of the two batches of such a step.
KINDS: list[dict[str, Any]] = [{}, {"frequency_penalty": 0.8}, {"repetition_penalty": 1.3}, {"logit_bias": {"17": 4.0}}]


def arrivals(seed: int, sampling: bool = False) -> list[Request]:
    """Rows that fill the device, then prompts in chunks all the time: some fit the device, most go to the host."""
    rng = random.Random(seed)
    first = [Request(f"a{i}", random_prompt(rng, 60), 70) for i in range(7)]
    then = [
        Request(f"b{i}", random_prompt(rng, rng.choice([20, 150, 300])), rng.randrange(2, 12), arrive=6 + 5 * i)
        for i in range(10)
    ]
    requests = [*first, *then]
    if not sampling:
        return requests
    return [
        Request(r.name, r.prompt, r.max_new_tokens, r.arrive, sampling=KINDS[i % 4]) for i, r in enumerate(requests)
    ]


class Seen:
    """Counts the prefills beside which host rows decode, by where their prompts go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scheduler: Any):
        self.beside = {"device": 0, "host": 0}
        prefill = scheduler.tp_worker.model_runner.neo_host.prefill
        own = PipelinedAttention.beside

        def beside(attention: Any, *args: Any, **kwargs: Any) -> Any:
            self.beside["device" if prefill.current is None else "host"] += 1
            return own(attention, *args, **kwargs)

        monkeypatch.setattr(PipelinedAttention, "beside", beside)


@pytest.mark.parametrize(
    ("arch", "page_size", "overlap"), [("llama", 1, True), pytest.param("qwen3", 16, False, marks=pytest.mark.slow)]
)
def test_exact_beside_prefills(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, arch: str, page_size: int, overlap: bool
) -> None:
    requests = arrivals(seed=1)
    options = OPTIONS | {"page_size": page_size, "disable_overlap_schedule": not overlap}
    with InProcessScheduler("neo", tiny(arch), **options) as scheduler:
        seen = Seen(monkeypatch, scheduler.scheduler)
        got = scheduler.run(requests, lambda s, step: s.token_manager.audit())
        steps = scheduler.scheduler.neo_metrics.counters.steps
    assert min(seen.beside.values()) > 0, seen.beside
    assert steps["pipelined_prefill"] == sum(seen.beside.values()) > 10, (steps, seen.beside)
    assert_exact(alone(arch, requests), tokens(got))


def test_sampling_beside_prefills(tiny: Tiny) -> None:
    requests = arrivals(seed=2, sampling=True)
    # With overlap scheduling SGLang's penalties come a token late, at moments that depend on the batches.
    plain = {"disable_overlap_schedule": True, "max_total_tokens": 4096, "max_running_requests": 20}
    with InProcessScheduler("plain", tiny("llama"), **plain) as scheduler:
        expected = scheduler.run(requests)
    with InProcessScheduler("neo", tiny("llama"), **OPTIONS, disable_overlap_schedule=True) as scheduler:
        got = scheduler.run(requests)
        steps = scheduler.scheduler.neo_metrics.counters.steps
    assert steps["pipelined_prefill"] > 10, steps
    assert_exact({name: result.reference() for name, result in expected.items()}, tokens(got))
    for name, result in expected.items():
        torch.testing.assert_close(torch.tensor(got[name].logprobs), torch.tensor(result.logprobs), rtol=0, atol=1e-3)


def test_requests_for_no_token_at_all(tiny: Tiny) -> None:
    """``max_new_tokens=0``, to score a prompt: SGLang has no decode step for them, and we none beside a prefill."""
    rng = random.Random(4)
    requests = [
        Request(f"r{i}", random_prompt(rng, 40), 12 if i == 4 else 0, arrive=i, input_logprobs=True) for i in range(8)
    ]
    with InProcessScheduler("plain", tiny("llama"), max_total_tokens=4096) as scheduler:
        expected = scheduler.run(requests)
    all_on_host = OPTIONS | {"max_total_tokens": 16, "neo_host_kv_size": 0.01}
    with InProcessScheduler("neo", tiny("llama"), **all_on_host) as scheduler:
        got = scheduler.run(requests)
        assert scheduler.scheduler.neo_metrics.counters.steps["pipelined_prefill"] == 3, "r4's"
    assert got["r4"].tokens == expected["r4"].tokens
    for name, result in expected.items():
        mine, its = torch.tensor(got[name].input_logprobs), torch.tensor(result.input_logprobs)
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-3)


def test_host_rows_do_not_wait_for_prompts(tiny: Tiny, alone: Any) -> None:
    """A prompt in many chunks comes while one row decodes: it gets a token in every one of those steps."""
    rng = random.Random(3)
    requests = [Request("row", random_prompt(rng, 30), 60), Request("prompt", random_prompt(rng, 600), 2, arrive=8)]
    at_first_token: list[int] = []

    def watch(scheduler: Any, step: int) -> None:
        running = {req.rid: req for req in scheduler.running_batch.reqs}
        if step == 4:
            assert scheduler.placement.move_to_host(running["row"])
        if "prompt" in running and not at_first_token:
            at_first_token.append(len(running["row"].output_ids))

    with InProcessScheduler("neo", tiny("llama"), **OPTIONS | {"max_total_tokens": 1024}) as scheduler:
        scheduler.scheduler.placement.rules = Rules(returns_per_step=0)
        got = scheduler.run(requests, watch)
        steps = scheduler.scheduler.neo_metrics.counters.steps
    assert steps["pipelined_prefill"] >= 600 // 64 and at_first_token[0] >= 8 + 600 // 64 - 3, (steps, at_first_token)
    assert_exact(alone("llama", requests), tokens(got))


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_workers_that_stop_beside_a_prefill(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """The prompts of such a step are right; the rows beside them are prefilled again, and so are those of steps that
    the workers refuse."""
    requests = arrivals(seed=4)
    stall, failed = Stall(after=12), []
    own = PipelinedAttention.launch_beside

    def launch_beside(attention: Any, rows: Any) -> int:
        if len(failed) in (1, 3):
            failed.append("refused")
            raise StepRefused("no steps today")
        failed.append("")
        return own(attention, rows)

    monkeypatch.setattr(PipelinedAttention, "launch_beside", launch_beside)
    options = OPTIONS | {"neo_watchdog_timeout": 0.8, "disable_overlap_schedule": not overlap}
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        scheduler.scheduler.placement.rules = Rules(pause_steps=4)
        got = scheduler.run(requests, stall)
        recovery = scheduler.scheduler.recovery
    assert stall.stalls == 1 and failed.count("refused") == 2 and recovery.failed_steps >= 3, recovery.failed_steps
    assert_exact(alone("llama", requests), tokens(got))


@pytest.mark.slow
def test_grammars_beside_prefills(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompts = [list(tokenizer.encode(text * 8)) for text in ("Call ", "The capital is ", "Once upon a time ")]
    regex = {"regex": "[(][0-9]{30}[)]"}
    requests = [Request("r0", prompts[0], 20, sampling=regex), Request("r1", prompts[1], 20)]
    requests += [Request(f"p{i}", prompts[2] * 4, 2, arrive=6 + 3 * i) for i in range(4)]
    options: dict[str, Any] = {"skip_tokenizer_init": False, "grammar_backend": "xgrammar", "max_total_tokens": 4096}
    with InProcessScheduler("plain", smollm2, **options) as scheduler:
        expected = scheduler.run(requests)

    def to_host(scheduler: Any, step: int) -> None:
        for req in scheduler.running_batch.reqs if step == 3 else ():
            assert scheduler.placement.move_to_host(req)

    with InProcessScheduler("neo", smollm2, **options, neo_mode="pipelined") as scheduler:
        scheduler.scheduler.placement.rules = Rules(returns_per_step=0)
        got = scheduler.run(requests, to_host)
        steps = scheduler.scheduler.neo_metrics.counters.steps
    assert steps["pipelined_prefill"] >= 4, steps
    assert_exact({name: result.reference() for name, result in expected.items()}, tokens(got))


# -- negative controls ------------------------------------------------------------------------------------------------


def _relays_nothing(pipelining: Pipelining, part: Any, decoded: Any) -> None:
    decoded.copy_done = pipelining._scheduler.device_module.Event()
    decoded.copy_to_cpu(return_logprob=part.return_logprob)


def _takes_other_rows(attention: PipelinedAttention, rows: Any) -> int:
    epoch = _LAUNCH(attention, rows)
    attention._second.load_control(epoch, range(len(rows))[::-1])
    return epoch


_LAUNCH = PipelinedAttention.launch_beside


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [(Pipelining, "_relay", _relays_nothing), (PipelinedAttention, "launch_beside", _takes_other_rows)],
)
def test_a_fault_beside_a_prefill_is_seen(
    tiny: Tiny, alone: Any, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any
) -> None:
    requests = arrivals(seed=1)
    monkeypatch.setattr(owner, name, fault)
    with InProcessScheduler("neo", tiny("llama"), **OPTIONS) as scheduler:
        got = tokens(scheduler.run(requests))
    expected = alone("llama", requests)
    assert sum(first_difference(n, r, got[n]) is not None for n, r in expected.items()) >= 2
