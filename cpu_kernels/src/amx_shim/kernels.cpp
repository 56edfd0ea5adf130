// The tile arithmetic of amx/ with tiles in software, over AVX2: for tests on machines without AMX. Not in the table of
// instruction sets that users choose from.
#include "../generic/headers.hpp"

#if defined(__x86_64__)

CPU_KERNELS_BUILD_FAST
CPU_KERNELS_BEGIN_TARGET("avx2,fma,f16c")
#define CPU_KERNELS_HAVE_F16C 1
namespace cpu_kernels {
namespace amx_shim {
namespace {

constexpr const char* kIsaName = "amx_shim";

// In this order: each builds on those before.
// clang-format off
#include "../generic/convert.hpp"
#include "../generic/unroll.hpp"
#include "../avx2/simd.hpp"
#include "../generic/attend.hpp"
#include "../generic/pages.hpp"
#define CPU_KERNELS_AMX_SHIM 1
#include "../amx/tiles.hpp"
#include "../amx/tile_arithmetic.hpp"
#include "../amx/block_arithmetic.hpp"
// clang-format on

void attend(const AttendShape& s, const Segment& seg, const NextSegment& next, Scratch& scratch) {
  const bool tiles = s.layout.type == Type::bf16 || s.layout.type == Type::i8;
  if (tiles && !s.slots && seg.end > seg.begin)
    attend_tiles(s, seg, next, scratch);
  else
    attend_any(s, seg, next, scratch);
}

}  // namespace

const KernelTable kTable = {kIsaName, attend, finish, merge, write_page, read_page, convert, 64};

}  // namespace amx_shim
}  // namespace cpu_kernels
CPU_KERNELS_END_TARGET

#endif
