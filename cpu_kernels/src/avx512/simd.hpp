// AVX-512 F, BW, DQ, VL and VNNI. The same ideas as for AVX2, with twice the lanes and twice the registers.

constexpr int kLanes = 16;
// Register blocks, of 32 registers.
constexpr int score_tokens(int queries) { return queries == 1 ? 16 : queries == 2 ? 8 : 4; }
constexpr int value_vectors(int queries) { return queries == 1 ? 8 : 4; }
using F = __m512;
using I = __m512i;
struct Two {
  F a, b;
};
struct TwoI {
  I a, b;
};

CPU_KERNELS_INLINE F zero() { return _mm512_setzero_ps(); }
CPU_KERNELS_INLINE F set1(float x) { return _mm512_set1_ps(x); }
CPU_KERNELS_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
CPU_KERNELS_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
// The same, but the compiler may not read it from memory once more for every use.
template <class V>
CPU_KERNELS_INLINE V in_register(V x) {
  __asm__("" : "+v"(x));
  return x;
}
CPU_KERNELS_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
CPU_KERNELS_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
CPU_KERNELS_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
CPU_KERNELS_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
CPU_KERNELS_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
CPU_KERNELS_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
CPU_KERNELS_INLINE F round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
CPU_KERNELS_INLINE F pow2n(F n) {
  const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(e, 23));
}
CPU_KERNELS_INLINE float reduce_max(F x) { return _mm512_reduce_max_ps(x); }
CPU_KERNELS_INLINE float reduce_add(F x) { return _mm512_reduce_add_ps(x); }

CPU_KERNELS_INLINE F to_f(F x) { return x; }
CPU_KERNELS_INLINE F to_f(I x) { return _mm512_cvtepi32_ps(x); }
CPU_KERNELS_INLINE I add(I a, I b) { return _mm512_add_epi32(a, b); }
CPU_KERNELS_INLINE F unpack_lo(F a, F b) { return _mm512_unpacklo_ps(a, b); }
CPU_KERNELS_INLINE I unpack_lo(I a, I b) { return _mm512_unpacklo_epi32(a, b); }
CPU_KERNELS_INLINE F unpack_hi(F a, F b) { return _mm512_unpackhi_ps(a, b); }
CPU_KERNELS_INLINE I unpack_hi(I a, I b) { return _mm512_unpackhi_epi32(a, b); }
template <int kControl>
CPU_KERNELS_INLINE F shuffle(F a, F b) {
  return _mm512_shuffle_ps(a, b, kControl);
}
template <int kControl>
CPU_KERNELS_INLINE I shuffle(I a, I b) {
  return _mm512_castps_si512(shuffle<kControl>(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
}
template <int kControl>
CPU_KERNELS_INLINE F shuffle_quarters(F a, F b) {
  return _mm512_shuffle_f32x4(a, b, kControl);
}
template <int kControl>
CPU_KERNELS_INLINE I shuffle_quarters(I a, I b) {
  return _mm512_shuffle_i32x4(a, b, kControl);
}

// In each 128-bit lane, the sums of that lane of a, b, c and d.
template <class V>
CPU_KERNELS_INLINE V fold4(V a, V b, V c, V d) {
  const V ab = add(unpack_lo(a, b), unpack_hi(a, b)), cd = add(unpack_lo(c, d), unpack_hi(c, d));
  return add(shuffle<0x44>(ab, cd), shuffle<0xee>(ab, cd));
}
// Lane i of the result is the sum of acc[i]'s lanes.
template <class V>
CPU_KERNELS_INLINE F reduce_rows(const V* acc) {
  const V a = fold4(acc[0], acc[1], acc[2], acc[3]), b = fold4(acc[4], acc[5], acc[6], acc[7]),
          c = fold4(acc[8], acc[9], acc[10], acc[11]), d = fold4(acc[12], acc[13], acc[14], acc[15]);
  const V ab = add(shuffle_quarters<0x88>(a, b), shuffle_quarters<0xdd>(a, b));
  const V cd = add(shuffle_quarters<0x88>(c, d), shuffle_quarters<0xdd>(c, d));
  return to_f(add(shuffle_quarters<0x88>(ab, cd), shuffle_quarters<0xdd>(ab, cd)));
}
// s[g][t] = sum of acc[g][t]'s lanes.
template <int Q, int kTokens, class V>
CPU_KERNELS_INLINE void reduce_store(const V* acc, float* s) {
  const F sums = reduce_rows(acc);
  if constexpr (Q == 1) {
    store(s, sums);
  } else if constexpr (Q == 2) {
    _mm256_storeu_ps(s, _mm512_castps512_ps256(sums));
    _mm256_storeu_ps(s + kTile, _mm512_extractf32x8_ps(sums, 1));
  } else {
    _mm_storeu_ps(s, _mm512_castps512_ps128(sums));
    _mm_storeu_ps(s + kTile, _mm512_extractf32x4_ps(sums, 1));
    _mm_storeu_ps(s + 2 * kTile, _mm512_extractf32x4_ps(sums, 2));
    _mm_storeu_ps(s + 3 * kTile, _mm512_extractf32x4_ps(sums, 3));
  }
}

CPU_KERNELS_INLINE __m512i load_bits(const void* p) { return _mm512_loadu_si512(p); }
CPU_KERNELS_INLINE __m256i load_half_bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// True: load_split gives even and odd elements; false: first and second half.
constexpr bool splits_odd_even(Type type) { return type == Type::bf16 || type == Type::i8; }
CPU_KERNELS_INLINE Two split_bf16(__m512i x) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
          _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
}
CPU_KERNELS_INLINE Two load_split(const float* p) { return {_mm512_loadu_ps(p), _mm512_loadu_ps(p + 16)}; }
CPU_KERNELS_INLINE Two load_split(const bf16* p) { return split_bf16(load_bits(p)); }
CPU_KERNELS_INLINE Two load_split(const f16* p) {
  return {_mm512_cvtph_ps(load_half_bits(p)), _mm512_cvtph_ps(load_half_bits(p + 16))};
}
// kLanes elements followed by zeros.
CPU_KERNELS_INLINE Two load_split_half(const float* p) { return {_mm512_loadu_ps(p), zero()}; }
CPU_KERNELS_INLINE Two load_split_half(const bf16* p) { return split_bf16(_mm512_zextsi256_si512(load_half_bits(p))); }
CPU_KERNELS_INLINE Two load_split_half(const f16* p) { return {_mm512_cvtph_ps(load_half_bits(p)), zero()}; }
CPU_KERNELS_INLINE F load_natural(const float* p) { return _mm512_loadu_ps(p); }
CPU_KERNELS_INLINE F load_natural(const bf16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_half_bits(p)), 16));
}
CPU_KERNELS_INLINE F load_natural(const f16* p) { return _mm512_cvtph_ps(load_half_bits(p)); }
// kLanes dims of two tokens: even elements are the first token's.
CPU_KERNELS_INLINE Two load_pair(const bf16* p) { return load_split(p); }
CPU_KERNELS_INLINE Two load_pair(const f16* p) {
  const __m512i x = load_bits(p);  // truncation keeps the even elements
  return {_mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)), _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(x, 16)))};
}

CPU_KERNELS_INLINE I izero() { return _mm512_setzero_si512(); }
CPU_KERNELS_INLINE I iload(const std::int16_t* p) { return load_bits(p); }
CPU_KERNELS_INLINE I ibroadcast(const std::int16_t* p) {
  int pair;
  std::memcpy(&pair, p, 4);
  return _mm512_set1_epi32(pair);
}
CPU_KERNELS_INLINE I madd16(I a, I b, I c) { return _mm512_dpwssd_epi32(c, a, b); }
CPU_KERNELS_INLINE TwoI split8(__m512i x) {
  return {_mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8), _mm512_srai_epi16(x, 8)};
}
// 4 * kLanes bytes: even bytes and odd bytes as int16.
CPU_KERNELS_INLINE TwoI load_split8(const std::int8_t* p) { return split8(load_bits(p)); }
// The same for `bytes` < 4 * kLanes bytes (a multiple of 16) and zeros after them.
CPU_KERNELS_INLINE TwoI load_split8_part(const std::int8_t* p, int bytes) {
  return split8(_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << (bytes / 4)) - 1), p));
}
// kLanes dims of four tokens: tokens 0 and 2, tokens 1 and 3.
CPU_KERNELS_INLINE TwoI load_quads8(const std::int8_t* p) { return load_split8(p); }
// 16 weights times `inverse`, rounded, each group of four in the order 0, 2, 1, 3.
CPU_KERNELS_INLINE void store_weights16(const float* p, F inverse, std::int16_t* out) {
  const __m256i x = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(mul(load(p), inverse)));
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2, 3, 6, 7,
                                         8, 9, 12, 13, 10, 11, 14, 15);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_shuffle_epi8(x, order));
}

// Bytes, 4 * kLanes of them. dot8 adds to each lane of c its four products of a's unsigned and b's signed bytes.
CPU_KERNELS_INLINE I load8(const std::uint8_t* p) { return load_bits(p); }
CPU_KERNELS_INLINE I load8_part(const std::uint8_t* p, int bytes) {
  return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << (bytes / 4)) - 1), p);
}
CPU_KERNELS_INLINE I broadcast8(const std::uint8_t* p) {
  int quad;
  std::memcpy(&quad, p, 4);
  return _mm512_set1_epi32(quad);
}
CPU_KERNELS_INLINE I plus128(I x) { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }
CPU_KERNELS_INLINE I dot8(I a, I b, I c) { return _mm512_dpbusd_epi32(c, a, b); }
// 16 weights times `inverse`, rounded.
CPU_KERNELS_INLINE void store_weights8(const float* p, F inverse, std::uint8_t* out) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(mul(load(p), inverse))));
}
