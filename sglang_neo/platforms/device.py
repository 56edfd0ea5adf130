"""Which device a server runs on, decided before SGLang is imported: SGLang fixes it at import time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_neo.errors import UsageError


@dataclass(frozen=True)
class DeviceChoice:
    device: str  # "cuda" or "cpu", or another that SGLang knows and that was asked for
    reason: str


def asked_device(argv: Sequence[str]) -> str | None:
    """The value of ``--device`` on the command line, or in the file named by ``--config``; None if neither has it."""
    for i, arg in enumerate(argv):
        if arg.startswith("--device="):
            return arg.split("=", 1)[1]
        if arg == "--device" and i + 1 < len(argv):
            return argv[i + 1]
    for i, arg in enumerate(argv):
        if arg == "--config" and i + 1 < len(argv):
            return _device_in_config(argv[i + 1])
        if arg.startswith("--config="):
            return _device_in_config(arg.split("=", 1)[1])
    return None


def _device_in_config(path: str) -> str | None:
    import yaml

    try:
        with open(path) as file:
            data = yaml.safe_load(file)
    except (OSError, yaml.YAMLError):
        return None  # SGLang's own reader, which runs later, says what is wrong with the file
    return str(data["device"]) if isinstance(data, dict) and data.get("device") else None


def choose_device(asked: str | None, cuda_available: bool) -> DeviceChoice:
    """Raises UsageError if CUDA is asked for on a machine without, or a device that we have nothing for."""
    if asked is None:
        if cuda_available:
            return DeviceChoice("cuda", "this machine has a CUDA GPU")
        return DeviceChoice("cpu", "this machine has no CUDA GPU")
    if asked.split(":")[0] == "cuda" and not cuda_available:
        raise UsageError("--device cuda was asked for, but PyTorch finds no CUDA GPU here; use --device cpu")
    if asked.split(":")[0] not in ("cuda", "cpu"):
        raise UsageError(f"--device {asked} is not supported by sglang_neo; give cuda or cpu")
    return DeviceChoice(asked, "asked for by --device")


def select(argv: Sequence[str]) -> DeviceChoice:
    """Choose the device and prepare this process and its children for it. Call before importing SGLang."""
    import torch

    asked = asked_device(argv)
    if asked == "cpu":
        # On a machine with a GPU, SGLang asks torch, not the flag, in many places.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    choice = choose_device(asked, torch.cuda.is_available())
    if choice.device == "cpu":
        from sglang_neo.platforms import torchvision_bridge

        torchvision_bridge.install()
    return choice
