"""Small tensors on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pinned(values: Sequence[int], device: torch.device | str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """On the host, to be copied to ``device`` with ``non_blocking``. Pinned for CUDA: a copy from other memory can make
    the calling thread wait for what is on the stream, and a step is launched while the one before it runs.

    PyTorch gives the memory to nobody else until the copy is done.
    """
    return torch.tensor(values, dtype=dtype, pin_memory=torch.device(device).type == "cuda")


def to_device(values: Sequence[int], device: torch.device | str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """On the device, in stream order; the calling thread does not wait."""
    return pinned(values, device, dtype).to(device, non_blocking=True)
