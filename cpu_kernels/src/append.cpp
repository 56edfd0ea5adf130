#include "append.hpp"

#include <cstring>

namespace cpu_kernels {
namespace {

// A slot is a page of one token with K and V apart; conversion between float types goes through the page kernels.
struct Place {
  PageLayout layout;
  std::uint8_t* page;
  int offset;
};

Place place_of(const KvPool& pool, int layer, std::int64_t place, int head) {
  const int tokens = pool.layout.page_tokens;
  return {pool.layout, pool.page(layer, place / tokens, head), static_cast<int>(place % tokens)};
}

template <class Function>
void for_runs(const KvPool& pool, const std::int64_t* places, std::int64_t count, const Function& f) {
  const int tokens = pool.layout.page_tokens;
  for (std::int64_t i = 0; i < count;) {
    int run = 1;
    while (i + run < count && places[i + run] == places[i] + run && places[i + run] % tokens != 0) ++run;
    f(i, run);
    i += run;
  }
}

}  // namespace

void write_token(const KernelTable& kernels, const KvPool& pool, int layer, std::int64_t id, int offset, int head,
                 Type type, const std::uint8_t* k, const std::uint8_t* v) {
  if (!pool.slots) {
    kernels.write_page(pool.layout, pool.page(layer, id, head), offset, 1, type, k, 0, v, 0);
    return;
  }
  const std::int64_t at = static_cast<std::int64_t>(head) * static_cast<std::int64_t>(pool.layout.row_bytes());
  kernels.convert(type, k, pool.layout.type, pool.k[layer] + id * pool.k_slot_bytes + at, pool.layout.head_dim);
  kernels.convert(type, v, pool.layout.type, pool.v[layer] + id * pool.v_slot_bytes + at, pool.layout.head_dim);
}

void write_tokens(const KernelTable& kernels, const KvPool& pool, int layer, const std::int64_t* places,
                  std::int64_t count, Type type, const TokenRows& k, const TokenRows& v) {
  if (pool.slots) {
    for (std::int64_t i = 0; i < count; ++i)
      for (int head = 0; head < pool.kv_heads; ++head)
        write_token(kernels, pool, layer, places[i], 0, head, type, k.data + i * k.token_bytes + head * k.head_bytes,
                    v.data + i * v.token_bytes + head * v.head_bytes);
    return;
  }
  for_runs(pool, places, count, [&](std::int64_t i, int run) {
    for (int head = 0; head < pool.kv_heads; ++head) {
      const Place at = place_of(pool, layer, places[i], head);
      kernels.write_page(at.layout, at.page, at.offset, run, type, k.data + i * k.token_bytes + head * k.head_bytes,
                         k.token_bytes, v.data + i * v.token_bytes + head * v.head_bytes, v.token_bytes);
    }
  });
}

void read_tokens(const KernelTable& kernels, const KvPool& pool, int layer, const std::int64_t* places,
                 std::int64_t count, Type type, const TokenRows& k, const TokenRows& v) {
  if (pool.slots) {
    for (std::int64_t i = 0; i < count; ++i)
      for (int head = 0; head < pool.kv_heads; ++head) {
        const std::int64_t at = static_cast<std::int64_t>(head) * static_cast<std::int64_t>(pool.layout.row_bytes());
        kernels.convert(pool.layout.type, pool.k[layer] + places[i] * pool.k_slot_bytes + at, type,
                        k.data + i * k.token_bytes + head * k.head_bytes, pool.layout.head_dim);
        kernels.convert(pool.layout.type, pool.v[layer] + places[i] * pool.v_slot_bytes + at, type,
                        v.data + i * v.token_bytes + head * v.head_bytes, pool.layout.head_dim);
      }
    return;
  }
  for_runs(pool, places, count, [&](std::int64_t i, int run) {
    for (int head = 0; head < pool.kv_heads; ++head) {
      const Place at = place_of(pool, layer, places[i], head);
      kernels.read_page(at.layout, at.page, at.offset, run, type, k.data + i * k.token_bytes + head * k.head_bytes,
                        k.token_bytes, v.data + i * v.token_bytes + head * v.head_bytes, v.token_bytes);
    }
  });
}

void copy_pages(const KvPool& pool, int layer_begin, int layer_end, const std::int32_t* from, const std::int32_t* to,
                std::int64_t count) {
  const std::size_t bytes = pool.kv_heads * pool.layout.page_bytes();
  for (int layer = layer_begin; layer < layer_end; ++layer)
    for (std::int64_t i = 0; i < count; ++i)
      if (from[i] != to[i]) std::memcpy(pool.page(layer, to[i], 0), pool.page(layer, from[i], 0), bytes);
}

}  // namespace cpu_kernels
