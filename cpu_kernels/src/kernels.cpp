#include "kernels.hpp"

#include <cstring>

#include "tables.hpp"

namespace cpu_kernels {

const KernelTable* kernel_table(const char* isa) {
  const KernelTable* const tables[] = {
#if defined(CPU_KERNELS_ONLY)  // sanitized builds leave out what takes minutes to compile
      CPU_KERNELS_ONLY
#else
#if defined(__x86_64__)
      &amx::kTable,    &avx512_bf16::kTable, &avx512::kTable, &amx_shim::kTable, &avx2::kTable,
#elif defined(__aarch64__)
      &neon::kTable,
#endif
      &scalar::kTable,
#endif
  };
  for (const KernelTable* table : tables)
    if (std::strcmp(table->isa, isa) == 0) return table;
  return nullptr;
}

}  // namespace cpu_kernels
