"""``python -m cpu_kernels.info``: what the kernels found on this machine and what they chose."""

from __future__ import annotations

import sys
from dataclasses import asdict

from cpu_kernels import _native, machine, tuning_files
from cpu_kernels.arrays import DTYPES
from cpu_kernels.attention import Tuning
from cpu_kernels.isa import ISA_ENV, choose_isa, features, isas


def _mib(size: int) -> str:
    return f"{size / (1 << 20):g} MiB" if size else "unknown"


def _arithmetic(isa: str, dtype: str, tuning: Tuning) -> str:
    """How an instruction set attends to keys and values of an element type."""
    parts = ["fp32"]
    if dtype == "int8":
        parts = ["16-bit integer products"]
        if isa in tuning_files.BYTE_ISAS:
            parts.append("8-bit ones with accurate_int8=False")
    if dtype == "bfloat16" and isa in tuning_files.DOT_ISAS:
        parts.append(f"bf16 dot products from {tuning.dot_min_queries} queries per KV head")
    if dtype in ("bfloat16", "int8") and isa in tuning_files.TILE_ISAS:
        parts.append(f"matrix tiles from {tuning.tile_min_queries} queries per KV head")
    return ", ".join(parts)


def describe() -> str:
    """The report as text; raises ValueError for a bad ``CPU_KERNELS_ISA``, as the kernels do."""
    present = features()
    lines = [
        f"machine   {machine.cpu_id()}",
        f"cores     {machine.usable_cores()} usable cores, {machine.numa_nodes()} NUMA node(s)",
        f"caches    L2 {_mib(machine.cache_bytes(2))}, L3 {_mib(machine.cache_bytes(3))} in total",
        f"memory    {machine.total_memory() / (1 << 30):.1f} GiB, transparent huge pages: {machine.huge_pages()}",
        "features  " + (", ".join(name for name, here in present.items() if here) or "none"),
    ]
    for isa in isas():
        missing = isa.missing(present)
        state = "available" if not missing else "needs " + ", ".join(missing)
        if not _native.has_kernels(isa.name):
            state += "; no attention kernels in this build"
        lines.append(f"  {isa.name:12} {isa.description}: {state}")
    chosen = choose_isa(present=present).name
    lines.append(f"chosen    {chosen} (override: {ISA_ENV})")
    found = tuning_files.find(chosen)
    tuning = found.calibration.applied() if found.calibration else Tuning()
    lines += [f"  {dtype:9} {_arithmetic(chosen, dtype, tuning)}" for dtype in DTYPES]
    lines.append(f"tuning    calibration {found.note}" + (f", {found.path}" if found.path else ""))
    lines.append("  " + ", ".join(f"{name}={value}" for name, value in asdict(tuning).items()))
    return "\n".join(lines)


def main() -> int:
    try:
        print(describe())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
