// The tables that this build may hold, one per instruction set.
#pragma once

#include "kernels.hpp"

namespace cpu_kernels {
namespace scalar {
extern const KernelTable kTable;
}
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
namespace avx512_bf16 {
extern const KernelTable kTable;
}
namespace amx {
extern const KernelTable kTable;
}
namespace amx_shim {
extern const KernelTable kTable;
}
namespace neon {
extern const KernelTable kTable;
}
}  // namespace cpu_kernels
