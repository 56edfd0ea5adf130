"""Which device a server runs on, decided before SGLang is imported: SGLang fixes it at import time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from sglang_neo.errors import UsageError


@dataclass(frozen=True)
class DeviceChoice:
    device: str  # "cuda", "cuda:N" or "cpu"
    reason: str


def asked_device(argv: Sequence[str]) -> str | None:
    """The value of ``--device`` on the command line, or in the file named by ``--config``; None if neither has it."""
    device, config = _last(argv, "--device"), _last(argv, "--config")
    return device if device is not None or config is None else _device_in_config(config)


def _last(argv: Sequence[str], flag: str) -> str | None:
    """The value of ``flag`` that counts for argparse, where it is given several times."""
    values = []
    for arg, following in zip_longest(argv, argv[1:]):
        name, equals, value = arg.partition("=")
        if name == flag and (equals or following is not None):
            values.append(value if equals else following)
    return values[-1] if values else None


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
