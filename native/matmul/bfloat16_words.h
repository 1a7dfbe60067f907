// Conversion of any element type to bfloat16 words, the upper half of a float, rounded to nearest even. Magnitudes
// below 2^-126 become zero, as in the CPU's instructions; NaN stays NaN.
//
// Included by files that are compiled once per instruction set.
#pragma once

#include <algorithm>
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
  if (i == count) return;
  const __mmask32 rest = (1u << (count - i)) - 1;
  const auto first = static_cast<__mmask16>(rest), second = static_cast<__mmask16>(rest >> 16);
  const __m512bh words =
      _mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(second, from + i + 16), _mm512_maskz_loadu_ps(first, from + i));
  _mm512_mask_storeu_epi16(to + i, rest, (__m512i)words);
#else
  ONNXTRAIN_VECTORIZE
  for (std::size_t j = i; j < count; ++j) to[j] = rounded(from[j]);
#endif
}

// Elements converted to float at a time.
inline constexpr std::size_t kWidened = 256;

inline void dequantize_to_words(const LowBit<float>& w, std::size_t line, std::size_t first, std::size_t count,
                                std::uint16_t* to) {
  alignas(kVectorBytes) float numbers[kWidened];
  const auto read = w.bits == 2 ? dequantize<float, 2> : w.bits == 4 ? dequantize<float, 4> : dequantize<float, 8>;
  for (std::size_t begin = 0; begin < count; begin += kWidened) {
    const std::size_t size = std::min(count - begin, kWidened);
    read(w, line, first + begin, size, numbers);
    round_to_words(numbers, size, to + begin);
  }
}

#if defined(__AVX512BF16__)
// As above for 4 bits: of each block, the sixteen numbers that its integers stand for are rounded, and looked up.
inline void look_up_words(const LowBit<float>& w, std::size_t line, std::size_t first, std::size_t count,
                          std::uint16_t* to) {
  constexpr std::size_t kTogether = 32;
  const __m512 integers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  std::size_t block = first / w.block, skipped = first % w.block;
  while (count != 0) {
    const std::size_t taken = std::min(count, w.block - skipped);
    const std::uint8_t* packed = w.integers + (line * w.blocks + block) * (w.block / 2) + skipped / 2;
    std::size_t i = 0;
    if (skipped % 2 == 0 && taken >= kTogether) {
      const __m512 scale = _mm512_set1_ps(w.scales[line * w.blocks + block]);
      const __m512 zero = _mm512_set1_ps(zero_point<float, 4>(w, line, block));
      const __m512bh levels =
          _mm512_cvtne2ps_pbh(_mm512_setzero_ps(), _mm512_mul_ps(_mm512_sub_ps(integers, zero), scale));
      for (; i + kTogether <= taken; i += kTogether) {
        const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(packed + i / 2)));
        const __m512i apart = _mm512_and_si512(_mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12)),
                                               _mm512_set1_epi32(0x000f000f));
        _mm512_storeu_si512(to + i, _mm512_permutexvar_epi16(apart, (__m512i)levels));
      }
    }
    if (i < taken) dequantize_to_words(w, line, block * w.block + skipped + i, taken - i, to + i);
    to += taken;
    count -= taken;
    skipped = 0;
    ++block;
  }
}
#endif

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
  if (matrix.stored == Stored::kLowBit) {
#if defined(__AVX512BF16__)
    if (matrix.low_bit->bits == 4) return look_up_words(*matrix.low_bit, line, first, count, to);
#endif
    return dequantize_to_words(*matrix.low_bit, line, first, count, to);
  }
  alignas(kVectorBytes) float numbers[kWidened];
  for (std::size_t begin = 0; begin < count; begin += kWidened) {
    const std::size_t size = std::min(count - begin, kWidened);
    widen_half_weights(static_cast<const std::uint16_t*>(matrix.data) + at + begin, size, numbers);
    round_to_words(numbers, size, to + begin);
  }
}

}  // namespace
}  // namespace onnxtrain
