"""Agreement of tensor-parallel ranks: they schedule alike, so what only one of them saw must reach all."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch


def from_first_rank(runner: Any, value: Any) -> Any:
    """What the first rank gives, which can be anything that pickles; all ranks of a model runner's group must call it.

    Args:
        runner: SGLang's model runner.
    """
    if runner.ps.tp_size == 1:
        return value
    given = [value]
    group = runner.tp_group
    torch.distributed.broadcast_object_list(given, src=group.ranks[0], group=group.cpu_group)
    return given[0]


def least_of_all_ranks(runner: Any, number: int) -> int:
    """The smallest that any rank gives; all ranks of a model runner's group must call it.

    Args:
        runner: SGLang's model runner.
    """
    return int(_least(runner, torch.tensor([number], dtype=torch.int64))[0])


def least_of_each(runner: Any, numbers: Sequence[float]) -> list[float]:
    """The same of several numbers, each by itself."""
    return [float(number) for number in _least(runner, torch.tensor(numbers, dtype=torch.float64))]


def meet(runner: Any, timeout_s: float) -> bool:
    """Whether all ranks of a model runner's group call this within so many seconds.

    After False the group is of no use any more: a rank that was late may meet others in what they call next.
    """
    if runner.ps.tp_size == 1:
        return True
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        torch.distributed.monitored_barrier(group=runner.tp_group.cpu_group, timeout=timeout)
    except RuntimeError:
        return False
    return True


def _least(runner: Any, numbers: torch.Tensor) -> torch.Tensor:
    if runner.ps.tp_size > 1:
        torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MIN, group=runner.tp_group.cpu_group)
    return numbers
