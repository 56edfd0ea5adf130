// Writing tokens into a pool, reading them back and copying pages.
#pragma once

#include <cstdint>

#include "kernels.hpp"

namespace cpu_kernels {

// Token `offset` of a page (of a slot pool: slot `id`, offset 0) of one head; k, v: head_dim elements of `type`.
void write_token(const KernelTable& kernels, const KvPool& pool, int layer, std::int64_t id, int offset, int head,
                 Type type, const std::uint8_t* k, const std::uint8_t* v);

// Tokens in token-major form: token i, head h at data + i * token_bytes + h * head_bytes.
struct TokenRows {
  std::uint8_t* data = nullptr;
  std::int64_t token_bytes = 0, head_bytes = 0;
};

// Token i of the rows is token places[i] of the layer: page * page_tokens + offset, or a slot id. Runs of consecutive
// places in one page are written at once. Places must be inside the pool; several threads may write different tokens.
void write_tokens(const KernelTable& kernels, const KvPool& pool, int layer, const std::int64_t* places,
                  std::int64_t count, Type type, const TokenRows& k, const TokenRows& v);
void read_tokens(const KernelTable& kernels, const KvPool& pool, int layer, const std::int64_t* places,
                 std::int64_t count, Type type, const TokenRows& k, const TokenRows& v);

// Copies all heads of pages from[i] to to[i] in layers [layer_begin, layer_end). Paged pools only.
void copy_pages(const KvPool& pool, int layer_begin, int layer_end, const std::int32_t* from, const std::int32_t* to,
                std::int64_t count);

}  // namespace cpu_kernels
