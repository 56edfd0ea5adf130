// bf16 keys and values with matrix tiles for more than 8 queries, as shared prefixes have them: whole blocks of 16.
// Keys and values then come from a cache, and arithmetic is the bound. Included after tile_arithmetic.hpp, whose tiles
// and registers these are.
//
// A core multiplies tiles beside what else it does, but looks only a few hundred instructions ahead. So the softmax of
// two blocks is cut into steps that stand between the products of the next two.
//
// The sums of more than two blocks crowd the first-level cache. So they are added to by tiles where they lie, and
// for several tiles of tokens at a time: weights are held until `tile_values` of them have come together. That asks for
// sums that seldom shrink: the maximum to which weights refer only follows when scores have outgrown it by kSlack, and
// then the block's weights so far are used up first. Weights up to 2^kSlack are as exact as those up to 1.
struct BlockArithmetic {
  using Tiles = TileArithmetic<Bf16Tiles<1>>;
  static constexpr bool kTokenScales = false, kOwnSoftmax = true;
  static constexpr int kQueries = 16, kBlocks = kMaxQueries / kQueries;
  static constexpr int kMostHeld = 4;                              // tiles of tokens
  static constexpr int kSteps = 8, kStepVectors = kTile / kSteps;  // of the softmax of one block and tile
  static constexpr float kSlack = 8.f;

  struct State {
    // Scores of `waiting` blocks, [token][query], from block `block` on, that are to become weights of held tile
    // `slot`: of tokens [first, n). The first of these blocks is at step `step`.
    int waiting, block, first, n, slot, step;
    float* scores;
    int side;  // of the scores that come next
    // Tiles of tokens whose values are still to be added, and the first of them that each block needs.
    int held, from[kBlocks];
    const std::uint8_t* values[kMostHeld];
    alignas(64) float factor[kQueries], shift[kQueries], sums[4][kQueries];
    alignas(64) std::uint8_t weights[kBlocks][kMostHeld][kTile / 32][1024];
    alignas(64) float rest[kQueries * 256];  // sums of the last block if it is not whole
    alignas(64) float spared[256];
  };
  static_assert(sizeof(State) <= sizeof(Work::extra) - Tiles::kExtra, "State must fit beside what Tiles uses");
  static State& state(Work& w) { return *reinterpret_cast<State*>(w.extra + Tiles::kExtra); }

  static void prepare(const AttendShape& s, const Segment& seg, Work& w) { Tiles::prepare(s, seg, w); }

  static void begin(const AttendShape& s, const Segment& seg, Work& w) {
    State& x = state(w);
    x.waiting = x.held = x.side = 0;
    for (int& from : x.from) from = 0;
    const int d = s.layout.head_dim, whole = seg.queries / kQueries * kQueries, rest = seg.queries - whole;
    if (rest == 0) return;
    std::memcpy(x.rest, seg.o + whole * d, rest * d * sizeof(float));
    std::memset(x.rest + rest * d, 0, (kQueries - rest) * d * sizeof(float));
  }

  static void end(const AttendShape& s, const Segment& seg, Work& w) {
    Ahead nothing;
    use_weights(s, seg, w, 0, nothing);
    const int d = s.layout.head_dim, whole = seg.queries / kQueries * kQueries;
    std::memcpy(seg.o + whole * d, state(w).rest, (seg.queries - whole) * d * sizeof(float));
  }

  static int most_held(const AttendShape& s, const Segment& seg) {
    if (Tiles::blocks(seg.queries) <= 2) return 1;
    return s.tuning.held_tiles < kMostHeld ? s.tuning.held_tiles : kMostHeld;
  }
  // The share of a tile's time that scores and softmax take, if its values follow at once.
  static float score_share(const AttendShape& s, const Segment& seg) { return most_held(s, seg) == 1 ? .625f : 1.f; }

  // Scores of a tile of tokens for all queries, and meanwhile the softmax of the blocks before.
  static void scores(const AttendShape& s, const Segment& seg, const Rows& r, Work& w, Ahead& ahead) {
    State& x = state(w);
    const int products = (r.hi() - r.lo() + 31) / 32 * Tiles::chunks(s.layout.head_dim);
    const int bytes = Tiles::pace(s, seg.queries, score_share(s, seg), products);
    Tiles::for_blocks(seg.queries, [&](auto count, int block) CPU_KERNELS_LAMBDA {
      constexpr int kCount = decltype(count)::value;
      const int steps = (x.waiting * kSteps + products - 1) / products;
      Tiles::template scores_of_tile<kCount>(s, r, w, block, x.side, [&] {
        for (int i = 0; i < steps && x.waiting > 0; ++i) softmax_step(s, seg, w);
        ahead.keep_up(kCount * bytes);
      });
      catch_up(s, seg, w);
      x.waiting = kCount;
      x.block = block;
      x.first = r.first;
      x.n = r.n;
      x.slot = x.held;
      x.step = 0;
      x.scores = Tiles::scores_of(w, x.side, 0);
      x.side = 1 - x.side;
    });
  }

  // They wait for the last blocks' weights, and for those of more tiles.
  static void values(const AttendShape& s, const Segment& seg, const Rows& r, Work& w, Ahead& ahead) {
    State& x = state(w);
    const int bytes = Tiles::pace(s, seg.queries, 1.f - score_share(s, seg), (s.layout.head_dim + 31) / 32);
    const bool copied = !Tiles::in_page(s, r);
    if (copied) catch_up(s, seg, w);  // before the copy, which takes the memory that it needs
    x.values[x.held++] = Tiles::value_rows(s, r, w.extra);
    if (copied || x.held >= most_held(s, seg)) use_weights(s, seg, w, bytes, ahead);
  }

  static void catch_up(const AttendShape& s, const Segment& seg, Work& w) {
    while (state(w).waiting > 0) softmax_step(s, seg, w);
  }

  // Before the first step of a block: the maximum, and what follows from it.
  static void softmax_begin(const AttendShape& s, const Segment& seg, Work& w) {
    State& x = state(w);
    const int first = x.block * kQueries;
    Wide factor = wide_load(w.query_scale + first);
    if (s.soft_cap > 0.f) {
      for (int t = 0; t < kTile; ++t)
        store(x.scores + 16 * t, Tiles::capped(mul(wide_load(x.scores + 16 * t), factor), s.soft_cap));
      factor = wide_set1(1.f);
    }
    for (int i = 0; i < x.first * kQueries; ++i) x.scores[i] = kNoToken;
    for (int i = x.n * kQueries; i < kTile * kQueries; ++i) x.scores[i] = kNoToken;
    Wide most[4];
    unroll<4>([&](auto j) CPU_KERNELS_LAMBDA { most[j] = wide_load(x.scores + 16 * j); });
    for (int t = 4; t < kTile; t += 4)
      unroll<4>([&](auto j) CPU_KERNELS_LAMBDA { most[j] = max(most[j], wide_load(x.scores + 16 * (t + j))); });
    const Wide top = mul(max(max(most[0], most[1]), max(most[2], most[3])), factor);
    const Wide old = wide_load(w.m + first), now = raised(old, top, wide_set1(kSlack)), by = sub(now, old);
    if (reduce_max(by) > 0.f) {
      const Wide alpha = exp2_wide(sub(wide_set1(0.f), by));
      store(w.m + first, now);
      store(w.alpha + first, alpha);
      store(w.l + first, mul(wide_load(w.l + first), alpha));
      tile_store<0>(x.spared, 64);  // it may hold a part of the next blocks' scores; 4 and 6 hold nothing now
      for (int j = 0; j < s.layout.head_dim && x.from[x.block] < x.slot; j += 16)
        add_values<1, 1>(s, seg, w, x.block, j, x.slot);
      tile_load<0>(x.spared, 64);
      rescale(w.alpha + first, kQueries, s.layout.head_dim, sums_of(s, seg, w, x.block));
      x.from[x.block] = x.slot;
    }
    store(x.factor, factor);
    store(x.shift, sub(wide_set1(0.f), now));
    unroll<4>([&](auto j) CPU_KERNELS_LAMBDA { store(x.sums[j], wide_set1(0.f)); });
  }

  // Eight tokens' scores of the first block that waits become weights.
  static __attribute__((noinline)) void softmax_step(const AttendShape& s, const Segment& seg, Work& w) {
    State& x = state(w);
    if (x.step == 0) softmax_begin(s, seg, w);
    const Wide factor = wide_load(x.factor), shift = wide_load(x.shift);
    const float* scores = x.scores + x.step * kStepVectors * kQueries;
    std::uint32_t (*lanes)[16] = Tiles::lanes(w) + x.step % 4 * (kStepVectors / 2);
    unroll<kStepVectors / 2>([&](auto i) CPU_KERNELS_LAMBDA {
      const Wide even = exp2_rough(fma(wide_load(scores + 32 * i), factor, shift));
      const Wide odd = exp2_rough(fma(wide_load(scores + 32 * i + 16), factor, shift));
      store(x.sums[i], add(wide_load(x.sums[i]), add(even, odd)));
      pack_bf16(even, odd, lanes[i]);
    });
    if (x.step % 4 == 3) transpose16(Tiles::lanes(w)[0], 64, x.weights[x.block][x.slot][x.step / 4], 64);
    if (++x.step < kSteps) return;
    float* l = w.l + x.block * kQueries;
    const Wide sum =
        add(add(wide_load(x.sums[0]), wide_load(x.sums[1])), add(wide_load(x.sums[2]), wide_load(x.sums[3])));
    store(l, add(wide_load(l), sum));
    x.step = 0;
    x.scores += kTile * kQueries;
    ++x.block;
    --x.waiting;
  }

  static float* sums_of(const AttendShape& s, const Segment& seg, Work& w, int block) {
    return (block + 1) * kQueries <= seg.queries ? seg.o + block * kQueries * s.layout.head_dim : state(w).rest;
  }

  // Adds the weighted values of held tiles before `to`, kTiles x 16 dims from j on, to the sums of kCount blocks that
  // all begin with the same tile.
  template <int kCount, int kTiles>
  static CPU_KERNELS_INLINE void add_values(const AttendShape& s, const Segment& seg, Work& w, int block, int j,
                                            int to) {
    State& x = state(w);
    const int d = s.layout.head_dim, row = d * static_cast<int>(sizeof(float));  // of sums, and of pairs of values
    float* o[kCount];
    unroll<kCount>([&](auto b) CPU_KERNELS_LAMBDA {
      o[b] = sums_of(s, seg, w, block + b) + j;
      unroll<kTiles>([&](auto i) CPU_KERNELS_LAMBDA { tile_load<2 * b + i>(o[b] + 16 * i, row); });
    });
    for (int tile = x.from[block]; tile < to; ++tile)
      for (int c = 0; c < kTile / 32; ++c) {
        unroll<kCount>([&](auto b) CPU_KERNELS_LAMBDA { tile_load<4 + b>(x.weights[block + b][tile][c], 64); });
        unroll<kTiles>([&](auto i) CPU_KERNELS_LAMBDA {
          tile_load<6 + i>(x.values[tile] + 16 * c * row + 4 * (j + 16 * i), row);
          unroll<kCount>([&](auto b) CPU_KERNELS_LAMBDA { tile_dot_bf16<2 * b + i, 4 + b, 6 + i>(); });
        });
      }
    unroll<kCount>([&](auto b) CPU_KERNELS_LAMBDA {
      unroll<kTiles>([&](auto i) CPU_KERNELS_LAMBDA { tile_store<2 * b + i>(o[b] + 16 * i, row); });
    });
  }

  // Adds the values of all held tiles. The blocks follow each other for every few dims, which are then in the cache.
  // Prefetches `bytes` for each block and 32 dims.
  static void use_weights(const AttendShape& s, const Segment& seg, Work& w, int bytes, Ahead& ahead) {
    catch_up(s, seg, w);
    State& x = state(w);
    if (x.held == 0) return;
    const int d = s.layout.head_dim;
    const auto add = [&](auto tiles, int j) CPU_KERNELS_LAMBDA {
      constexpr int kTiles = decltype(tiles)::value;
      Tiles::for_blocks(seg.queries, [&](auto count, int block) CPU_KERNELS_LAMBDA {
        constexpr int kCount = decltype(count)::value;
        if (x.from[block] == x.from[block + kCount - 1])
          add_values<kCount, kTiles>(s, seg, w, block, j, x.held);
        else
          for (int b = 0; b < kCount; ++b) add_values<1, kTiles>(s, seg, w, block + b, j, x.held);
        ahead.keep_up(kCount * bytes);
      });
    };
    int j = 0;
    for (; j + 32 <= d; j += 32) add(std::integral_constant<int, 2>(), j);
    if (j < d) add(std::integral_constant<int, 1>(), j);
    x.held = 0;
    for (int& from : x.from) from = 0;
  }
};

template <class Arithmetic>
void attend_in_tiles(const AttendShape& s, const Segment& seg, const NextSegment& next, Scratch& scratch) {
  attend_with<Arithmetic>(s, seg, next, scratch);
  tile_release();
}

// bf16 or int8 pages, at least one token.
void attend_tiles(const AttendShape& s, const Segment& seg, const NextSegment& next, Scratch& scratch) {
  if (s.layout.type == Type::bf16)
    return seg.queries <= 8 ? attend_in_tiles<TileArithmetic<Bf16Tiles<2>>>(s, seg, next, scratch)
                            : attend_in_tiles<BlockArithmetic>(s, seg, next, scratch);
  return seg.queries <= 8 || s.tuning.accurate_int8
             ? attend_in_tiles<TileArithmetic<Int8Tiles<2>>>(s, seg, next, scratch)
             : attend_in_tiles<TileArithmetic<Int8Tiles<1>>>(s, seg, next, scratch);
}
