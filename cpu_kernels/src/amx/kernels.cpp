#include "../generic/headers.hpp"

#if defined(__x86_64__)

// GCC 12 takes the undefined inputs that its own intrinsics begin with for mistakes.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

CPU_KERNELS_BEGIN_TARGET(
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512bf16,amx-tile,amx-bf16,amx-int8,avx2,fma,f16c")
#define CPU_KERNELS_HAVE_F16C 1
namespace cpu_kernels {
namespace amx {
namespace {

constexpr const char* kIsaName = "amx";

// In this order: each builds on those before.
// clang-format off
#include "../generic/convert.hpp"
#include "../generic/unroll.hpp"
#include "../avx512/simd.hpp"
#include "../generic/attend.hpp"
#include "../generic/byte_dots.hpp"
#include "../generic/pages.hpp"
#include "../avx512_bf16/dot.hpp"
#include "tiles.hpp"
#include "tile_arithmetic.hpp"
#include "block_arithmetic.hpp"
// clang-format on

void attend(const AttendShape& s, const Segment& seg, const NextSegment& next, Scratch& scratch) {
  const bool bf16 = s.layout.type == Type::bf16, int8 = s.layout.type == Type::i8;
  if (s.slots || seg.end <= seg.begin)
    attend_any_or_bytes(s, seg, next, scratch);
  else if ((bf16 || int8) && seg.queries >= s.tuning.tile_min_queries)
    attend_tiles(s, seg, next, scratch);
  else if (bf16 && seg.queries >= s.tuning.dot_min_queries)
    attend_with<DotArithmetic>(s, seg, next, scratch);
  else
    attend_any_or_bytes(s, seg, next, scratch);
}

}  // namespace

const KernelTable kTable = {kIsaName, attend, finish, merge, write_page, read_page, convert, 64};

}  // namespace amx
}  // namespace cpu_kernels
CPU_KERNELS_END_TARGET

#endif
