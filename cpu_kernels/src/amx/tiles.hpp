// Tile registers of AMX, or the same in software where CPU_KERNELS_AMX_SHIM is defined: the arithmetic of
// tile_arithmetic.hpp can then be tested on any machine. Included inside the target region.

struct alignas(64) TileShapes {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

#if defined(CPU_KERNELS_AMX_SHIM)

struct SoftTiles {
  TileShapes shapes;
  std::uint8_t data[8][16][64];
};
inline SoftTiles& soft_tiles() {
  static thread_local SoftTiles tiles;
  return tiles;
}
inline void tile_configure(const TileShapes& shapes) {
  soft_tiles().shapes = shapes;
  std::memset(soft_tiles().data, 0, sizeof(soft_tiles().data));
}
inline void tile_release() {}
template <int kTileRegister>
inline void tile_zero() {
  std::memset(soft_tiles().data[kTileRegister], 0, 1024);
}
template <int kTileRegister>
inline void tile_load(const void* base, std::int64_t stride) {
  SoftTiles& s = soft_tiles();
  for (int row = 0; row < s.shapes.rows[kTileRegister]; ++row)
    std::memcpy(s.data[kTileRegister][row], static_cast<const std::uint8_t*>(base) + row * stride,
                s.shapes.row_bytes[kTileRegister]);
}
template <int kTileRegister>
inline void tile_store(void* base, std::int64_t stride) {
  SoftTiles& s = soft_tiles();
  for (int row = 0; row < s.shapes.rows[kTileRegister]; ++row)
    std::memcpy(static_cast<std::uint8_t*>(base) + row * stride, s.data[kTileRegister][row],
                s.shapes.row_bytes[kTileRegister]);
}
// The processor faults too if the shapes of a product do not fit.
template <int kC, int kA, int kB>
inline void check_tile_shapes() {
  const TileShapes& shapes = soft_tiles().shapes;
  if (shapes.rows[kA] != shapes.rows[kC] || shapes.row_bytes[kB] != shapes.row_bytes[kC] ||
      4 * shapes.rows[kB] != shapes.row_bytes[kA])
    __builtin_trap();
}
// C[m][n] += A[m][2 k] B[k][2 n] + A[m][2 k + 1] B[k][2 n + 1], in fp32.
template <int kC, int kA, int kB>
inline void tile_dot_bf16() {
  SoftTiles& s = soft_tiles();
  check_tile_shapes<kC, kA, kB>();
  const int rows = s.shapes.rows[kC], columns = s.shapes.row_bytes[kC] / 4, inner = s.shapes.rows[kB];
  for (int m = 0; m < rows; ++m)
    for (int k = 0; k < inner; ++k)
      for (int n = 0; n < columns; ++n) {
        bf16 a[2], b[2];
        float c;
        std::memcpy(a, s.data[kA][m] + 4 * k, 4);
        std::memcpy(b, s.data[kB][k] + 4 * n, 4);
        std::memcpy(&c, s.data[kC][m] + 4 * n, 4);
        c += to_float(a[0]) * to_float(b[0]) + to_float(a[1]) * to_float(b[1]);
        std::memcpy(s.data[kC][m] + 4 * n, &c, 4);
      }
}

// C[m][n] += the sum of A[m][4 k + i] B[k][4 n + i] over i < 4, signed bytes in int32.
template <int kC, int kA, int kB>
inline void tile_dot_int8() {
  SoftTiles& s = soft_tiles();
  check_tile_shapes<kC, kA, kB>();
  for (int m = 0; m < s.shapes.rows[kC]; ++m)
    for (int k = 0; k < s.shapes.rows[kB]; ++k)
      for (int n = 0; n < s.shapes.row_bytes[kC] / 4; ++n) {
        std::int8_t a[4], b[4];
        std::int32_t c;
        std::memcpy(a, s.data[kA][m] + 4 * k, 4);
        std::memcpy(b, s.data[kB][k] + 4 * n, 4);
        std::memcpy(&c, s.data[kC][m] + 4 * n, 4);
        for (int i = 0; i < 4; ++i) c += a[i] * b[i];
        std::memcpy(s.data[kC][m] + 4 * n, &c, 4);
      }
}

// Sixteen floats, the width of a tile's row, as two vectors of AVX2.
struct Wide {
  F lo, hi;
};
inline Wide wide_load(const void* p) {
  const float* from = static_cast<const float*>(p);
  return {load(from), load(from + 8)};
}
inline void store(float* p, Wide x) {
  store(p, x.lo);
  store(p + 8, x.hi);
}
inline Wide wide_set1(float x) { return {set1(x), set1(x)}; }
inline Wide add(Wide a, Wide b) { return {add(a.lo, b.lo), add(a.hi, b.hi)}; }
inline Wide sub(Wide a, Wide b) { return {sub(a.lo, b.lo), sub(a.hi, b.hi)}; }
inline Wide mul(Wide a, Wide b) { return {mul(a.lo, b.lo), mul(a.hi, b.hi)}; }
inline Wide div(Wide a, Wide b) { return {div(a.lo, b.lo), div(a.hi, b.hi)}; }
inline Wide max(Wide a, Wide b) { return {max(a.lo, b.lo), max(a.hi, b.hi)}; }
inline Wide fma(Wide a, Wide b, Wide c) { return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)}; }
// No less than 2^-100: products of the least weights and scales, and what rounding leaves of them, are then no
// denormal numbers, which are slow.
inline Wide exp2_wide(Wide x) {
  x = max(x, wide_set1(-100.f));
  return {exp2(x.lo), exp2(x.hi)};
}
inline Wide exp2_rough(Wide x) { return exp2_wide(x); }
inline F raised(F from, F to, F by) { return _mm256_blendv_ps(from, to, _mm256_cmp_ps(to, add(from, by), _CMP_GT_OQ)); }
// `to` where it is above `from` by more than `by`, else `from`.
inline Wide raised(Wide from, Wide to, Wide by) {
  return {raised(from.lo, to.lo, by.lo), raised(from.hi, to.hi, by.hi)};
}
inline float reduce_max(Wide x) { return reduce_max(max(x.lo, x.hi)); }
inline Wide int_to_float(Wide x) {
  return {_mm256_cvtepi32_ps(_mm256_castps_si256(x.lo)), _mm256_cvtepi32_ps(_mm256_castps_si256(x.hi))};
}
inline Wide swap_halves(Wide x) { return {x.hi, x.lo}; }
inline Wide first_halves(Wide x, Wide y) { return {x.lo, y.lo}; }
inline Wide second_halves(Wide x, Wide y) { return {x.hi, y.hi}; }
inline Wide eight_twice(const float* p) { return {load(p), load(p)}; }
inline Wide two_eight_times(const float* p) { return {set1(p[0]), set1(p[1])}; }
inline void store_first_half(float* p, Wide x) { store(p, x.lo); }

// to[column][row] = from[row][column], 16 x 16 elements of 4 bytes, rows `from_stride` and `to_stride` bytes apart.
inline void transpose16(const void* from, std::int64_t from_stride, void* to, std::int64_t to_stride) {
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 16; ++column)
      std::memcpy(static_cast<std::uint8_t*>(to) + column * to_stride + 4 * row,
                  static_cast<const std::uint8_t*>(from) + row * from_stride + 4 * column, 4);
}

inline std::uint16_t bf16_bits(float x) {
  bf16 rounded;
  from_float(x, &rounded);
  return rounded.bits;
}
// 32 floats to bf16.
inline void round_bf16(const float* from, void* to) {
  for (int i = 0; i < 32; ++i) {
    const std::uint16_t bits = bf16_bits(from[i]);
    std::memcpy(static_cast<std::uint8_t*>(to) + 2 * i, &bits, 2);
  }
}
// 32 floats as the sums of two bf16 each.
inline void split_bf16(const float* from, void* high, void* low) {
  for (int i = 0; i < 32; ++i) {
    std::uint32_t u;
    std::memcpy(&u, from + i, 4);
    u &= 0xffff0000;
    float top;
    std::memcpy(&top, &u, 4);
    const std::uint16_t bits[2] = {static_cast<std::uint16_t>(u >> 16), bf16_bits(from[i] - top)};
    std::memcpy(static_cast<std::uint8_t*>(high) + 2 * i, bits, 2);
    std::memcpy(static_cast<std::uint8_t*>(low) + 2 * i, bits + 1, 2);
  }
}
// 16 floats times `factor`, rounded to int8.
inline void round_int8(const float* from, float factor, void* to) {
  for (int i = 0; i < 16; ++i)
    static_cast<std::int8_t*>(to)[i] = static_cast<std::int8_t>(std::lrintf(from[i] * factor));
}
// 16 floats times `factor`, rounded, as 128 * high + low.
inline void split_int8(const float* from, float factor, void* high, void* low) {
  for (int i = 0; i < 16; ++i) {
    const int x = static_cast<int>(std::lrintf(from[i] * factor)), top = (x + 64) >> 7;
    static_cast<std::int8_t*>(high)[i] = static_cast<std::int8_t>(top);
    static_cast<std::int8_t*>(low)[i] = static_cast<std::int8_t>(x - 128 * top);
  }
}

// Weights of a few tokens, [token][query], become one 32-bit element per row of the weights' tile: the row's weights
// of those tokens. Rows are 16 queries, or the high parts of 8 queries and then the low parts.
inline void pack_bf16(Wide first, Wide second, std::uint32_t* rows) {  // 2 tokens, 16 queries
  float p[32];
  store(p, first);
  store(p + 16, second);
  for (int q = 0; q < 16; ++q) rows[q] = bf16_bits(p[q]) | static_cast<std::uint32_t>(bf16_bits(p[16 + q])) << 16;
}
inline void pack_bf16_parts(const float* p, std::uint32_t* rows) {  // 2 tokens, 8 queries
  std::uint16_t high[32], low[32];
  float padded[32] = {};
  std::memcpy(padded, p, 64);
  split_bf16(padded, high, low);
  for (int q = 0; q < 8; ++q) {
    rows[q] = high[q] | static_cast<std::uint32_t>(high[8 + q]) << 16;
    rows[8 + q] = low[q] | static_cast<std::uint32_t>(low[8 + q]) << 16;
  }
}
inline void pack_int8(const float* p, Wide factor, std::uint32_t* rows) {  // 4 tokens, 16 queries
  float f[16];
  store(f, factor);
  for (int q = 0; q < 16; ++q) {
    rows[q] = 0;
    for (int t = 0; t < 4; ++t)
      rows[q] |= static_cast<std::uint32_t>(std::lrintf(p[16 * t + q] * f[q]) & 0xff) << (8 * t);
  }
}
inline void pack_int8_parts(const float* p, Wide factor, std::uint32_t* rows) {  // 4 tokens, 8 queries
  float f[16];
  store(f, factor);
  for (int q = 0; q < 8; ++q) {
    rows[q] = rows[8 + q] = 0;
    for (int t = 0; t < 4; ++t) {
      const int x = static_cast<int>(std::lrintf(p[8 * t + q] * f[q])), top = (x + 64) >> 7;
      rows[q] |= static_cast<std::uint32_t>(top & 0xff) << (8 * t);
      rows[8 + q] |= static_cast<std::uint32_t>((x - 128 * top) & 0xff) << (8 * t);
    }
  }
}

#else

// The instructions read and write memory that the compiler does not know of.
CPU_KERNELS_INLINE void tile_fence() { __asm__ volatile("" ::: "memory"); }
CPU_KERNELS_INLINE void tile_configure(const TileShapes& shapes) {
  tile_fence();
  _tile_loadconfig(&shapes);
}
CPU_KERNELS_INLINE void tile_release() { _tile_release(); }
template <int kTileRegister>
CPU_KERNELS_INLINE void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"n"(kTileRegister));
}
template <int kTileRegister>
CPU_KERNELS_INLINE void tile_load(const void* base, std::int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(base), "r"(stride), "n"(kTileRegister) : "memory");
}
template <int kTileRegister>
CPU_KERNELS_INLINE void tile_store(void* base, std::int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(base), "r"(stride), "n"(kTileRegister) : "memory");
}
template <int kC, int kA, int kB>
CPU_KERNELS_INLINE void tile_dot_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(kC), "n"(kA), "n"(kB));
}

template <int kC, int kA, int kB>
CPU_KERNELS_INLINE void tile_dot_int8() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(kC), "n"(kA), "n"(kB));
}

// Sixteen floats, the width of a tile's row.
using Wide = F;
CPU_KERNELS_INLINE Wide wide_load(const void* p) { return _mm512_loadu_ps(p); }
CPU_KERNELS_INLINE Wide wide_set1(float x) { return set1(x); }
// 2^x, relative error below 2e-7. No less than 2^-100: products of the least weights and scales, and what rounding
// leaves of them, are then no denormal numbers, which are slow.
CPU_KERNELS_INLINE Wide exp2_wide(Wide x) {
  x = max(x, set1(-100.f));
  const F f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
  F p = fma(set1(1.877576608e-03f), f, set1(8.989340252e-03f));
  p = fma(p, f, set1(5.582631792e-02f));
  p = fma(p, f, set1(2.401536171e-01f));
  p = fma(p, f, set1(6.931530732e-01f));
  p = fma(p, f, set1(9.999999251e-01f));
  return _mm512_scalef_ps(p, x);  // p * 2^floor(x)
}
// The same with a relative error below 3e-6, for what becomes bf16.
CPU_KERNELS_INLINE Wide exp2_rough(Wide x) {
  x = max(x, set1(-100.f));
  const F f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  F p = fma(set1(1.353416724e-02f), f, set1(5.201146191e-02f));
  p = fma(p, f, set1(2.414427561e-01f));
  p = fma(p, f, set1(6.930038346e-01f));
  p = fma(p, f, set1(1.000002593f));
  return _mm512_scalef_ps(p, x);
}
CPU_KERNELS_INLINE Wide raised(Wide from, Wide to, Wide by) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(to, add(from, by), _CMP_GT_OQ), from, to);
}
CPU_KERNELS_INLINE Wide int_to_float(Wide x) { return _mm512_cvtepi32_ps(_mm512_castps_si512(x)); }
CPU_KERNELS_INLINE Wide swap_halves(Wide x) { return _mm512_shuffle_f32x4(x, x, 0x4e); }
CPU_KERNELS_INLINE Wide first_halves(Wide x, Wide y) { return _mm512_shuffle_f32x4(x, y, 0x44); }
CPU_KERNELS_INLINE Wide second_halves(Wide x, Wide y) { return _mm512_shuffle_f32x4(x, y, 0xee); }
CPU_KERNELS_INLINE Wide eight_twice(const float* p) { return _mm512_broadcast_f32x8(_mm256_loadu_ps(p)); }
CPU_KERNELS_INLINE Wide two_eight_times(const float* p) {
  const __m512i order = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  double pair;
  std::memcpy(&pair, p, 8);
  return _mm512_permutexvar_ps(order, _mm512_castpd_ps(_mm512_set1_pd(pair)));
}
CPU_KERNELS_INLINE void store_first_half(float* p, Wide x) { _mm256_storeu_ps(p, _mm512_castps512_ps256(x)); }

// 32 floats to bf16.
CPU_KERNELS_INLINE void round_bf16(const float* from, void* to) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(load(from + 16), load(from)));
}
CPU_KERNELS_INLINE F bf16_part(F x) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
// 32 floats as the sums of two bf16 each.
CPU_KERNELS_INLINE void split_bf16(const float* from, void* high, void* low) {
  const F a = load(from), b = load(from + 16), a_high = bf16_part(a), b_high = bf16_part(b);
  _mm512_storeu_si512(high, (__m512i)_mm512_cvtne2ps_pbh(b_high, a_high));
  _mm512_storeu_si512(low, (__m512i)_mm512_cvtne2ps_pbh(sub(b, b_high), sub(a, a_high)));
}
// 16 floats times `factor`, rounded to int8.
CPU_KERNELS_INLINE void round_int8(const float* from, float factor, void* to) {
  _mm_storeu_si128(static_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(mul(load(from), set1(factor)))));
}
// 16 floats times `factor`, rounded, as 128 * high + low.
CPU_KERNELS_INLINE void split_int8(const float* from, float factor, void* high, void* low) {
  const __m512i x = _mm512_cvtps_epi32(mul(load(from), set1(factor)));
  const __m512i top = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(64)), 7);
  _mm_storeu_si128(static_cast<__m128i*>(high), _mm512_cvtepi32_epi8(top));
  _mm_storeu_si128(static_cast<__m128i*>(low), _mm512_cvtepi32_epi8(_mm512_sub_epi32(x, _mm512_slli_epi32(top, 7))));
}

// Weights of a few tokens, [token][query], become one 32-bit element per row of the weights' tile: the row's weights
// of those tokens. Rows are 16 queries, or the high parts of 8 queries and then the low parts.
CPU_KERNELS_INLINE __m512i interleave_halves16(__m512i x) {  // 16-bit elements 0, 16, 1, 17, ...
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, x);
}
CPU_KERNELS_INLINE void pack_bf16(Wide first, Wide second, std::uint32_t* rows) {  // 2 tokens, 16 queries
  _mm512_storeu_si512(rows, interleave_halves16((__m512i)_mm512_cvtne2ps_pbh(second, first)));
}
CPU_KERNELS_INLINE void pack_bf16_parts(const float* p, std::uint32_t* rows) {  // 2 tokens, 8 queries
  const __m512i order = _mm512_set_epi16(31, 23, 30, 22, 29, 21, 28, 20, 27, 19, 26, 18, 25, 17, 24, 16, 15, 7, 14, 6,
                                         13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0);
  const F x = load(p), high = bf16_part(x);
  _mm512_storeu_si512(rows, _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(sub(x, high), high)));
}
CPU_KERNELS_INLINE __m512i rounded(const float* p, Wide factor) { return _mm512_cvtps_epi32(mul(load(p), factor)); }
CPU_KERNELS_INLINE void pack_int8(const float* p, Wide factor, std::uint32_t* rows) {  // 4 tokens, 16 queries
  // In each 128-bit lane the four tokens' weights of four queries, one token after the other.
  const __m512i x = _mm512_packs_epi16(_mm512_packs_epi32(rounded(p, factor), rounded(p + 16, factor)),
                                       _mm512_packs_epi32(rounded(p + 32, factor), rounded(p + 48, factor)));
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  _mm512_storeu_si512(rows, _mm512_shuffle_epi8(x, order));
}
CPU_KERNELS_INLINE void pack_int8_parts(const float* p, Wide factor, std::uint32_t* rows) {  // 4 tokens, 8 queries
  // Packed, 128-bit lane 0 has queries 0 to 3 of tokens 0 and 2, lane 1 queries 4 to 7 of them, lanes 2 and 3 tokens 1
  // and 3. Ordered: the four tokens of query 0, of query 1, and so on.
  const __m512i order = _mm512_set_epi16(31, 15, 27, 11, 30, 14, 26, 10, 29, 13, 25, 9, 28, 12, 24, 8, 23, 7, 19, 3, 22,
                                         6, 18, 2, 21, 5, 17, 1, 20, 4, 16, 0);
  const __m512i x = _mm512_permutexvar_epi16(order, _mm512_packs_epi32(rounded(p, factor), rounded(p + 16, factor)));
  const __m512i high = _mm512_srai_epi16(_mm512_add_epi16(x, _mm512_set1_epi16(64)), 7);
  const __m512i low = _mm512_sub_epi16(x, _mm512_slli_epi16(high, 7));
  // In 128-bit lane i the high parts of queries 2 i and 2 i + 1, then their low parts.
  const __m512i parts = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  _mm512_storeu_si512(rows, _mm512_permutexvar_epi32(parts, _mm512_packs_epi16(high, low)));
}
CPU_KERNELS_INLINE F unpack_lo64(F x, F y) {
  return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
}
CPU_KERNELS_INLINE F unpack_hi64(F x, F y) {
  return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
}
// to[column][row] = from[row][column], 16 x 16 elements of 4 bytes, rows `from_stride` and `to_stride` bytes apart.
CPU_KERNELS_INLINE void transpose16(const void* from, std::int64_t from_stride, void* to, std::int64_t to_stride) {
  const std::uint8_t* rows = static_cast<const std::uint8_t*>(from);
  std::uint8_t* columns = static_cast<std::uint8_t*>(to);
  F a[16], b[16];
  unroll<8>([&](auto i) CPU_KERNELS_LAMBDA {
    const F x = wide_load(rows + 2 * i * from_stride), y = wide_load(rows + (2 * i + 1) * from_stride);
    a[2 * i] = _mm512_unpacklo_ps(x, y);
    a[2 * i + 1] = _mm512_unpackhi_ps(x, y);
  });
  unroll<4>([&](auto i) CPU_KERNELS_LAMBDA {
    b[4 * i] = unpack_lo64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = unpack_hi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = unpack_lo64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = unpack_hi64(a[4 * i + 1], a[4 * i + 3]);
  });
  // 128-bit lane l of b[4 i + j] now holds column 4 l + j of rows 4 i to 4 i + 3.
  unroll<4>([&](auto j) CPU_KERNELS_LAMBDA {
    const F even_lo = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88), odd_lo = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd);
    const F even_hi = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88),
            odd_hi = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
    _mm512_storeu_ps(columns + j * to_stride, _mm512_shuffle_f32x4(even_lo, even_hi, 0x88));
    _mm512_storeu_ps(columns + (4 + j) * to_stride, _mm512_shuffle_f32x4(odd_lo, odd_hi, 0x88));
    _mm512_storeu_ps(columns + (8 + j) * to_stride, _mm512_shuffle_f32x4(even_lo, even_hi, 0xdd));
    _mm512_storeu_ps(columns + (12 + j) * to_stride, _mm512_shuffle_f32x4(odd_lo, odd_hi, 0xdd));
  });
}

#endif
