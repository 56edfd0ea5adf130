// One lane: the reference that every instruction set is compared with, and the fallback everywhere.

constexpr int kLanes = 1;
// Register blocks: tokens whose scores and vectors of dims whose sums are computed at once, for so many queries.
constexpr int score_tokens(int queries) { return queries <= 2 ? 4 / queries : 1; }
constexpr int value_vectors(int) { return 8; }
using F = float;
using I = std::int32_t;  // holds two int16, or one int32
struct Two {
  F a, b;
};
struct TwoI {
  I a, b;
};

CPU_KERNELS_INLINE F zero() { return 0.f; }
CPU_KERNELS_INLINE F set1(float x) { return x; }
CPU_KERNELS_INLINE F load(const float* p) { return *p; }
CPU_KERNELS_INLINE void store(float* p, F x) { *p = x; }
template <class V>
CPU_KERNELS_INLINE V in_register(V x) {
  return x;
}
CPU_KERNELS_INLINE F fma(F a, F b, F c) { return a * b + c; }
CPU_KERNELS_INLINE F add(F a, F b) { return a + b; }
CPU_KERNELS_INLINE F sub(F a, F b) { return a - b; }
CPU_KERNELS_INLINE F mul(F a, F b) { return a * b; }
CPU_KERNELS_INLINE F div(F a, F b) { return a / b; }
CPU_KERNELS_INLINE F max(F a, F b) { return a > b ? a : b; }
CPU_KERNELS_INLINE F round(F x) { return std::nearbyint(x); }
CPU_KERNELS_INLINE F pow2n(F n) {
  const std::int32_t bits = (static_cast<std::int32_t>(n) + 127) << 23;
  F r;
  std::memcpy(&r, &bits, 4);
  return r;
}
CPU_KERNELS_INLINE float reduce_max(F x) { return x; }
CPU_KERNELS_INLINE float reduce_add(F x) { return x; }
// s[g][t] = sum of acc[g][t]'s lanes.
template <int Q, int kTokens, class V>
CPU_KERNELS_INLINE void reduce_store(const V* acc, float* s) {
  for (int g = 0; g < Q; ++g)
    for (int t = 0; t < kTokens; ++t) s[g * kTile + t] = static_cast<float>(acc[g * kTokens + t]);
}

CPU_KERNELS_INLINE Two load_split(const float* p) { return {p[0], p[1]}; }
CPU_KERNELS_INLINE Two load_split(const bf16* p) { return {to_float(p[0]), to_float(p[1])}; }
CPU_KERNELS_INLINE Two load_split(const f16* p) { return {to_float(p[0]), to_float(p[1])}; }
template <class T>
CPU_KERNELS_INLINE F load_natural(const T* p) {
  return to_float(*p);
}
CPU_KERNELS_INLINE Two load_pair(const bf16* p) { return {to_float(p[0]), to_float(p[1])}; }
CPU_KERNELS_INLINE Two load_pair(const f16* p) { return {to_float(p[0]), to_float(p[1])}; }
// True: load_split gives even and odd elements; false: first and second half. Equal for one lane.
constexpr bool splits_odd_even(Type) { return true; }

CPU_KERNELS_INLINE I izero() { return 0; }
CPU_KERNELS_INLINE I pack16(int a, int b) {
  return static_cast<I>((static_cast<std::uint32_t>(b) << 16) | (static_cast<std::uint32_t>(a) & 0xffff));
}
CPU_KERNELS_INLINE I iload(const std::int16_t* p) { return pack16(p[0], p[1]); }
CPU_KERNELS_INLINE I ibroadcast(const std::int16_t* p) { return pack16(p[0], p[1]); }
CPU_KERNELS_INLINE I madd16(I a, I b, I c) {
  return c + static_cast<std::int16_t>(a & 0xffff) * static_cast<std::int16_t>(b & 0xffff) +
         static_cast<std::int16_t>(a >> 16) * static_cast<std::int16_t>(b >> 16);
}
CPU_KERNELS_INLINE F to_f(I a) { return static_cast<F>(a); }
// 4 * kLanes bytes: even bytes and odd bytes as int16.
CPU_KERNELS_INLINE TwoI load_split8(const std::int8_t* p) { return {pack16(p[0], p[2]), pack16(p[1], p[3])}; }
// kLanes dims of four tokens: tokens 0 and 2, tokens 1 and 3.
CPU_KERNELS_INLINE TwoI load_quads8(const std::int8_t* p) { return load_split8(p); }
// 16 weights times `inverse`, rounded, each group of four in the order 0, 2, 1, 3.
CPU_KERNELS_INLINE void store_weights16(const float* p, F inverse, std::int16_t* out) {
  for (int i = 0; i < 16; ++i)
    out[(i & ~3) + (i & 1) * 2 + ((i >> 1) & 1)] = static_cast<std::int16_t>(std::nearbyint(p[i] * inverse));
}

// Bytes, 4 of them. dot8 adds to c the products of a's unsigned and b's signed bytes.
CPU_KERNELS_INLINE I load8(const std::uint8_t* p) {
  I x;
  std::memcpy(&x, p, 4);
  return x;
}
CPU_KERNELS_INLINE I broadcast8(const std::uint8_t* p) { return load8(p); }
CPU_KERNELS_INLINE I plus128(I x) { return x ^ static_cast<I>(0x80808080); }
CPU_KERNELS_INLINE I dot8(I a, I b, I c) {
  for (int i = 0; i < 32; i += 8) c += static_cast<std::uint8_t>(a >> i) * static_cast<std::int8_t>(b >> i);
  return c;
}
// 16 weights times `inverse`, rounded.
CPU_KERNELS_INLINE void store_weights8(const float* p, F inverse, std::uint8_t* out) {
  for (int i = 0; i < 16; ++i) out[i] = static_cast<std::uint8_t>(std::nearbyint(p[i] * inverse));
}
