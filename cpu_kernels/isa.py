"""Which instruction set the kernels use: one table, the best that the machine has, or the one the user names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from cpu_kernels import _native

#: Environment variable that forces an instruction set by name, for tests and for comparing.
ISA_ENV = "CPU_KERNELS_ISA"


@dataclass(frozen=True)
class Isa:
    """One row of the table in ``src/cpu_features.cpp``."""

    name: str
    description: str
    required: tuple[str, ...]  # feature names, see features()

    def missing(self, present: Mapping[str, bool]) -> tuple[str, ...]:
        """The required features that ``present`` lacks, in table order."""
        return tuple(f for f in self.required if not present.get(f, False))


def features() -> dict[str, bool]:
    """CPU features by name; True if this process may execute them (the operating system saves their registers)."""
    return _native.features()


def isas() -> tuple[Isa, ...]:
    """Every instruction set in the table, best first, whether this machine has it or not."""
    return tuple(Isa(*row) for row in _native.isas())


def choose_isa(name: str | None = None, present: Mapping[str, bool] | None = None) -> Isa:
    """The instruction set to use.

    Args:
        name: force this one; default: the environment variable ``CPU_KERNELS_ISA``, else the best that is present.
        present: feature table; default: this machine's.

    Raises:
        ValueError: the name is not in the table, or this machine lacks features that it needs.
    """
    present = features() if present is None else present
    table = isas()
    wanted = name if name is not None else os.environ.get(ISA_ENV)
    if wanted:
        by_name = {isa.name: isa for isa in table}
        if wanted not in by_name:
            raise ValueError(f"unknown instruction set {wanted!r}; known: {', '.join(by_name)} (set {ISA_ENV})")
        missing = by_name[wanted].missing(present)
        if missing:
            raise ValueError(f"instruction set {wanted!r} needs {', '.join(missing)}, which this machine lacks")
        return by_name[wanted]
    return next(isa for isa in table if not isa.missing(present))
