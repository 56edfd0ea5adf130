"""Tuning that was measured on this machine and saved, see cpu_kernels.calibration.

Plans made without a ``tuning`` use what was saved for their instruction set. Results lie in
``$XDG_CACHE_HOME/cpu_kernels`` (``~/.cache/cpu_kernels``), one file per CPU model and instruction set, and hold for one
build of the kernels.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from cpu_kernels import _native, machine
from cpu_kernels.attention import Tuning
from cpu_kernels.isa import choose_isa

#: Environment variable: "off" to use no calibration, else the directory to keep it in.
CALIBRATION_ENV = "CPU_KERNELS_CALIBRATION"
#: Of the file; another number is another format.
FORMAT = 1
#: Instruction sets for which dot_min_queries and tile_min_queries mean something.
DOT_ISAS, TILE_ISAS = ("avx512_bf16", "amx"), ("amx",)
#: Instruction sets with 8-bit arithmetic for int8 pools (``accurate_int8=False``); on others it would gain nothing.
BYTE_ISAS = ("scalar", "avx512", "avx512_bf16", "amx")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trial:
    """One thing that was measured."""

    what: str  # the tuning field, or fields
    value: str
    microseconds: float  # of one run
    against: float | None = None  # the same without it, for thresholds


@dataclass(frozen=True)
class Calibration:
    """A result, as it is saved."""

    cpu: str  # machine.cpu_id()
    isa: str
    build: str  # build_id()
    threads: int
    date: str
    seconds: float  # of measuring
    tuning: dict[str, int | str]  # the fields of Tuning that were measured
    tried: tuple[Trial, ...] = field(default=(), compare=False)

    def applied(self, tuning: Tuning | None = None) -> Tuning:
        """``tuning`` (default: Tuning()) with the measured fields; ValueError or TypeError if they are none."""
        known = {f.name: f.type for f in fields(Tuning)}
        for name, value in self.tuning.items():
            if name not in known:
                raise ValueError(f"unknown field {name!r}")
            if isinstance(value, bool) or not isinstance(value, str if name == "prefetch_hint" else int):
                raise ValueError(f"bad value of {name}: {value!r}")
            if isinstance(value, int) and not 0 < value < 2**31:
                raise ValueError(f"bad value of {name}: {value!r}")
        changes: dict[str, Any] = self.tuning
        return replace(tuning or Tuning(), **changes)


@dataclass(frozen=True)
class Found:
    """What there is for an instruction set; ``calibration`` is None if nothing can be used, ``note`` says why."""

    path: Path | None
    calibration: Calibration | None
    note: str
    bad: bool = False  # a file is there and was ignored


_build: str | None = None


def build_id() -> str:
    """Names this build of the kernels: a hash of the compiled module."""
    global _build
    if _build is None:
        _build = hashlib.sha256(Path(_native.__file__).read_bytes()).hexdigest()[:16]
    return _build


def directory() -> Path | None:
    """Where results are kept; None: calibration is switched off."""
    given = os.environ.get(CALIBRATION_ENV, "")
    if given.lower() == "off":
        return None
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of that variable says that relative paths are to be ignored.
    base = Path(cache) if os.path.isabs(cache) else Path(os.path.expanduser("~")) / ".cache"
    return base / "cpu_kernels"


def file_of(isa: str) -> Path | None:
    """Of an instruction set on this CPU; None: calibration is switched off."""
    where = directory()
    if where is None:
        return None
    cpu = machine.cpu_id()
    slug = re.sub(r"[^a-z0-9]+", "-", cpu.lower()).strip("-")[:80]
    return where / f"{slug}-{hashlib.sha256(cpu.encode()).hexdigest()[:8]}-{isa}.json"


def find(isa: str | None = None) -> Found:
    """Looks for a result that holds for this CPU, build and instruction set. Never raises for what a file contains."""
    name = choose_isa(isa).name
    path = file_of(name)
    if path is None:
        return Found(None, None, f"switched off by {CALIBRATION_ENV}")
    try:
        text = path.read_text()
    except FileNotFoundError:
        return Found(path, None, "none yet (python -m cpu_kernels.calibration)")
    except (OSError, UnicodeDecodeError) as error:
        return Found(path, None, f"ignored, cannot be read: {type(error).__name__}", bad=True)
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            return Found(path, None, "ignored, another format", bad=True)
        for key, mine in (("cpu", machine.cpu_id()), ("isa", name), ("build", build_id())):
            if data.get(key) != mine:
                what = {"cpu": "measured on another CPU", "isa": "of another instruction set"}
                return Found(path, None, f"ignored, {what.get(key, 'measured with another build')}", bad=True)
        result = Calibration(
            data["cpu"],
            data["isa"],
            data["build"],
            int(data["threads"]),
            str(data["date"]),
            float(data["seconds"]),
            dict(data["tuning"]),
            tuple(Trial(**trial) for trial in data["tried"]),
        )
        result.applied()
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return Found(path, None, f"ignored, corrupt: {error or type(error).__name__}", bad=True)
    return Found(path, result, f"measured {result.date} with {result.threads} thread(s)")


_loaded: dict[tuple[str, Path | None], Tuning | None] = {}


def load(isa: str | None = None) -> Tuning | None:
    """The tuning measured on this machine, or None.

    Read once per process and instruction set. A file that does not hold here (corrupt, from another CPU or build) is
    ignored, with one line in the log.
    """
    name = choose_isa(isa).name
    key = name, directory()
    if key not in _loaded:
        found = find(name)
        if found.bad:
            _log.warning("calibration %s: %s", found.path, found.note)
        _loaded[key] = found.calibration.applied() if found.calibration else None
    return _loaded[key]


def save(result: Calibration) -> Path:
    """Writes it for load(), all or nothing. Raises OSError; ValueError if calibration is switched off."""
    path = file_of(result.isa)
    if path is None:
        raise ValueError(f"calibration is switched off by {CALIBRATION_ENV}")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".calibration-")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"format": FORMAT, **asdict(result)}, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    forget()
    return path


def forget() -> None:
    """Has load() look again."""
    _loaded.clear()


def remember(result: Calibration) -> None:
    """Has load() answer with it in this process, saved or not."""
    _loaded[result.isa, directory()] = result.applied()
