// Conversions of single elements. Included inside each instruction set's namespace and target region.

CPU_KERNELS_INLINE float to_float(float x) { return x; }

CPU_KERNELS_INLINE float to_float(bf16 x) {
  const std::uint32_t u = static_cast<std::uint32_t>(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

CPU_KERNELS_INLINE float to_float(f16 x) {
#if defined(CPU_KERNELS_HAVE_F16C)
  return _cvtsh_ss(x.bits);
#elif defined(__aarch64__)
  __fp16 h;
  std::memcpy(&h, &x.bits, 2);
  return h;
#else
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
  std::uint32_t u = rest << 13;
  float f;
  if (rest >= 0x7c00) {  // infinity, NaN
    u |= 0x7f800000;
    std::memcpy(&f, &u, 4);
  } else {  // the product is exact and handles subnormals too
    std::memcpy(&f, &u, 4);
    f *= 0x1p112f;
  }
  std::memcpy(&u, &f, 4);
  u |= sign;
  std::memcpy(&f, &u, 4);
  return f;
#endif
}

CPU_KERNELS_INLINE void from_float(float x, float* out) { *out = x; }

// Round to nearest even; NaN stays NaN.
CPU_KERNELS_INLINE void from_float(float x, bf16* out) {
  std::uint32_t u;
  std::memcpy(&u, &x, 4);
  const std::uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  out->bits = static_cast<std::uint16_t>((u & 0x7fffffff) > 0x7f800000 ? (u >> 16) | 0x40 : rounded);
}

CPU_KERNELS_INLINE void from_float(float x, f16* out) {
#if defined(CPU_KERNELS_HAVE_F16C)
  out->bits = static_cast<std::uint16_t>(_cvtss_sh(x, 0));
#elif defined(__aarch64__)
  const __fp16 h = static_cast<__fp16>(x);
  std::memcpy(&out->bits, &h, 2);
#else
  std::uint32_t u;
  std::memcpy(&u, &x, 4);
  const std::uint32_t sign = (u >> 16) & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) {
    out->bits = static_cast<std::uint16_t>(sign | 0x7e00);
  } else if (u >= 0x477ff000) {  // rounds to infinity
    out->bits = static_cast<std::uint16_t>(sign | 0x7c00);
  } else if (u >= 0x38800000) {
    u += 0xfff + ((u >> 13) & 1);
    out->bits = static_cast<std::uint16_t>(sign | ((u - 0x38000000) >> 13));
  } else {  // subnormal: adding 0.5 leaves the rounded value in the low bits
    float f;
    std::memcpy(&f, &u, 4);
    f += 0.5f;
    std::memcpy(&u, &f, 4);
    out->bits = static_cast<std::uint16_t>(sign | (u - 0x3f000000));
  }
#endif
}

// The nearest integer, ties to even, for |x| < 2^22: std::lrintf would be a call.
CPU_KERNELS_INLINE std::int32_t nearest(float x) {
  const float shifted = x + 0x1.8p23f;
  std::int32_t bits;
  std::memcpy(&bits, &shifted, 4);
  return bits - 0x4b400000;
}
