"""Agreement of tensor-parallel ranks: they schedule alike, so what only one of them saw must reach all."""

from __future__ import annotations

from typing import Any

import torch


def least_of_all_ranks(runner: Any, number: int) -> int:
    """The smallest that any rank gives; all ranks of a model runner's group must call it.

    Args:
        runner: SGLang's model runner.
    """
    if runner.ps.tp_size == 1:
        return number
    smallest = torch.tensor(number, dtype=torch.int64)
    torch.distributed.all_reduce(smallest, op=torch.distributed.ReduceOp.MIN, group=runner.tp_group.cpu_group)
    return int(smallest.item())
