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
// C[m][n] += A[m][2 k] B[k][2 n] + A[m][2 k + 1] B[k][2 n + 1], in fp32.
template <int kC, int kA, int kB>
inline void tile_dot_bf16() {
  SoftTiles& s = soft_tiles();
  const int rows = s.shapes.rows[kC], columns = s.shapes.row_bytes[kC] / 4, inner = s.shapes.row_bytes[kA] / 4;
  if (s.shapes.rows[kA] != rows || s.shapes.row_bytes[kB] != 4 * columns || s.shapes.rows[kB] != inner)
    __builtin_trap();  // the processor would fault too
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

// 32 floats to bf16.
inline void round_bf16_32(const float* from, std::uint16_t* to) {
  for (int i = 0; i < 32; ++i) {
    bf16 x;
    from_float(from[i], &x);
    to[i] = x.bits;
  }
}
// to[column][row] = from[row][column] for 16 rows of 16 and the first `columns` columns.
inline void transpose16(const float* from, float* to, int to_stride, int columns) {
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < columns; ++column) to[column * to_stride + row] = from[16 * row + column];
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

CPU_KERNELS_INLINE void round_bf16_32(const float* from, std::uint16_t* to) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + 16), _mm512_loadu_ps(from)));
}
CPU_KERNELS_INLINE F unpack_lo64(F x, F y) {
  return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
}
CPU_KERNELS_INLINE F unpack_hi64(F x, F y) {
  return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
}
CPU_KERNELS_INLINE void transpose16(const float* from, float* to, int to_stride, int columns) {
  F a[16], b[16];
  unroll<8>([&](auto i) CPU_KERNELS_LAMBDA {
    const F x = load(from + 32 * i), y = load(from + 32 * i + 16);
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
    if (j < columns) store(to + j * to_stride, _mm512_shuffle_f32x4(even_lo, even_hi, 0x88));
    if (4 + j < columns) store(to + (4 + j) * to_stride, _mm512_shuffle_f32x4(odd_lo, odd_hi, 0x88));
    if (8 + j < columns) store(to + (8 + j) * to_stride, _mm512_shuffle_f32x4(even_lo, even_hi, 0xdd));
    if (12 + j < columns) store(to + (12 + j) * to_stride, _mm512_shuffle_f32x4(odd_lo, odd_hi, 0xdd));
  });
}

#endif
