"""NeoScheduler against plain SGLang in one process: tokens exact, cache use and retractions equal, no KV slot lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_neo.errors import UsageError
from tests.harness.exact import assert_exact, first_difference
from tests.harness.inprocess import InProcessScheduler, Request, Result
from tests.harness.models import ARCHITECTURES, VOCAB_SIZE, perturbed_copy

Tiny = Callable[..., Path]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)

PAGE_SIZES = (1, 64)
#: Page size and overlap scheduling; CI tries two of the four.
DIAGONAL = [(1, True), (64, False), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, False), (64, True)])]


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


def workload() -> list[Request]:
    """Short and long prompts, some with a common prefix of more than two pages of 64, arriving while others run."""
    rng = random.Random(11)
    prefix = random_prompt(rng, 150)
    return [
        Request("first", prefix + random_prompt(rng, 5), 8),
        Request("one-token", random_prompt(rng, 1), 20),
        Request("shares-1", prefix + random_prompt(rng, 3), 16, arrive=5),
        Request("whole-pages", random_prompt(rng, 64), 16, arrive=6),
        Request("shares-2", prefix[:140] + random_prompt(rng, 40), 12, arrive=6),
        Request("long", random_prompt(rng, 300), 10, arrive=9),
        Request("same-again", prefix, 6, arrive=24),
    ]


SHARING = ("shares-1", "shares-2", "same-again")


def tokens(results: dict[str, Result]) -> dict[str, list[int]]:
    return {name: result.tokens for name, result in results.items()}


def assert_same_course(neo: dict[str, Result], plain: dict[str, Result]) -> None:
    """Beyond tokens: the two schedulers made the same use of the cache and ended every request alike."""
    assert {n: r.cached_tokens for n, r in neo.items()} == {n: r.cached_tokens for n, r in plain.items()}
    assert {n: r.retractions for n, r in neo.items()} == {n: r.retractions for n, r in plain.items()}
    assert {n: r.finish for n, r in neo.items()} == {n: r.finish for n, r in plain.items()}
    for name, result in neo.items():
        assert result.logprobs == pytest.approx(plain[name].logprobs, abs=1e-4), name


def serve_both(
    model: Path,
    requests: Sequence[Request],
    on_step: Callable[[Any, int], None] | None = None,
    neo_mode: str = "auto",
    **arguments: Any,
) -> tuple[dict[str, Result], dict[str, Result]]:
    """Results of plain and neo for the same requests under the same server arguments."""
    results = []
    for kind in ("plain", "neo"):
        own = {"neo_mode": neo_mode} if kind == "neo" else {}
        with InProcessScheduler(kind, model, **arguments, **own) as scheduler:  # type: ignore[arg-type]
            results.append(scheduler.run(requests, on_step))
    return results[0], results[1]


@pytest.mark.parametrize(
    ("arch", "page_size", "overlap"),
    [
        # In CI one of each architecture's four, another one from one to the next.
        pytest.param(arch, page_size, overlap, marks=[] if (i + j + 2 * k) % 4 == 0 else pytest.mark.slow)
        for i, arch in enumerate(ARCHITECTURES)
        for j, page_size in enumerate(PAGE_SIZES)
        for k, overlap in enumerate((True, False))
    ],
)
def test_exact_on_every_architecture(tiny: Tiny, alone: Any, arch: str, page_size: int, overlap: bool) -> None:
    requests = workload()
    plain, neo = serve_both(tiny(arch), requests, page_size=page_size, disable_overlap_schedule=not overlap)
    assert_exact({name: result.reference() for name, result in plain.items()}, tokens(neo))
    assert_exact(alone(arch, requests), tokens(neo))
    assert_same_course(neo, plain)
    assert {result.finish for result in neo.values()} == {"length"}
    assert all(neo[name].cached_tokens >= 128 for name in SHARING), "the shared prefix was not found in the cache"
    assert neo["first"].cached_tokens == 0


@pytest.mark.parametrize(("page_size", "overlap"), DIAGONAL)
def test_chunked_prefill(tiny: Tiny, alone: Any, page_size: int, overlap: bool) -> None:
    requests = workload()
    chunked_steps = [0]

    def count(scheduler: Any, step: int) -> None:
        chunked_steps[0] += scheduler.chunked_req is not None

    common = {"page_size": page_size, "disable_overlap_schedule": not overlap}
    plain, neo = serve_both(tiny("llama"), requests, count, chunked_prefill_size=64, **common)
    assert chunked_steps[0] >= 8, "no prompt was prefilled in chunks"
    assert_exact(alone("llama", requests), tokens(neo))
    assert_same_course(neo, plain)

    chunked_steps[0] = 0
    plain, neo = serve_both(tiny("llama"), requests, count, chunked_prefill_size=-1, **common)
    assert chunked_steps[0] == 0
    assert_exact(alone("llama", requests), tokens(neo))
    assert_same_course(neo, plain)


def crowded(seed: int, count: int = 6) -> list[Request]:
    """Requests whose answers together need far more KV than a small pool has."""
    rng = random.Random(seed)
    return [Request(f"r{i}", random_prompt(rng, 20 + i), 70, arrive=i) for i in range(count)]


@pytest.mark.parametrize(
    ("page_size", "pool", "overlap"),
    [(1, 260, True)]
    + [pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 260, False), (64, 512, True), (64, 512, False)]],
)
def test_retraction(tiny: Tiny, alone: Any, page_size: int, pool: int, overlap: bool) -> None:
    requests = crowded(5)
    plain, neo = serve_both(
        tiny("llama"),
        requests,
        page_size=page_size,
        max_total_tokens=pool,
        disable_overlap_schedule=not overlap,
        schedule_conservativeness=0.1,  # admit more than will fit
        neo_mode="gpu-only",  # with host memory nothing would be retracted: test_host_rows.py
    )
    assert sum(result.retractions for result in plain.values()) > 0, "the pool was large enough: nothing retracted"
    assert_exact(alone("llama", requests), tokens(neo))
    assert_same_course(neo, plain)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_eviction_of_cached_prefixes(tiny: Tiny, alone: Any, page_size: int) -> None:
    rng = random.Random(3)
    prompts = [random_prompt(rng, 130) for _ in range(6)]
    expected = alone("llama", [Request(str(i), prompts[i], 8) for i in range(6)])
    with InProcessScheduler("neo", tiny("llama"), page_size=page_size, max_total_tokens=512) as scheduler:
        for turn, order in enumerate((range(6), reversed(range(6)))):
            for i in order:
                results = scheduler.run([Request(str(i), prompts[i], 8)])
                assert_exact({str(i): expected[str(i)]}, tokens(results))
                if turn == 1 and i == 5:
                    assert results["5"].cached_tokens >= 128
                if turn == 1 and i == 0:
                    assert results["0"].cached_tokens == 128, "evicted from the device, and found on the host"
        assert scheduler.scheduler.token_manager.host_cache_counters.loaded_tokens >= 128
        scheduler.flush()
        assert scheduler.allocator.available_size() == scheduler.allocator.size
        scheduler.check_idle()


@pytest.mark.parametrize(("page_size", "overlap"), DIAGONAL)
def test_abort(tiny: Tiny, alone: Any, page_size: int, overlap: bool) -> None:
    rng = random.Random(8)
    requests = [
        Request("stays-1", random_prompt(rng, 30), 30),
        Request("running", random_prompt(rng, 40), 60, abort=12),
        Request("in-queue", random_prompt(rng, 20), 10, arrive=2, abort=4),  # two requests run at most: it waits
        Request("in-prefill", random_prompt(rng, 500), 10, arrive=14, abort=17),  # eight chunks of 64
        Request("stays-2", random_prompt(rng, 50), 10, arrive=18),
    ]
    plain, neo = serve_both(
        tiny("llama"),
        requests,
        page_size=page_size,
        max_running_requests=2,
        chunked_prefill_size=64,
        disable_overlap_schedule=not overlap,
    )
    assert_same_course(neo, plain)
    expected = alone("llama", requests)
    aborted = {"running", "in-queue", "in-prefill"}
    assert {name for name, result in neo.items() if result.finish == "abort"} == aborted
    stayed = {name: reference for name, reference in expected.items() if name not in aborted}
    assert_exact(stayed, {name: neo[name].tokens for name in stayed})
    assert 0 < len(neo["running"].tokens) < 60
    assert neo["running"].tokens == list(expected["running"].tokens[: len(neo["running"].tokens)])
    assert neo["in-queue"].tokens == []


def test_stop_token_ends_a_request(tiny: Tiny, alone: Any) -> None:
    request = Request("a", [5, 6, 7, 8], 20)
    expected = alone("llama", [request])["a"].tokens
    stop = next(token for token in expected if expected.index(token) >= 4)
    end = expected.index(stop) + 1
    with InProcessScheduler("neo", tiny("llama")) as scheduler:
        sampling = {"stop_token_ids": [stop], "ignore_eos": False}
        result = scheduler.run([Request("a", request.prompt, 20, sampling=sampling)])["a"]
    assert (result.tokens, result.finish) == (list(expected[:end]), "stop")


@pytest.mark.parametrize("page_size", [1, pytest.param(64, marks=pytest.mark.slow)])
def test_a_crowd_of_requests_in_a_small_pool(tiny: Tiny, page_size: int) -> None:
    """Random lengths, arrivals and aborts with chunks, evictions and retractions all at once."""
    rng = random.Random(page_size)
    prefixes = [random_prompt(rng, 70) for _ in range(3)]
    requests = []
    for i in range(200):
        arrive = rng.randrange(120)
        prompt = rng.choice(prefixes)[: rng.randrange(71)] + random_prompt(rng, rng.randrange(1, 60))
        abort = arrive + rng.randrange(40) if rng.random() < 0.1 else None
        requests.append(Request(f"r{i:03}", prompt, rng.randrange(1, 16), arrive=arrive, abort=abort))
    plain, neo = serve_both(
        tiny("qwen3"),
        requests,
        page_size=page_size,
        max_total_tokens=1024,
        max_running_requests=16,
        chunked_prefill_size=128,
        schedule_conservativeness=0.1,
        neo_mode="gpu-only",  # an abort at a given step would else meet another token
    )
    assert_exact({name: result.reference() for name, result in plain.items()}, tokens(neo))
    assert_same_course(neo, plain)
    assert any(result.finish == "abort" for result in neo.values())
    assert any(result.cached_tokens for result in neo.values())


def test_state_for_server_info(tiny: Tiny) -> None:
    with InProcessScheduler("neo", tiny("llama"), page_size=64, max_total_tokens=640) as scheduler:
        scheduler.run([Request("a", list(range(3, 103)), 4)])
        state = scheduler.scheduler.neo_state()
    assert (state["sglang_version"], state["neo_mode"], state["active_mode"]) == ("0.5.17", "sync", "sync")
    assert (state["device"], state["attention_backend"]) == ("cpu", "torch_native")
    # One page of the prompt stays in the radix cache.
    assert state["device_kv"] == {"total_tokens": 640, "free_tokens": 576, "page_size": 64}
    assert all(name.startswith("sglang_neo.") for name in state["classes"].values())
    assert state["host_kv"]["total_tokens"] == state["host_kv"]["free_tokens"] > 0
    assert state["host_tokens_total"] == state["steps_total"]["sync"] == 0
    assert state["steps_total"]["gpu_only"] in (3, 4)  # with overlap scheduling, one step after the last token


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({"neo_mode": "gpu-only"}, "--neo-mode gpu-only"), ({"enable_mixed_chunk": True}, "--enable-mixed-chunk")],
)
def test_gpu_only_has_no_host_pool_and_says_why(tiny: Tiny, arguments: dict[str, Any], reason: str) -> None:
    with InProcessScheduler("neo", tiny("llama"), **arguments) as scheduler:
        state = scheduler.scheduler.neo_state()
    assert state["active_mode"] == "gpu-only" and reason in state["gpu_only_reason"]
    assert state["host_kv"]["total_tokens"] == 0


def test_a_host_kv_type_that_does_not_go_with_the_model_is_refused(tiny: Tiny) -> None:
    with pytest.raises(UsageError, match="give auto, float32 or int8"):
        InProcessScheduler("neo", tiny("llama"), neo_host_kv_dtype="float16")


# -- negative controls: what the comparisons above must catch -------------------------------------------------


def test_control_wrong_weight_is_not_exact(tiny: Tiny, alone: Any, tmp_path: Path) -> None:
    requests = workload()
    wrong = perturbed_copy(tiny("llama"), tmp_path / "wrong", "model.layers.1.self_attn.v_proj.weight", 1.05)
    with InProcessScheduler("neo", wrong) as scheduler:
        results = scheduler.run(requests)
    with pytest.raises(AssertionError, match="not exact"):
        assert_exact(alone("llama", requests), tokens(results))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_control_wrong_kv_shows_in_its_request_alone(tiny: Tiny, alone: Any, page_size: int) -> None:
    requests = [Request(f"r{i}", random_prompt(random.Random(i), 30), 30) for i in range(4)]

    def corrupt(scheduler: Any, step: int) -> None:
        if step == 10:
            [victim] = [req for req in scheduler.running_batch.reqs if req.rid == "r2"]
            slots = scheduler.req_to_token_pool.req_to_token[victim.req_pool_idx, 5:25].long()
            pool = scheduler.tp_worker.model_runner.token_to_kv_pool
            pool.get_value_buffer(1)[slots] *= -1

    with InProcessScheduler("neo", tiny("llama"), page_size=page_size) as scheduler:
        results = scheduler.run(requests, corrupt)
    found = {
        name: first_difference(name, reference, results[name].tokens)
        for name, reference in alone("llama", requests).items()
    }
    assert [name for name, difference in found.items() if difference is not None] == ["r2"]
    with pytest.raises(AssertionError, match="request r2"):
        assert_exact(alone("llama", requests), tokens(results))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_control_a_lost_kv_slot_is_found(tiny: Tiny, page_size: int) -> None:
    with InProcessScheduler("neo", tiny("llama"), page_size=page_size) as scheduler:
        scheduler.run([Request("a", [5, 6, 7])])
        scheduler.allocator.alloc(page_size)
        with pytest.raises(AssertionError, match="KV slots lost"):
            scheduler.check_idle()
        with pytest.raises(Exception, match=r"(?i)leak"):  # SGLang's own check, which every run goes through
            scheduler.run([Request("b", [5, 6, 7])])
