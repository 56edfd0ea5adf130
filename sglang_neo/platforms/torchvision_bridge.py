"""Make ``import torchvision`` work beside a CPU build of torch.

SGLang imports torchvision at start (sglang/srt/utils/common.py: ``from torchvision.io import decode_jpeg``). The
torchvision of PyPI is a CUDA build: beside a CPU torch its C++ operators cannot be loaded, and its Python side then
fails because it registers fake kernels for ``torchvision::nms`` and ``torchvision::qnms``, which nobody declared.
Declaring those two schemas is enough; the operators themselves stay unavailable, as SGLang never calls them here.

The declaration must come after torch and before torchvision, in every process that imports SGLang (servers, their
workers, SGLang's own tools such as ``sglang.benchmark.serving``). So ``install`` registers an import hook that waits
for ``torchvision``, and ``write_pth`` puts a one-line ``.pth`` file into the environment so that each interpreter
start installs the hook (a few microseconds; nothing is imported until torchvision is).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

PTH_NAME = "sglang_neo_torchvision.pth"
_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_library: object | None = None  # torch drops the schemas when its Library object dies


def declare_missing_operators(spec: importlib.machinery.ModuleSpec | None) -> bool:
    """Declare the schemas if torchvision's own operators cannot be loaded. Returns whether it did."""
    global _library
    if _library is not None or spec is None or spec.origin is None:
        return False
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return False  # not a CPU build of torch: torchvision is on its own
    for extension in Path(spec.origin).parent.glob("_C.*"):
        try:
            torch.ops.load_library(str(extension))
        except OSError:
            continue
        return False  # a torchvision that fits this torch
    library = torch.library.Library("torchvision", "DEF")
    for name, schema in _SCHEMAS.items():
        library.define(name + schema)
    _library = library
    return True


class _TorchvisionHook(importlib.abc.MetaPathFinder):
    """Runs ``declare_missing_operators`` just before torchvision is imported; finds nothing itself."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            declare_missing_operators(importlib.util.find_spec(name))
        return None


def install() -> None:
    """Install the import hook once; does nothing if torchvision is already imported."""
    if "torchvision" not in sys.modules and not any(isinstance(f, _TorchvisionHook) for f in sys.meta_path):
        sys.meta_path.insert(0, _TorchvisionHook())


def write_pth(directory: Path | None = None) -> Path:
    """Write the ``.pth`` file into ``directory`` (default: this environment's site-packages); returns its path."""
    target = (directory or Path(sysconfig.get_path("purelib"))) / PTH_NAME
    target.write_text("import sglang_neo.platforms.torchvision_bridge as b; b.install()\n")
    return target
