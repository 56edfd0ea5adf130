// Keys and values of 16 or 8 bits with matrix tiles. Included after generic/attend.hpp and tiles.hpp.
//
// All tiles are 16 rows of 64 bytes. Scores: 16 tokens x 64 bytes of K are the first operand as they lie in the page,
// 64 bytes of dims x 16 columns of queries the second, arranged once per segment; the result is [token][column].
// Values: 16 rows x 64 bytes of weights are the first operand, 64 bytes of tokens x 16 dims of V, interleaved as the
// page has them, the second; the result is [row][dim].
//
// The 16 columns, and later rows, are a block: 16 queries, or 8 queries in two parts each, of which the first holds the
// high bits and the second what is left. Two parts double the bits of queries and weights (8 per part) and cost nothing
// if there are only 8 queries, as the tile would be half empty.
//
// The softmax works on [token][query] as the tiles left it: a vector holds the 16 or 8 queries of one or two tokens, so
// nothing but the finished weights is transposed, and those as 32-bit groups of tokens, a half or a quarter as many.
//
// Two blocks, and two tiles of keys or values, are multiplied at a time: each tile that is loaded feeds two products.
// Registers: 2 * b + x the sums of block b and tile x; 4 + b the block's queries or weights; 6 + x keys or values.

// What depends on the element type: how queries and weights become columns and rows of kParts parts, and how the parts
// of a product are put together.
template <int kParts>
struct Bf16Tiles {
  static constexpr bool kTokenScales = false;
  static constexpr int kBytes = 2, kQueries = 16 / kParts;
  static constexpr bool kAsGiven = kParts == 1;  // columns of bf16 queries are these

  template <int kC, int kA, int kB>
  static CPU_KERNELS_INLINE void dot() {
    tile_dot_bf16<kC, kA, kB>();
  }
  // Columns from a query's `dims` floats, and the unit of what the columns hold.
  static float columns(const float* query, int dims, std::uint8_t* first, std::uint8_t* second) {
    for (int i = 0; i < dims; i += 32)
      if constexpr (kParts == 2)
        split_bf16(query + i, first + 2 * i, second + 2 * i);
      else
        round_bf16(query + i, first + 2 * i);
    return 1.f;
  }
  static CPU_KERNELS_INLINE Wide join(Wide first, Wide second) { return add(first, second); }
  static CPU_KERNELS_INLINE Wide single(Wide x) { return x; }
  // Weights of 64 tokens, [token][query], become weight tiles.
  static CPU_KERNELS_INLINE void pack(const float* p, Wide, std::uint32_t (*lanes)[16], std::uint8_t* tiles) {
    static_assert(kParts == 2, "blocks of 16 queries have arithmetic of their own");
    for (int i = 0; i < kTile / 2; ++i) pack_bf16_parts(p + 16 * i, lanes[i]);
    transpose16(lanes[0], 64, tiles, 64);
    transpose16(lanes[16], 64, tiles + 1024, 64);
  }
};

template <int kParts>
struct Int8Tiles {
  static constexpr bool kTokenScales = true;
  static constexpr int kBytes = 1, kQueries = 16 / kParts;
  static constexpr bool kAsGiven = false;
  // The largest 128 * high + low with high <= 127 and low <= 63.
  static constexpr float kMost = kParts == 2 ? 16319.f : 127.f;

  template <int kC, int kA, int kB>
  static CPU_KERNELS_INLINE void dot() {
    tile_dot_int8<kC, kA, kB>();
  }
  static float columns(const float* query, int dims, std::uint8_t* first, std::uint8_t* second) {
    Wide top = wide_set1(0.f);
    for (int i = 0; i < dims; i += 16) {
      const Wide x = wide_load(query + i);
      top = max(top, max(x, sub(wide_set1(0.f), x)));
    }
    const float most = reduce_max(top), factor = most > 0.f ? kMost / most : 0.f;
    for (int i = 0; i < dims; i += 16)
      if constexpr (kParts == 2)
        split_int8(query + i, factor, first + i, second + i);
      else
        round_int8(query + i, factor, first + i);
    return most / kMost;
  }
  static CPU_KERNELS_INLINE Wide join(Wide first, Wide second) {
    return fma(int_to_float(first), wide_set1(128.f), int_to_float(second));
  }
  static CPU_KERNELS_INLINE Wide single(Wide x) { return int_to_float(x); }
  static CPU_KERNELS_INLINE void pack(const float* p, Wide factor, std::uint32_t (*lanes)[16], std::uint8_t* tiles) {
    for (int i = 0; i < kTile / 4; ++i)
      if constexpr (kParts == 2)
        pack_int8_parts(p + 32 * i, factor, lanes[i]);
      else
        pack_int8(p + 64 * i, factor, lanes[i]);
    transpose16(lanes[0], 64, tiles, 64);
  }
};

template <class Tiles>
struct TileArithmetic {
  static constexpr bool kTokenScales = Tiles::kTokenScales, kOwnSoftmax = true;
  static constexpr int kQueries = Tiles::kQueries;     // of a block
  static constexpr int kVectorTokens = 16 / kQueries;  // of a vector of scores
  static constexpr int kVectors = kTile / kVectorTokens;
  static constexpr int kTileTokens = 64 / Tiles::kBytes;  // of a tile of weights or values
  static constexpr int kWeightBytes = kTile / kTileTokens * 1024;

  static int blocks(int queries) { return (queries + kQueries - 1) / kQueries; }
  static int chunks(int head_dim) { return (head_dim * Tiles::kBytes + 63) / 64; }

  // Chunk c of a block's queries: [64 bytes of dims, by 4][column][4 bytes], zeros after head_dim.
  static std::uint8_t* query_tile(Work& w, int block, int c, int head_dim) {
    return reinterpret_cast<std::uint8_t*>(w.queries) + (block * chunks(head_dim) + c) * 1024;
  }
  static std::uint8_t* weight_tiles(Work& w, int block) {
    return reinterpret_cast<std::uint8_t*>(w.w16) + block * kWeightBytes;
  }
  // What a tile stores cannot be forwarded to loads, which wait until it is in the cache. So there are two sides of
  // everything that is stored, scores and then weighted values: while one is filled, the other is used.
  static float* scores_of(Work& w, int side, int b) { return w.s[0] + (2 * side + b) * kTile * 16; }
  static float* results(Work& w, int side) { return w.s[0] + side * 4 * 256; }
  // Bytes of w.extra that are used: a copy of values, or what stands before them.
  static constexpr int kExtra = 32 * 1024;
  // Weights before they are transposed.
  static std::uint32_t (*lanes(Work& w))[16] { return reinterpret_cast<std::uint32_t (*)[16]>(w.extra + 2048); }

  static void begin(const AttendShape&, const Segment&, Work&) {}
  static void end(const AttendShape&, const Segment&, Work&) {}

  static void prepare(const AttendShape& s, const Segment& seg, Work& w) {
    const int d = s.layout.head_dim, all = chunks(d), dims = all * 64 / Tiles::kBytes;
    const float scale = s.scale * (s.soft_cap > 0.f ? 2.f * kLog2E / s.soft_cap : kLog2E);
    alignas(64) float natural[256];
    alignas(64) std::uint8_t columns[16][512];
    for (int block = 0; block < blocks(seg.queries); ++block) {
      std::memset(columns, 0, sizeof columns);
      for (int i = 0; i < kQueries; ++i) {
        const int g = block * kQueries + i;
        w.query_scale[g] = 0.f;
        if (g >= seg.queries) continue;
        if (Tiles::kAsGiven && s.query_type == Type::bf16) {
          std::memcpy(columns[i], query_pointer(seg, g, d, Type::bf16), d * 2);
          w.query_scale[g] = scale;
          continue;
        }
        read_query(s, seg, g, natural);
        for (int j = d; j < dims; ++j) natural[j] = 0.f;
        w.query_scale[g] = scale * Tiles::columns(natural, dims, columns[i], columns[(i + 8) % 16]);
      }
      for (int c = 0; c < all; ++c) transpose16(columns[0] + 64 * c, 512, query_tile(w, block, c, d), 64);
    }
    TileShapes shapes;
    for (int i = 0; i < 8; ++i) {
      shapes.rows[i] = 16;
      shapes.row_bytes[i] = 64;
    }
    tile_configure(shapes);
  }

  // Calls f with how many blocks (one or two, a constant) and the first of them.
  template <class Function>
  static CPU_KERNELS_INLINE void for_blocks(int queries, const Function& f) {
    const int all = blocks(queries);
    int block = 0;
    for (; block + 2 <= all; block += 2) f(std::integral_constant<int, 2>(), block);
    if (block < all) f(std::integral_constant<int, 1>(), block);
  }

  // What is prefetched during each of `steps` equal steps of one block that together take `share` of the block's time.
  static int pace(const AttendShape& s, int queries, float share, int steps) {
    const float bytes = 2.f * kTile * static_cast<float>(s.layout.row_bytes());
    return static_cast<int>(bytes * share / static_cast<float>(blocks(queries) * steps)) + 1;
  }

  // The last chunk's keys if a row is not whole chunks: 16 tokens with zeros after the last dim.
  static const std::uint8_t* padded_keys(const std::uint8_t* k, int row, int from, std::uint8_t* to) {
    for (int t = 0; t < 16; ++t) {
      std::memcpy(to + 64 * t, k + t * row + from, row - from);
      std::memset(to + 64 * t + row - from, 0, 64 - (row - from));
    }
    return to;
  }

  // Products of kBlocks blocks with 16 or 32 tokens from t on; calls meanwhile() for every chunk.
  template <int kBlocks, int kTiles, class Function>
  static CPU_KERNELS_INLINE void scores_at(const AttendShape& s, const Rows& r, Work& w, int block, int side, int t,
                                           const Function& meanwhile) {
    const int d = s.layout.head_dim, row = d * Tiles::kBytes;
    unroll<kBlocks>(
        [&](auto b) CPU_KERNELS_LAMBDA { unroll<kTiles>([&](auto x) CPU_KERNELS_LAMBDA { tile_zero<2 * b + x>(); }); });
    for (int c = 0; c < chunks(d); ++c) {
      const bool whole = 64 * c + 64 <= row;
      unroll<kBlocks>([&](auto b) CPU_KERNELS_LAMBDA { tile_load<4 + b>(query_tile(w, block + b, c, d), 64); });
      unroll<kTiles>([&](auto x) CPU_KERNELS_LAMBDA {
        const std::uint8_t* k = r.k[t + 16 * x];
        if (whole)
          tile_load<6 + x>(k + 64 * c, row);
        else
          tile_load<6 + x>(padded_keys(k, row, 64 * c, w.extra + 1024 * x), 64);
        unroll<kBlocks>([&](auto b) CPU_KERNELS_LAMBDA { Tiles::template dot<2 * b + x, 6 + x, 4 + b>(); });
      });
      meanwhile();
    }
    unroll<kBlocks>([&](auto b) CPU_KERNELS_LAMBDA {
      unroll<kTiles>([&](auto x)
                         CPU_KERNELS_LAMBDA { tile_store<2 * b + x>(scores_of(w, side, b) + 16 * (t + 16 * x), 64); });
    });
  }

  template <int kBlocks, class Function>
  static CPU_KERNELS_INLINE void scores_of_tile(const AttendShape& s, const Rows& r, Work& w, int block, int side,
                                                const Function& meanwhile) {
    for (int t = r.lo(); t < r.hi(); t += 32)
      if (t + 16 < r.hi())
        scores_at<kBlocks, 2>(s, r, w, block, side, t, meanwhile);
      else
        scores_at<kBlocks, 1>(s, r, w, block, side, t, meanwhile);
  }

  // Scores of all queries and their softmax; weights end up as tiles.
  static void scores(const AttendShape& s, const Segment& seg, const Rows& r, Work& w, Ahead& ahead) {
    if constexpr (kTokenScales) {  // of what is no token, not even one of no weight
      for (int t = 0; t < r.lo(); ++t) w.v_scale[t] = 0.f;
      for (int t = r.hi(); t < kTile; ++t) w.v_scale[t] = 0.f;
    }
    const int score_pace = pace(s, seg.queries, .375f, 2 * chunks(s.layout.head_dim));
    const int softmax_pace = pace(s, seg.queries, .25f, kVectors / 8);
    int scored = 0, weighted = 0, side = 0;
    const auto catch_up = [&] {
      for (int b = 0; weighted < scored; ++b, ++weighted)
        softmax(s, r, w, weighted, scores_of(w, 1 - side, b), softmax_pace, ahead);
    };
    for_blocks(seg.queries, [&](auto count, int block) CPU_KERNELS_LAMBDA {
      constexpr int kBlocks = decltype(count)::value;
      scores_of_tile<kBlocks>(s, r, w, block, side, [&] { ahead.keep_up(kBlocks * score_pace); });
      catch_up();
      scored += kBlocks;
      side = 1 - side;
    });
    catch_up();
  }

  // cap * tanh(score / cap) in log2 units; z = 2 * log2(e) * score / cap.
  static CPU_KERNELS_INLINE Wide capped(Wide z, float cap) {  // tanh(x) = 1 - 2 / (e^(2 x) + 1)
    const Wide e = exp2_wide(sub(wide_set1(0.f), max(sub(wide_set1(0.f), z), wide_set1(-100.f))));
    return mul(wide_set1(cap * kLog2E), sub(wide_set1(1.f), div(wide_set1(2.f), add(e, wide_set1(1.f)))));
  }

  // A vector's queries and tokens.
  static CPU_KERNELS_INLINE Wide per_query(const float* p) {
    if constexpr (kQueries == 16)
      return wide_load(p);
    else
      return eight_twice(p);
  }
  static CPU_KERNELS_INLINE Wide per_token(const float* p) {
    if constexpr (kQueries == 16)
      return wide_set1(*p);
    else
      return two_eight_times(p);
  }
  static CPU_KERNELS_INLINE void store_queries(float* p, Wide x) {
    if constexpr (kQueries == 16)
      store(p, x);
    else
      store_first_half(p, x);
  }
  static CPU_KERNELS_INLINE Wide max_of_tokens(Wide x) { return kQueries == 16 ? x : max(x, swap_halves(x)); }
  static CPU_KERNELS_INLINE Wide sum_of_tokens(Wide x) { return kQueries == 16 ? x : add(x, swap_halves(x)); }

  // x: scores of one block as the tiles left them, [token][column]; they become [token][query], then weights.
  static void softmax(const AttendShape& s, const Rows& r, Work& w, int block, float* x, int bytes, Ahead& ahead) {
    constexpr int kAtOnce = 4;  // sums that do not wait for each other
    const int first = block * kQueries;
    Wide factor = per_query(w.query_scale + first);
    Wide most[kAtOnce];
    unroll<kAtOnce>([&](auto j) CPU_KERNELS_LAMBDA { most[j] = wide_set1(kNoToken); });
    for (int i = 0; i < kVectors; i += kAtOnce)
      unroll<kAtOnce>([&](auto j) CPU_KERNELS_LAMBDA {
        Wide y;
        if constexpr (kQueries == 16) {
          y = Tiles::single(wide_load(x + 16 * (i + j)));
        } else {
          const Wide a = wide_load(x + 32 * (i + j)), b = wide_load(x + 32 * (i + j) + 16);
          y = Tiles::join(first_halves(a, b), second_halves(a, b));
        }
        if constexpr (kTokenScales) y = mul(y, per_token(w.k_scale + (i + j) * kVectorTokens));
        if (s.soft_cap > 0.f) y = capped(mul(y, factor), s.soft_cap);
        store(x + 16 * (i + j), y);
        most[j] = max(most[j], y);
      });
    if (s.soft_cap > 0.f) factor = wide_set1(1.f);
    const bool partial = r.first > 0 || r.n < kTile;
    if (partial) {
      for (int i = 0; i < r.first * kQueries; ++i) x[i] = kNoToken;
      for (int i = r.n * kQueries; i < kTile * kQueries; ++i) x[i] = kNoToken;
    }
    if (partial) {
      unroll<kAtOnce>([&](auto j) CPU_KERNELS_LAMBDA { most[j] = wide_load(x + 16 * j); });
      for (int i = kAtOnce; i < kVectors; i += kAtOnce)
        unroll<kAtOnce>([&](auto j) CPU_KERNELS_LAMBDA { most[j] = max(most[j], wide_load(x + 16 * (i + j))); });
    }
    const Wide top = max_of_tokens(max(max(most[0], most[1]), max(most[2], most[3])));
    const Wide old = per_query(w.m + first), now = max(old, mul(top, factor));
    const Wide alpha = exp2_wide(sub(old, now)), shift = sub(wide_set1(0.f), now);
    store_queries(w.m + first, now);
    store_queries(w.alpha + first, alpha);

    Wide sums[kAtOnce], heaviest[kAtOnce];
    unroll<kAtOnce>([&](auto j) CPU_KERNELS_LAMBDA { sums[j] = heaviest[j] = wide_set1(0.f); });
    for (int i = 0; i < kVectors; i += 2 * kAtOnce) {
      unroll<2>([&](auto k) CPU_KERNELS_LAMBDA {
        unroll<kAtOnce>([&](auto j) CPU_KERNELS_LAMBDA {
          float* at = x + 16 * (i + kAtOnce * k + j);
          Wide p = exp2_wide(fma(wide_load(at), factor, shift));
          sums[j] = add(sums[j], p);
          if constexpr (kTokenScales) {
            p = mul(p, per_token(w.v_scale + (i + kAtOnce * k + j) * kVectorTokens));
            heaviest[j] = max(heaviest[j], p);
          }
          store(at, p);
        });
      });
      ahead.keep_up(bytes);
    }
    const Wide sum = sum_of_tokens(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
    store_queries(w.l + first, fma(per_query(w.l + first), alpha, sum));
    // int8: the values' scales went into the weights, which are now rounded in units of their largest.
    Wide per_unit = wide_set1(1.f);
    if constexpr (kTokenScales) {
      const Wide heavy = max_of_tokens(max(max(heaviest[0], heaviest[1]), max(heaviest[2], heaviest[3])));
      store_queries(w.weight_scale + first, mul(heavy, wide_set1(1.f / Tiles::kMost)));
      per_unit = div(wide_set1(Tiles::kMost), max(heavy, wide_set1(1e-30f)));
    }
    Tiles::pack(x, per_unit, lanes(w), weight_tiles(w, block));
  }

  // Whether a tile's values can be used where they are.
  static bool in_page(const AttendShape& s, const Rows& r) {
    return s.layout.page_tokens >= kTile && (kTokenScales || (r.first == 0 && r.n == kTile));
  }

  // Values of a tile with one stride from group to group: in the page, or copied if they do not lie together or if
  // 16-bit values of no token, which may be NaN, would be multiplied by a weight of zero.
  static const std::uint8_t* value_rows(const AttendShape& s, const Rows& r, std::uint8_t* copy) {
    constexpr int kGroup = 4 / Tiles::kBytes;
    const int row = 4 * s.layout.head_dim, lo = r.lo(), hi = r.hi();
    if (in_page(s, r)) return r.v[lo / kGroup] - lo / kGroup * row;
    for (int t = 0; t < kTile; t += kGroup) {
      std::uint8_t* to = copy + t / kGroup * row;
      if (t < lo || t >= hi || t >= r.n || t + kGroup <= r.first) {
        std::memset(to, 0, row);
        continue;
      }
      std::memcpy(to, r.v[t / kGroup], row);
      if constexpr (kTokenScales) continue;
      for (int i = 0; i < kGroup; ++i)
        if (t + i < r.first || t + i >= r.n)
          for (int at = i * Tiles::kBytes; at < row; at += 4) std::memset(to + at, 0, Tiles::kBytes);
    }
    return copy;
  }

  // Weighted values of kTiles x 16 dims from j on, for kBlocks blocks.
  template <int kBlocks, int kTiles>
  static CPU_KERNELS_INLINE void values_at(const AttendShape& s, Work& w, const std::uint8_t* v, int block, int j,
                                           float* to) {
    const int row = 4 * s.layout.head_dim;
    unroll<kBlocks>(
        [&](auto b) CPU_KERNELS_LAMBDA { unroll<kTiles>([&](auto x) CPU_KERNELS_LAMBDA { tile_zero<2 * b + x>(); }); });
    for (int c = 0; c < kTile / kTileTokens; ++c) {
      unroll<kBlocks>([&](auto b) CPU_KERNELS_LAMBDA { tile_load<4 + b>(weight_tiles(w, block + b) + 1024 * c, 64); });
      unroll<kTiles>([&](auto x) CPU_KERNELS_LAMBDA {
        tile_load<6 + x>(v + 16 * c * row + 4 * j + 64 * x, row);
        unroll<kBlocks>([&](auto b) CPU_KERNELS_LAMBDA { Tiles::template dot<2 * b + x, 4 + b, 6 + x>(); });
      });
    }
    unroll<kBlocks>([&](auto b) CPU_KERNELS_LAMBDA {
      unroll<kTiles>([&](auto x) CPU_KERNELS_LAMBDA { tile_store<2 * b + x>(to + 256 * (2 * b + x), 64); });
    });
  }

  // Adds them to the sums, which shrink by alpha before.
  template <int kBlocks, int kTiles>
  static CPU_KERNELS_INLINE void add_values(const AttendShape& s, const Segment& seg, const Work& w, int block, int j,
                                            const float* from) {
    const int d = s.layout.head_dim;
    for (int b = 0; b < kBlocks; ++b) {
      const int first = (block + b) * kQueries, count = seg.queries - first < kQueries ? seg.queries - first : kQueries;
      for (int q = 0; q < count; ++q) {
        const Wide alpha = wide_set1(w.alpha[first + q]);
        unroll<kTiles>([&](auto x) CPU_KERNELS_LAMBDA {
          const float* y_at = from + 256 * (2 * b + x) + 16 * q;
          float* to = seg.o + (first + q) * d + j + 16 * x;
          Wide y;
          if constexpr (kQueries == 16)
            y = Tiles::single(wide_load(y_at));
          else
            y = Tiles::join(wide_load(y_at), wide_load(y_at + 128));
          if constexpr (kTokenScales) y = mul(y, wide_set1(w.weight_scale[first + q]));
          store(to, fma(wide_load(to), alpha, y));
        });
      }
    }
  }

  static void values(const AttendShape& s, const Segment& seg, const Rows& r, Work& w, Ahead& ahead) {
    const int d = s.layout.head_dim, bytes = pace(s, seg.queries, .375f, (d + 31) / 32), pairs = d / 32;
    const std::uint8_t* v = value_rows(s, r, w.extra);
    for_blocks(seg.queries, [&](auto count, int block) CPU_KERNELS_LAMBDA {
      constexpr int kBlocks = decltype(count)::value;
      for (int i = 0; i < pairs; ++i) {
        values_at<kBlocks, 2>(s, w, v, block, 32 * i, results(w, i % 2));
        if (i > 0) add_values<kBlocks, 2>(s, seg, w, block, 32 * (i - 1), results(w, (i - 1) % 2));
        ahead.keep_up(kBlocks * bytes);
      }
      if (32 * pairs < d) values_at<kBlocks, 1>(s, w, v, block, 32 * pairs, results(w, pairs % 2));
      if (pairs > 0) add_values<kBlocks, 2>(s, seg, w, block, 32 * (pairs - 1), results(w, (pairs - 1) % 2));
      if (32 * pairs < d) add_values<kBlocks, 1>(s, seg, w, block, 32 * pairs, results(w, pairs % 2));
    });
  }
};
