#include "../generic/headers.hpp"

#if defined(__aarch64__)

namespace cpu_kernels {
namespace neon {
namespace {

constexpr const char* kIsaName = "neon";

// In this order: each builds on those before.
// clang-format off
#include "../generic/convert.hpp"
#include "../generic/unroll.hpp"
#include "simd.hpp"
#include "../generic/attend.hpp"
#include "../generic/pages.hpp"
// clang-format on

}  // namespace

const KernelTable kTable = {kIsaName, attend_any, finish, merge, write_page, read_page, convert};

}  // namespace neon
}  // namespace cpu_kernels

#endif
