// 8-bit arithmetic on int8 keys and values, for instruction sets with dot products of unsigned and signed bytes (dot8
// in simd.hpp): queries are rounded to 8 bits per query, weights to 8 bits per tile. Half the work of 16-bit
// arithmetic, and less exact. Included after attend.hpp.

template <int Q>
CPU_KERNELS_INLINE void byte_scores_block(const std::uint8_t* const* rows, const std::uint8_t* q, int q_stride,
                                          int head_dim, float* s, Lines ahead) {
  constexpr int kTokens = score_tokens(Q), kBytes = 4 * kLanes;
  I acc[Q * kTokens];
  const std::uint8_t* k[kTokens];
  unroll<kTokens>([&](auto t) CPU_KERNELS_LAMBDA { k[t] = rows[t]; });
  unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
    const I bias = load8(q + g * q_stride);
    unroll<kTokens>([&](auto t) CPU_KERNELS_LAMBDA { acc[g * kTokens + t] = bias; });
  });
  q += kBytes;
  const auto step = [&](int d, const auto& load_keys) CPU_KERNELS_LAMBDA {
    if constexpr (Q <= 2) {  // few queries stay in registers, and keys pass by
      I x[Q];
      unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA { x[g] = in_register(load8(q + g * q_stride + d)); });
      unroll<kTokens>([&](auto t) CPU_KERNELS_LAMBDA {
        const I y = plus128(load_keys(k[t] + d));
        unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA { acc[g * kTokens + t] = dot8(y, x[g], acc[g * kTokens + t]); });
      });
    } else {
      I y[kTokens];
      unroll<kTokens>([&](auto t) CPU_KERNELS_LAMBDA { y[t] = plus128(load_keys(k[t] + d)); });
      unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
        const I x = in_register(load8(q + g * q_stride + d));
        unroll<kTokens>([&](auto t) CPU_KERNELS_LAMBDA { acc[g * kTokens + t] = dot8(y[t], x, acc[g * kTokens + t]); });
      });
    }
  };
  int d = 0;
  for (; d + kBytes <= head_dim; d += kBytes) {
    ahead.prefetch<kBytes * kTokens>(d * kTokens);
    step(d, [](auto p) CPU_KERNELS_LAMBDA { return load8(p); });
  }
  if constexpr (kBytes > 16) {  // head_dim is a multiple of 16
    if (d < head_dim) {
      ahead.prefetch<kBytes / 2 * kTokens>(d * kTokens);
      step(d, [&](auto p) CPU_KERNELS_LAMBDA { return load8_part(p, head_dim - d); });
    }
  }
  reduce_store<Q, kTokens>(acc, s);
}

template <int Q>
void byte_scores(const Rows& r, const std::uint8_t* q, int q_stride, int head_dim, float* s, Ahead& ahead) {
  constexpr int kTokens = score_tokens(Q);
  for (int t = r.lo(); t < r.n; t += kTokens) {
    const Lines lines = ahead.take(kTokens * head_dim);
    byte_scores_block<Q>(r.k + t, q, q_stride, head_dim, s + t, lines);
  }
}

struct ByteValues {
  const Rows& r;
  int first, n;
  const std::uint8_t* p;  // weights of query g at p + g * kWeightStride, in token order
  const float* scale;     // of the weights
  float* o;
  int head_dim;
  Ahead& ahead;
  static constexpr int kWeightStride = 2 * kTile;
  template <int Q, int kVectors>
  CPU_KERNELS_INLINE void run(int d) const {
    I acc[Q * kVectors];
    unroll<Q * kVectors>([&](auto i) CPU_KERNELS_LAMBDA { acc[i] = izero(); });
    constexpr int kBytes = 4 * kVectors * kLanes;
    const Lines lines = ahead.take((n - first) * kVectors * kLanes);
    const int quads = (n + 3) / 4;
    for (int i = first / 4; i < quads; ++i) {
      lines.prefetch<kBytes>((i - first / 4) * kBytes);
      const std::uint8_t* v = r.v[i] + 4 * d;
      I x[kVectors];
      unroll<kVectors>([&](auto j) CPU_KERNELS_LAMBDA { x[j] = load8(v + 4 * j * kLanes); });
      unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
        const I weights = broadcast8(p + g * kWeightStride + 4 * i);
        unroll<kVectors>(
            [&](auto j) CPU_KERNELS_LAMBDA { acc[g * kVectors + j] = dot8(weights, x[j], acc[g * kVectors + j]); });
      });
    }
    add_scaled<Q, kVectors>(acc, scale, o + d, head_dim);
  }
};

template <int Q>
void byte_values(const ByteValues& block) {
  value_passes<ByteValues, Q, value_vectors(Q)>(block, block.head_dim, 0);
}

struct ByteArithmetic {
  static constexpr bool kTokenScales = true, kOwnSoftmax = false;
  static constexpr float kQueryMax = 127.f, kWeightMax = 255.f;

  // Bytes from one query to the next. dot8 wants one operand unsigned: 128 is added to the keys, so a query begins with
  // a vector of int32 whose sum takes 128 times the sum of the query's bytes away again.
  static int query_stride(int head_dim) { return 4 * kLanes + round_up(head_dim, 4 * kLanes); }

  static void prepare(const AttendShape& s, const Segment& seg, Work& w) {
    const int d = s.layout.head_dim, stride = query_stride(d);
    alignas(64) float natural[256];
    for (int i = 0; i < seg.queries; ++i) {
      read_query(s, seg, i, natural);
      const float top = largest(natural, d), inverse = top > 0.f ? kQueryMax / top : 0.f;
      w.query_scale[i] = top / kQueryMax;
      std::uint8_t* q = reinterpret_cast<std::uint8_t*>(w.queries) + i * stride;
      std::memset(q, 0, stride);
      std::int32_t sum = 0;
      for (int j = 0; j < d; ++j) {
        const std::int8_t x = static_cast<std::int8_t>(nearest(natural[j] * inverse));
        q[4 * kLanes + j] = static_cast<std::uint8_t>(x);
        sum += x;
      }
      sum *= -128;
      std::memcpy(q, &sum, sizeof(sum));
    }
  }

  static void scores(const AttendShape& s, const Segment& seg, const Rows& r, Work& w, Ahead& ahead) {
    const int d = s.layout.head_dim, stride = query_stride(d);
    for_query_blocks(seg.queries, [&](int g, auto count) CPU_KERNELS_LAMBDA {
      byte_scores<count>(r, reinterpret_cast<const std::uint8_t*>(w.queries) + g * stride, stride, d, w.s[g], ahead);
    });
  }

  static void values(const AttendShape& s, const Segment& seg, const Rows& r, Work& w, Ahead& ahead) {
    const int d = s.layout.head_dim;
    std::uint8_t* weights = reinterpret_cast<std::uint8_t*>(w.w16);
    for (int g = 0; g < seg.queries; ++g) {
      const F inverse = set1(scale_weights(r, g, kWeightMax, w));
      for (int t = r.lo(); t < r.hi(); t += 16)
        store_weights8(&w.s[g][t], inverse, weights + g * ByteValues::kWeightStride + t);
    }
    rescale(w.alpha, seg.queries, d, seg.o);
    for_query_blocks(seg.queries, [&](int g, auto count) CPU_KERNELS_LAMBDA {
      byte_values<count>(
          {r, r.first, r.n, weights + g * ByteValues::kWeightStride, w.weight_scale + g, seg.o + g * d, d, ahead});
    });
  }
};

// What attend_any does, with 8-bit arithmetic where the tuning allows it.
void attend_any_or_bytes(const AttendShape& s, const Segment& seg, const NextSegment& next, Scratch& scratch) {
  if (s.layout.type == Type::i8 && !s.tuning.accurate_int8)
    attend_with<ByteArithmetic>(s, seg, next, scratch);
  else
    attend_any(s, seg, next, scratch);
}
