// The kernels of one instruction set as a table of function pointers, chosen once per plan.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout.hpp"

namespace cpu_kernels {

constexpr int kTile = 64;                          // tokens per step of the online softmax
constexpr int kMergedParts = 64;                   // partial results that one merge takes
constexpr int kMaxQueries = 64;                    // queries of one KV head that one pass over its tokens serves
constexpr int kMaxPasses = 8;                      // passes over a segment's tokens
constexpr std::size_t kScratchFixed = 128 * 1024;  // bytes of a worker's scratch before the queries
constexpr float kNoToken = -1e30f;                 // running maximum of a row that has seen no token yet

// What calibration may change. Zeroes are never filled in by the kernels: these are the values used.
struct Tuning {
  int prefetch_hint = 2;         // 0 none, 1 T0, 2 T1, 3 T2, 4 NTA
  int prefetch_tiles = 1;        // 1 or 2: how many tiles of 64 tokens ahead
  int min_split_tokens = 32;     // no KV split shorter than this
  int min_thread_tokens = 1024;  // tokens x KV heads below which one more thread does not pay
  int last_round_tokens = 384;   // tokens x KV heads that are left for each thread when the rest is divided evenly
  int prefix_min_rows = 2;       // shared prefixes of fewer rows are read per row
  int prefix_piece_kib = 512;    // keys and values that all passes over a shared prefix read before they go on
  int held_tiles = 2;        // 1 to 4: tiles of 64 tokens whose weights matrix tiles take at a time, shared prefixes
  int dot_min_queries = 8;   // queries per KV head from which bf16 dot products replace fp32 FMA
  int tile_min_queries = 4;  // queries per KV head from which AMX tiles are used
  int accurate_int8 = 1;     // 1: 16-bit queries and weights, 0: 8-bit where the ISA gains from it
};

// A run of tokens of one KV head and the queries that attend to it. Where these are more than kMaxQueries, several
// passes over the tokens serve some rows each, and follow each other in pieces of tokens that the core's cache holds.
struct Segment {
  const std::uint8_t* k = nullptr;  // page 0 (or slot 0) of this layer and head
  const std::uint8_t* v = nullptr;
  std::int64_t k_stride = 0, v_stride = 0;  // bytes from one page (slot) to the next
  const std::int32_t* table = nullptr;      // page ids of tokens [0, end), or slot ids
  int begin = 0, end = 0;                   // tokens; begin == end: no token
  // Query i is the head_dim elements at query_base + query_rows[i / heads] * row_bytes + (i % heads) * head_dim.
  const std::uint8_t* query_base = nullptr;
  const std::int32_t* query_rows = nullptr;
  std::int64_t query_row_bytes = 0;
  int heads = 0;    // query heads per KV head
  int queries = 0;  // a multiple of heads, of no more than kMaxPasses passes
  // Results, not normalised: o[query][head_dim], m[query] (log2 units), l[query]. o is 64-byte aligned.
  float* o = nullptr;
  float* m = nullptr;
  float* l = nullptr;
};

// The segment that the same worker attends to next, asked for as late as its first tokens can still be prefetched.
struct NextSegment {
  const Segment* (*find)(void* context) = nullptr;  // null if there is none; called once at most
  void* context = nullptr;
};

// What all segments of a plan have in common.
struct AttendShape {
  PageLayout layout;
  bool slots = false;
  Type query_type = Type::f32;
  float scale = 1.f;     // of the scores
  float soft_cap = 0.f;  // 0: none; else scores become cap * tanh(score / cap)
  Tuning tuning;
};

// Memory of one worker; sized by scratch_bytes, 64-byte aligned. `ran` is set by the kernel that did the work.
struct Scratch {
  std::uint8_t* memory = nullptr;
  const char* ran = nullptr;
};

// Rows that one pass serves at most, and passes that so many rows take, each of them serving about as many.
inline int pass_rows(int heads) { return heads < kMaxQueries ? kMaxQueries / heads : 1; }
inline int pass_count(int rows, int heads) { return (rows + pass_rows(heads) - 1) / pass_rows(heads); }

// Of one pass's prepared queries: fp32 at most, padded to the widest vectors, after a scale for each.
inline std::size_t pass_bytes(int queries, int head_dim) {
  const std::size_t padded = static_cast<std::size_t>(head_dim + 63) / 64 * 64;
  return (kMaxQueries + (queries > 16 ? queries : 16) * padded) * sizeof(float);
}

// For segments of at most `rows` rows.
inline std::size_t scratch_bytes(int rows, int heads, int head_dim) {
  const int passes = pass_count(rows, heads), most = (rows + passes - 1) / passes;
  return kScratchFixed + passes * pass_bytes(most * heads, head_dim);
}

struct KernelTable {
  const char* isa;
  // Attends to `segment`; prefetches the first tokens of `next` towards the end.
  void (*attend)(const AttendShape& shape, const Segment& segment, const NextSegment& next, Scratch& scratch);
  // out[i][d] = o[i][d] / l[i] in `type` for `count` queries; lse[i] = natural log-sum-exp (lse may be null).
  void (*finish)(const float* o, const float* m, const float* l, int count, int head_dim, Type type, void* out,
                 float* lse);
  // Merges `parts` <= kMergedParts partial results, each of `count` <= 16 queries, into the first.
  void (*merge)(float* const* o, float* const* m, float* const* l, int parts, int count, int head_dim);
  // Writes tokens [first, first + tokens) of a page (page: K, V and scales of one head) from token-major rows of one
  // head; `type` is the rows' type. Other tokens of the page keep their bytes.
  void (*write_page)(const PageLayout& layout, std::uint8_t* page, int first, int tokens, Type type,
                     const std::uint8_t* k, std::int64_t k_row_bytes, const std::uint8_t* v, std::int64_t v_row_bytes);
  // The inverse.
  void (*read_page)(const PageLayout& layout, const std::uint8_t* page, int first, int tokens, Type type,
                    std::uint8_t* k, std::int64_t k_row_bytes, std::uint8_t* v, std::int64_t v_row_bytes);
  // `count` elements from one floating type to another.
  void (*convert)(Type from_type, const std::uint8_t* from, Type to_type, std::uint8_t* to, int count);
  // Queries of one KV head for which arithmetic on a 16-bit token in a page takes about as long as reading it does.
  // Plans weigh shared runs by it. Of AMX by counting cycles, not by timing.
  int balanced_queries = 16;
};

// The kernels of an instruction set by name, or null if this build has none for it. Does not ask the CPU.
const KernelTable* kernel_table(const char* isa);

}  // namespace cpu_kernels
