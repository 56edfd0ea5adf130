"""Server arguments: every one of SGLang's, plus ``--neo-*``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sglang.srt.arg_groups.arg_utils import A, Arg, add_cli_args_from_dataclass
from sglang.srt.server_args import ServerArgs
from sglang.srt.server_args_config_parser import ConfigArgumentMerger

from sglang_neo.errors import UsageError
from sglang_neo.host_kv.limits import host_memory_limit
from sglang_neo.refusals import gpu_only_reasons, refuse_flags, refuse_model, refuse_on_cpu_device

logger = logging.getLogger(__name__)

#: In which steps have two lanes.
LANE_MODES = ("pipelined", "symmetric")
NeoMode = Literal["auto", "gpu-only", "sync", "pipelined", "symmetric", "deferred"]
HostKVDtype = Literal["auto", "bfloat16", "float16", "float32", "int8"]

#: Flags of the planner, which mode auto has, and those that it does without.
PLANNER_FLAGS = ("neo_max_host_tpot", "neo_max_tpot", "neo_profile_anew")
FIXED_MODE_FLAGS = ("neo_host_prefill_rate",)

#: Flags that only say something about host rows, with the value that means "not given".
HOST_FLAGS = {
    "neo_host_kv_size": None,
    "neo_host_kv_ratio": None,
    "neo_host_kv_dtype": "auto",
    "neo_host_prompt_tokens": None,
    "neo_host_prefill_rate": 12.0,
    "neo_cpu_threads": None,
    "neo_share_cores": False,
    "neo_deferred_slots": None,
    "neo_max_host_tpot": 250.0,
    "neo_max_tpot": None,
    "neo_profile_anew": False,
    "neo_watchdog_timeout": 30.0,
}


#: Numbers of SGLang's that it divides by, allocates or counts with unchecked, and the least of each.
LEAST = {
    "tp_size": 1,
    "dp_size": 1,
    "pp_size": 1,
    "nnodes": 1,
    "page_size": 1,
    "max_total_tokens": 2,
    "max_running_requests": 1,
    "context_length": 1,
    "stream_interval": 1,
    "decode_log_interval": 1,
    "tokenizer_worker_num": 1,
}


def flag_name(field: str) -> str:
    """``neo_host_kv_size`` -> ``--neo-host-kv-size``."""
    return "--" + field.replace("_", "-")


@dataclass
class NeoServerArgs(ServerArgs):
    """SGLang's server arguments and ours. Raises UsageError on construction for what we cannot serve."""

    neo_mode: A[
        NeoMode,
        Arg(
            help="How the CPU takes part. gpu-only: not at all, as plain SGLang. Otherwise requests go on in host "
            "memory, with their attention on the CPU, when the GPU's KV pool is full. sync: the GPU waits for the CPU "
            "in each layer. deferred (APEX): they pass through --neo-deferred-slots, and the CPU has a step for each "
            "layer. pipelined (NEO): they ride in two lanes, and the CPU works for one while the GPU runs the other. "
            "symmetric (FastDecode): the same with every request in host memory from its prompt on, to compare with. "
            "auto: a planner chooses before each step, by times measured at the first start (docs/planner.md)."
        ),
    ] = "auto"
    neo_host_kv_size: A[
        float | None,
        Arg(
            help="Host memory for KV cache, in GB (10^9 bytes) for the whole machine, shared by all ranks. Default: "
            "half of what is free after a reserve of 10 GiB (40 percent of it on small machines), at most 8 times the "
            "GPU's KV pool."
        ),
    ] = None
    neo_host_kv_ratio: A[
        float | None,
        Arg(help="Host KV size as a multiple of the GPU's KV pool, instead of --neo-host-kv-size."),
    ] = None
    neo_host_kv_dtype: A[
        HostKVDtype,
        Arg(help="Data type of the host KV cache; auto: the GPU pool's. int8 keeps a scale per token and head."),
    ] = "auto"
    neo_host_prompt_tokens: A[
        int | None,
        Arg(
            help="Longest prompt, in tokens, that is computed straight into host memory. It costs GPU memory for so "
            "many tokens of one layer. Default: the model's context, or what the host pool can hold if that is less."
        ),
    ] = None
    neo_host_prefill_rate: A[
        float,
        Arg(
            help="Tokens of prompts that are computed straight into host memory per decode step, on average, while "
            "requests decode from GPU memory. Some 150 take as long as a decode step does, so the default costs those "
            "requests 8 percent of their speed while such prompts wait. More fills host memory faster. Mode auto "
            "decides without it."
        ),
    ] = 12.0
    neo_cpu_threads: A[
        int | None,
        Arg(
            help="CPU threads for attention, per machine. Default: all cores but one per rank and "
            "one in eight, two at most, for SGLang's other processes."
        ),
    ] = None
    neo_share_cores: A[
        bool,
        Arg(
            help="Let the server's other threads run on the cores of the CPU attention threads too. By default they "
            "keep off them, with a GPU and where two cores or more are left for them."
        ),
    ] = False
    neo_deferred_slots: A[
        int | None,
        Arg(
            help="Rows of each decode step that requests in host memory pass through in deferred mode: with L layers, "
            "up to slots * (L + 1) of them, each with a token every L + 1 steps. Default: as many as the CPU finishes "
            "within a step, measured at start. Mode auto uses as many of them as pay. 0: no deferred mode."
        ),
    ] = None
    neo_max_host_tpot: A[
        float,
        Arg(
            help="Longest acceptable time per output token of a request decoded from host memory, in ms, in mode auto. "
            "Requests of a priority below 0 have no such bound."
        ),
    ] = 250.0
    neo_max_tpot: A[
        float | None,
        Arg(
            help="Longest acceptable time per output token of a request decoded from GPU memory, in ms, in mode auto: "
            "no slower mode is chosen than plain steps are, or than this."
        ),
    ] = None
    neo_profile_anew: A[
        bool,
        Arg(
            help="Mode auto: measure this machine again, whatever was saved of it (python -m sglang_neo.profile does "
            "this and nothing else)."
        ),
    ] = False

    neo_watchdog_timeout: A[
        float,
        Arg(
            help="Seconds after which a step whose CPU work does not come back counts as failed: its host rows are "
            "prefilled again and the server goes on."
        ),
    ] = 30.0
    neo_report_host_rows: A[
        bool,
        Arg(
            help="meta_info of /generate gets neo_host_row: for each output token 1 if the request was decoded from "
            "host memory then, else 0. For measurements."
        ),
    ] = False
    neo_check_integrity: A[
        bool,
        Arg(
            help="For debugging: after every step, check that no KV page of either pool is lost or has two owners and, "
            "in deferred mode, that every hand-off was of the request, layer and position that it was meant for; a "
            "violation stops the server. Slow."
        ),
    ] = False

    def __post_init__(self) -> None:
        check_sglang_flags(self)
        check_neo_flags(self, usable_cores=len(os.sched_getaffinity(0)), memory=host_memory_limit())
        refuse_flags(self)
        check_model_path(self.model_path, self.load_format)
        check_config_file(Path(self.model_path).expanduser() / "config.json")
        super().__post_init__()
        refuse_flags(self)  # SGLang's resolution may have switched something on
        refuse_on_cpu_device(self)
        refuse_model(self)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        ServerArgs.add_cli_args(parser)
        group = parser.add_argument_group("sglang_neo", "Decode attention on the host CPU.")
        add_cli_args_from_dataclass(group, NeoServerArgs, fields=neo_fields())

    def get_tokenizer_worker_class(self) -> type:
        from sglang_neo.tokenizer_manager import NeoTokenizerWorker

        return NeoTokenizerWorker


def neo_fields() -> list[str]:
    """Names of the fields that NeoServerArgs adds to SGLang's."""
    inherited = {field.name for field in dataclasses.fields(ServerArgs)}
    return [field.name for field in dataclasses.fields(NeoServerArgs) if field.name not in inherited]


def check_sglang_flags(args: ServerArgs) -> None:
    """Raises UsageError for values of SGLang's flags that would end the start in a traceback, or in a line that does
    not name the flag."""
    for field, least in LEAST.items():
        value = getattr(args, field)
        if value is not None and value < least:
            raise UsageError(f"{flag_name(field)} must be at least {least}, got {value}")
    fraction = args.mem_fraction_static
    if fraction is not None and not 0 < fraction < 1:
        raise UsageError(f"--mem-fraction-static must be between 0 and 1, got {fraction}")
    try:
        json.loads(args.json_model_override_args)
    except ValueError as error:
        raise UsageError(f"--json-model-override-args is not valid JSON ({error})") from None


def check_neo_flags(args: NeoServerArgs, usable_cores: int, memory: int) -> None:
    """Raises UsageError for values out of range and for flags that contradict each other.

    Args:
        usable_cores: CPU cores this process may run on.
        memory: bytes of host memory this process may have.
    """
    for field in (
        "neo_host_kv_size",
        "neo_host_kv_ratio",
        "neo_host_prompt_tokens",
        "neo_host_prefill_rate",
        "neo_cpu_threads",
        "neo_max_host_tpot",
        "neo_max_tpot",
        "neo_watchdog_timeout",
    ):
        value = getattr(args, field)
        if value is not None and not value > 0:
            raise UsageError(f"{flag_name(field)} must be greater than 0, got {value}")
    if args.neo_deferred_slots is not None and args.neo_deferred_slots < 0:
        raise UsageError(f"--neo-deferred-slots must not be negative, got {args.neo_deferred_slots}")
    if args.neo_mode == "deferred" and args.neo_deferred_slots == 0:
        raise UsageError("--neo-mode deferred contradicts --neo-deferred-slots 0: drop one or the other")
    if args.neo_mode in ("sync", *LANE_MODES) and args.neo_deferred_slots:
        raise UsageError(f"--neo-mode {args.neo_mode} contradicts --neo-deferred-slots: drop one or the other")
    given = given_host_flags(args)
    if args.neo_mode == "gpu-only" and given:
        raise UsageError(f"--neo-mode gpu-only contradicts {', '.join(given)}: drop one or the other")
    if args.neo_host_kv_size is not None and args.neo_host_kv_ratio is not None:
        raise UsageError("--neo-host-kv-size contradicts --neo-host-kv-ratio: give one of them")
    if args.neo_host_kv_size is not None and args.neo_host_kv_size * 1e9 > memory:
        raise UsageError(
            f"--neo-host-kv-size {args.neo_host_kv_size:g} GB is more than the {memory / 1e9:.1f} GB of host memory "
            "that this machine or control group gives; ask for less"
        )
    if args.neo_cpu_threads is not None and args.neo_cpu_threads > usable_cores:
        raise UsageError(
            f"--neo-cpu-threads {args.neo_cpu_threads} is more than the {usable_cores} cores this process may use"
        )


def given_host_flags(args: NeoServerArgs) -> list[str]:
    """The command-line names of the host-row flags that were given."""
    return [flag_name(field) for field, default in HOST_FLAGS.items() if getattr(args, field) != default]


def mode_lines(args: NeoServerArgs) -> list[str]:
    """What the user is told at start about flags that do nothing yet and modes that will not be used."""
    lines = []
    reasons = gpu_only_reasons(args)
    if args.neo_mode == "auto" and reasons:
        lines.append(f"--neo-mode auto runs gpu-only: {'; '.join(reasons)}")
    idle = FIXED_MODE_FLAGS if args.neo_mode == "auto" else PLANNER_FLAGS
    without_effect = [flag for flag in given_host_flags(args) if reasons or flag in map(flag_name, idle)]
    if without_effect:
        lines.append(f"without effect: {', '.join(without_effect)}")
    return lines


def check_model_path(path: str, load_format: str) -> None:
    """Raises UsageError if ``path`` names no local model and cannot be the name of one elsewhere.

    Names on a model hub, URLs of object stores and SGLang's own stand-ins are left to SGLang.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not any((folder / name).is_file() for name in ("config.json", "params.json")):
            raise UsageError(f"{path} is not a model: it has no config.json; give the folder of a Hugging Face model")
        weights = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
        if load_format in ("auto", "safetensors", "pt") and not any(any(folder.glob(w)) for w in weights):
            raise UsageError(f"{path} has no weights (*.safetensors, *.bin, *.pt); --load-format dummy needs none")
        return
    if folder.exists() or "://" in path:
        return
    looks_local = path.startswith(("/", ".", "~")) or path.count("/") > 1
    if looks_local or (path.count("/") == 1 and Path(path).parent.is_dir()):
        raise UsageError(f"the model path {path} does not exist")


def check_config_file(config: Path) -> None:
    """Raises UsageError if a model's ``config.json`` is there and is no JSON object."""
    if not config.is_file():
        return
    try:
        content = json.loads(config.read_text())
    except ValueError as error:
        raise UsageError(f"{config} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise UsageError(f"{config} is not the config of a model: it holds no JSON object")


def prepare_server_args(argv: list[str]) -> NeoServerArgs:
    """Parse a command line as SGLang does (``prepare_server_args`` in sglang/srt/server_args.py), for NeoServerArgs.

    Exits as argparse does on flags it does not know. Raises UsageError, or what SGLang raises, for bad values.
    """
    parser = argparse.ArgumentParser(prog="python -m sglang_neo.launch_server")
    NeoServerArgs.add_cli_args(parser)
    if any(arg == "--config" or arg.startswith("--config=") for arg in argv):
        argv = [part for arg in argv for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])]
        argv = ConfigArgumentMerger(parser).merge_config_with_args(argv)
    raw = parser.parse_args(argv)
    if not isinstance(getattr(logging, raw.log_level.upper(), None), int):
        raise UsageError(f"--log-level {raw.log_level} is none of Python's; give debug, info, warning or error")
    logging.basicConfig(
        level=getattr(logging, raw.log_level.upper()),
        format="[%(asctime)s] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )
    args: NeoServerArgs = NeoServerArgs.from_cli_args(raw)
    return args
