// Decode attention over a run of tokens, written once over the primitives of simd.hpp. Included inside each instruction
// set's namespace and target region.
//
// A tile of up to 64 tokens is read once: scores of all queries, online softmax, weighted sum of values. Row pointers
// are looked up per tile, so pages of any size and token-major slots share the code, and while one tile is computed
// the rows of a later one are prefetched, line by line between the arithmetic.

// Register blocks serve 4, 2 or 1 queries: calls f(first query, integral_constant of their number).
template <class Function>
CPU_KERNELS_INLINE void for_query_blocks(int queries, const Function& f) {
  int g = 0;
  for (; queries - g >= 4; g += 4) f(g, std::integral_constant<int, 4>());
  if (queries - g >= 2) {
    f(g, std::integral_constant<int, 2>());
    g += 2;
  }
  if (g < queries) f(g, std::integral_constant<int, 1>());
}

// Pointers to the rows of one tile. Token t of the tile is token base + t of the row, base a multiple of 64; tokens
// [first, n) are attended to. Pointers are valid in [first rounded down to 16, n rounded up to 16).
struct Rows {
  int first, n;
  const std::uint8_t* k[kTile];
  const std::uint8_t* v[kTile];  // by group of interleaved tokens
  const float* k_scale[kTile / 16];
  const float* v_scale[kTile / 16];

  int lo() const { return first & ~15; }
  int hi() const { return (n + 15) & ~15; }
};

void find_rows(const AttendShape& s, const Segment& seg, int tile, Rows* r) {
  const int base = tile * kTile;
  r->first = seg.begin > base ? seg.begin - base : 0;
  r->n = seg.end - base < kTile ? seg.end - base : kTile;
  const std::int64_t row = static_cast<std::int64_t>(s.layout.row_bytes());
  if (s.slots) {
    for (int t = r->lo(); t < r->hi(); ++t) {
      const int known = t < r->first ? r->first : t >= r->n ? r->n - 1 : t;
      const std::int64_t slot = seg.table[base + known];
      r->k[t] = seg.k + slot * seg.k_stride;
      r->v[t] = seg.v + slot * seg.v_stride;
    }
    return;
  }
  const int group = value_group(s.layout.type), page_tokens = s.layout.page_tokens;
  for (int t = r->lo(); t < r->hi(); t += 16) {
    const std::int64_t page = seg.table[(base + t) >> __builtin_ctz(page_tokens)];
    const int offset = (base + t) & (page_tokens - 1);
    const std::uint8_t* k = seg.k + page * seg.k_stride;
    const std::uint8_t* v = seg.v + page * seg.v_stride;
    for (int i = 0; i < 16; ++i) r->k[t + i] = k + (offset + i) * row;
    for (int i = 0; i < 16 / group; ++i) r->v[t / group + i] = v + (offset + i * group) * row;
    if (s.layout.type == Type::i8) {
      r->k_scale[t / 16] = reinterpret_cast<const float*>(k + s.layout.k_scale_offset()) + offset;
      r->v_scale[t / 16] = reinterpret_cast<const float*>(v + s.layout.v_scale_offset() - s.layout.v_offset()) + offset;
    }
  }
}

template <int kLines, int kLocality>
CPU_KERNELS_INLINE void prefetch_as(const std::uint8_t* p) {
  unroll<kLines>([&](auto i) CPU_KERNELS_LAMBDA { __builtin_prefetch(p + 64 * i, 0, kLocality); });
}

template <int kLines>
CPU_KERNELS_INLINE void prefetch_lines(const std::uint8_t* p, int hint) {
  switch (hint) {
    case 1:
      return prefetch_as<kLines, 3>(p);
    case 2:
      return prefetch_as<kLines, 2>(p);
    case 3:
      return prefetch_as<kLines, 1>(p);
    case 4:
      return prefetch_as<kLines, 0>(p);
    default:
      return;
  }
}

// Bytes that a loop prefetches itself, a few lines in each of its iterations; none if `at` is null.
struct Lines {
  const std::uint8_t* at;
  int hint;

  template <int kBytes>
  CPU_KERNELS_INLINE void prefetch(int offset) const {
    if (at != nullptr) prefetch_lines<kBytes / 64>(at + offset, hint);
  }
};

// Prefetches a tile's keys, then its values, in the order of their addresses (which the hardware's own prefetchers
// follow) and at the pace at which the current tile's bytes are used: a CPU that waits for as many lines as it can
// drops further prefetches, so those that come in bursts are in part lost.
struct Ahead {
  static constexpr int kBlock = 256;

  const Rows* rows = nullptr;  // null: nothing to prefetch
  int hint = 0;
  int span_tokens = 16;  // tokens whose rows are contiguous
  int row_bytes = 0;
  int group = 1;
  int token = 0, end_token = 0;
  bool in_values = false;
  int budget = 0;
  const std::uint8_t *at = nullptr, *end = nullptr;

  void begin(const AttendShape& s, const Rows* tile) {
    rows = tile;
    hint = s.tuning.prefetch_hint;
    span_tokens = s.slots ? 1 : s.layout.page_tokens;
    row_bytes = static_cast<int>(s.layout.row_bytes());
    group = s.slots ? 1 : value_group(s.layout.type);
    token = tile->lo();
    end_token = tile->hi();
    if (s.layout.type == Type::i8)
      for (int t = token; t < end_token; t += 16) {
        prefetch_lines<1>(reinterpret_cast<const std::uint8_t*>(tile->k_scale[t / 16]), hint);
        prefetch_lines<1>(reinterpret_cast<const std::uint8_t*>(tile->v_scale[t / 16]), hint);
      }
    next_span();
  }

  bool next_span() {
    if (token >= end_token) {
      if (in_values) {
        rows = nullptr;
        return false;
      }
      in_values = true;
      token = rows->lo();
    }
    // Tiles begin at multiples of 64 tokens, so within one a page begins at a multiple of its tokens.
    int next = (token & -span_tokens) + span_tokens;
    if (next > end_token) next = end_token;
    at = in_values ? rows->v[token / group] : rows->k[token];
    end = at + (next - token) * row_bytes;
    token = next;
    return true;
  }

  // Prefetches `bytes` more.
  __attribute__((noinline)) void go_on(int bytes) {
    __asm__ volatile("");  // or GCC drops calls: to it, a function that only prefetches has no effect
    while (rows != nullptr && bytes > 0) {
      const std::uint8_t* to = end - at > bytes ? at + bytes : end;
      bytes -= static_cast<int>(to - at);
      for (; at < to; at += 64) prefetch_lines<1>(at, hint);
      at = to;
      if (at == end) next_span();
    }
  }

  // `bytes` of the current tile are being used, by a loop without prefetches.
  CPU_KERNELS_INLINE void keep_up(int bytes) {
    if (rows == nullptr) return;
    budget += bytes;
    if (budget < kBlock) return;
    go_on(budget);
    budget = 0;
  }

  // The same, by a loop that prefetches what this returns. Bytes that do not lie together are prefetched here.
  CPU_KERNELS_INLINE Lines take(int bytes) {
    if (rows == nullptr) return {nullptr, 0};
    if (end - at < bytes) {
      go_on(bytes);
      return {nullptr, 0};
    }
    const Lines lines{at, hint};
    at += bytes;
    if (at == end) next_span();
    return lines;
  }

  void rest() { go_on(1 << 30); }
};

// 2^x, relative error below 2e-7, for x in [-126, 126]; smaller x gives 2^-126.
CPU_KERNELS_INLINE F exp2(F x) {
  x = max(x, set1(-126.f));
  const F n = round(x), f = sub(x, n);
  F p = fma(set1(1.326472703e-03f), f, set1(9.671512878e-03f));
  p = fma(p, f, set1(5.550733746e-02f));
  p = fma(p, f, set1(2.402224208e-01f));
  p = fma(p, f, set1(6.931469776e-01f));
  p = fma(p, f, set1(1.f));
  return mul(p, pow2n(n));
}

// Values are summed over so many tokens at a time (int8: a tile). All passes over the dims then find them in the
// first-level cache, beside what is being prefetched into it.
constexpr int kValueTokens = 32;

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

CPU_KERNELS_INLINE int round_up(int n, int to) { return (n + to - 1) / to * to; }

// The state of one attend call in the worker's scratch memory: of the present pass, but for the queries.
struct Work {
  Rows rows[3];
  alignas(64) float k_scale[kTile], v_scale[kTile];  // int8; 0 for tokens outside the tile
  float *query_scale, *queries;  // of the present pass, the queries in the order and type that the scores want
  alignas(64) float m[kMaxQueries], l[kMaxQueries], alpha[kMaxQueries], weight_scale[kMaxQueries];
  alignas(64) float s[kMaxQueries][kTile];           // scores, then weights
  alignas(64) std::int16_t w16[kMaxQueries][kTile];  // weights as int16 or bf16 where the values' arithmetic wants them
  alignas(64) std::uint8_t extra[84 * 1024];         // for tile arithmetic
  alignas(64) std::uint8_t prepared[1];              // the queries of all passes, pass_bytes each
};
static_assert(offsetof(Work, prepared) <= kScratchFixed, "scratch_bytes must cover Work");

CPU_KERNELS_INLINE const std::uint8_t* query_pointer(const Segment& seg, int i, int head_dim, Type type) {
  return seg.query_base + seg.query_rows[i / seg.heads] * seg.query_row_bytes +
         static_cast<std::int64_t>(i % seg.heads) * head_dim * static_cast<std::int64_t>(type_bytes(type));
}

// Elements to floats, in blocks whose size the compiler knows and so makes vectors of.
template <class T>
CPU_KERNELS_INLINE void read_floats(const std::uint8_t* from, int count, float* to) {
  for (int d = 0; d < count; d += 16) {
    T block[16];
    std::memcpy(block, from + d * sizeof(T), sizeof block);
    for (int j = 0; j < 16; ++j) to[d + j] = to_float(block[j]);
  }
}

// Query i as floats in natural order.
CPU_KERNELS_INLINE void read_query(const AttendShape& s, const Segment& seg, int i, float* out) {
  const int d = s.layout.head_dim;
  const std::uint8_t* p = query_pointer(seg, i, d, s.query_type);
  if (s.query_type == Type::f32)
    read_floats<float>(p, d, out);
  else if (s.query_type == Type::f16)
    read_floats<f16>(p, d, out);
  else
    read_floats<bf16>(p, d, out);
}

// ---- fp32 arithmetic on keys and values of type T ----------------------------------------------------------------

template <class T, int Q>
CPU_KERNELS_INLINE void float_scores_block(const std::uint8_t* const* rows, const float* q, int q_stride, int head_dim,
                                           float* s, Lines ahead) {
  constexpr int kTokens = score_tokens(Q);
  F acc[Q * kTokens];
  const T* k[kTokens];
  unroll<Q * kTokens>([&](auto i) CPU_KERNELS_LAMBDA { acc[i] = zero(); });
  unroll<kTokens>([&](auto t) CPU_KERNELS_LAMBDA { k[t] = reinterpret_cast<const T*>(rows[t]); });
  int d = 0;
  for (; d + 2 * kLanes <= head_dim; d += 2 * kLanes) {
    ahead.prefetch<2 * kLanes * kTokens * sizeof(T)>(d * kTokens * static_cast<int>(sizeof(T)));
    if constexpr (Q <= 2) {  // few queries stay in registers, and keys pass by
      F x[2 * Q];
      unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
        x[2 * g] = in_register(load(q + g * q_stride + d));
        x[2 * g + 1] = in_register(load(q + g * q_stride + d + kLanes));
      });
      unroll<kTokens>([&](auto t) CPU_KERNELS_LAMBDA {
        const Two y = load_split(k[t] + d);
        unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
          F& a = acc[g * kTokens + t];
          a = fma(y.b, x[2 * g + 1], fma(y.a, x[2 * g], a));
        });
      });
    } else {
      Two y[kTokens];
      unroll<kTokens>([&](auto t) CPU_KERNELS_LAMBDA { y[t] = load_split(k[t] + d); });
      unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
        const F x = in_register(load(q + g * q_stride + d));
        unroll<kTokens>([&](auto t)
                            CPU_KERNELS_LAMBDA { acc[g * kTokens + t] = fma(y[t].a, x, acc[g * kTokens + t]); });
      });
      unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
        const F x = in_register(load(q + g * q_stride + d + kLanes));
        unroll<kTokens>([&](auto t)
                            CPU_KERNELS_LAMBDA { acc[g * kTokens + t] = fma(y[t].b, x, acc[g * kTokens + t]); });
      });
    }
  }
  if constexpr (2 * kLanes > 16) {  // head_dim is a multiple of 16
    if (d < head_dim) {
      ahead.prefetch<kLanes * kTokens * sizeof(T)>(d * kTokens * static_cast<int>(sizeof(T)));
      unroll<kTokens>([&](auto t) CPU_KERNELS_LAMBDA {
        const Two x = load_split_half(k[t] + d);
        unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
          F& a = acc[g * kTokens + t];
          a = fma(x.b, load(q + g * q_stride + d + kLanes), fma(x.a, load(q + g * q_stride + d), a));
        });
      });
    }
  }
  reduce_store<Q, kTokens>(acc, s);
}

template <class T, int Q>
void float_scores(const Rows& r, const float* q, int q_stride, int head_dim, float* s, Ahead& ahead) {
  constexpr int kTokens = score_tokens(Q);
  for (int t = r.lo(); t < r.n; t += kTokens) {
    const Lines lines = ahead.take(kTokens * head_dim * static_cast<int>(sizeof(T)));
    float_scores_block<T, Q>(r.k + t, q, q_stride, head_dim, s + t, lines);
  }
}

// What was summed before a new maximum shrinks by alpha. Mostly there is none and alpha is 1.
CPU_KERNELS_INLINE void rescale(const float* alpha, int queries, int head_dim, float* o) {
  for (int g = 0; g < queries; ++g) {
    if (alpha[g] == 1.f) continue;
    const F a = set1(alpha[g]);
    for (int d = 0; d < head_dim; d += kLanes) store(o + g * head_dim + d, mul(a, load(o + g * head_dim + d)));
  }
}

template <int Q, int kVectors>
CPU_KERNELS_INLINE void load_sums(F (&acc)[Q * kVectors], const float* o, int head_dim) {
  unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
    unroll<kVectors>([&](auto j) CPU_KERNELS_LAMBDA { acc[g * kVectors + j] = load(o + g * head_dim + j * kLanes); });
  });
}

template <int Q, int kVectors>
CPU_KERNELS_INLINE void store_sums(const F (&acc)[Q * kVectors], float* o, int head_dim) {
  unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
    unroll<kVectors>([&](auto j) CPU_KERNELS_LAMBDA { store(o + g * head_dim + j * kLanes, acc[g * kVectors + j]); });
  });
}

// acc[g] += x * weight of query g.
template <int Q, int kVectors>
CPU_KERNELS_INLINE void add_weighted(F (&acc)[Q * kVectors], const F (&x)[kVectors], const float* weights) {
  unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
    const F w = set1(weights[g * kTile]);
    unroll<kVectors>([&](auto j) CPU_KERNELS_LAMBDA { acc[g * kVectors + j] = fma(x[j], w, acc[g * kVectors + j]); });
  });
}

// Values of tokens [first, n), interleaved in pairs, 16-bit.
template <class T, int Q, int kVectors>
CPU_KERNELS_INLINE void pair_values_block(const Rows& r, int first, int n, const float (*p)[kTile], float* o,
                                          int head_dim, int d, Lines ahead) {
  F acc[Q * kVectors];
  load_sums<Q, kVectors>(acc, o + d, head_dim);
  constexpr int kBytes = 2 * kVectors * kLanes * static_cast<int>(sizeof(T));
  const int pairs = n / 2;
  for (int i = first / 2; i < pairs; ++i) {
    ahead.prefetch<kBytes>((i - first / 2) * kBytes);
    const T* v = reinterpret_cast<const T*>(r.v[i]) + 2 * d;
    if constexpr (Q <= 2) {
      F w[2 * Q];
      unroll<2 * Q>([&](auto g) CPU_KERNELS_LAMBDA { w[g] = set1(p[g / 2][2 * i + g % 2]); });
      unroll<kVectors>([&](auto j) CPU_KERNELS_LAMBDA {
        const Two x = load_pair(v + 2 * j * kLanes);
        unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
          F& to = acc[g * kVectors + j];
          to = fma(x.b, w[2 * g + 1], fma(x.a, w[2 * g], to));
        });
      });
    } else {
      F a[kVectors], b[kVectors];
      unroll<kVectors>([&](auto j) CPU_KERNELS_LAMBDA {
        const Two x = load_pair(v + 2 * j * kLanes);
        a[j] = x.a;
        b[j] = x.b;
      });
      add_weighted<Q, kVectors>(acc, a, p[0] + 2 * i);
      add_weighted<Q, kVectors>(acc, b, p[0] + 2 * i + 1);
    }
  }
  if (n & 1) {  // the pair's other token is no token: its bytes may be NaN
    const T* v = reinterpret_cast<const T*>(r.v[pairs]) + 2 * d;
    F a[kVectors];
    unroll<kVectors>([&](auto j) CPU_KERNELS_LAMBDA { a[j] = load_pair(v + 2 * j * kLanes).a; });
    add_weighted<Q, kVectors>(acc, a, p[0] + 2 * pairs);
  }
  store_sums<Q, kVectors>(acc, o + d, head_dim);
}

// Values of tokens [first, n), token-major.
template <class T, int Q, int kVectors>
CPU_KERNELS_INLINE void row_values_block(const Rows& r, int first, int n, const float (*p)[kTile], float* o,
                                         int head_dim, int d) {
  F acc[Q * kVectors];
  load_sums<Q, kVectors>(acc, o + d, head_dim);
  for (int t = first; t < n; ++t) {
    const T* v = reinterpret_cast<const T*>(r.v[t]) + d;
    F x[kVectors];
    unroll<kVectors>([&](auto j) CPU_KERNELS_LAMBDA { x[j] = load_natural(v + j * kLanes); });
    add_weighted<Q, kVectors>(acc, x, p[0] + t);
  }
  store_sums<Q, kVectors>(acc, o + d, head_dim);
}

// Passes over the dims, as many vectors at a time as the registers hold, then fewer. head_dim is a multiple of 16.
template <class Block, int Q, int kVectors>
CPU_KERNELS_INLINE void value_passes(const Block& block, int head_dim, int d) {
  for (; head_dim - d >= kVectors * kLanes; d += kVectors * kLanes) block.template run<Q, kVectors>(d);
  if constexpr (kVectors * kLanes > 16) value_passes<Block, Q, kVectors / 2>(block, head_dim, d);
}

template <class T, bool kPairs>
struct FloatValues {
  const Rows& r;
  int first, n;
  const float (*p)[kTile];
  float* o;
  int head_dim;
  Ahead& ahead;
  template <int Q, int kVectors>
  CPU_KERNELS_INLINE void run(int d) const {
    const int bytes = (n - first) * kVectors * kLanes * static_cast<int>(sizeof(T));
    if constexpr (kPairs) {
      pair_values_block<T, Q, kVectors>(r, first, n, p, o, head_dim, d, ahead.take(bytes));
    } else {
      ahead.keep_up(bytes);
      row_values_block<T, Q, kVectors>(r, first, n, p, o, head_dim, d);
    }
  }
};

// Values of tokens [first, n), interleaved in pairs or token-major.
template <class T, bool kPairs, int Q>
void float_values(const Rows& r, int first, int n, const float (*p)[kTile], float* o, int head_dim, Ahead& ahead) {
  const FloatValues<T, kPairs> block{r, first, n, p, o, head_dim, ahead};
  value_passes<FloatValues<T, kPairs>, Q, value_vectors(Q)>(block, head_dim, 0);
}

template <class T>
struct FloatArithmetic {
  static constexpr bool kTokenScales = false, kOwnSoftmax = false;

  static int query_stride(int head_dim) { return round_up(head_dim, 2 * kLanes); }

  static void prepare(const AttendShape& s, const Segment& seg, Work& w) {
    const int d = s.layout.head_dim, stride = query_stride(d);
    alignas(64) float natural[512];
    for (int i = d; i < stride; ++i) natural[i] = 0.f;
    for (int i = 0; i < seg.queries; ++i) {
      float* q = w.queries + i * stride;
      if (s.query_type == s.layout.type && d == stride) {  // taken apart as the keys will be
        const T* from = reinterpret_cast<const T*>(query_pointer(seg, i, d, s.query_type));
        for (int c = 0; c < stride; c += 2 * kLanes) {
          const Two x = load_split(from + c);
          store(q + c, x.a);
          store(q + c + kLanes, x.b);
        }
        continue;
      }
      read_query(s, seg, i, natural);
      if (splits_odd_even(s.layout.type)) {
        for (int c = 0; c < stride; c += 2 * kLanes)
          for (int j = 0; j < kLanes; ++j) {
            q[c + j] = natural[c + 2 * j];
            q[c + kLanes + j] = natural[c + 2 * j + 1];
          }
      } else {
        std::memcpy(q, natural, stride * sizeof(float));
      }
    }
  }

  static void scores(const AttendShape& s, const Segment& seg, const Rows& r, Work& w, Ahead& ahead) {
    const int d = s.layout.head_dim, stride = query_stride(d);
    for_query_blocks(seg.queries, [&](int g, auto count) CPU_KERNELS_LAMBDA {
      float_scores<T, count>(r, w.queries + g * stride, stride, d, w.s[g], ahead);
    });
  }

  static void values(const AttendShape& s, const Segment& seg, const Rows& r, Work& w, Ahead& ahead) {
    const int d = s.layout.head_dim;
    rescale(w.alpha, seg.queries, d, seg.o);
    for (int t = r.lo(); t < r.n; t += kValueTokens) {
      const int first = t > r.first ? t : r.first, n = t + kValueTokens < r.n ? t + kValueTokens : r.n;
      for_query_blocks(seg.queries, [&](int g, auto count) CPU_KERNELS_LAMBDA {
        if (sizeof(T) == 2 && !s.slots)
          float_values<T, sizeof(T) == 2, count>(r, first, n, w.s + g, seg.o + g * d, d, ahead);
        else
          float_values<T, false, count>(r, first, n, w.s + g, seg.o + g * d, d, ahead);
      });
    }
  }
};

// ---- int16 arithmetic on int8 keys and values with a scale per token ---------------------------------------------

template <int Q>
CPU_KERNELS_INLINE void int_scores_block(const std::uint8_t* const* rows, const std::int16_t* q, int q_stride,
                                         int head_dim, float* s, Lines ahead) {
  constexpr int kTokens = score_tokens(Q);
  I acc[Q * kTokens];
  const std::int8_t* k[kTokens];
  unroll<Q * kTokens>([&](auto i) CPU_KERNELS_LAMBDA { acc[i] = izero(); });
  unroll<kTokens>([&](auto t) CPU_KERNELS_LAMBDA { k[t] = reinterpret_cast<const std::int8_t*>(rows[t]); });
  int d = 0;
  for (; d + 4 * kLanes <= head_dim; d += 4 * kLanes) {
    ahead.prefetch<4 * kLanes * kTokens>(d * kTokens);
    if constexpr (Q <= 2) {
      I x[2 * Q];
      unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
        x[2 * g] = in_register(iload(q + g * q_stride + d));
        x[2 * g + 1] = in_register(iload(q + g * q_stride + d + 2 * kLanes));
      });
      unroll<kTokens>([&](auto t) CPU_KERNELS_LAMBDA {
        const TwoI y = load_split8(k[t] + d);
        unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
          I& a = acc[g * kTokens + t];
          a = madd16(y.b, x[2 * g + 1], madd16(y.a, x[2 * g], a));
        });
      });
    } else {
      TwoI y[kTokens];
      unroll<kTokens>([&](auto t) CPU_KERNELS_LAMBDA { y[t] = load_split8(k[t] + d); });
      unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
        const I x = in_register(iload(q + g * q_stride + d));
        unroll<kTokens>([&](auto t)
                            CPU_KERNELS_LAMBDA { acc[g * kTokens + t] = madd16(y[t].a, x, acc[g * kTokens + t]); });
      });
      unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
        const I x = in_register(iload(q + g * q_stride + d + 2 * kLanes));
        unroll<kTokens>([&](auto t)
                            CPU_KERNELS_LAMBDA { acc[g * kTokens + t] = madd16(y[t].b, x, acc[g * kTokens + t]); });
      });
    }
  }
  if constexpr (4 * kLanes > 16) {
    if (d < head_dim)
      unroll<kTokens>([&](auto t) CPU_KERNELS_LAMBDA {
        const TwoI x = load_split8_part(k[t] + d, head_dim - d);
        unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
          I& a = acc[g * kTokens + t];
          a = madd16(x.b, iload(q + g * q_stride + d + 2 * kLanes), madd16(x.a, iload(q + g * q_stride + d), a));
        });
      });
  }
  reduce_store<Q, kTokens>(acc, s);
}

template <int Q>
void int_scores(const Rows& r, const std::int16_t* q, int q_stride, int head_dim, float* s, Ahead& ahead) {
  constexpr int kTokens = score_tokens(Q);
  for (int t = r.lo(); t < r.n; t += kTokens) {
    const Lines lines = ahead.take(kTokens * head_dim);
    int_scores_block<Q>(r.k + t, q, q_stride, head_dim, s + t, lines);
  }
}

// o += sums * scale of the query.
template <int Q, int kVectors>
CPU_KERNELS_INLINE void add_scaled(const I (&acc)[Q * kVectors], const float* scale, float* o, int head_dim) {
  unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
    const F by = set1(scale[g]);
    unroll<kVectors>([&](auto j) CPU_KERNELS_LAMBDA {
      float* to = o + g * head_dim + j * kLanes;
      store(to, fma(to_f(acc[g * kVectors + j]), by, load(to)));
    });
  });
}

struct IntValues {
  const Rows& r;
  int first, n;
  const std::int16_t (*p)[kTile];  // in each group of four tokens: 0, 2, 1, 3
  const float* scale;              // of the weights
  float* o;
  int head_dim;
  Ahead& ahead;
  template <int Q, int kVectors>
  CPU_KERNELS_INLINE void run(int d) const {
    I acc[Q * kVectors];
    unroll<Q * kVectors>([&](auto i) CPU_KERNELS_LAMBDA { acc[i] = izero(); });
    constexpr int kBytes = 4 * kVectors * kLanes;
    const Lines lines = ahead.take((n - first) * kVectors * kLanes);
    const int quads = (n + 3) / 4;
    for (int i = first / 4; i < quads; ++i) {
      lines.prefetch<kBytes>((i - first / 4) * kBytes);
      const std::int8_t* v = reinterpret_cast<const std::int8_t*>(r.v[i]) + 4 * d;
      if constexpr (Q <= 2) {
        I w[2 * Q];
        unroll<2 * Q>([&](auto g) CPU_KERNELS_LAMBDA { w[g] = ibroadcast(p[g / 2] + 4 * i + 2 * (g % 2)); });
        unroll<kVectors>([&](auto j) CPU_KERNELS_LAMBDA {
          const TwoI x = load_quads8(v + 4 * j * kLanes);
          unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
            I& to = acc[g * kVectors + j];
            to = madd16(x.b, w[2 * g + 1], madd16(x.a, w[2 * g], to));
          });
        });
      } else {
        TwoI x[kVectors];
        unroll<kVectors>([&](auto j) CPU_KERNELS_LAMBDA { x[j] = load_quads8(v + 4 * j * kLanes); });
        unroll<Q>([&](auto g) CPU_KERNELS_LAMBDA {
          const I a = ibroadcast(p[0] + g * kTile + 4 * i), b = ibroadcast(p[0] + g * kTile + 4 * i + 2);
          unroll<kVectors>([&](auto j) CPU_KERNELS_LAMBDA {
            I& to = acc[g * kVectors + j];
            to = madd16(x[j].b, b, madd16(x[j].a, a, to));
          });
        });
      }
    }
    add_scaled<Q, kVectors>(acc, scale, o + d, head_dim);
  }
};

template <int Q>
void int_values(const IntValues& block) {
  value_passes<IntValues, Q, value_vectors(Q)>(block, block.head_dim, 0);
}

// The largest magnitude of n floats, n a multiple of 16.
CPU_KERNELS_INLINE float largest(const float* x, int n) {
  F top = zero();
  for (int i = 0; i < n; i += kLanes) top = max(top, max(load(x + i), sub(zero(), load(x + i))));
  return reduce_max(top);
}

// The values' scales go into the weights of query g, which will be rounded to integers up to `top`. Returns the factor
// that makes them so large; w.weight_scale undoes it.
CPU_KERNELS_INLINE float scale_weights(const Rows& r, int g, float top, Work& w) {
  float* p = w.s[g];
  F most = zero();
  for (int t = r.lo(); t < r.hi(); t += kLanes) {
    const F x = mul(load(p + t), load(w.v_scale + t));
    store(p + t, x);
    most = max(most, x);
  }
  const float largest = reduce_max(most);
  w.weight_scale[g] = largest / top;
  return largest > 1e-30f ? top / largest : 0.f;
}

struct IntArithmetic {
  static constexpr bool kTokenScales = true, kOwnSoftmax = false;
  // The largest sum of products must fit int32: 127 * 32767 * 256 = 1.07e9 for keys, 127 * 32767 * 64 for values.
  static constexpr float kQueryMax = 32767.f, kWeightMax = 32767.f;

  static int query_stride(int head_dim) { return round_up(head_dim, 4 * kLanes); }

  static void prepare(const AttendShape& s, const Segment& seg, Work& w) {
    const int d = s.layout.head_dim, stride = query_stride(d);
    alignas(64) float natural[512];
    for (int i = d; i < stride; ++i) natural[i] = 0.f;
    for (int i = 0; i < seg.queries; ++i) {
      read_query(s, seg, i, natural);
      const float top = largest(natural, d), inverse = top > 0.f ? kQueryMax / top : 0.f;
      w.query_scale[i] = top / kQueryMax;
      std::int16_t* q = reinterpret_cast<std::int16_t*>(w.queries) + i * stride;
      for (int c = 0; c < stride; c += 4 * kLanes)
        for (int j = 0; j < 2 * kLanes; ++j) {
          constexpr bool kOddEven = splits_odd_even(Type::i8);
          q[c + j] = static_cast<std::int16_t>(nearest(natural[kOddEven ? c + 2 * j : c + j] * inverse));
          q[c + 2 * kLanes + j] =
              static_cast<std::int16_t>(nearest(natural[kOddEven ? c + 2 * j + 1 : c + 2 * kLanes + j] * inverse));
        }
    }
  }

  static void scores(const AttendShape& s, const Segment& seg, const Rows& r, Work& w, Ahead& ahead) {
    const int d = s.layout.head_dim, stride = query_stride(d);
    for_query_blocks(seg.queries, [&](int g, auto count) CPU_KERNELS_LAMBDA {
      const std::int16_t* q = reinterpret_cast<const std::int16_t*>(w.queries) + g * stride;
      int_scores<count>(r, q, stride, d, w.s[g], ahead);
    });
  }

  static void values(const AttendShape& s, const Segment& seg, const Rows& r, Work& w, Ahead& ahead) {
    const int d = s.layout.head_dim;
    for (int g = 0; g < seg.queries; ++g) {
      const F inverse = set1(scale_weights(r, g, kWeightMax, w));
      for (int t = r.lo(); t < r.hi(); t += 16) store_weights16(&w.s[g][t], inverse, w.w16[g] + t);
    }
    rescale(w.alpha, seg.queries, d, seg.o);
    for_query_blocks(seg.queries, [&](int g, auto count) CPU_KERNELS_LAMBDA {
      int_values<count>({r, r.first, r.n, w.w16 + g, w.weight_scale + g, seg.o + g * d, d, ahead});
    });
  }
};

// ---- online softmax ----------------------------------------------------------------------------------------------

// Scores in w.s become weights; w.m, w.l and w.alpha (by which what was summed before shrinks) are brought up to date.
template <bool kTokenScales>
void softmax_tile(const AttendShape& s, const Rows& r, int queries, Work& w) {
  const int lo = r.lo(), hi = r.hi();
  const bool partial = r.first != lo || r.n != hi;
  const F cap = set1(s.soft_cap * kLog2E);
  alignas(64) float top[kMaxQueries];
  for (int g = 0; g < queries; ++g) {
    float* x = w.s[g];
    if (partial) {  // tokens that are none must not raise the maximum: they repeat one that is
      for (int t = lo; t < r.first; ++t) x[t] = x[r.first];
      for (int t = r.n; t < hi; ++t) x[t] = x[r.first];
    }
    const float scale = kTokenScales ? s.scale * w.query_scale[g] : s.scale;
    const F factor = set1(s.soft_cap > 0.f ? scale * 2.f * kLog2E / s.soft_cap : scale * kLog2E);
    F most = set1(kNoToken);
    for (int t = lo; t < hi; t += kLanes) {
      F y = mul(load(x + t), factor);
      if constexpr (kTokenScales) y = mul(y, load(w.k_scale + t));
      if (s.soft_cap > 0.f) {  // tanh(z) = 1 - 2 / (e^(2 z) + 1)
        const F e = exp2(sub(zero(), max(sub(zero(), y), set1(-126.f))));
        y = mul(cap, sub(set1(1.f), div(set1(2.f), add(e, set1(1.f)))));
      }
      store(x + t, y);
      most = max(most, y);
    }
    top[g] = reduce_max(most);
  }
  for (int g = queries; g % kLanes != 0; ++g) top[g] = kNoToken;
  for (int g = 0; g < queries; g += kLanes) {
    const F old = load(w.m + g), now = max(old, load(top + g));
    store(w.alpha + g, exp2(sub(old, now)));
    store(w.m + g, now);
  }
  for (int g = 0; g < queries; ++g) {
    float* x = w.s[g];
    const F most = set1(w.m[g]);
    F sum = zero();
    for (int t = lo; t < hi; t += kLanes) {
      const F p = exp2(sub(load(x + t), most));
      store(x + t, p);
      sum = add(sum, p);
    }
    if (partial) {
      for (int t = lo; t < r.first; ++t) x[t] = 0.f;
      for (int t = r.n; t < hi; ++t) x[t] = 0.f;
      sum = zero();
      for (int t = lo; t < hi; t += kLanes) sum = add(sum, load(x + t));
    }
    w.l[g] = w.l[g] * w.alpha[g] + reduce_add(sum);
  }
}

// ---- one segment -------------------------------------------------------------------------------------------------

// The tiles after those of a piece, of which the first are prefetched towards its end: of the next piece, or of the
// next segment, which is asked for as late as can be.
struct Beyond {
  const AttendShape& s;
  const NextSegment& next;
  const Segment* segment = nullptr;
  int tile = 0, end = -1;  // -1: not asked for yet

  // Finds the rows of one more tile; false if there is none.
  bool find(Rows* to) {
    if (end < 0) {
      segment = next.find != nullptr ? next.find(next.context) : nullptr;
      const bool some = segment != nullptr && segment->end > segment->begin;
      tile = some ? segment->begin / kTile : 0;
      end = some ? (segment->end + kTile - 1) / kTile : 0;
    }
    if (tile >= end) return false;
    find_rows(s, *segment, tile++, to);
    return true;
  }
};

// Attends to the tokens of `seg`, those of one piece, with the queries of one pass, on top of what seg.o, m and l hold.
// Pieces are prefetched from memory by the first pass over them (`first`), what is beyond them by the last one.
template <class Arithmetic>
void attend_pass(const AttendShape& s, const Segment& seg, bool first, Beyond* beyond, Work& w) {
  std::memcpy(w.m, seg.m, seg.queries * sizeof(float));
  std::memcpy(w.l, seg.l, seg.queries * sizeof(float));
  for (int g = seg.queries; g % 16 != 0; ++g) {  // vectors and blocks of tiles are whole
    w.m[g] = kNoToken;
    w.l[g] = 0.f;
  }
  const int tiles_begin = seg.begin / kTile, tiles_end = (seg.end + kTile - 1) / kTile;
  const int distance = s.tuning.prefetch_hint == 0 ? 0 : s.tuning.prefetch_tiles >= 2 ? 2 : 1;
  if constexpr (Arithmetic::kOwnSoftmax) Arithmetic::begin(s, seg, w);
  for (int i = 0; i < (distance > 0 ? distance : 1) && tiles_begin + i < tiles_end; ++i)
    find_rows(s, seg, tiles_begin + i, &w.rows[i]);
  for (int tile = tiles_begin; tile < tiles_end; ++tile) {
    const int i = tile - tiles_begin;
    const Rows& r = w.rows[i % 3];
    Ahead ahead;
    Rows* later = &w.rows[(i + distance) % 3];
    if (distance == 0) {
      if (tile + 1 < tiles_end) find_rows(s, seg, tile + 1, &w.rows[(i + 1) % 3]);
    } else if (tile + distance < tiles_end) {
      find_rows(s, seg, tile + distance, later);
      if (first) ahead.begin(s, later);
    } else if (beyond != nullptr && beyond->find(later)) {
      ahead.begin(s, later);
    }
    if constexpr (Arithmetic::kTokenScales) {
      for (int t = r.lo(); t < r.hi(); t += 16) {
        std::memcpy(w.k_scale + t, r.k_scale[t / 16], 64);
        std::memcpy(w.v_scale + t, r.v_scale[t / 16], 64);
      }
      const auto no_token = [&](int t) CPU_KERNELS_LAMBDA {
        w.k_scale[t] = w.k_scale[r.first];
        w.v_scale[t] = 0.f;
      };
      for (int t = r.lo(); t < r.first; ++t) no_token(t);
      for (int t = r.n; t < r.hi(); ++t) no_token(t);
    }
    Arithmetic::scores(s, seg, r, w, ahead);
    if constexpr (!Arithmetic::kOwnSoftmax) softmax_tile<Arithmetic::kTokenScales>(s, r, seg.queries, w);
    Arithmetic::values(s, seg, r, w, ahead);
    ahead.rest();
  }
  if constexpr (Arithmetic::kOwnSoftmax) Arithmetic::end(s, seg, w);
  std::memcpy(seg.m, w.m, seg.queries * sizeof(float));
  std::memcpy(seg.l, w.l, seg.queries * sizeof(float));
}

template <class Arithmetic>
void attend_with(const AttendShape& s, const Segment& seg, const NextSegment& next, Scratch& scratch) {
  scratch.ran = kIsaName;
  Work& w = *reinterpret_cast<Work*>(scratch.memory);
  const int d = s.layout.head_dim;
  for (int g = 0; g < seg.queries; ++g) {
    seg.m[g] = kNoToken;
    seg.l[g] = 0.f;
  }
  std::memset(seg.o, 0, static_cast<std::size_t>(seg.queries) * d * sizeof(float));
  if (seg.end <= seg.begin) return;

  const int rows = seg.queries / seg.heads, passes = pass_count(rows, seg.heads);
  const std::size_t bytes = pass_bytes((rows + passes - 1) / passes * seg.heads, d);
  const auto part = [&](int pass, int begin, int end) {
    const int first = rows * pass / passes, at = first * seg.heads;
    Segment some = seg;
    some.begin = begin;
    some.end = end;
    some.query_rows += first;
    some.queries = rows * (pass + 1) / passes * seg.heads - at;
    some.o += at * d;
    some.m += at;
    some.l += at;
    w.query_scale = reinterpret_cast<float*>(w.prepared + pass * bytes);
    w.queries = w.query_scale + kMaxQueries;
    return some;
  };
  for (int pass = 0; pass < passes; ++pass) Arithmetic::prepare(s, part(pass, seg.begin, seg.end), w);
  const std::int64_t token_bytes = 2 * static_cast<std::int64_t>(s.layout.row_bytes());
  const std::int64_t piece = passes == 1 ? seg.end : std::int64_t{1024} * s.tuning.prefix_piece_kib / token_bytes;
  for (int begin = seg.begin; begin < seg.end;) {
    const std::int64_t wanted = (begin + piece + kTile - 1) / kTile * kTile;
    const int end = wanted < seg.end ? static_cast<int>(wanted) : seg.end;
    Beyond beyond{s, next};
    if (end < seg.end) {
      beyond.segment = &seg;
      beyond.tile = end / kTile;
      beyond.end = (seg.end + kTile - 1) / kTile;
    }
    for (int pass = 0; pass < passes; ++pass)
      attend_pass<Arithmetic>(s, part(pass, begin, end), pass == 0, pass + 1 == passes ? &beyond : nullptr, w);
    begin = end;
  }
}

void attend_any(const AttendShape& s, const Segment& seg, const NextSegment& next, Scratch& scratch) {
  switch (s.layout.type) {
    case Type::f32:
      return attend_with<FloatArithmetic<float>>(s, seg, next, scratch);
    case Type::f16:
      return attend_with<FloatArithmetic<f16>>(s, seg, next, scratch);
    case Type::bf16:
      return attend_with<FloatArithmetic<bf16>>(s, seg, next, scratch);
    case Type::i8:
      return attend_with<IntArithmetic>(s, seg, next, scratch);
  }
}

// ---- results -----------------------------------------------------------------------------------------------------

template <class T>
CPU_KERNELS_INLINE void scale_out(const float* o, float factor, int head_dim, T* out) {
  for (int d = 0; d < head_dim; d += 16) {  // as in read_floats
    T block[16];
    for (int j = 0; j < 16; ++j) from_float(o[d + j] * factor, block + j);
    std::memcpy(out + d, block, sizeof block);
  }
}

void finish(const float* o, const float* m, const float* l, int count, int head_dim, Type type, void* out, float* lse) {
  for (int i = 0; i < count; ++i) {
    const float factor = l[i] > 0.f ? 1.f / l[i] : 0.f;
    const float* from = o + i * head_dim;
    if (type == Type::f32)
      scale_out(from, factor, head_dim, static_cast<float*>(out) + i * head_dim);
    else if (type == Type::f16)
      scale_out(from, factor, head_dim, static_cast<f16*>(out) + i * head_dim);
    else
      scale_out(from, factor, head_dim, static_cast<bf16*>(out) + i * head_dim);
    if (lse != nullptr) lse[i] = l[i] > 0.f ? (m[i] + std::log2(l[i])) * kLn2 : -HUGE_VALF;
  }
}

void merge(float* const* o, float* const* m, float* const* l, int parts, int count, int head_dim) {
  alignas(64) float most[16], sum[16], factor[kMergedParts][16];
  for (int i = 0; i < count; ++i) {
    most[i] = m[0][i];
    sum[i] = 0.f;
    for (int p = 1; p < parts; ++p) most[i] = m[p][i] > most[i] ? m[p][i] : most[i];
  }
  for (int p = 0; p < parts; ++p) {
    for (int i = 0; i < 16; ++i) factor[p][i] = i < count && l[p][i] > 0.f ? m[p][i] - most[i] : 2.f * kNoToken;
    for (int i = 0; i < 16; i += kLanes) store(factor[p] + i, exp2(load(factor[p] + i)));
    for (int i = 0; i < count; ++i) sum[i] += l[p][i] > 0.f ? factor[p][i] * l[p][i] : 0.f;
  }
  for (int i = 0; i < count; ++i) {
    float* to = o[0] + i * head_dim;
    for (int d = 0; d < head_dim; d += kLanes) {
      F total = mul(load(to + d), set1(factor[0][i]));
      for (int p = 1; p < parts; ++p) total = fma(load(o[p] + i * head_dim + d), set1(factor[p][i]), total);
      store(to + d, total);
    }
    m[0][i] = most[i];
    l[0][i] = sum[i];
  }
}
