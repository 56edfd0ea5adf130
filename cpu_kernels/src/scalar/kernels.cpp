#include "../generic/headers.hpp"

CPU_KERNELS_BUILD_FAST
namespace cpu_kernels {
namespace scalar {
namespace {

constexpr const char* kIsaName = "scalar";

// In this order: each builds on those before.
// clang-format off
#include "../generic/convert.hpp"
#include "../generic/unroll.hpp"
#include "simd.hpp"
#include "../generic/attend.hpp"
#include "../generic/byte_dots.hpp"
#include "../generic/pages.hpp"
// clang-format on

}  // namespace

const KernelTable kTable = {kIsaName, attend_any_or_bytes, finish, merge, write_page, read_page, convert};

}  // namespace scalar
}  // namespace cpu_kernels
