"""CPU kernels of sglang_neo: a library of its own that knows neither SGLang nor torch.

Decode attention over host KV (``attention``), the worker threads and the hand-off protocol (``workers``), the choice of
the instruction set (``isa``), and the tools ``info``, ``bench`` and ``calibration``.
"""

from cpu_kernels.isa import ISA_ENV, Isa, choose_isa, features, isas

__all__ = ["ISA_ENV", "Isa", "choose_isa", "features", "isas"]
