"""Fixtures and rules for every test: GPU tests are skipped without a GPU, models are built once per session."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Before torch is imported: one OpenMP thread is steadier than several on a small machine, and a test's rounding must
# not depend on the number of cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Nor on what was once measured on this machine: the kernels' built-in tuning.
os.environ.setdefault("CPU_KERNELS_CALIBRATION", "off")

import pytest
from hypothesis import settings

from sglang_neo.platforms import torchvision_bridge
from tests.harness.models import SMOLLM2, tiny_model

# In-process tests import SGLang here, where no launcher has prepared the interpreter.
torchvision_bridge.install()

# A test must not fail because the machine is busy.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def cuda_available() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # What takes longest begins, so that several processes end together.
    items.sort(key=lambda item: "servers" not in getattr(item, "fixturenames", ()))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not cuda_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.harness.distribution import scheduler

    return scheduler(config, log)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this session keeps its tiny models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny(model_directory: Path) -> Callable[..., Path]:
    """``tiny("llama")``: the folder of that tiny model, with tiny_model's other arguments if wanted."""

    def build(arch: str, **options: Any) -> Path:
        return tiny_model(arch, model_directory, **options)

    return build


@pytest.fixture(scope="session")
def alone(tiny: Callable[..., Path]) -> Callable[[str, Sequence[Any]], dict[str, Any]]:
    """``alone("llama", requests)``: what a plain model runner answers: no scheduler, no cache, nothing but decoding.
    Kept per prompt. It runs several at a time: test_runner.py shows that this changes nothing."""
    kept: dict[tuple[str, tuple[int, ...], int], Any] = {}

    def references(arch: str, requests: Sequence[Any]) -> dict[str, Any]:
        from tests.harness.inprocess import InProcessRunner

        keys = {r.name: (arch, tuple(r.prompt), r.max_new_tokens) for r in requests}
        missing = {keys[r.name]: r for r in requests if keys[r.name] not in kept}
        if missing:
            with InProcessRunner("plain", tiny(arch), max_total_tokens=8192, max_running_requests=32) as runner:
                answers = runner.answers(list(missing.values()))
            kept.update({key: answers[r.name] for key, r in missing.items()})
        return {name: kept[key] for name, key in keys.items()}

    return references


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, a real model with a tokenizer."""
    if not (SMOLLM2 / "config.json").is_file():
        pytest.fail(f"{SMOLLM2} does not exist: run `make setup` first", pytrace=False)
    return SMOLLM2
