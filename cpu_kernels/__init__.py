"""CPU kernels of sglang_neo: a library of its own that knows neither SGLang nor torch.

Today it holds the detection of the CPU's instruction sets and the choice of the one to use; the attention kernels
that will be chosen by it do not exist yet.
"""

from cpu_kernels.isa import ISA_ENV, Isa, choose_isa, features, isas

__all__ = ["ISA_ENV", "Isa", "choose_isa", "features", "isas"]
