"""What every kept result carries: machine, date, commit, command and versions."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("sglang", "sglang-neo", "torch", "triton", "flashinfer-python", "sglang-kernel", "transformers")


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _gpu_names() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _commit() -> str:
    """SGLANG_NEO_COMMIT where the tree was copied without its history, else what git says."""
    given = os.environ.get("SGLANG_NEO_COMMIT")
    if given:
        return given
    git = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12"], capture_output=True, text=True)
    return git.stdout.strip() or "unknown"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _script() -> list[str]:
    """How the running program was named, without the folder it lies in."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return ["-m", spec.name] if spec is not None else [Path(sys.argv[0]).name]


def provenance() -> dict[str, Any]:
    return {
        "machine": {
            "cpu": _cpu_name(),
            "cores": len(os.sched_getaffinity(0)),
            "gpus": _gpu_names(),
        },
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": shlex.join(["python", *_script(), *sys.argv[1:]]),
        "versions": _versions(),
    }
