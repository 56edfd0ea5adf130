"""A server that silently ran plain SGLang would be our worst fault: the checks that stop it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_neo import seams
from sglang_neo.errors import UsageError
from sglang_neo.seams import SEAMS, Seam, SeamError
from tests.harness.inprocess import InProcessScheduler

Tiny = Callable[..., Path]


def test_the_installed_version_is_supported() -> None:
    assert seams.sglang_version() == importlib.metadata.version("sglang") == "0.5.17"


@pytest.mark.parametrize("version", ["0.5.16", "0.5.18", "0.5.17.post1", "0.5.17rc1", "1.0"])
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(UsageError) as refusal:
        seams.sglang_version()
    assert f"{version} is installed" in str(refusal.value)
    assert "pip install sglang==0.5.17" in str(refusal.value)


def test_missing_sglang_is_said_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UsageError, match="not installed; run `make setup`"):
        seams.sglang_version()


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: f"{seam.module.rsplit('.', 1)[-1]}.{seam.name}")
def test_each_seam_holds(seam: Seam) -> None:
    seams.check_seams((seam,))
    assert len(seam.reason) > 10


def test_all_seams_hold() -> None:
    seams.check_seams()
    assert len({(seam.module, seam.name) for seam in SEAMS}) == len(SEAMS)


SCHEDULER = "sglang.srt.managers.scheduler"


@pytest.mark.parametrize("name", ["Scheduler.init_nothing", "NoScheduler", "NoScheduler.init", "Scheduler.a.b"])
def test_a_missing_name_is_found(name: str) -> None:
    with pytest.raises(SeamError, match=f"no {SCHEDULER}.{name}, which sglang_neo needs: the reason"):
        seams.check_seams((Seam(SCHEDULER, name, (), "the reason"),))


def test_a_missing_parameter_is_found() -> None:
    seam = Seam(SCHEDULER, "Scheduler.get_internal_state", ("self", "recv_req", "other", "more"), "the reason")
    with pytest.raises(SeamError, match=r"get_internal_state lacks other, more \(the reason\)"):
        seams.check_seams((seam,))


def test_a_missing_module_is_found() -> None:
    with pytest.raises(ImportError):
        seams.check_seams((Seam("sglang.srt.nowhere", "anything", (), ""),))


def test_overridden_methods_are_named_as_seams() -> None:
    """Whoever overrides one more method of SGLang has to say so in seams.py."""
    from sglang_neo.args import NeoServerArgs
    from sglang_neo.batching import NeoPrefillAdder, NeoScheduleBatch
    from sglang_neo.model_runner import NeoKVCacheConfigurator, NeoModelRunner, NeoTpModelWorker
    from sglang_neo.scheduler import NeoScheduler
    from sglang_neo.token_manager import (
        NeoPagedTokenToKVPoolAllocator,
        NeoReqToTokenPool,
        NeoTokenToKVPoolAllocator,
    )

    named = {seam.name for seam in SEAMS}
    for ours in (
        NeoScheduler,
        NeoTpModelWorker,
        NeoModelRunner,
        NeoKVCacheConfigurator,
        NeoTokenToKVPoolAllocator,
        NeoPagedTokenToKVPoolAllocator,
        NeoReqToTokenPool,
        NeoScheduleBatch,
        NeoPrefillAdder,
    ):
        [base] = ours.__bases__
        for name, value in vars(ours).items():
            if callable(value) and hasattr(base, name):
                assert f"{base.__name__}.{name}" in named, f"{ours.__name__}.{name}"
    assert NeoServerArgs.__mro__[1].__name__ == "ServerArgs"


class Foreign:
    """A class that is not sglang_neo's."""


def stand_in(name: str) -> Any:
    return type(name, (), {"__module__": "sglang_neo.fake"})()


def fake_scheduler(**replaced: Any) -> Any:
    allocator = replaced.get("token_manager", stand_in("Allocator"))
    runner = replaced.get("model_runner", stand_in("Runner"))
    worker = replaced.get("model_worker", stand_in("Worker"))
    scheduler = replaced.get("scheduler", stand_in("Scheduler"))
    runner.token_to_kv_pool_allocator = replaced.get("runners_token_manager", allocator)
    worker.model_runner = runner
    scheduler.tp_worker, scheduler.token_to_kv_pool_allocator = worker, allocator
    scheduler.req_to_token_pool = replaced.get("request_pool", stand_in("RequestPool"))
    allocator.token_manager = SimpleNamespace(has_host=replaced.get("has_host", False))
    runner.attn_backend = replaced.get("attn_backend", stand_in("Backend"))
    return scheduler


def test_our_objects_pass() -> None:
    seams.check_running(fake_scheduler())


@pytest.mark.parametrize("role", ["scheduler", "model_worker", "model_runner", "token_manager", "request_pool"])
def test_one_plain_object_is_found(role: str) -> None:
    with pytest.raises(SeamError, match=f"{role} is .*Foreign"):
        seams.check_running(fake_scheduler(**{role: Foreign()}))


def test_two_token_managers_are_found() -> None:
    with pytest.raises(SeamError, match="different token managers"):
        seams.check_running(fake_scheduler(runners_token_manager=stand_in("Allocator")))


def test_host_rows_without_a_hybrid_backend_are_found() -> None:
    with pytest.raises(SeamError, match="attention backend Backend is not hybrid"):
        seams.check_running(fake_scheduler(has_host=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU device: set CUDA_VISIBLE_DEVICES=''")
def test_a_real_plain_scheduler_is_found(tiny: Tiny) -> None:
    with InProcessScheduler("plain", tiny("llama")) as scheduler, pytest.raises(SeamError) as error:
        seams.check_running(scheduler.scheduler)
    for role in ("scheduler", "model_worker", "model_runner", "token_manager"):
        assert f"{role} is sglang." in str(error.value)


def test_running_classes_reads_the_types() -> None:
    found = seams.running_classes(fake_scheduler(scheduler=SimpleNamespace()))
    assert found["scheduler"] == "types.SimpleNamespace"
    assert found["model_runner"] == "sglang_neo.fake.Runner"
