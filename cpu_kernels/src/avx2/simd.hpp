// AVX2 with FMA and F16C. Ports decide what is here: 16-bit elements become fp32 by one shift (even) or one mask (odd)
// instead of unpacking, which leaves the two FMA ports to the FMAs.

constexpr int kLanes = 8;
// Register blocks, of 16 registers; eight accumulators are what the FMA's latency and throughput ask for.
constexpr int score_tokens(int queries) { return queries == 1 ? 8 : queries == 2 ? 4 : 2; }
constexpr int value_vectors(int queries) { return queries == 1 ? 8 : queries == 2 ? 4 : 2; }
using F = __m256;
using I = __m256i;
struct Two {
  F a, b;
};
struct TwoI {
  I a, b;
};

CPU_KERNELS_INLINE F zero() { return _mm256_setzero_ps(); }
CPU_KERNELS_INLINE F set1(float x) { return _mm256_set1_ps(x); }
CPU_KERNELS_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
CPU_KERNELS_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x); }
// The same, but the compiler may not read it from memory once more for every use.
template <class V>
CPU_KERNELS_INLINE V in_register(V x) {
  __asm__("" : "+x"(x));
  return x;
}
CPU_KERNELS_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
CPU_KERNELS_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
CPU_KERNELS_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
CPU_KERNELS_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
CPU_KERNELS_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
CPU_KERNELS_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
CPU_KERNELS_INLINE F round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
CPU_KERNELS_INLINE F pow2n(F n) {
  const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
CPU_KERNELS_INLINE float reduce_max(F x) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
CPU_KERNELS_INLINE float reduce_add(F x) {
  __m128 m = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  m = _mm_add_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_add_ss(m, _mm_movehdup_ps(m)));
}

CPU_KERNELS_INLINE F to_f(F x) { return x; }
CPU_KERNELS_INLINE F to_f(I x) { return _mm256_cvtepi32_ps(x); }
CPU_KERNELS_INLINE I add(I a, I b) { return _mm256_add_epi32(a, b); }
template <int kControl>
CPU_KERNELS_INLINE F shuffle(F a, F b) {
  return _mm256_shuffle_ps(a, b, kControl);
}
template <int kControl>
CPU_KERNELS_INLINE I shuffle(I a, I b) {
  return _mm256_castps_si256(shuffle<kControl>(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b)));
}
template <int kMask>
CPU_KERNELS_INLINE F blend(F a, F b) {
  return _mm256_blend_ps(a, b, kMask);
}
template <int kMask>
CPU_KERNELS_INLINE I blend(I a, I b) {
  return _mm256_blend_epi32(a, b, kMask);
}
CPU_KERNELS_INLINE F swap_halves(F a, F b) { return _mm256_permute2f128_ps(a, b, 0x21); }
CPU_KERNELS_INLINE I swap_halves(I a, I b) { return _mm256_permute2x128_si256(a, b, 0x21); }

// Halves of a and b added: [a a b b] in each 128-bit lane. A blend takes the place of one of two shuffles.
template <class V>
CPU_KERNELS_INLINE V fold2(V a, V b) {
  return add(shuffle<0x4e>(a, b), blend<0xcc>(a, b));
}
// Lane i of the result is the sum of acc[i]'s lanes.
template <class V>
CPU_KERNELS_INLINE F reduce_rows(const V* acc) {
  const V ab = fold2(acc[0], acc[1]), cd = fold2(acc[2], acc[3]), ef = fold2(acc[4], acc[5]),
          gh = fold2(acc[6], acc[7]);
  const V abcd = add(shuffle<0x88>(ab, cd), shuffle<0xdd>(ab, cd));
  const V efgh = add(shuffle<0x88>(ef, gh), shuffle<0xdd>(ef, gh));
  return to_f(add(swap_halves(abcd, efgh), blend<0xf0>(abcd, efgh)));
}

// s[g][t] = sum of acc[g][t]'s lanes.
template <int Q, int kTokens, class V>
CPU_KERNELS_INLINE void reduce_store(const V* acc, float* s) {
  const F sums = reduce_rows(acc);
  const __m128 lo = _mm256_castps256_ps128(sums), hi = _mm256_extractf128_ps(sums, 1);
  if constexpr (Q == 1) {
    store(s, sums);
  } else if constexpr (Q == 2) {
    _mm_storeu_ps(s, lo);
    _mm_storeu_ps(s + kTile, hi);
  } else {
    _mm_storel_pi(reinterpret_cast<__m64*>(s), lo);
    _mm_storeh_pi(reinterpret_cast<__m64*>(s + kTile), lo);
    _mm_storel_pi(reinterpret_cast<__m64*>(s + 2 * kTile), hi);
    _mm_storeh_pi(reinterpret_cast<__m64*>(s + 3 * kTile), hi);
  }
}

CPU_KERNELS_INLINE __m256i load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
CPU_KERNELS_INLINE __m128i load_half_bits(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

// True: load_split gives even and odd elements; false: first and second half.
constexpr bool splits_odd_even(Type type) { return type == Type::bf16; }
CPU_KERNELS_INLINE Two load_split(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
CPU_KERNELS_INLINE Two load_split(const bf16* p) {
  const __m256i x = load_bits(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000))))};
}
CPU_KERNELS_INLINE Two load_split(const f16* p) {
  return {_mm256_cvtph_ps(load_half_bits(p)), _mm256_cvtph_ps(load_half_bits(p + 8))};
}
CPU_KERNELS_INLINE F load_natural(const float* p) { return _mm256_loadu_ps(p); }
CPU_KERNELS_INLINE F load_natural(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half_bits(p)), 16));
}
CPU_KERNELS_INLINE F load_natural(const f16* p) { return _mm256_cvtph_ps(load_half_bits(p)); }
// kLanes dims of two tokens: even elements are the first token's.
CPU_KERNELS_INLINE Two load_pair(const bf16* p) { return load_split(p); }
CPU_KERNELS_INLINE Two load_pair(const f16* p) {
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9, 12, 13,
                                         2, 3, 6, 7, 10, 11, 14, 15);
  const __m256i x = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(load_bits(p), order), 0xd8);
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(x)), _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}

CPU_KERNELS_INLINE I izero() { return _mm256_setzero_si256(); }
CPU_KERNELS_INLINE I iload(const std::int16_t* p) { return load_bits(p); }
CPU_KERNELS_INLINE I ibroadcast(const std::int16_t* p) {
  int pair;
  std::memcpy(&pair, p, 4);
  return _mm256_set1_epi32(pair);
}
// In this order, or GCC adds the products of both halves first, and runs out of registers.
CPU_KERNELS_INLINE I madd16(I a, I b, I c) { return in_register(_mm256_add_epi32(c, _mm256_madd_epi16(a, b))); }
// 4 * kLanes bytes as int16, first and second half.
CPU_KERNELS_INLINE TwoI load_split8(const std::int8_t* p) {
  return {_mm256_cvtepi8_epi16(load_half_bits(p)), _mm256_cvtepi8_epi16(load_half_bits(p + 16))};
}
// The same for 16 bytes and zeros after them.
CPU_KERNELS_INLINE TwoI load_split8_part(const std::int8_t* p, int) {
  return {_mm256_cvtepi8_epi16(load_half_bits(p)), izero()};
}
// kLanes dims of four tokens: tokens 0 and 2, tokens 1 and 3.
CPU_KERNELS_INLINE TwoI load_quads8(const std::int8_t* p) {
  const I x = load_bits(p);
  return {_mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), _mm256_srai_epi16(x, 8)};
}
// 16 weights times `inverse`, rounded, each group of four in the order 0, 2, 1, 3.
CPU_KERNELS_INLINE void store_weights16(const float* p, F inverse, std::int16_t* out) {
  const __m256i a = _mm256_cvtps_epi32(mul(load(p), inverse)), b = _mm256_cvtps_epi32(mul(load(p + 8), inverse));
  const __m256i x = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
  const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15, 0, 1, 4, 5, 2, 3, 6, 7,
                                         8, 9, 12, 13, 10, 11, 14, 15);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_shuffle_epi8(x, order));
}
