// Plans and kernels of every instruction set of this machine against double precision, for the sanitizers and for
// emulators: no Python needed. The Python tests cover more shapes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "../append.hpp"
#include "../plan.hpp"
#include "check.hpp"
#include "kernels_here.hpp"

using namespace cpu_kernels;

namespace {

struct Case {
  Type type;
  int head_dim, kv_heads, heads, page_tokens;
  std::vector<int> lengths;
  int shared, threads, window;
  bool slots;
  bool accurate_int8 = true;
};

// What sanitizers and emulators have to say about this is of no interest, and it would take most of the time.
#if defined(__clang__)
#define UNCHECKED __attribute__((no_sanitize("address", "undefined")))
#else
#define UNCHECKED __attribute__((no_sanitize("address", "undefined"), optimize("O2")))
#endif

// Attention of one query to tokens [first, length) of keys and values [token][stride]: out[dim], returns the natural
// log-sum-exp.
UNCHECKED double reference(const float* query, const float* keys, const float* values, int first, int length,
                           std::size_t stride, int dim, double scale, double* scores, double* out) {
  double most = -INFINITY, total = 0;
  for (int t = first; t < length; ++t) {
    double s = 0;
    for (int d = 0; d < dim; ++d) s += static_cast<double>(query[d]) * keys[t * stride + d];
    scores[t] = s * scale;
    if (scores[t] > most) most = scores[t];
  }
  for (int d = 0; d < dim; ++d) out[d] = 0;
  for (int t = first; t < length; ++t) {
    const double p = std::exp(scores[t] - most);
    total += p;
    for (int d = 0; d < dim; ++d) out[d] += p * values[t * stride + d];
  }
  for (int d = 0; d < dim && total > 0; ++d) out[d] /= total;
  return most + std::log(total);
}

// Multiples of 1/16 in [-2, 2), which every type but int8 holds exactly.
UNCHECKED void draw(std::uint32_t* state, float* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    *state = *state * 1664525u + 1013904223u;
    to[i] = static_cast<float>(*state >> 26) / 16.f - 2.f;
  }
}

void attends(const KernelTable& kernels, const Case& c) {
  std::uint32_t random = 7;
  const int rows = static_cast<int>(c.lengths.size()), dim = c.head_dim, q_heads = c.kv_heads * c.heads;
  const int per_id = c.slots ? 1 : c.page_tokens;
  KvPool pool;
  pool.layout = {c.type, per_id, dim};
  pool.layers = 1;
  pool.kv_heads = c.kv_heads;
  pool.slots = c.slots;

  // Shared tokens stand in the same pages of every row; the ids run backwards, with one page that nobody uses.
  const int shared_ids = c.shared / per_id;
  std::vector<std::int32_t> table, lengths;
  std::vector<std::int64_t> begin = {0};
  int used = shared_ids;
  for (int length : c.lengths) {
    lengths.push_back(length);
    for (int i = 0; i < (length + per_id - 1) / per_id; ++i) table.push_back(i < shared_ids ? i : used++);
    begin.push_back(static_cast<std::int64_t>(table.size()));
  }
  pool.pages = used + 1;
  for (std::int32_t& id : table) id = used - id;
  // Exactly as large as it must be, and all NaN: the sanitizer sees reads past it, the comparison those of no token.
  std::vector<std::uint8_t> memory;
  std::uint8_t *k_layer = nullptr, *v_layer = nullptr;
  if (c.slots) {
    pool.k_slot_bytes = pool.v_slot_bytes = static_cast<std::int64_t>(c.kv_heads * pool.layout.row_bytes());
    memory.assign(2 * static_cast<std::size_t>(pool.pages * pool.k_slot_bytes), 0xff);
    k_layer = memory.data();
    v_layer = k_layer + pool.pages * pool.k_slot_bytes;
    pool.k = &k_layer;
    pool.v = &v_layer;
  } else {
    memory.assign(static_cast<std::size_t>(pool.pages) * c.kv_heads * pool.layout.page_bytes(), 0xff);
    pool.base = memory.data();
  }

  std::vector<std::vector<float>> keys(rows), values(rows);
  for (int row = 0; row < rows; ++row) {
    const std::size_t size = static_cast<std::size_t>(c.lengths[row]) * c.kv_heads * dim;
    keys[row].resize(size);
    values[row].resize(size);
    draw(&random, keys[row].data(), size);
    draw(&random, values[row].data(), size);
    const std::size_t common = row == 0 ? 0 : static_cast<std::size_t>(c.shared) * c.kv_heads * dim;
    std::copy_n(keys[0].begin(), common, keys[row].begin());
    std::copy_n(values[0].begin(), common, values[row].begin());
    std::vector<std::int64_t> places;
    for (int t = 0; t < c.lengths[row]; ++t)
      places.push_back(static_cast<std::int64_t>(table[begin[row] + t / per_id]) * per_id + t % per_id);
    const std::int64_t head = dim * 4, token = head * c.kv_heads;
    const TokenRows k = {reinterpret_cast<std::uint8_t*>(keys[row].data()), token, head};
    const TokenRows v = {reinterpret_cast<std::uint8_t*>(values[row].data()), token, head};
    write_tokens(kernels, pool, 0, places.data(), c.lengths[row], Type::f32, k, v);
    if (c.type == Type::i8) read_tokens(kernels, pool, 0, places.data(), c.lengths[row], Type::f32, k, v);
  }

  std::vector<float> q(static_cast<std::size_t>(rows) * q_heads * dim), out(q.size(), NAN), lse(rows * q_heads, NAN);
  draw(&random, q.data(), q.size());
  std::vector<std::int32_t> members;
  PrefixGroup group{0, c.shared, 0, rows};
  for (int row = 0; row < rows; ++row) members.push_back(row);
  PlanInput input;
  input.pool = &pool;
  input.rows = rows;
  input.lengths = lengths.data();
  input.table = table.data();
  input.table_begin = begin.data();
  input.q_heads = q_heads;
  input.scale = 1.f / std::sqrt(static_cast<float>(dim));
  input.window = c.window;
  input.threads = c.threads;
  input.groups = &group;
  input.group_count = c.shared > 0 ? 1 : 0;
  input.group_rows = members.data();
  input.kernels = &kernels;
  input.tuning.min_split_tokens = 64;
  input.tuning.dot_min_queries = input.tuning.tile_min_queries = 1;
  input.tuning.accurate_int8 = c.accurate_int8;
  Plan plan(input);
  LayerIo io;
  io.q = reinterpret_cast<const std::uint8_t*>(q.data());
  io.out = reinterpret_cast<std::uint8_t*>(out.data());
  io.q_row_bytes = io.out_row_bytes = static_cast<std::int64_t>(q_heads) * dim * 4;
  io.lse = lse.data();
  io.lse_row = q_heads;
  plan.run(io, c.threads);
  plan.run(io, c.threads);  // counters must have come back to where they were

  double worst = 0, largest = 0;
  std::vector<double> scores(*std::max_element(lengths.begin(), lengths.end())), want(dim);
  for (int row = 0; row < rows; ++row)
    for (int h = 0; h < q_heads; ++h) {
      const int first = c.window > 0 ? std::max(0, c.lengths[row] - c.window) : 0;
      const std::size_t at = static_cast<std::size_t>(h / c.heads) * dim,
                        token = static_cast<std::size_t>(dim) * c.kv_heads;
      const std::size_t to = (static_cast<std::size_t>(row) * q_heads + h) * dim;
      const double want_lse = reference(&q[to], keys[row].data() + at, values[row].data() + at, first, c.lengths[row],
                                        token, dim, input.scale, scores.data(), want.data());
      for (int d = 0; d < dim; ++d) {
        const double error = std::fabs(out[to + d] - want[d]);
        worst = error <= worst ? worst : error;  // and NaN is an error
        largest = std::max(largest, std::fabs(want[d]));
      }
      const float got = lse[row * q_heads + h];
      if (c.lengths[row] > 0)
        CHECK(std::fabs(got - want_lse) < (c.accurate_int8 ? 1e-2 : 5e-2));
      else
        CHECK(std::isinf(got) && got < 0);
    }
  const bool tiles = std::strstr(kernels.isa, "amx") != nullptr;
  const bool bf16 = c.type == Type::bf16 && (tiles || std::strstr(kernels.isa, "bf16"));
  const double int8 = !c.accurate_int8 ? 2e-2 : tiles ? 3e-4 : 2e-4;  // tiles: queries and weights of 15 bits, not 16
  const double bound = c.type == Type::i8 ? int8 : bf16 ? 8e-3 : 5e-6;
  if (!(worst <= bound * std::max(largest, 1e-30)))
    std::printf("%s type %d dim %d heads %d page %d shared %d window %d slots %d: error %g of %g\n", kernels.isa,
                static_cast<int>(c.type), dim, c.heads, c.page_tokens, c.shared, c.window, c.slots, worst, largest);
  CHECK(worst <= bound * std::max(largest, 1e-30));
}

void all_cases(const KernelTable& kernels) {
  const std::vector<int> lengths = {0, 1, 15, 64, 65, 130};
  for (Type type : {Type::f32, Type::f16, Type::bf16, Type::i8})
    for (int dim : {16, 64, 80, 96, 128, 256})
      for (int heads : {1, 2, 7, 16}) {
        attends(kernels, {type, dim, 2, heads, 64, lengths, 0, 1, 0, false});
        if (type == Type::i8)
          attends(kernels, {type, dim, 2, heads, 64, lengths, 0, 1, 0, false, false});
        else
          attends(kernels, {type, dim, 2, heads, 64, lengths, 0, 1, 40, true});
      }
  for (Type type : {Type::f32, Type::bf16, Type::i8})
    for (int page : {16, 32, 64, 128})
      for (int heads : {1, 4, 9}) {
        attends(kernels, {type, 64, 2, heads, page, {200, 300, 130, 128, 140}, 128, 3, 0, false});
        attends(kernels, {type, 64, 1, heads, page, {200, 300, 130, 17}, 0, 2, 33, false});
        if (type == Type::i8) attends(kernels, {type, 64, 2, heads, page, {200, 300, 130}, 128, 3, 0, false, false});
      }
}

}  // namespace

int main(int argc, char** argv) {
  int ran = 0;
  for (const KernelTable* kernels : kernels_here()) {
    if (argc > 1 && std::strcmp(argv[1], kernels->isa) != 0) continue;
    all_cases(*kernels);
    std::printf("%s: ok\n", kernels->isa);
    ++ran;
  }
  CHECK(ran > 0);
  return 0;
}
