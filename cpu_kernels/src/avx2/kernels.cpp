#include "../generic/headers.hpp"

#if defined(__x86_64__)

CPU_KERNELS_BEGIN_TARGET("avx2,fma,f16c")
#define CPU_KERNELS_HAVE_F16C 1
namespace cpu_kernels {
namespace avx2 {
namespace {

constexpr const char* kIsaName = "avx2";

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

}  // namespace avx2
}  // namespace cpu_kernels
CPU_KERNELS_END_TARGET

#endif
