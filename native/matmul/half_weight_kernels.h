// float16 and bfloat16 weights, widened exactly while packing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/elementwise.h"
#include "matmul/line_packing.h"
#include "matmul/table.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace onnxtrain {
namespace {

// Converts float16 bits to float.
inline float widened_half(std::uint16_t half) {
  const std::uint32_t rest = half & 0x7fffu, sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
  const std::uint32_t moved = (rest << 13) + (112u << 23);  // rebiases the exponent from 15 to 127
  const float tiny = __builtin_bit_cast(float, moved + (1u << 23)) - 0x1p-14f;  // subnormals have no implicit leading 1
  const std::uint32_t number = rest < 0x0400u ? __builtin_bit_cast(std::uint32_t, tiny) : moved;
  return __builtin_bit_cast(float, sign | (rest < 0x7c00u ? number : moved + (112u << 23)));
}

// Converts bfloat16 bits to float.
inline float widened_bfloat16(std::uint16_t word) {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(word) << 16);
}

template <typename T>
inline void widen_half_weights(const std::uint16_t* from, std::size_t count, T* to) {
  std::size_t i = 0;
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == sizeof(float)) {
    for (; i + 16 <= count; i += 16) {
      __m256i words;
      __builtin_memcpy(&words, from + i, sizeof words);
      _mm512_storeu_ps(to + i, _mm512_cvtph_ps(words));
    }
  }
#endif
  ONNXTRAIN_VECTORIZE
  for (std::size_t j = i; j < count; ++j) to[j] = static_cast<T>(widened_half(from[j]));
}

template <typename T>
inline void widen_bfloat16(const std::uint16_t* from, std::size_t count, T* to) {
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) to[i] = static_cast<T>(widened_bfloat16(from[i]));
}

// Packs rows [first_row, first_row + depth) from column `first_column` on into panels; the last one is zero-padded.
template <typename T>
void pack_half_weights(const HalfWeights& w, std::size_t first_row, std::size_t depth, std::size_t first_column,
                 std::size_t columns, T* packed) {
  const LinesPacking<T> packing = {w.transposed, first_row, depth, first_column, columns, packed};
  if (w.stored == Stored::kFloat16) {
    pack_lines(packing, [&](std::size_t line, std::size_t first, std::size_t count, T* to) {
      widen_half_weights(w.words + line * w.line + first, count, to);
    });
  } else {
    pack_lines(packing, [&](std::size_t line, std::size_t first, std::size_t count, T* to) {
      widen_bfloat16(w.words + line * w.line + first, count, to);
    });
  }
}

}  // namespace
}  // namespace onnxtrain
