"""Between a layer's tensors and the boxes of a hand-off: one fused kernel each way, the same addresses in every step.

Which rows of the batch are host rows stands in a *control* tensor on the device, int32 ``[1 + capacity]``:
``control[0]`` is the step's number, ``control[1 + i]`` where in the batch the i-th host row is, -1 if there is no i-th.
So the kernels can be captured in a CUDA graph whose batch has any host rows, and cost next to nothing where there are
none. The boxes are pinned host memory, which CUDA kernels read and write directly.
"""

from __future__ import annotations

from typing import Protocol

import torch

#: control's value where there is no host row.
NO_ROW = -1


class Exchange(Protocol):
    """``capacity``: how many host rows there may be; entries of ``control`` beyond are not looked at."""

    def pack(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        control: torch.Tensor,
        outbox: torch.Tensor,
        header: torch.Tensor,
        capacity: int,
    ) -> None:
        """Host rows of ``q, k, v`` (``[batch, ...]``) to ``outbox[i]``, the step's number to ``header[0]``."""

    def unpack(self, inbox: torch.Tensor, control: torch.Tensor, out: torch.Tensor, capacity: int) -> None:
        """``inbox[i]`` to the i-th host row of ``out`` (``[batch, ...]``); other rows stay as they are."""


class TorchExchange:
    """Plain torch, for the CPU device. Rows of a box that no host row has are overwritten with anything."""

    def pack(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        control: torch.Tensor,
        outbox: torch.Tensor,
        header: torch.Tensor,
        capacity: int,
    ) -> None:
        rows = control[1 : 1 + capacity].clamp(min=0)
        parts = [x.reshape(x.shape[0], -1).index_select(0, rows) for x in (q, k, v)]
        torch.cat(parts, dim=1, out=outbox[:capacity])
        header[:1] = control[:1]

    def unpack(self, inbox: torch.Tensor, control: torch.Tensor, out: torch.Tensor, capacity: int) -> None:
        rows = control[1 : 1 + capacity]
        there = rows >= 0
        out.view(out.shape[0], -1).index_copy_(0, rows[there].long(), inbox[:capacity][there])


def exchange_for(device: str) -> Exchange:
    """The kind that fits the device ("cpu" or "cuda")."""
    if not device.startswith("cuda"):
        return TorchExchange()
    from sglang_neo.hybrid.triton_exchange import TritonExchange

    return TritonExchange()
