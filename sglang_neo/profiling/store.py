"""Where a machine's tables lie, under which key, and when they are measured."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import torch

from cpu_kernels import machine
from cpu_kernels.isa import choose_isa
from cpu_kernels.tuning_files import build_id
from sglang_neo import seams
from sglang_neo.planning import tables
from sglang_neo.planning.tables import Key, ProfileError, Tables
from sglang_neo.profiling.measure import Profile
from sglang_neo.profiling.trial import Trials
from sglang_neo.ranks import least_of_all_ranks

logger = logging.getLogger(__name__)


def folder() -> Path:
    """``$XDG_CACHE_HOME/sglang_neo``, by default ``~/.cache/sglang_neo``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang_neo"


def key_of(runner: Any) -> Key:
    """What the tables of this model runner are measured on."""
    args, config, host = runner.server_args, runner.model_config, runner.neo_host
    graphs = runner.decode_cuda_graph_runner
    model = (
        f"{Path(args.model_path).name} ({config.hf_config.architectures[0]}, {config.num_hidden_layers} layers of "
        f"{config.hidden_size}, {runner.dtype}, quantization {args.quantization}, host KV {host.pool.geometry.dtype}, "
        f"TP {args.tp_size}, {args.attention_backend}, page {runner.page_size}, "
        f"{'graphs' if getattr(graphs, 'capture_bs', None) else 'eager'})"
    )
    gpu = torch.cuda.get_device_name(runner.gpu_id) if str(runner.device).startswith("cuda") else "the CPU itself"
    return Key(
        model=model,
        gpu=gpu,
        cpu=machine.cpu_id(),
        threads=host.attention.workers.threads,
        kernels=f"{build_id()} {choose_isa().name}",
        sglang=seams.sglang_version(),
    )


def tables_for(runner: Any, path: Path | None = None, anew: bool = False) -> Tables:
    """The tables of a model runner that has a host side: those that were saved, else measured now and saved.

    All ranks of a model must call it, before anything is served.

    Args:
        path: of the file; default: in ``folder()``.
        anew: measure, whatever was saved.

    Raises:
        TrialError: the CPU side does not work.
    """
    key, first = key_of(runner), runner.ps.tp_rank == 0
    path = path or folder() / key.file_name
    found = None
    if not anew and path.exists():
        try:
            found = tables.load(path, key)
        except ProfileError as error:
            if first:
                logger.warning(f"sglang_neo: {error}")
    if least_of_all_ranks(runner, int(found is not None)):
        assert found is not None
        if first:
            logger.info(f"sglang_neo: profile {path}")
        return found
    begin = time.perf_counter()
    with _progress(first) as bar, torch.inference_mode():
        measured = Profile(Trials(runner), bar.update).tables()
    if first:
        try:
            tables.save(path, key, measured)
            kept = f"saved as {path}"
        except OSError as error:
            kept = f"not saved: {error}"
        logger.info(f"sglang_neo: profiled this machine in {time.perf_counter() - begin:.1f} s, {kept}")
    return measured


def _progress(shown: bool) -> Any:
    from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

    return tqdm(total=Profile.STEPS, desc="Profiling for the planner, once per model and machine", disable=not shown)
