// bf16 dot products: two tokens or two dims in every 32-bit lane are multiplied and added at once, in fp32. Queries and
// weights are rounded to bf16, which keeps this from being as exact as fp32 arithmetic; it pays when many queries share
// the keys and values. Included after generic/attend.hpp inside an instruction set that has AVX512_BF16.

CPU_KERNELS_INLINE __m512bh load_bf16(const void* p) { return (__m512bh)_mm512_loadu_si512(p); }

// kLanes floats to bf16, the first element in the lowest bits.
CPU_KERNELS_INLINE __m512bh round_bf16(const float* p) { return _mm512_cvtne2ps_pbh(load(p + 16), load(p)); }

struct DotArithmetic {
  static constexpr bool kTokenScales = false, kOwnSoftmax = false;

  static int query_stride(int head_dim) { return round_up(head_dim, 2 * kLanes); }

  // Queries as bf16 in natural order, zeros after the last dim.
  static void prepare(const AttendShape& s, const Segment& seg, Work& w) {
    const int d = s.layout.head_dim, stride = query_stride(d);
    alignas(64) float natural[512];
    for (int i = d; i < stride; ++i) natural[i] = 0.f;
    for (int i = 0; i < seg.queries; ++i) {
      read_query(s, seg, i, natural);
      std::uint16_t* q = reinterpret_cast<std::uint16_t*>(w.queries) + i * stride;
      for (int c = 0; c < stride; c += 32) _mm512_storeu_si512(q + c, (__m512i)round_bf16(natural + c));
    }
  }

  template <int Q>
  static void scores_of(const Rows& r, const std::uint16_t* q, int stride, int head_dim, float* s, Ahead& ahead) {
    constexpr int kTokens = score_tokens(Q);
    for (int t = r.lo(); t < r.n; t += kTokens) {
      const Lines lines = ahead.take(kTokens * head_dim * 2);
      F acc[Q * kTokens];
      unroll<Q * kTokens>([&](auto i) CPU_KERNELS_LAMBDA { acc[i] = zero(); });
      const std::uint8_t* const* k = r.k + t;
      for (int d = 0; d < head_dim; d += 32) {
        const bool whole = head_dim - d >= 32;
        const __mmask16 mask = whole ? 0xffff : 0xff;
        if (whole)
          lines.prefetch<64 * kTokens>(d * 2 * kTokens);
        else
          lines.prefetch<32 * kTokens>(d * 2 * kTokens);
        const auto keys = [&](auto i)
                              CPU_KERNELS_LAMBDA { return (__m512bh)_mm512_maskz_loadu_epi32(mask, k[i] + 2 * d); };
        if constexpr (Q <= 2) {  // few queries stay in registers, and keys pass by
          __m512bh x[Q];
          unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA { x[g] = load_bf16(q + g * stride + d); });
          unroll<kTokens>([&](auto i) CPU_KERNELS_LAMBDA {
            const __m512bh y = keys(i);
            unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
              acc[g * kTokens + i] = _mm512_dpbf16_ps(acc[g * kTokens + i], y, x[g]);
            });
          });
        } else {
          __m512bh y[kTokens];
          unroll<kTokens>([&](auto i) CPU_KERNELS_LAMBDA { y[i] = keys(i); });
          unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
            const __m512bh x = load_bf16(q + g * stride + d);
            unroll<kTokens>([&](auto i) CPU_KERNELS_LAMBDA {
              acc[g * kTokens + i] = _mm512_dpbf16_ps(acc[g * kTokens + i], y[i], x);
            });
          });
        }
      }
      reduce_store<Q, kTokens>(acc, s + t);
    }
  }

  static void scores(const AttendShape& s, const Segment& seg, const Rows& r, Work& w, Ahead& ahead) {
    const int d = s.layout.head_dim, stride = query_stride(d);
    for_query_blocks(seg.queries, [&](int g, auto count) CPU_KERNELS_LAMBDA {
      scores_of<count>(r, reinterpret_cast<const std::uint16_t*>(w.queries) + g * stride, stride, d, w.s[g], ahead);
    });
  }

  // Weights as bf16, in w.w16 and in token order: neighbours are the two tokens of a pair.
  static CPU_KERNELS_INLINE void round_weights(const Rows& r, int queries, Work& w) {
    for (int g = 0; g < queries; ++g) {
      const int lo = r.lo() & ~31;
      for (int t = lo; t < r.lo(); ++t) w.s[g][t] = 0.f;
      for (int t = r.hi(); t & 31; ++t) w.s[g][t] = 0.f;
      for (int t = lo; t < r.hi(); t += 32) _mm512_storeu_si512(&w.w16[g][t], (__m512i)round_bf16(&w.s[g][t]));
    }
  }

  struct Values {
    const Rows& r;
    int first, n;
    const std::int16_t (*p)[kTile];
    float* o;
    int head_dim;
    Ahead& ahead;
    template <int Q, int kVectors>
    CPU_KERNELS_INLINE void run(int d) const {
      F acc[Q * kVectors];
      load_sums<Q, kVectors>(acc, o + d, head_dim);
      const Lines lines = ahead.take((n - first) * kVectors * kLanes * 2);
      const int pairs = (n + 1) / 2;
      for (int i = first / 2; i < pairs; ++i) {
        lines.prefetch<64 * kVectors>((i - first / 2) * 64 * kVectors);
        const std::uint8_t* v = r.v[i] + 4 * d;
        __m512bh x[kVectors];
        unroll<kVectors>([&](auto j) CPU_KERNELS_LAMBDA { x[j] = load_bf16(v + 64 * j); });
        if (2 * i + 1 == n)  // the pair's other token is no token: its bytes may be NaN
          unroll<kVectors>([&](auto j) CPU_KERNELS_LAMBDA {
            x[j] = (__m512bh)_mm512_and_si512((__m512i)x[j], _mm512_set1_epi32(0xffff));
          });
        unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
          const __m512bh weight = (__m512bh)ibroadcast(p[0] + g * kTile + 2 * i);
          unroll<kVectors>([&](auto j) CPU_KERNELS_LAMBDA {
            acc[g * kVectors + j] = _mm512_dpbf16_ps(acc[g * kVectors + j], x[j], weight);
          });
        });
      }
      store_sums<Q, kVectors>(acc, o + d, head_dim);
    }
  };

  template <int Q>
  static void values_of(const Values& block) {
    value_passes<Values, Q, value_vectors(Q)>(block, block.head_dim, 0);
  }

  static void values(const AttendShape& s, const Segment& seg, const Rows& r, Work& w, Ahead& ahead) {
    const int d = s.layout.head_dim;
    round_weights(r, seg.queries, w);
    rescale(w.alpha, seg.queries, d, seg.o);
    for (int t = r.lo(); t < r.n; t += kValueTokens) {
      const int first = t > r.first ? t : r.first, n = t + kValueTokens < r.n ? t + kValueTokens : r.n;
      for_query_blocks(seg.queries, [&](int g, auto count) CPU_KERNELS_LAMBDA {
        values_of<count>({r, first, n, w.w16 + g, seg.o + g * d, d, ahead});
      });
    }
  }
};
