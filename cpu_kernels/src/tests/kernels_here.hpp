// The instruction sets that are both in this build and of this machine.
#pragma once

#include <string>
#include <vector>

#include "../cpu_features.hpp"
#include "../kernels.hpp"

namespace cpu_kernels {

// `required`: names of features, with commas between them.
inline bool present(const char* required) {
  Feature features[64];
  const std::size_t count = detect_features(features, 64);
  std::string left = required;
  while (!left.empty()) {
    const std::size_t comma = left.find(',');
    const std::string name = left.substr(0, comma);
    bool found = false;
    for (std::size_t i = 0; i < count && i < 64; ++i) found |= name == features[i].name && features[i].present;
    if (!found) return false;
    left = comma == std::string::npos ? "" : left.substr(comma + 1);
  }
  return true;
}

// Best first; the matrix tiles in software, which no user gets, come last.
inline std::vector<const KernelTable*> kernels_here() {
  std::vector<const KernelTable*> found;
  const auto add = [&](const char* name) {
    if (const KernelTable* kernels = kernel_table(name)) found.push_back(kernels);
  };
  std::size_t count = 0;
  const Isa* table = isa_table(&count);
  for (std::size_t i = 0; i < count; ++i)
    if (present(table[i].required)) add(table[i].name);
  if (present("avx2,fma,f16c")) add("amx_shim");
  return found;
}

}  // namespace cpu_kernels
