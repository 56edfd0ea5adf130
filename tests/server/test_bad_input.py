"""Bad input: one line that says what is wrong, exit code 2, no traceback, nothing left behind.

Most mistakes are found before any process is started: those cases run the launcher's ``main`` in this process.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.servers import READY_SECONDS, ServerPool, ServerSpec, check_told_in_one_line, free_port
from sglang_neo import launch_server

Launch = Callable[..., tuple[int, str]]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Launch]:
    """``launch(*flags)`` runs the launcher's main up to the start of processes; returns exit code and output."""

    def never(server_args: object, debug: bool = False) -> int:
        pytest.fail("the launcher would have started the server")

    def run(*flags: object) -> tuple[int, str]:
        argv = [str(flag) for flag in flags]
        if "--port" not in argv:
            argv += ["--port", str(free_port())]
        capfd.readouterr()
        try:
            code = launch_server.main(argv)
        except SystemExit as end:  # argparse's way
            code = int(end.code or 0)
        out, err = capfd.readouterr()
        return code, out + err

    monkeypatch.setattr(launch_server, "serve", never)
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    environment = dict(os.environ)
    root = logging.getLogger()
    logging_before = root.level, list(root.handlers)
    yield run
    for signum, handler in handlers.items():
        signal.signal(signum, handler)
    os.environ.clear()
    os.environ.update(environment)
    root.setLevel(logging_before[0])
    root.handlers[:] = logging_before[1]


@pytest.fixture(scope="module")
def llama(tiny: Callable[..., Path]) -> Path:
    return tiny("llama")


@pytest.fixture
def broken(llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model for a test to break."""
    return Path(shutil.copytree(llama, tmp_path / "broken"))


def check(result: tuple[int, str], *expected: str) -> None:
    code, text = result
    check_told_in_one_line(text, expected)
    assert code == 2


# the model


def test_no_such_path(launch: Launch, tmp_path: Path) -> None:
    check(launch("--model-path", tmp_path / "none"), "none does not exist")


def test_folder_without_a_model(launch: Launch, tmp_path: Path) -> None:
    check(launch("--model-path", tmp_path), "is not a model", "config.json")


def test_folder_without_weights(launch: Launch, broken: Path) -> None:
    (broken / "model.safetensors").unlink()
    check(launch("--model-path", broken), "has no weights", "--load-format dummy")


@pytest.mark.parametrize("text", ['{"architectures": [', "", "[]"], ids=["cut", "empty", "list"])
def test_corrupt_config(launch: Launch, broken: Path, text: str) -> None:
    (broken / "config.json").write_text(text)
    check(launch("--model-path", broken, "--skip-tokenizer-init"), "config.json")


def test_unknown_model_type(launch: Launch, broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "nosuch"}))
    check(launch("--model-path", broken, "--skip-tokenizer-init"), "nosuch")


# the machine


def test_port_in_use(launch: Launch, llama: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        check(launch("--model-path", llama, "--skip-tokenizer-init", "--port", port), f"{port}", "--port")


def test_host_of_another_machine(launch: Launch, llama: Path) -> None:
    check(launch("--model-path", llama, "--skip-tokenizer-init", "--host", "192.0.2.1"), "192.0.2.1", "--host")


def test_cuda_on_a_machine_without(launch: Launch, llama: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA GPU")
    check(launch("--model-path", llama, "--device", "cuda"), "--device cuda", "--device cpu")


def test_more_host_memory_than_there_is(launch: Launch, llama: Path) -> None:
    check(launch("--model-path", llama, "--neo-host-kv-size", "1e9"), "--neo-host-kv-size", "GB of host memory")


# our flags


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--neo-mode", "pipelined", "--neo-deferred-slots", "2"], "contradicts --neo-deferred-slots"),
        (["--neo-mode", "gpu-only", "--neo-host-kv-size", "0.1"], "contradicts --neo-host-kv-size"),
        (["--neo-mode", "gpu-only", "--neo-cpu-threads", "1"], "contradicts --neo-cpu-threads"),
        (["--neo-host-kv-size", "0.1", "--neo-host-kv-ratio", "2"], "contradicts --neo-host-kv-ratio"),
        (["--neo-host-kv-size", "0"], "greater than 0"),
        (["--neo-host-kv-size", "nan"], "greater than 0"),
        (["--neo-host-kv-ratio", "-1"], "greater than 0"),
        (["--neo-cpu-threads", "100000"], "cores"),
        (["--neo-max-tpot", "0"], "--neo-max-tpot"),
    ],
    ids=" ".join,
)
def test_our_flags(launch: Launch, llama: Path, flags: list[str], expected: str) -> None:
    check(launch("--model-path", llama, *flags), expected)


# The slow ones: test_refusals.py refuses them without a process.
@pytest.mark.parametrize(
    "flags",
    [
        ["--pp-size", "2"],
        pytest.param(["--enable-dp-attention", "--tp-size", "2", "--dp-size", "2"], marks=pytest.mark.slow),
        pytest.param(["--speculative-algorithm", "EAGLE"], marks=pytest.mark.slow),
        pytest.param(["--disaggregation-mode", "prefill"], marks=pytest.mark.slow),
        ["--enable-hierarchical-cache"],
        pytest.param(["--enable-lmcache"], marks=pytest.mark.slow),
        pytest.param(["--enable-hisparse"], marks=pytest.mark.slow),
        pytest.param(["--enable-two-batch-overlap"], marks=pytest.mark.slow),
        pytest.param(["--enable-single-batch-overlap"], marks=pytest.mark.slow),
        pytest.param(["--enable-pdmux"], marks=pytest.mark.slow),
        pytest.param(["--dllm-algorithm", "LowConfidence"], marks=pytest.mark.slow),
        pytest.param(["--attn-cp-size", "2"], marks=pytest.mark.slow),
        pytest.param(["--dcp-size", "2"], marks=pytest.mark.slow),
        pytest.param(["--enable-unified-memory"], marks=pytest.mark.slow),
        pytest.param(["--encoder-only"], marks=pytest.mark.slow),
        pytest.param(["--use-ray"], marks=pytest.mark.slow),
        pytest.param(["--smg-grpc-mode"], marks=pytest.mark.slow),
    ],
    ids=lambda flags: flags[0],
)
def test_refused_features(launch: Launch, llama: Path, flags: list[str]) -> None:
    check(launch("--model-path", llama, *flags), "not supported", r"python -m sglang\.launch_server")


# the command line


def test_unknown_flag(launch: Launch, llama: Path) -> None:
    code, text = launch("--model-path", llama, "--neo-nosuch")
    assert code == 2
    assert "error: unrecognized arguments: --neo-nosuch" in text
    assert "Traceback" not in text


def test_unknown_choice(launch: Launch, llama: Path) -> None:
    code, text = launch("--model-path", llama, "--neo-mode", "fastest")
    assert code == 2
    assert "error: argument --neo-mode" in text
    assert "Traceback" not in text


def test_no_model(launch: Launch) -> None:
    code, text = launch()
    assert code == 2
    assert "--model-path" in text and "error:" in text
    assert "Traceback" not in text


def test_missing_config_file(launch: Launch, llama: Path, tmp_path: Path) -> None:
    check(launch("--model-path", llama, "--config", tmp_path / "none.yaml"), r"none\.yaml")


@pytest.mark.parametrize("text", ["a: [1, 2", "- just\n- a list\n"], ids=["broken", "list"])
def test_bad_config_file(launch: Launch, llama: Path, tmp_path: Path, text: str) -> None:
    config = tmp_path / "server.yaml"
    config.write_text(text)
    check(launch("--model-path", llama, "--config", config), "(?i)config|yaml")


def test_help_lists_our_flags_beside_sglangs(launch: Launch) -> None:
    code, text = launch("--help")
    assert code == 0
    for flag in ("--model-path", "--tp-size", "--neo-mode", "--neo-host-kv-size", "--neo-max-host-tpot"):
        assert flag in text


# what only the server's processes find out


@pytest.mark.slow  # these two: what a worker finds; test_processes.py has the way it takes, without a server
def test_damaged_weights(servers: ServerPool, tiny_spec: ServerSpec, broken: Path) -> None:
    """Found by two schedulers, behind a controller that says nothing of what they found: told once all the same."""
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with servers.starting(ServerSpec(broken, (*tiny_spec.flags, "--dp-size", "2"))) as server:
        assert server.wait_exit(READY_SECONDS) == 2
        server.check_gone()
        check_told_in_one_line(server.log(), ["weights is damaged"])


@pytest.mark.slow
def test_unsupported_architecture(servers: ServerPool, tiny_spec: ServerSpec, broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchForCausalLM"]}))
    with servers.starting(ServerSpec(broken, tiny_spec.flags)) as server:
        assert server.wait_exit(READY_SECONDS) == 2
        server.check_gone()
        check_told_in_one_line(server.log(), ["NoSuchForCausalLM"])


@pytest.mark.slow  # how a failed start is told: test_processes.py
def test_bad_tokenizer_path(servers: ServerPool, tiny_spec: ServerSpec, tmp_path: Path) -> None:
    flags = ("--skip-server-warmup", "--tokenizer-path", str(tmp_path / "none"))
    with servers.starting(ServerSpec(tiny_spec.model, flags)) as server:
        assert server.wait_exit(READY_SECONDS) == 2
        server.check_gone()
        check_told_in_one_line(server.log(), ["tokenizer", "none"])
