"""Server arguments: every flag of ours, its checks, the ways to give it, and SGLang's own beside it."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_neo import args as neo_args
from sglang_neo.args import (
    HOST_FLAGS,
    LEAST,
    NeoServerArgs,
    check_model_path,
    check_neo_flags,
    flag_name,
    mode_lines,
    neo_fields,
    prepare_server_args,
)
from sglang_neo.errors import UsageError
from sglang_neo.launch_server import check_port

Tiny = Callable[..., Path]

GIB = 2**30
CORES = 8

if torch.cuda.is_available():
    pytest.skip("these tests run on the CPU device: set CUDA_VISIBLE_DEVICES=''", allow_module_level=True)


@pytest.fixture(autouse=True)
def keep_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing a command line sets logging up anew, which would take pytest's handlers away."""
    monkeypatch.setattr("logging.basicConfig", lambda **kwargs: None)


def flags(**given: Any) -> Any:
    return SimpleNamespace(**{"neo_mode": "auto", **HOST_FLAGS, **given})


def check(**given: Any) -> None:
    check_neo_flags(flags(**given), usable_cores=CORES, memory=16 * GIB)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"neo_mode": "gpu-only"},
        {"neo_host_kv_size": 4.0},
        {"neo_host_kv_size": 16 * GIB / 1e9},
        {"neo_host_kv_ratio": 0.5},
        {"neo_host_kv_dtype": "int8"},
        {"neo_cpu_threads": CORES},
        {"neo_mode": "sync"},
        {"neo_mode": "deferred", "neo_deferred_slots": 8},
        {"neo_deferred_slots": 1},
        {"neo_max_host_tpot": 200.0, "neo_max_tpot": 20.0},
    ],
)
def test_good_flags_pass(given: dict[str, Any]) -> None:
    check(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"neo_mode": "pipelined", "neo_deferred_slots": 2}, "--neo-mode pipelined contradicts --neo-deferred-slots"),
        ({"neo_mode": "deferred", "neo_deferred_slots": 0}, "deferred contradicts --neo-deferred-slots 0"),
        ({"neo_mode": "sync", "neo_deferred_slots": 2}, "--neo-mode sync contradicts --neo-deferred-slots"),
        ({"neo_deferred_slots": -1}, "--neo-deferred-slots must not be negative, got -1"),
        ({"neo_host_kv_size": 0.0}, "--neo-host-kv-size must be greater than 0, got 0.0"),
        ({"neo_host_kv_size": float("nan")}, "--neo-host-kv-size must be greater than 0"),
        ({"neo_host_kv_ratio": -1.0}, "--neo-host-kv-ratio must be greater than 0"),
        ({"neo_cpu_threads": 0}, "--neo-cpu-threads must be greater than 0"),
        ({"neo_max_host_tpot": -5.0}, "--neo-max-host-tpot must be greater than 0"),
        ({"neo_max_tpot": 0.0}, "--neo-max-tpot must be greater than 0"),
        (
            {"neo_host_kv_size": 4.0, "neo_host_kv_ratio": 1.0},
            "--neo-host-kv-size contradicts --neo-host-kv-ratio: give one",
        ),
        ({"neo_host_kv_size": 17.2}, "--neo-host-kv-size 17.2 GB is more than the 17.2 GB of host memory"),
        ({"neo_cpu_threads": CORES + 1}, "--neo-cpu-threads 9 is more than the 8 cores"),
    ],
)
def test_bad_flags_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        check(**given)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("neo_host_kv_size", 1.0),
        ("neo_host_kv_ratio", 1.0),
        ("neo_host_kv_dtype", "int8"),
        ("neo_cpu_threads", 2),
        ("neo_deferred_slots", 8),
        ("neo_max_host_tpot", 100.0),
        ("neo_max_tpot", 10.0),
    ],
)
def test_gpu_only_contradicts_every_host_flag(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"--neo-mode gpu-only contradicts {flag_name(field)}"):
        check(neo_mode="gpu-only", **{field: value})


def test_gpu_only_names_all_that_it_contradicts() -> None:
    with pytest.raises(UsageError, match="--neo-host-kv-ratio, --neo-cpu-threads: drop"):
        check(neo_mode="gpu-only", neo_cpu_threads=2, neo_host_kv_ratio=1.0)


def test_host_flags_and_fields_agree() -> None:
    assert set(neo_fields()) == {"neo_mode", "neo_check_integrity", "neo_report_host_rows", *HOST_FLAGS}
    defaults = {field.name: field.default for field in dataclasses.fields(NeoServerArgs)}
    assert {name: defaults[name] for name in HOST_FLAGS} == HOST_FLAGS


def parse(*argv: str) -> NeoServerArgs:
    return prepare_server_args([*argv, "--skip-tokenizer-init"])


def test_defaults(tiny: Tiny) -> None:
    args = parse("--model-path", str(tiny("llama")))
    assert args.neo_mode == "auto"
    assert {name: getattr(args, name) for name in HOST_FLAGS} == HOST_FLAGS
    assert mode_lines(args) == []


def test_flags_on_the_command_line(tiny: Tiny) -> None:
    args = parse(
        *("--model-path", str(tiny("llama")), "--max-total-tokens", "640", "--neo-host-kv-size", "0.25"),
        *("--neo-cpu-threads=1", "--neo-host-kv-dtype", "float16", "--neo-max-host-tpot", "90"),
    )
    assert (args.neo_host_kv_size, args.neo_cpu_threads, args.neo_host_kv_dtype) == (0.25, 1, "float16")
    assert (args.neo_max_host_tpot, args.neo_max_tpot, args.max_total_tokens) == (90.0, None, 640)
    assert mode_lines(args) == []


def test_flags_of_the_planner_and_of_fixed_modes(tiny: Tiny) -> None:
    model = ("--model-path", str(tiny("llama")), "--neo-max-tpot", "9", "--neo-host-prefill-rate", "5")
    assert mode_lines(parse(*model)) == ["without effect: --neo-host-prefill-rate"]
    assert mode_lines(parse(*model, "--neo-mode", "sync")) == ["without effect: --neo-max-tpot"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((f"--{field.replace('_', '-')} {least - 1}", f"must be at least {least}") for field, least in LEAST.items()),
        ("--mem-fraction-static 2", "between 0 and 1, got 2.0"),
        ("--json-model-override-args {", "--json-model-override-args is not valid JSON"),
        ("--log-level loud", "--log-level loud is none of Python's"),
    ],
)
def test_values_that_sglang_would_trip_over(tiny: Tiny, line: str, message: str) -> None:
    """Some tracebacks of its own would come minutes later, from a worker."""
    with pytest.raises(UsageError, match=message) as refusal:
        prepare_server_args(["--model-path", str(tiny("llama")), *line.split()])
    assert line.split()[0] in str(refusal.value)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_none_can_be(port: int) -> None:
    with pytest.raises(UsageError, match=f"--port must be between 0 and 65535, got {port}"):
        check_port("127.0.0.1", port)


def test_gpu_only_asked_for_needs_no_explanation(tiny: Tiny) -> None:
    assert mode_lines(parse("--model-path", str(tiny("llama")), "--neo-mode", "gpu-only")) == []


def test_a_flag_out_of_range_is_refused_before_anything_is_loaded(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neo_args, "host_memory_limit", lambda: 10**9)
    with pytest.raises(UsageError, match=r"more than the 1\.0 GB of host memory"):
        parse("--model-path", str(tiny("llama")), "--neo-host-kv-size", "1.5")
    with pytest.raises(UsageError, match="cores this process may use"):
        parse("--model-path", str(tiny("llama")), "--neo-cpu-threads", "100000")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--neo-mode", "fast"], "invalid choice: 'fast'"),
        (["--neo-cpu-threads", "many"], "invalid int value"),
        (["--neo-host-kv-dtype", "int4"], "invalid choice: 'int4'"),
        (["--neo-nothing"], "unrecognized arguments: --neo-nothing"),
    ],
)
def test_what_argparse_refuses(tiny: Tiny, capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as end:
        parse("--model-path", str(tiny("llama")), *argv)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_help_shows_our_flags_in_a_group_of_their_own() -> None:
    parser = argparse.ArgumentParser()
    NeoServerArgs.add_cli_args(parser)
    [group] = [group for group in parser._action_groups if group.title == "sglang_neo"]
    shown = {option for action in group._group_actions for option in action.option_strings}
    assert shown == {flag_name(field) for field in neo_fields()}
    assert all(len(action.help or "") > 20 for action in group._group_actions)
    text = parser.format_help()
    assert "--neo-host-kv-size" in text[text.index("\nsglang_neo:") :]
    assert "--max-total-tokens" in text, "SGLang's flags are there too"


@pytest.mark.parametrize("form", ["--config FILE", "--config=FILE"])
def test_config_file(tiny: Tiny, tmp_path: Path, form: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(f"model-path: {tiny('llama')}\nneo-host-kv-ratio: 1.5\nneo-max-tpot: 30\nmax-total-tokens: 320\n")
    args = parse(*form.replace("FILE", str(file)).split())
    assert (args.neo_host_kv_ratio, args.neo_max_tpot, args.max_total_tokens) == (1.5, 30.0, 320)


def test_the_command_line_goes_before_the_config_file(tiny: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("neo-host-kv-ratio: 1.5\nneo-mode: auto\n")
    args = parse("--model-path", str(tiny("llama")), f"--config={file}", "--neo-host-kv-ratio", "2")
    assert args.neo_host_kv_ratio == 2.0


def test_a_bad_value_in_the_config_file_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(f"model-path: {tiny('llama')}\nneo-mode: deferred\nneo-deferred-slots: 0\n")
    with pytest.raises(UsageError, match="deferred contradicts --neo-deferred-slots 0"):
        parse("--config", str(file))


def test_workers_of_several_http_processes_are_ours(tiny: Tiny) -> None:
    from sglang_neo.tokenizer_manager import NeoTokenizerWorker

    assert parse("--model-path", str(tiny("llama"))).get_tokenizer_worker_class() is NeoTokenizerWorker


# -- the model's path -----------------------------------------------------------------------------------------


def model_folder(folder: Path, *files: str) -> str:
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    return str(folder)


def test_a_whole_folder_passes(tmp_path: Path) -> None:
    check_model_path(model_folder(tmp_path / "a", "config.json", "model.safetensors"), "auto")
    check_model_path(model_folder(tmp_path / "b", "params.json", "model.bin"), "auto")


def test_a_folder_without_weights_passes_only_for_dummy_weights(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "a", "config.json")
    check_model_path(path, "dummy")
    with pytest.raises(UsageError, match=r"has no weights .*--load-format dummy needs none"):
        check_model_path(path, "auto")


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a model: it has no config\.json"):
        check_model_path(model_folder(tmp_path / "a", "model.safetensors"), "auto")


@pytest.mark.parametrize("path", ["/no/such/model", "./model", "../model", "~/no-such-model", "a/b/c"])
def test_a_local_path_that_does_not_exist(path: str) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        check_model_path(path, "auto")


def test_a_relative_path_under_a_folder_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(UsageError, match="models/typo does not exist"):
        check_model_path("models/typo", "auto")


@pytest.mark.parametrize("path", ["meta-llama/Llama-3.1-8B", "gpt2", "s3://bucket/model", "gs://a/b/c"])
def test_names_on_a_hub_and_urls_are_left_to_sglang(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_model_path(path, "auto")


def test_a_file_is_left_to_sglang(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    check_model_path(str(tmp_path / "model.gguf"), "auto")
