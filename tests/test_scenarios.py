"""What users of other servers have reported, as tests, in every mode in which requests live in host memory.

Each safeguard is taken out once (``UNGUARDED``, at the end), and its scenario must fail then. Copies under way:
test_copies.py; ranks that do not have the same memory: test_ranks.py.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from sglang_neo.placement import Placement
from sglang_neo.scheduler import NeoScheduler
from sglang_neo.token_manager import NeoReqToTokenPool, NeoTokenManager
from tests.harness.exact import assert_exact
from tests.harness.inprocess import InProcessScheduler, Request
from tests.harness.traffic import RandomMoves, random_prompt, tokens
from tests.test_auto import no_profiling, random_moves  # noqa: F401  a fixture of every test

Tiny = Callable[..., Path]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "pipelined": {"neo_mode": "pipelined"},
    "deferred": {"neo_deferred_slots": 2, "neo_check_integrity": True},
}


AUTO: dict[str, Any] = {"neo_mode": "auto", "neo_deferred_slots": 2, "neo_check_integrity": True}


def in_modes(quick: str, auto: bool = False) -> Any:
    """In every mode; CI tries one. ``auto``: in that one too, with ``random_moves`` of test_auto.py."""
    modes = {**MODES, "auto": AUTO} if auto else MODES
    return pytest.mark.parametrize(
        "mode",
        [pytest.param(o, id=name, marks=[] if name == quick else [pytest.mark.slow]) for name, o in modes.items()],
    )


def crowd(seed: int, count: int, prompt: int, answer: int, prefix: str = "r") -> list[Request]:
    rng = random.Random(seed)
    return [Request(f"{prefix}{i:03}", random_prompt(rng, prompt), answer, arrive=i // 4) for i in range(count)]


@in_modes("deferred")
def test_after_a_crowd_the_device_alone_serves_again(tiny: Tiny, alone: Any, mode: dict[str, Any]) -> None:
    """Long decodes fill the device pool to the last token; when the load has fallen, no step waits for the CPU, neither
    for those that are left of the crowd nor for those that come then."""
    many, few = crowd(1, 14, 50, 90), crowd(2, 3, 40, 40, "after")
    many.append(Request("last", random_prompt(random.Random(3), 30), 320, arrive=4))
    fullest, tail = 0, []

    def watch(scheduler: Any, step: int) -> None:
        nonlocal fullest
        tail.append(len(scheduler.token_manager.host_rows()))
        usage = scheduler.token_manager.device_usage()
        fullest = max(fullest, usage.total_tokens - scheduler.placement.device_free())

    with InProcessScheduler("neo", tiny("llama"), max_total_tokens=512, max_running_requests=20, **mode) as scheduler:
        got = scheduler.run(many, watch)
        steps = scheduler.scheduler.neo_metrics.counters.steps
        host_steps = sum(count for name, count in steps.items() if name != "gpu_only")
        moves = scheduler.scheduler.token_manager.migrations.to_host
        got |= scheduler.run(few)
        assert sum(count for name, count in steps.items() if name != "gpu_only") == host_steps > 20
        assert scheduler.scheduler.token_manager.migrations.to_host == moves
        scheduler.flush()
        usage = scheduler.scheduler.token_manager.device_usage()
        assert usage.free_tokens == usage.total_tokens
    assert fullest >= 500, "the pool was to be full"
    assert max(tail) > 5 and not any(tail[-40:]), "nobody is left in host memory"
    assert_exact(alone("llama", many + few), tokens(got))


@in_modes("pipelined")
def test_eleven_requests_and_two_thousand_tokens(tiny: Tiny, alone: Any, mode: dict[str, Any]) -> None:
    """No allocation fails, nobody is retracted, and every answer is whole."""
    requests = crowd(3, 11, 150, 100)
    with InProcessScheduler("neo", tiny("llama"), max_total_tokens=2000, max_running_requests=20, **mode) as scheduler:
        got = scheduler.run(requests)
    assert sum(result.retractions for result in got.values()) == 0
    assert_exact(alone("llama", requests), tokens(got))


class Vanishing:
    """``on_step``: clients go away at the worst moments, each at one that its name says."""

    MOMENTS = ("first-token", "to-host", "to-device", "waiting", "on-host")

    def __init__(self, seed: int):
        self.rng, self.gone = random.Random(seed), {moment: 0 for moment in self.MOMENTS}
        self.moves = RandomMoves(seed, rate=0.2)

    def __call__(self, scheduler: Any, step: int) -> None:
        for req in list(scheduler.waiting_queue):
            if req.rid.startswith("waiting"):
                self._leave(scheduler, req, "waiting")
        for req in list(scheduler.running_batch.reqs):
            if req.finished() or req.to_finish is not None or req.kv is None or req.is_retracted:
                continue
            moment = req.rid.rsplit("-", 1)[0]
            if moment in self.gone and self._has_come(moment, scheduler, req):
                self._leave(scheduler, req, moment)
        self.moves(scheduler, step)

    def _has_come(self, moment: str, scheduler: Any, req: Any) -> bool:
        on_host = getattr(req, "neo_host_row", None) is not None
        if moment == "first-token":
            return len(req.output_ids) <= 1
        if moment == "to-host":
            return not on_host and bool(scheduler.placement.move_to_host(req))
        if moment == "to-device":
            return on_host and bool(scheduler.placement.move_to_device(req))
        return on_host and self.rng.random() < 0.3

    def _leave(self, scheduler: Any, req: Any, moment: str) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self.gone[moment] += 1
        scheduler.abort_request(AbortReq(rid=req.rid))


#: NEO_TEST_ABORTS=1000 is the long version.
ABORTS = int(os.environ.get("NEO_TEST_ABORTS", "20"))


@in_modes("sync")
@pytest.mark.timeout(max(300, ABORTS))
def test_clients_that_vanish(tiny: Tiny, alone: Any, mode: dict[str, Any]) -> None:
    """At their first token, during a move either way, while waiting, on the host; those who stay get their answers."""
    rng = random.Random(4)
    stay = crowd(5, 6, 60, 60, "stay")
    leave = []
    for i in range(ABORTS):
        name, prompt = f"{Vanishing.MOMENTS[i % 5]}-{i:04}", random_prompt(rng, rng.randrange(5, 90))
        leave.append(Request(name, prompt, 40, arrive=i // 2, vanishes=True))
    vanishing = Vanishing(seed=6)
    with InProcessScheduler("neo", tiny("llama"), max_total_tokens=600, max_running_requests=12, **mode) as scheduler:
        manager = scheduler.scheduler.token_manager
        before = manager.host_usage()
        got = scheduler.run(stay + leave, vanishing)
        scheduler.flush()
        assert manager.host_usage() == before and not manager.host_rows()
        assert manager.device_usage().free_tokens == manager.device_usage().total_tokens
        manager.audit()
    assert min(vanishing.gone.values()) > 0 and sum(vanishing.gone.values()) > ABORTS / 2, vanishing.gone
    answers = {name: got[name].tokens for name in got if name.startswith("stay")}
    assert_exact(alone("llama", stay), answers)


@in_modes("sync")
def test_one_request_alone_outgrows_the_device(tiny: Tiny, alone: Any, mode: dict[str, Any]) -> None:
    requests = [Request("long", random_prompt(random.Random(6), 100), 90)]
    with InProcessScheduler("neo", tiny("llama"), max_total_tokens=128, **mode) as scheduler:
        got = scheduler.run(requests)
    assert len(got["long"].tokens) == 90
    assert_exact(alone("llama", requests), tokens(got))


def test_both_pools_full_and_a_prefix_comes_back(tiny: Tiny, alone: Any) -> None:
    """The device's tree has to give way to the prefix, and what leaves it wants to go where the prefix lies."""
    rng = random.Random(8)
    kept, other = random_prompt(rng, 260), random_prompt(rng, 300)
    first, second = [Request("kept", kept, 30)], [Request("other", other, 5)]
    third = [Request("again", [*kept[:257], *random_prompt(rng, 9)], 10)]

    def to_host(scheduler: Any, step: int) -> None:
        for req in scheduler.running_batch.reqs:
            if not req.finished() and getattr(req, "neo_host_row", None) is None:
                scheduler.placement.move_to_host(req)

    five_pages = 5.01 * 64 * 2 * 2 * 16 * 3 * 4 / 1e9
    with InProcessScheduler("neo", tiny("llama"), max_total_tokens=400, neo_host_kv_size=five_pages) as scheduler:
        got = scheduler.run(first, to_host)
        empty_device_tree(scheduler.scheduler)
        got |= scheduler.run(second)
        assert (
            scheduler.scheduler.token_manager.host_usage().free_tokens
            < 300
            <= scheduler.scheduler.tree_cache.evictable_size()
        )
        got |= scheduler.run(third)
        counters = scheduler.scheduler.token_manager.host_cache_counters
    assert counters.loaded_tokens == got["again"].cached_tokens == 256, counters
    assert_exact(alone("llama", first + second + third), tokens(got))


def empty_device_tree(scheduler: Any) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    scheduler.tree_cache.evict(EvictParams(num_tokens=scheduler.tree_cache.evictable_size()))


@in_modes("", auto=True)
@pytest.mark.timeout(1800)
def test_memory_does_not_grow(tiny: Tiny, mode: dict[str, Any]) -> None:
    """Chats of several turns for 5,000 steps: no view keeps a big tensor of indices alive."""
    rng = random.Random(7)
    process, steps, after = psutil.Process(), 0, []
    with InProcessScheduler("neo", tiny("llama"), max_total_tokens=600, max_running_requests=12, **mode) as scheduler:
        number = 0
        while steps < 5000:
            history = [random_prompt(rng, 20) for _ in range(8)]
            for _turn in range(3):
                requests = [Request(f"{number}-{i}", chat, 25) for i, chat in enumerate(history)]
                got = scheduler.run(requests, random_moves(mode, number, rate=0.05))
                history = [
                    [*chat, *got[f"{number}-{i}"].tokens, *random_prompt(rng, 5)] for i, chat in enumerate(history)
                ]
                number, steps = number + 1, steps + scheduler.steps
            after.append((steps, process.memory_info().rss / 1e6))
    half = next(rss for at, rss in after if at > 1500)
    assert after[-1][1] < half + 30, f"MB by steps: {after}"


# -- without their safeguards ------------------------------------------------------------------------------------------


def keep_at_any_price(manager: NeoTokenManager, *args: Any) -> None:
    """What leaves the device's tree, where everything in the host's may give way to it."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    assert manager.host_cache is not None
    manager.host_cache.evict(EvictParams(num_tokens=manager.host_evictable()))
    KEEP(manager, *args)


KEEP = NeoTokenManager.keep
#: A scenario, its mode, and what is taken out of the server.
UNGUARDED: list[tuple[Callable[..., None], str | None, type, str, Any]] = [
    (test_after_a_crowd_the_device_alone_serves_again, "sync", Placement, "_return", lambda self, batch: None),
    (test_eleven_requests_and_two_thousand_tokens, "sync", Placement, "_make_room", lambda *a, **k: False),
    (
        test_one_request_alone_outgrows_the_device,
        "sync",
        NeoScheduler,
        "init_req_max_new_tokens",
        Scheduler.init_req_max_new_tokens,
    ),
    (test_clients_that_vanish, "sync", NeoReqToTokenPool, "free", ReqToTokenPool.free),
    (test_clients_that_vanish, "deferred", NeoTokenManager, "steps_over", lambda self, epoch: None),
    (test_both_pools_full_and_a_prefix_comes_back, None, NeoTokenManager, "keep", keep_at_any_price),
]


@pytest.mark.parametrize(
    ("scenario", "mode", "owner", "name", "fault"),
    UNGUARDED,
    ids=[f"{name}-{scenario.__name__.removeprefix('test_')}" for scenario, _, _, name, _ in UNGUARDED],
)
def test_a_scenario_without_its_safeguard_fails(
    tiny: Tiny,
    alone: Any,
    monkeypatch: pytest.MonkeyPatch,
    scenario: Callable[..., None],
    mode: str | None,
    owner: type,
    name: str,
    fault: Any,
) -> None:
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises((AssertionError, RuntimeError)):
        scenario(tiny, alone, *([MODES[mode]] if mode is not None else []))
