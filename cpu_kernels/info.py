"""``python -m cpu_kernels.info``: what the kernels found on this machine and what they chose."""

from __future__ import annotations

import os
import platform
import sys

from cpu_kernels.isa import ISA_ENV, choose_isa, features, isas


def describe() -> str:
    """The report as text; raises ValueError for a bad ``CPU_KERNELS_ISA``, as the kernels do."""
    present = features()
    lines = [
        f"machine   {platform.machine()}, {len(os.sched_getaffinity(0))} usable cores",
        "features  " + (", ".join(name for name, here in present.items() if here) or "none"),
    ]
    for isa in isas():
        missing = isa.missing(present)
        state = "available" if not missing else "needs " + ", ".join(missing)
        lines.append(f"  {isa.name:12} {isa.description}: {state}")
    lines.append(f"chosen    {choose_isa(present=present).name} (override: {ISA_ENV})")
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
