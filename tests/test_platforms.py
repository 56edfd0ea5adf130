"""Which device a server runs on, the CPU device's defaults, and torchvision beside a CPU build of torch."""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.utils  # noqa: F401  SGLang chooses its platform here: before any test pretends to have another device
import torch

from sglang_neo import platforms
from sglang_neo.errors import UsageError
from sglang_neo.platforms import device, torchvision_bridge
from tests.harness.models import REPO_ROOT

# -- the entry point that SGLang asks -------------------------------------------------------------------------


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    for where in (torch.cuda, torch.xpu, torch.backends.mps):
        monkeypatch.setattr(where, "is_available", lambda: False)


def test_without_an_accelerator_our_platform_is_named(no_accelerator: None) -> None:
    from sglang_neo.platforms.cpu import NeoCpuPlatform

    assert platforms.activate() == f"{NeoCpuPlatform.__module__}:{NeoCpuPlatform.__qualname__}"


@pytest.mark.parametrize("which", ["cuda", "xpu", "mps"])
def test_with_an_accelerator_sglang_keeps_its_own(
    no_accelerator: None, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    where = {"cuda": torch.cuda, "xpu": torch.xpu, "mps": torch.backends.mps}[which]
    monkeypatch.setattr(where, "is_available", lambda: True)
    assert platforms.activate() is None


def test_sglangs_own_cpu_engine_can_be_asked_for(no_accelerator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert platforms.activate() is None


def test_the_entry_point_is_registered() -> None:
    from importlib.metadata import entry_points

    [entry] = [entry for entry in entry_points(group="sglang.srt.platforms") if entry.name == "neo_cpu"]
    assert entry.load() is platforms.activate


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the CPU device: set CUDA_VISIBLE_DEVICES=''")
def test_sglang_takes_our_platform() -> None:
    from sglang.srt.platforms import current_platform

    from sglang_neo.platforms.cpu import NeoCpuPlatform

    assert isinstance(current_platform, NeoCpuPlatform)


# -- the platform's defaults ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "ranks", "shares"),
    [
        ([0, 1, 2, 3], 2, [[0, 1], [2, 3]]),
        ([0, 1, 2, 3, 4], 2, [[0, 1], [2, 3]]),
        ([4, 9], 2, [[4], [9]]),
        ([5], 2, [[5], [5]]),
        ([3, 7], 4, [[3], [7], [3], [7]]),
        ([1, 2, 3], 1, [[1, 2, 3]]),
    ],
)
def test_spread_cores(cores: list[int], ranks: int, shares: list[list[int]]) -> None:
    from sglang_neo.platforms.cpu import spread_cores

    assert spread_cores(cores, ranks) == shares


def arguments(**given: Any) -> Any:
    unset = {"attention_backend": None, "sampling_backend": None, "max_total_tokens": None, "mem_fraction_static": None}
    return SimpleNamespace(**{**unset, "tp_size": 1, **given})


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Cores that this process may use, as the platform sees them; and no environment set by an earlier test."""
    usable = [0, 1, 2, 3]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(usable))
    for name in ("OMP_NUM_THREADS", "SGLANG_CPU_OMP_THREADS_BIND"):
        monkeypatch.setenv(name, "")  # so that the original is put back afterwards
        monkeypatch.delenv(name)
    return usable


def defaults(**given: Any) -> Any:
    from sglang_neo.platforms.cpu import NeoCpuPlatform

    args = arguments(**given)
    NeoCpuPlatform().apply_server_args_defaults(args)
    return args


def test_defaults_of_the_cpu_device(cores: list[int]) -> None:
    args = defaults()
    assert (args.attention_backend, args.sampling_backend, args.max_total_tokens) == ("torch_native", "pytorch", 16384)
    assert args.mem_fraction_static is not None and 0.5 < args.mem_fraction_static < 1
    assert os.environ["OMP_NUM_THREADS"] == "3", "one core is left to the other processes"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in os.environ


def test_what_the_user_gave_stays(cores: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    given = {
        "attention_backend": "triton",
        "sampling_backend": "other",
        "max_total_tokens": 640,
        "mem_fraction_static": 0.3,
    }
    assert vars(defaults(**given)) == {**given, "tp_size": 1, "sleep_on_idle": True}  # which has no flag for no
    assert os.environ["OMP_NUM_THREADS"] == "7"


def test_two_ranks_get_cores_of_their_own(cores: list[int]) -> None:
    defaults(tp_size=2)
    assert os.environ["SGLANG_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_one_core_still_gets_a_thread(cores: list[int]) -> None:
    cores[:] = [6]
    defaults()
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_allocator_class_is_sglangs_choice() -> None:
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator

    from sglang_neo.platforms.cpu import NeoCpuPlatform

    make = NeoCpuPlatform().get_paged_allocator_cls()
    common: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "kvcache": None, "need_sort": False}
    assert type(make(128, page_size=1, **common)) is TokenToKVPoolAllocator
    paged = make(128, page_size=64, **common)
    assert type(paged) is PagedTokenToKVPoolAllocator and paged.page_size == 64


# -- choosing the device --------------------------------------------------------------------------------------


def test_the_command_line_names_the_device() -> None:
    assert device.asked_device(["--device", "cpu"]) == "cpu"
    assert device.asked_device(["--tp", "2", "--device=cuda"]) == "cuda"
    assert device.asked_device(["--tp", "2"]) is None
    assert device.asked_device([]) is None
    assert device.asked_device(["--device", "cuda", "--device=cpu"]) == "cpu", "as argparse takes it"
    assert device.asked_device(["--device=cuda", "--device", "cpu"]) == "cpu"
    assert device.asked_device(["--device"]) is None  # argparse will say what is missing


def test_the_config_file_names_the_device(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("device: cpu\ntp-size: 2\n")
    assert device.asked_device(["--config", str(file)]) == "cpu"
    assert device.asked_device([f"--config={file}"]) == "cpu"
    assert device.asked_device([f"--config={file}", "--device", "cuda"]) == "cuda", "the command line goes first"


@pytest.mark.parametrize("text", ["tp-size: 2\n", "device:\n", "- device\n", "", "device: [\n"])
def test_a_config_file_without_a_device(tmp_path: Path, text: str) -> None:
    file = tmp_path / "server.yaml"
    file.write_text(text)
    assert device.asked_device(["--config", str(file)]) is None


def test_a_config_file_that_is_not_there_is_left_to_sglang(tmp_path: Path) -> None:
    assert device.asked_device(["--config", str(tmp_path / "none.yaml")]) is None


@pytest.mark.parametrize(
    ("asked", "cuda", "chosen"),
    [
        (None, True, "cuda"),
        (None, False, "cpu"),
        ("cpu", True, "cpu"),
        ("cpu", False, "cpu"),
        ("cuda", True, "cuda"),
        ("cuda:1", True, "cuda:1"),
    ],
)
def test_choose_device(asked: str | None, cuda: bool, chosen: str) -> None:
    choice = device.choose_device(asked, cuda)
    assert choice.device == chosen
    assert choice.reason


@pytest.mark.parametrize("asked", ["cuda", "cuda:0"])
def test_cuda_without_a_gpu_is_refused(asked: str) -> None:
    with pytest.raises(UsageError, match="--device cuda was asked for, but PyTorch finds no CUDA GPU here"):
        device.choose_device(asked, cuda_available=False)


@pytest.mark.parametrize("asked", ["xpu", "tpu:0"])
def test_a_device_that_we_have_nothing_for_is_refused(asked: str) -> None:
    with pytest.raises(UsageError, match=f"--device {asked} is not supported by sglang_neo; give cuda or cpu"):
        device.choose_device(asked, cuda_available=True)


def test_asking_for_the_cpu_hides_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert device.select(["--device", "cpu"]).device == "cpu"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


# -- torchvision ----------------------------------------------------------------------------------------------


def python(script: str, site: bool = True) -> subprocess.CompletedProcess[str]:
    """Run ``script`` in a new interpreter; with ``site=False`` no ``.pth`` file of the environment is read."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO_ROOT), sysconfig.get_path("purelib")])}
    command = [sys.executable, *([] if site else ["-S"]), "-c", script]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_pth_file(tmp_path: Path) -> None:
    path = torchvision_bridge.write_pth(tmp_path)
    assert path == tmp_path / torchvision_bridge.PTH_NAME
    [line] = path.read_text().splitlines()
    assert line.startswith("import "), "site runs only lines that begin so"
    compile(line, str(path), "exec")


cpu_build = pytest.mark.skipif(
    torch.version.cuda is not None or torch.version.hip is not None, reason="torchvision fits this torch"
)


@cpu_build
def test_torchvision_imports_in_this_environment() -> None:
    run = python("import torchvision; print(torchvision.__version__)")
    assert run.returncode == 0, f"run `make setup`: {run.stderr[-500:]}"


@cpu_build
def test_torchvision_imports_through_the_pth_file_and_not_without(tmp_path: Path) -> None:
    torchvision_bridge.write_pth(tmp_path)
    use = "import torchvision; from torchvision.io import decode_jpeg; print('imported')"
    bare = python(use, site=False)
    if bare.returncode == 0:
        pytest.skip("torchvision's operators load beside this torch: there is nothing to bridge")
    assert "torchvision::nms" in bare.stderr
    bridged = python(f"import site; site.addsitedir({str(tmp_path)!r}); {use}", site=False)
    assert (bridged.returncode, bridged.stdout) == (0, "imported\n"), bridged.stderr


def test_installing_the_hook_imports_nothing() -> None:
    script = """
import sys
from sglang_neo.platforms import torchvision_bridge as bridge
bridge.install(); bridge.install()
assert sum(type(finder).__name__ == "_TorchvisionHook" for finder in sys.meta_path) == 1
assert not {"torch", "torchvision", "sglang"} & set(sys.modules), "a start of Python must stay cheap"
print("ok")
"""
    run = python(script, site=False)
    assert run.stdout == "ok\n", run.stderr


def test_a_torch_with_cuda_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision_bridge, "_library", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    spec = importlib.machinery.ModuleSpec("torchvision", None, origin="/nowhere/torchvision/__init__.py")
    assert torchvision_bridge.declare_missing_operators(spec) is False
    assert torchvision_bridge.declare_missing_operators(None) is False
