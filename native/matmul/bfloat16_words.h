// Conversion of any element type to bfloat16 words, the upper half of a float, rounded to nearest even. Magnitudes
// below 2^-126 become zero, as in the CPU's instructions; NaN stays NaN.
//
// Included by files that are compiled once per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/elementwise.h"
#include "matmul/bfloat16_table.h"
#include "matmul/low_bit_kernels.h"
#include "matmul/half_weight_kernels.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace onnxtrain {
namespace {

inline std::uint16_t rounded(float value) {
  const auto bits = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  const std::uint32_t nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  const std::uint32_t word = magnitude > 0x7f800000u ? bits >> 16 | 0x40u : nearest;
  return static_cast<std::uint16_t>(magnitude < 0x00800000u ? bits >> 16 & 0x8000u : word);
}

inline void round_to_words(const float* from, std::size_t count, std::uint16_t* to) {
  std::size_t i = 0;
#if defined(__AVX512BF16__)
  for (; i + 32 <= count; i += 32) {
    const __m512bh words = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i));
    __builtin_memcpy(to + i, &words, sizeof words);
  }
#endif
  ONNXTRAIN_VECTORIZE
  for (std::size_t j = i; j < count; ++j) to[j] = rounded(from[j]);
}

// Elements converted to float at a time.
inline constexpr std::size_t kWidened = 256;

// Elements [first, first + count) of line `line` of a matrix.
inline void read_words(const StoredMatrix& matrix, std::size_t line, std::size_t first, std::size_t count,
                       std::uint16_t* to) {
  const std::size_t at = line * matrix.line + first;
  if (matrix.stored == Stored::kFloat) {
    round_to_words(static_cast<const float*>(matrix.data) + at, count, to);
    return;
  }
  if (matrix.stored == Stored::kBfloat16) {
    const std::uint16_t* from = static_cast<const std::uint16_t*>(matrix.data) + at;
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = 0; i < count; ++i) {
      to[i] = static_cast<std::uint16_t>((from[i] & 0x7f80u) == 0 ? from[i] & 0x8000u : from[i]);
    }
    return;
  }
  alignas(kVectorBytes) float numbers[kWidened];
  for (std::size_t begin = 0; begin < count; begin += kWidened) {
    const std::size_t size = count - begin < kWidened ? count - begin : kWidened;
    if (matrix.stored == Stored::kFloat16) {
      widen_half_weights(static_cast<const std::uint16_t*>(matrix.data) + at + begin, size, numbers);
    } else {
      const LowBit<float>& w = *matrix.low_bit;
      const auto read = w.bits == 2 ? dequantize<float, 2> : w.bits == 4 ? dequantize<float, 4> : dequantize<float, 8>;
      read(w, line, first + begin, size, numbers);
    }
    round_to_words(numbers, size, to + begin);
  }
}

}  // namespace
}  // namespace onnxtrain
