// Arm NEON as every 64-bit Arm CPU has it.

constexpr int kLanes = 4;
// Register blocks, of 32 registers; as many accumulators as four FMA pipes with a latency of four want.
constexpr int score_tokens(int queries) { return queries == 1 ? 16 : queries == 2 ? 8 : 4; }
constexpr int value_vectors(int queries) { return queries == 1 ? 8 : 4; }
using F = float32x4_t;
using I = int32x4_t;
struct Two {
  F a, b;
};
struct TwoI {
  I a, b;
};

CPU_KERNELS_INLINE F zero() { return vdupq_n_f32(0.f); }
CPU_KERNELS_INLINE F set1(float x) { return vdupq_n_f32(x); }
CPU_KERNELS_INLINE F load(const float* p) { return vld1q_f32(p); }
CPU_KERNELS_INLINE void store(float* p, F x) { vst1q_f32(p, x); }
template <class V>
CPU_KERNELS_INLINE V in_register(V x) {
  return x;
}
CPU_KERNELS_INLINE F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
CPU_KERNELS_INLINE F add(F a, F b) { return vaddq_f32(a, b); }
CPU_KERNELS_INLINE F sub(F a, F b) { return vsubq_f32(a, b); }
CPU_KERNELS_INLINE F mul(F a, F b) { return vmulq_f32(a, b); }
CPU_KERNELS_INLINE F div(F a, F b) { return vdivq_f32(a, b); }
CPU_KERNELS_INLINE F max(F a, F b) { return vmaxq_f32(a, b); }
CPU_KERNELS_INLINE F round(F x) { return vrndnq_f32(x); }
CPU_KERNELS_INLINE F pow2n(F n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}
CPU_KERNELS_INLINE float reduce_max(F x) { return vmaxvq_f32(x); }
CPU_KERNELS_INLINE float reduce_add(F x) { return vaddvq_f32(x); }

// Lane i of the result is the sum of acc[i]'s lanes.
CPU_KERNELS_INLINE F reduce_rows(const F* acc) {
  return vpaddq_f32(vpaddq_f32(acc[0], acc[1]), vpaddq_f32(acc[2], acc[3]));
}
CPU_KERNELS_INLINE F reduce_rows(const I* acc) {
  return vcvtq_f32_s32(vpaddq_s32(vpaddq_s32(acc[0], acc[1]), vpaddq_s32(acc[2], acc[3])));
}
// s[g][t] = sum of acc[g][t]'s lanes.
template <int Q, int kTokens, class V>
CPU_KERNELS_INLINE void reduce_store(const V* acc, float* s) {
  static_assert(kTokens % 4 == 0, "");
  unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
    unroll<kTokens / 4>(
        [&](auto i) CPU_KERNELS_LAMBDA { store(s + g * kTile + 4 * i, reduce_rows(acc + g * kTokens + 4 * i)); });
  });
}

// True: load_split gives even and odd elements; false: first and second half.
constexpr bool splits_odd_even(Type type) { return type == Type::bf16 || type == Type::i8; }
CPU_KERNELS_INLINE uint32x4_t load_bits(const void* p) {
  return vreinterpretq_u32_u8(vld1q_u8(static_cast<const std::uint8_t*>(p)));
}
CPU_KERNELS_INLINE float16x4_t load_f16(const f16* p) {
  return vreinterpret_f16_u8(vld1_u8(reinterpret_cast<const std::uint8_t*>(p)));
}
CPU_KERNELS_INLINE Two load_split(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
CPU_KERNELS_INLINE Two load_split(const bf16* p) {
  const uint32x4_t x = load_bits(p);
  return {vreinterpretq_f32_u32(vshlq_n_u32(x, 16)), vreinterpretq_f32_u32(vandq_u32(x, vdupq_n_u32(0xffff0000)))};
}
CPU_KERNELS_INLINE Two load_split(const f16* p) { return {vcvt_f32_f16(load_f16(p)), vcvt_f32_f16(load_f16(p + 4))}; }
CPU_KERNELS_INLINE F load_natural(const float* p) { return vld1q_f32(p); }
CPU_KERNELS_INLINE F load_natural(const bf16* p) {
  const uint16x4_t x = vreinterpret_u16_u8(vld1_u8(reinterpret_cast<const std::uint8_t*>(p)));
  return vreinterpretq_f32_u32(vshll_n_u16(x, 16));
}
CPU_KERNELS_INLINE F load_natural(const f16* p) { return vcvt_f32_f16(load_f16(p)); }
// kLanes dims of two tokens: even elements are the first token's.
CPU_KERNELS_INLINE Two load_pair(const bf16* p) { return load_split(p); }
CPU_KERNELS_INLINE Two load_pair(const f16* p) {
  const uint16x8_t x = vreinterpretq_u16_u32(load_bits(p));
  return {vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(vuzp1q_u16(x, x)))),
          vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(vuzp2q_u16(x, x))))};
}

CPU_KERNELS_INLINE I izero() { return vdupq_n_s32(0); }
CPU_KERNELS_INLINE I iload(const std::int16_t* p) { return vreinterpretq_s32_s16(vld1q_s16(p)); }
CPU_KERNELS_INLINE I ibroadcast(const std::int16_t* p) {
  std::int32_t pair;
  std::memcpy(&pair, p, 4);
  return vdupq_n_s32(pair);
}
// Lane i of a and b holds two int16; the lane order of the sums does not matter to scores but does to values, so
// products of neighbours are added.
CPU_KERNELS_INLINE I madd16(I a, I b, I c) {
  const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
  const int32x4_t lo = vmull_s16(vget_low_s16(x), vget_low_s16(y)), hi = vmull_high_s16(x, y);
  return vaddq_s32(c, vpaddq_s32(lo, hi));
}
CPU_KERNELS_INLINE F to_f(I a) { return vcvtq_f32_s32(a); }
// 4 * kLanes bytes: even bytes and odd bytes as int16.
CPU_KERNELS_INLINE TwoI load_split8(const std::int8_t* p) {
  const int16x8_t x = vreinterpretq_s16_s8(vld1q_s8(p));
  return {vreinterpretq_s32_s16(vshrq_n_s16(vshlq_n_s16(x, 8), 8)), vreinterpretq_s32_s16(vshrq_n_s16(x, 8))};
}
// kLanes dims of four tokens: tokens 0 and 2, tokens 1 and 3.
CPU_KERNELS_INLINE TwoI load_quads8(const std::int8_t* p) { return load_split8(p); }
// 16 weights times `inverse`, rounded, each group of four in the order 0, 2, 1, 3.
CPU_KERNELS_INLINE void store_weights16(const float* p, F inverse, std::int16_t* out) {
  for (int i = 0; i < 16; i += 4) {
    const int16x4_t x = vmovn_s32(vcvtnq_s32_f32(mul(load(p + i), inverse)));
    const uint8x8_t order = {0, 1, 4, 5, 2, 3, 6, 7};
    vst1_s16(out + i, vreinterpret_s16_u8(vtbl1_u8(vreinterpret_u8_s16(x), order)));
  }
}
