// Writing and reading tokens of a page. Included inside each instruction set's namespace and target region.

template <class From, class To>
CPU_KERNELS_INLINE void convert_one(const From& from, To* to) {
  if constexpr (std::is_same_v<From, To>)
    *to = from;  // keeps the bits of a NaN
  else
    from_float(to_float(from), to);
}

// From: type of the rows, To: type of the pool.
template <class From, class To>
void write_rows(const PageLayout& layout, std::uint8_t* page, int first, int tokens, const std::uint8_t* k,
                std::int64_t k_row_bytes, const std::uint8_t* v, std::int64_t v_row_bytes) {
  constexpr int kGroup = 4 / sizeof(To);
  const int dim = layout.head_dim;
  for (int t = 0; t < tokens; ++t) {
    const From* from = reinterpret_cast<const From*>(k + t * k_row_bytes);
    To* to = reinterpret_cast<To*>(page) + static_cast<std::size_t>(first + t) * dim;
    for (int d = 0; d < dim; ++d) convert_one(from[d], to + d);
  }
  To* values = reinterpret_cast<To*>(page + layout.v_offset());
  for (int t = 0; t < tokens;) {
    const int at = first + t;
    To* to = values + static_cast<std::size_t>(at / kGroup) * dim * kGroup;
    const From* a = reinterpret_cast<const From*>(v + t * v_row_bytes);
    if (kGroup == 2 && at % 2 == 0 && t + 1 < tokens) {
      const From* b = reinterpret_cast<const From*>(v + (t + 1) * v_row_bytes);
      for (int d = 0; d < dim; ++d) {
        convert_one(a[d], to + 2 * d);
        convert_one(b[d], to + 2 * d + 1);
      }
      t += 2;
    } else {
      for (int d = 0; d < dim; ++d) convert_one(a[d], to + d * kGroup + at % kGroup);
      t += 1;
    }
  }
}

template <class From>
CPU_KERNELS_INLINE float quantise(const From* from, int dim, std::int8_t* to, int stride) {
  float top = 0.f;
  for (int d = 0; d < dim; ++d) {
    const float x = std::fabs(to_float(from[d]));
    top = x > top ? x : top;
  }
  const float inverse = top > 0.f ? 127.f / top : 0.f;
  for (int d = 0; d < dim; ++d) {
    float x = to_float(from[d]) * inverse;
    x = x > 127.f ? 127.f : x < -127.f ? -127.f : x;  // and NaN or infinity does not overflow the conversion
    to[d * stride] = static_cast<std::int8_t>(x == x ? nearest(x) : 0);
  }
  return top / 127.f;
}

template <class From>
void write_rows8(const PageLayout& layout, std::uint8_t* page, int first, int tokens, const std::uint8_t* k,
                 std::int64_t k_row_bytes, const std::uint8_t* v, std::int64_t v_row_bytes) {
  const int dim = layout.head_dim;
  float* k_scale = reinterpret_cast<float*>(page + layout.k_scale_offset());
  float* v_scale = reinterpret_cast<float*>(page + layout.v_scale_offset());
  std::int8_t* keys = reinterpret_cast<std::int8_t*>(page);
  std::int8_t* values = reinterpret_cast<std::int8_t*>(page + layout.v_offset());
  for (int t = 0; t < tokens; ++t) {
    const int at = first + t;
    k_scale[at] = quantise(reinterpret_cast<const From*>(k + t * k_row_bytes), dim, keys + at * dim, 1);
    v_scale[at] =
        quantise(reinterpret_cast<const From*>(v + t * v_row_bytes), dim, values + (at / 4) * dim * 4 + at % 4, 4);
  }
}

template <class From>
void write_any(const PageLayout& layout, std::uint8_t* page, int first, int tokens, const std::uint8_t* k,
               std::int64_t k_row_bytes, const std::uint8_t* v, std::int64_t v_row_bytes) {
  switch (layout.type) {
    case Type::f32:
      return write_rows<From, float>(layout, page, first, tokens, k, k_row_bytes, v, v_row_bytes);
    case Type::f16:
      return write_rows<From, f16>(layout, page, first, tokens, k, k_row_bytes, v, v_row_bytes);
    case Type::bf16:
      return write_rows<From, bf16>(layout, page, first, tokens, k, k_row_bytes, v, v_row_bytes);
    case Type::i8:
      return write_rows8<From>(layout, page, first, tokens, k, k_row_bytes, v, v_row_bytes);
  }
}

void write_page(const PageLayout& layout, std::uint8_t* page, int first, int tokens, Type type, const std::uint8_t* k,
                std::int64_t k_row_bytes, const std::uint8_t* v, std::int64_t v_row_bytes) {
  if (type == Type::f32)
    write_any<float>(layout, page, first, tokens, k, k_row_bytes, v, v_row_bytes);
  else if (type == Type::f16)
    write_any<f16>(layout, page, first, tokens, k, k_row_bytes, v, v_row_bytes);
  else
    write_any<bf16>(layout, page, first, tokens, k, k_row_bytes, v, v_row_bytes);
}

// From: type of the pool, To: type of the rows.
template <class From, class To>
void read_rows(const PageLayout& layout, const std::uint8_t* page, int first, int tokens, std::uint8_t* k,
               std::int64_t k_row_bytes, std::uint8_t* v, std::int64_t v_row_bytes) {
  constexpr int kGroup = 4 / sizeof(From);
  const int dim = layout.head_dim;
  const float* k_scale = reinterpret_cast<const float*>(page + layout.k_scale_offset());
  const float* v_scale = reinterpret_cast<const float*>(page + layout.v_scale_offset());
  for (int t = 0; t < tokens; ++t) {
    const int at = first + t;
    const From* keys = reinterpret_cast<const From*>(page) + static_cast<std::size_t>(at) * dim;
    const From* values = reinterpret_cast<const From*>(page + layout.v_offset()) +
                         static_cast<std::size_t>(at / kGroup) * dim * kGroup + at % kGroup;
    To* k_to = reinterpret_cast<To*>(k + t * k_row_bytes);
    To* v_to = reinterpret_cast<To*>(v + t * v_row_bytes);
    if constexpr (std::is_same_v<From, std::int8_t>) {
      for (int d = 0; d < dim; ++d) from_float(static_cast<float>(keys[d]) * k_scale[at], k_to + d);
      for (int d = 0; d < dim; ++d) from_float(static_cast<float>(values[d * kGroup]) * v_scale[at], v_to + d);
    } else {
      for (int d = 0; d < dim; ++d) convert_one(keys[d], k_to + d);
      for (int d = 0; d < dim; ++d) convert_one(values[d * kGroup], v_to + d);
    }
  }
}

template <class To>
void read_any(const PageLayout& layout, const std::uint8_t* page, int first, int tokens, std::uint8_t* k,
              std::int64_t k_row_bytes, std::uint8_t* v, std::int64_t v_row_bytes) {
  switch (layout.type) {
    case Type::f32:
      return read_rows<float, To>(layout, page, first, tokens, k, k_row_bytes, v, v_row_bytes);
    case Type::f16:
      return read_rows<f16, To>(layout, page, first, tokens, k, k_row_bytes, v, v_row_bytes);
    case Type::bf16:
      return read_rows<bf16, To>(layout, page, first, tokens, k, k_row_bytes, v, v_row_bytes);
    case Type::i8:
      return read_rows<std::int8_t, To>(layout, page, first, tokens, k, k_row_bytes, v, v_row_bytes);
  }
}

void read_page(const PageLayout& layout, const std::uint8_t* page, int first, int tokens, Type type, std::uint8_t* k,
               std::int64_t k_row_bytes, std::uint8_t* v, std::int64_t v_row_bytes) {
  if (type == Type::f32)
    read_any<float>(layout, page, first, tokens, k, k_row_bytes, v, v_row_bytes);
  else if (type == Type::f16)
    read_any<f16>(layout, page, first, tokens, k, k_row_bytes, v, v_row_bytes);
  else
    read_any<bf16>(layout, page, first, tokens, k, k_row_bytes, v, v_row_bytes);
}

template <class From, class To>
void convert_rows(const std::uint8_t* from, std::uint8_t* to, int count) {
  for (int i = 0; i < count; ++i) convert_one(reinterpret_cast<const From*>(from)[i], reinterpret_cast<To*>(to) + i);
}

template <class From>
void convert_from(const std::uint8_t* from, Type to_type, std::uint8_t* to, int count) {
  if (to_type == Type::f32)
    convert_rows<From, float>(from, to, count);
  else if (to_type == Type::f16)
    convert_rows<From, f16>(from, to, count);
  else
    convert_rows<From, bf16>(from, to, count);
}

void convert(Type from_type, const std::uint8_t* from, Type to_type, std::uint8_t* to, int count) {
  if (from_type == Type::f32)
    convert_from<float>(from, to_type, to, count);
  else if (from_type == Type::f16)
    convert_from<f16>(from, to_type, to, count);
  else
    convert_from<bf16>(from, to_type, to, count);
}
