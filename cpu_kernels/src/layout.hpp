// Where the keys and values of a layer lie in host memory: the paged host pool and SGLang's token-major slots.
#pragma once

#include <cstddef>
#include <cstdint>

namespace cpu_kernels {

// Element types of keys and values, and (all but i8) of queries and outputs.
enum class Type : int { f32 = 0, f16 = 1, bf16 = 2, i8 = 3 };

struct bf16 {
  std::uint16_t bits;
};
struct f16 {
  std::uint16_t bits;
};

inline std::size_t type_bytes(Type t) { return t == Type::f32 ? 4 : t == Type::i8 ? 1 : 2; }

// Tokens whose values stand interleaved in a page, so that one 32-bit lane holds what one dot-product instruction adds
// up: V[token / group][dim][token % group]. Keys are never interleaved: K[token][dim].
inline int value_group(Type t) { return t == Type::f32 ? 1 : t == Type::i8 ? 4 : 2; }

inline std::size_t align64(std::size_t n) { return (n + 63) & ~static_cast<std::size_t>(63); }

// One page: `page_tokens` tokens of one KV head of one layer. int8 pages carry one fp32 scale per token for K and one
// for V; 16-bit and fp32 pages carry none. Every part starts on a cache line when the page does.
struct PageLayout {
  Type type = Type::bf16;
  int page_tokens = 64;
  int head_dim = 128;

  std::size_t row_bytes() const { return head_dim * type_bytes(type); }
  std::size_t scale_bytes() const { return type == Type::i8 ? align64(page_tokens * sizeof(float)) : 0; }
  std::size_t k_scale_offset() const { return align64(page_tokens * row_bytes()); }
  std::size_t v_offset() const { return k_scale_offset() + scale_bytes(); }
  std::size_t v_scale_offset() const { return v_offset() + align64(page_tokens * row_bytes()); }
  std::size_t page_bytes() const { return v_scale_offset() + scale_bytes(); }
};

// A view of the keys and values of all layers; owns nothing.
struct KvPool {
  PageLayout layout;
  int layers = 0;
  std::int64_t pages = 0;  // paged: pages per layer; slots: slots per layer
  int kv_heads = 0;
  bool slots = false;
  // Paged: page (layer, page, head) starts at base + ((layer * pages + page) * kv_heads + head) * page_bytes.
  std::uint8_t* base = nullptr;
  // Slots: K of (slot, head) starts at k[layer] + slot * k_slot_bytes + head * row_bytes, V likewise,
  // [slot][head][dim].
  std::uint8_t* const* k = nullptr;
  std::uint8_t* const* v = nullptr;
  std::int64_t k_slot_bytes = 0, v_slot_bytes = 0;

  std::uint8_t* page(int layer, std::int64_t page, int head) const {
    return base + static_cast<std::size_t>((layer * pages + page) * kv_heads + head) * layout.page_bytes();
  }
};

}  // namespace cpu_kernels
