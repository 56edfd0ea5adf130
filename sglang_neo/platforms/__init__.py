"""SGLang on a machine without a GPU: the CPU reference device, for tests, CI and trying things out.

The device is slow and is not what sglang_neo is for; it is the place where every mode can be run and compared
token by token without a GPU. Numbers measured on it say nothing about a GPU machine.
"""

from __future__ import annotations

import os


def activate() -> str | None:
    """Entry point of the group ``sglang.srt.platforms`` (sglang/srt/platforms/__init__.py, ``_resolve_platform``).

    Returns the platform class's qualified name where no accelerator is in use, else None, so that CUDA machines keep
    SGLang's own platform: with an out-of-tree platform, SGLang would ask it for pools, allocators and graph runners.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return None  # the user asked for SGLang's own CPU engine
    import torch

    if torch.cuda.is_available() or torch.xpu.is_available() or torch.backends.mps.is_available():
        return None
    return "sglang_neo.platforms.cpu:NeoCpuPlatform"
