"""Copies between the pools that are under way while requests end, are aborted or retracted, or move on.

On the CPU device copies happen at once; here they happen as late as anybody allows. Each safeguard that orders them is
taken out once, and the tests must see it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_neo import token_manager
from sglang_neo.host_kv import transfer
from sglang_neo.hybrid import host_attention
from tests.harness.exact import assert_exact
from tests.harness.inprocess import InProcessScheduler, Request
from tests.harness.queues import LateCopies
from tests.harness.traffic import RandomMoves, random_prompt, random_requests, tokens
from tests.test_auto import no_profiling, random_moves  # noqa: F401  a fixture of every test
from tests.test_scenarios import ABORTS, in_modes

Tiny = Callable[..., Path]

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)

PAGE = 64 * 2 * 2 * 16 * 3 * 4 / 1e9  # GB: tokens, K and V, heads, head_dim, layers, bytes


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    device = LateCopies(seed=1)
    monkeypatch.setattr(transfer, "device_for", lambda device_of_kv: device)
    return device


def under_way(scheduler: Any, req: Any) -> bool:
    row = token_manager.host_row(req)
    return row is not None and row.arrival is not None and not row.arrival.done()


class AbortsDuringCopies:
    """``on_step``: moves a request whose name begins with "gone" to the host and aborts it at once."""

    def __init__(self, device: LateCopies, seed: int, moves: RandomMoves):
        self.device, self.rng, self.aborts = device, random.Random(seed), 0
        self.moves = moves

    def __call__(self, scheduler: Any, step: int) -> None:
        from sglang.srt.managers.io_struct import AbortReq

        self.moves(scheduler, step)
        for req in list(scheduler.running_batch.reqs):
            if not req.rid.startswith("gone") or req.finished() or req.to_finish is not None or req.kv is None:
                continue
            if token_manager.host_row(req) is None and self.rng.random() < 0.5:
                scheduler.placement.move_to_host(req)
            if under_way(scheduler, req):
                self.aborts += 1
                scheduler.abort_request(AbortReq(rid=req.rid))
        self.device.some_steps()


@in_modes("deferred", auto=True)
@pytest.mark.timeout(max(300, ABORTS))
def test_aborts_during_copies(tiny: Tiny, alone: Any, late: LateCopies, mode: dict[str, Any]) -> None:
    rng = random.Random(2)
    stay = [Request(f"stay{i}", random_prompt(rng, 60), 60, arrive=i) for i in range(6)]
    gone = [
        Request(f"gone{i:04}", random_prompt(rng, rng.randrange(5, 90)), 40, arrive=i // 2, vanishes=True)
        for i in range(ABORTS)
    ]
    aborts = AbortsDuringCopies(late, 3, random_moves(mode, 3, rate=0.2))
    options = {"max_total_tokens": 600, "max_running_requests": 12, "neo_host_kv_size": 12 * PAGE, **mode}
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        manager = scheduler.scheduler.token_manager
        before = manager.host_usage()
        got = scheduler.run(stay + gone, aborts)
        scheduler.flush()
        assert manager.host_usage() == before
        manager.audit()
    assert aborts.aborts > ABORTS / 2
    assert_exact(alone("llama", stay), {name: got[name].tokens for name in got if name.startswith("stay")})


class Retractions:
    """``on_step``: sends requests to the host and has SGLang retract everybody while the copies are under way."""

    def __init__(self, device: LateCopies):
        self.device, self.retracted = device, 0
        self.moves = RandomMoves(7, rate=0.5)

    def __call__(self, scheduler: Any, step: int) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

        self.moves(scheduler, step)
        copying = sum(under_way(scheduler, req) for req in scheduler.running_batch.reqs)
        if step % 12 == 8 and copying and self.retracted < 20:
            self.retracted += copying
            scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
            scheduler.continue_generation(ContinueGenerationReqInput())
        if step % 3 == 0:
            self.device.some_steps()


def run_with_retractions(tiny: Tiny, alone: Any, late: LateCopies, mode: dict[str, Any], requests: Any) -> Retractions:
    retractions = Retractions(late)
    options = {"max_total_tokens": 1024, "max_running_requests": 12, "neo_host_kv_size": 12 * PAGE, **mode}
    with InProcessScheduler("neo", tiny("llama"), **options) as scheduler:
        got = scheduler.run(requests, retractions)
    assert_exact(alone("llama", requests), tokens(got))
    return retractions


@in_modes("sync")
def test_retractions_during_copies(tiny: Tiny, alone: Any, late: LateCopies, mode: dict[str, Any]) -> None:
    """What was copied is right, and its pages are nobody else's before the copy is over."""
    requests = random_requests(seed=5, count=10)
    assert run_with_retractions(tiny, alone, late, mode, requests).retracted >= 5


def no_wait(*args: Any) -> None:
    pass


#: What keeps a reader behind the copy that it reads. Giving pages back waits too, so that whatever comes after need not
#: know of the copy; by itself that changes no token while all copies go through one queue.
SAFEGUARDS = {
    "workers begin behind arrivals": [
        (host_attention, "await_arrivals", no_wait),
        (transfer.KVTransfer, "settle", no_wait),
    ],
    "copies back come behind copies out": [(transfer.KVTransfer, "_conflicts", lambda *a, **k: ())],
}


@pytest.mark.parametrize("safeguard", SAFEGUARDS)
def test_without_its_safeguard_a_copy_is_read_too_early(
    tiny: Tiny, alone: Any, late: LateCopies, monkeypatch: pytest.MonkeyPatch, safeguard: str
) -> None:
    for owner, name, fault in SAFEGUARDS[safeguard]:
        monkeypatch.setattr(owner, name, fault)
    monkeypatch.setattr(late, "some_steps", lambda: None)
    with pytest.raises(AssertionError, match="not exact"):
        run_with_retractions(tiny, alone, late, {}, random_requests(seed=5, count=10))
