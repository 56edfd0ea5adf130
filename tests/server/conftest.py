"""Fixtures for tests that talk to real servers."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from bench.servers import PORTS, Server, ServerPool, ServerSpec, extra_flags
from tests.harness.models import cut_copy

_POOL = pytest.StashKey[ServerPool]()


def own_ports() -> range:
    """Ports that no other process of this test run uses: pytest-xdist's workers are gw0, gw1, ..."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    size = len(PORTS) // 16
    return PORTS[worker % 16 * size :][:size]


@pytest.fixture(scope="package")
def servers(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[ServerPool]:
    pool = ServerPool(tmp_path_factory.mktemp("servers"), own_ports())
    pytestconfig.stash[_POOL] = pool
    yield pool
    pool.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the end of the server's log to the report of a failure."""
    report = yield
    pool = item.config.stash.get(_POOL, None)
    if report.failed and pool is not None and pool.last is not None and "servers" in getattr(item, "fixturenames", ()):
        report.sections.append(("server log", pool.last.log_tail()))
    return report


#: A device pool that has room for no prompt: every request is computed straight into host memory and decoded there.
_ON_HOST = ("--max-total-tokens", "16", "--neo-host-kv-size", "1", "--neo-check-integrity")
NEO_MODES = {
    "pipelined": (*_ON_HOST, "--neo-mode", "pipelined"),
    "sync": (*_ON_HOST, "--neo-mode", "sync"),
    "deferred": (*_ON_HOST, "--neo-mode", "deferred", "--neo-deferred-slots", "4"),
    "auto": (*_ON_HOST, "--neo-deferred-slots", "4"),
    "device": ("--neo-mode", "sync", "--neo-host-kv-size", "1"),  # with room for all
}


@pytest.fixture(
    scope="session",
    params=[pytest.param(mode, marks=[] if mode == "device" else pytest.mark.slow) for mode in NEO_MODES],
)
def neo_mode(request: pytest.FixtureRequest) -> str:
    """Where the requests of the suites below are decoded, and how. CI tries one: on few cores each layer's hand-off
    would wait for the other tests. In one process tests/test_requests.py has all of them."""
    mode: str = request.param
    return mode


#: Modes in which the real model is cut to its first layers: in deferred steps a token takes one more step than layers.
_CUT, _LAYERS = ("deferred", "auto"), 4


@pytest.fixture(scope="session")
def neo_model(smollm2: Path, neo_mode: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model that answers: a real one."""
    return cut_copy(smollm2, tmp_path_factory.mktemp("cut") / "model", _LAYERS) if neo_mode in _CUT else smollm2


@pytest.fixture(scope="session")
def knows(neo_mode: str) -> Callable[[str, str], bool]:
    """``knows("Paris", text)``: whether an answer has that in it. A model that is cut may say anything, or nothing."""
    return (lambda fact, text: True) if neo_mode in _CUT else (lambda fact, text: fact in text)


@pytest.fixture(scope="session")
def neo_spec(neo_model: Path, neo_mode: str) -> ServerSpec:
    """sglang_neo with the real model, in float32: its tokens are then those of plain SGLang exactly."""
    return ServerSpec(neo_model, ("--dtype", "float32", "--enable-metrics", *NEO_MODES[neo_mode], *extra_flags()))


@pytest.fixture
def neo(servers: ServerPool, neo_spec: ServerSpec) -> Server:
    """A server with the real model, shared by all tests that leave it as they found it."""
    return servers.shared(neo_spec)


@pytest.fixture(scope="session")
def tiny_spec(tiny: Callable[..., Path]) -> ServerSpec:
    """sglang_neo with a tiny model and no tokenizer: for tests of processes, which care for no text. In a fixed mode,
    which measures nothing at its start."""
    mode = ("--neo-mode", "sync")
    return ServerSpec(tiny("llama"), ("--dtype", "float32", "--skip-tokenizer-init", "--skip-server-warmup", *mode))


@pytest.fixture(scope="session")
def paged_spec(tiny_spec: ServerSpec) -> ServerSpec:
    """The same with pages of 64 tokens."""
    return tiny_spec.with_flags("--page-size", "64")
