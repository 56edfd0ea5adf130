// bf16 keys and values with matrix tiles. Included after generic/attend.hpp and tiles.hpp.
//
// Scores: 16 tokens x 32 dims of K are the first operand as they lie in the page, 32 dims x up to 16 queries the
// second, arranged once per segment; the result is [token][query] and is transposed. Values: up to 16 queries x 32
// weights are the first operand, 32 tokens x 16 dims of V, interleaved in pairs as the page has them, the second; the
// result is [query][dim], as the sums are kept.
//
// Registers: 0, 1 scores; 2, 7 keys or values; 3 queries; 4, 5 sums; 6 weights.

struct TileArithmetic {
  static constexpr bool kTokenScales = false;
  static constexpr int kBlock = 16;  // queries

  static int chunks(int head_dim) { return (head_dim + 31) / 32; }

  static void shape_for(int queries) {
    TileShapes shapes;
    const auto set = [&](int i, int rows, int row_bytes) {
      shapes.rows[i] = static_cast<std::uint8_t>(rows);
      shapes.row_bytes[i] = static_cast<std::uint16_t>(row_bytes);
    };
    set(0, 16, 4 * queries);
    set(1, 16, 4 * queries);
    set(2, 16, 64);
    set(7, 16, 64);
    set(3, 16, 4 * queries);
    set(4, queries, 64);
    set(5, queries, 64);
    set(6, queries, 64);
    tile_configure(shapes);
  }

  // Block b of queries, chunk c of 32 dims: [16 pairs of dims][queries][2], rows 64 bytes apart, zeros after head_dim.
  static std::uint16_t* query_tile(Work& w, int block, int chunk, int head_dim) {
    return reinterpret_cast<std::uint16_t*>(w.queries) + (block * chunks(head_dim) + chunk) * 512;
  }

  static void prepare(const AttendShape& s, const Segment& seg, Work& w) {
    const int d = s.layout.head_dim;
    alignas(64) float natural[512];
    alignas(64) std::uint16_t rounded[512];
    for (int i = d; i < round_up(d, 32); ++i) natural[i] = 0.f;
    for (int i = 0; i < seg.queries; ++i) {
      read_query(s, seg, i, natural);
      for (int c = 0; c < chunks(d); ++c) {
        round_bf16_32(natural + 32 * c, rounded);
        std::uint16_t* to = query_tile(w, i / kBlock, c, d) + 2 * (i % kBlock);
        for (int j = 0; j < 16; ++j) std::memcpy(to + 32 * j, rounded + 2 * j, 4);
      }
    }
    shape_for(seg.queries < kBlock ? seg.queries : kBlock);
  }

  // Calls f(block, queries in it) with the tiles shaped for so many.
  template <class Function>
  static CPU_KERNELS_INLINE void for_blocks(int queries, const Function& f) {
    const int whole = queries / kBlock, left = queries % kBlock;
    for (int block = 0; block < whole; ++block) f(block, kBlock);
    if (left == 0) return;
    if (whole > 0) shape_for(left);
    f(whole, left);
    if (whole > 0) shape_for(kBlock);
  }

  // The last chunk's keys if head_dim is not a multiple of 32: 16 tokens with zeros after the last dim.
  static const std::uint8_t* padded_keys(const std::uint8_t* k, int row, int from, int count, std::uint8_t* to) {
    for (int t = 0; t < 16; ++t) {
      std::memcpy(to + 64 * t, k + t * row + from, count);
      std::memset(to + 64 * t + count, 0, 64 - count);
    }
    return to;
  }

  static void scores(const AttendShape& s, const Segment& seg, const Rows& r, Work& w, Ahead& ahead) {
    const int d = s.layout.head_dim, row = 2 * d, all = chunks(d);
    float* raw = reinterpret_cast<float*>(w.extra);  // 2 x [16 tokens][16 queries], then padded keys
    std::uint8_t* padded = w.extra + 2048;
    const int lo = r.lo(), hi = r.hi();
    for_blocks(seg.queries, [&](int block, int queries) CPU_KERNELS_LAMBDA {
      for (int t = lo; t < hi; t += 32) {
        const bool two = t + 16 < hi;
        tile_zero<0>();
        tile_zero<1>();
        for (int c = 0; c < all; ++c) {
          tile_load<3>(query_tile(w, block, c, d), 64);
          if (32 * c + 32 <= d) {
            tile_load<2>(r.k[t] + 64 * c, row);
            tile_dot_bf16<0, 2, 3>();
            if (two) {
              tile_load<7>(r.k[t + 16] + 64 * c, row);
              tile_dot_bf16<1, 7, 3>();
            }
          } else {
            const int count = row - 64 * c;
            tile_load<2>(padded_keys(r.k[t], row, 64 * c, count, padded), 64);
            tile_dot_bf16<0, 2, 3>();
            if (two) {
              tile_load<7>(padded_keys(r.k[t + 16], row, 64 * c, count, padded + 1024), 64);
              tile_dot_bf16<1, 7, 3>();
            }
          }
          ahead.keep_up((two ? 32 : 16) * 64);
        }
        tile_store<0>(raw, 64);
        if (two) tile_store<1>(raw + 256, 64);
        transpose16(raw, &w.s[block * kBlock][t], kTile, queries);
        if (two) transpose16(raw + 256, &w.s[block * kBlock][t + 16], kTile, queries);
      }
    });
  }

  // Values of tokens [t, t + 32) as [16 pairs][dim][2] with one stride: in the page, or copied if they do not lie
  // together or some are no tokens (whose bytes may be NaN, which no weight of zero takes away).
  static const std::uint8_t* value_rows(const Rows& r, int t, int row, std::uint8_t* copy) {
    const int lo = r.lo();
    if (t >= lo && t + 32 <= r.n && r.v[t / 2 + 8] == r.v[t / 2] + 8 * row) return r.v[t / 2];
    for (int i = 0; i < 16; ++i) {
      const int at = t + 2 * i;
      if (at < lo || at >= r.n) {
        std::memset(copy + i * row, 0, row);
      } else {
        std::memcpy(copy + i * row, r.v[at / 2], row);
        if (at + 1 >= r.n)
          for (int b = 0; b < row; b += 4) std::memset(copy + i * row + b + 2, 0, 2);
      }
    }
    return copy;
  }

  static void values(const AttendShape& s, const Segment& seg, const Rows& r, Work& w, Ahead& ahead) {
    const int d = s.layout.head_dim, row = 4 * d, lo = r.lo() & ~31, hi = r.hi();
    for (int g = 0; g < seg.queries; ++g) {
      for (int t = lo; t < r.lo(); ++t) w.s[g][t] = 0.f;
      for (int t = hi; t & 31; ++t) w.s[g][t] = 0.f;
      for (int t = lo; t < hi; t += 32) round_bf16_32(&w.s[g][t], reinterpret_cast<std::uint16_t*>(&w.w16[g][t]));
    }
    rescale(w.alpha, seg.queries, d, seg.o);
    for (int t = lo; t < hi; t += 32) {
      const std::uint8_t* v = value_rows(r, t, row, w.extra);
      for_blocks(seg.queries, [&](int block, int) CPU_KERNELS_LAMBDA {
        tile_load<6>(&w.w16[block * kBlock][t], kTile * 2);
        float* o = seg.o + block * kBlock * d;
        for (int j = 0; j < d; j += 32) {
          tile_load<4>(o + j, row);
          tile_load<2>(v + 4 * j, row);
          tile_dot_bf16<4, 6, 2>();
          if (j + 16 < d) {
            tile_load<5>(o + j + 16, row);
            tile_load<7>(v + 4 * j + 64, row);
            tile_dot_bf16<5, 6, 7>();
            tile_store<5>(o + j + 16, row);
          }
          tile_store<4>(o + j, row);
          ahead.keep_up(32 * 32 * 2);
        }
      });
    }
  }
};

void attend_tiles(const AttendShape& s, const Segment& seg, const Segment* next, Scratch& scratch) {
  attend_with<TileArithmetic>(s, seg, next, scratch);
  tile_release();
}
