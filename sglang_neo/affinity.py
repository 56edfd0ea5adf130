"""Which cores the threads of a server run on: those of the CPU attention workers are for the workers alone.

A worker spins on its core for as long as steps run. The operating system takes that for work like any other, and where
it puts SGLang's scheduler or tokenizer beside it, the worker is off the core for milliseconds and every hand-off in
that time is late.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable
from typing import Any

from cpu_kernels.cores import claimed_cores, format_cpu_list, keep_off

logger = logging.getLogger(__name__)


def worth_it(usable: int, workers: int, ranks: int) -> bool:
    """Whether the cores that are left do for the rest of the server: one per scheduler, and one for all others."""
    return workers > 0 and usable - workers >= ranks + 1


def leave_to_workers(args: Any, cores: Collection[int], pids: Iterable[int]) -> None:
    """All threads of these processes but the workers keep off the workers' cores, where it is worth it.

    Not on the CPU device, where the model's own threads need every core.
    """
    if args.neo_share_cores or not str(args.device).startswith("cuda"):
        return
    ranks = args.tp_size * args.dp_size
    usable = os.sched_getaffinity(0).union(cores)
    if not worth_it(len(usable), len(cores), ranks):
        logger.info("sglang_neo: too few cores are left for the server to keep off those of its CPU attention threads")
        return
    if keep_off(cores, pids):
        logger.info(f"sglang_neo: cores {format_cpu_list(cores)} are left to the CPU attention threads")


def leave_to_all_workers(args: Any) -> None:
    """The same in the launching process, for all processes of the server and the workers of all ranks."""
    import psutil

    if args.neo_share_cores:
        return
    family = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    try:
        cores = {core for core, owner in claimed_cores().items() if owner in family}
    except RuntimeError:  # nobody can claim any; workers that could not have said so
        return
    if cores:
        leave_to_workers(args, cores, family)
