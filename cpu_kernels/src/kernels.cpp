#include "kernels.hpp"

#include <algorithm>
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

// Queries are kept as fp32 at most, padded to the widest vectors.
std::size_t scratch_bytes(int max_queries, int head_dim) {
  return kScratchFixed +
         static_cast<std::size_t>(std::max(max_queries, 16)) * ((head_dim + 63) / 64 * 64) * sizeof(float);
}

}  // namespace cpu_kernels
