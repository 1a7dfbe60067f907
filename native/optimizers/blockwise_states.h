// States in 8 bits: 8-bit floating-point codes with one scale per block of kStateBlock elements. The scale is a power
// of two such that the largest element of a block has the largest exponent.
//
// Signed codes have 1 sign, 4 exponent and 3 fraction bits; unsigned ones (averages of squares) 5 exponent and 3
// fraction bits. A code with exponent bits e and fraction f represents scale 2^(e - top) (1 + f/8), or scale 2^(1 -
// top) f/8 if e = 0, where top is the largest e. Decoding is exact; encoding rounds stochastically to a neighbour, such
// that the expectation is exact. A positive unsigned value never becomes zero, since its root may be a divisor. A block
// with a non-finite element is NaN.
//
// Included by kernels.cpp only.
#pragma once

#include "kernels/drawing.h"
#include "kernels/elementwise.h"
#include "kernels/kernel_table.h"

namespace onnxtrain {
namespace {

template <bool is_signed>
struct Code {
  static constexpr std::uint32_t kExponents = is_signed ? 16 : 32, kLargest = 8 * kExponents - 1;
  // A float in [1, 2), exponent bits 127, maps to the largest exponent.
  static constexpr std::uint32_t kOffset = 8 * (128 - kExponents);
  // Below this, codes are equidistant: adding it leaves the spacing unchanged.
  static constexpr float kLeastNormal = __builtin_bit_cast(float, (kOffset + 8) << 20);
};

template <bool is_signed>
void decode_states_of(std::size_t count, const std::uint8_t* codes, const float* scales, float* wide) {
  using C = Code<is_signed>;
  for (std::size_t begin = 0; begin < count; begin += kStateBlock) {
    const std::size_t end = count - begin < kStateBlock ? count : begin + kStateBlock;
    const float scale = *scales++;
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint32_t code = codes[i], magnitude = code & C::kLargest;
      const bool small = magnitude < 8;
      const std::uint32_t bits = (magnitude + C::kOffset + (small ? 8u : 0u)) << 20;
      const float size = (__builtin_bit_cast(float, bits) - (small ? C::kLeastNormal : 0.0f)) * scale;
      const std::uint32_t sign = is_signed ? (code & 0x80u) << 24 : 0u;
      wide[i] = __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, size) | sign);
    }
  }
}

// The scale of a block whose largest magnitude has these bits: a power of two, at least 8/15 of that magnitude.
inline float scale_of(std::uint32_t largest) {
  if (largest >= 0x7f800000u) return __builtin_nanf("");
  std::uint32_t bits = (largest + 0xfffffu) & 0x7f800000u;
  bits = bits < 0x00800000u ? 0x00800000u : bits;
  return __builtin_bit_cast(float, bits > 0x7f000000u ? 0x7f000000u : bits);
}

template <bool is_signed>
void encode_states_of(const Draw& draw, std::size_t first, std::size_t count, const float* wide, std::uint8_t* codes,
                      float* scales) {
  using C = Code<is_signed>;
  for (std::size_t begin = 0; begin < count; begin += kStateBlock) {
    const std::size_t end = count - begin < kStateBlock ? count : begin + kStateBlock;
    std::uint32_t largest = 0;
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint32_t size = __builtin_bit_cast(std::uint32_t, wide[i]) & 0x7fffffffu;
      largest = size > largest ? size : largest;
    }
    const float scale = scale_of(largest), factor = 1.0f / scale;
    *scales++ = scale;
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = begin; i < end; ++i) {
      const auto bits = __builtin_bit_cast(std::uint32_t, wide[i]);
      const std::uint32_t magnitude = bits & 0x7fffffffu;
      const float size = __builtin_bit_cast(float, magnitude) * factor;
      const bool small = size < C::kLeastNormal;
      const float shifted = size + (small ? C::kLeastNormal : 0.0f);
      std::uint32_t code = (__builtin_bit_cast(std::uint32_t, shifted) + (drawn(draw, first + i) >> 12)) >> 20;
      code -= C::kOffset + (small ? 8u : 0u);
      code = code > C::kLargest ? C::kLargest : code;
      if (is_signed) {
        code |= bits >> 24 & 0x80u;
      } else {
        code |= (code == 0 && magnitude != 0) ? 1u : 0u;
      }
      codes[i] = static_cast<std::uint8_t>(code);
    }
  }
}

inline void decode_states(bool is_signed, std::size_t count, const std::uint8_t* codes, const float* scales,
                          float* wide) {
  (is_signed ? decode_states_of<true> : decode_states_of<false>)(count, codes, scales, wide);
}

// Element i has index `first` + i in the state; i = 0 begins a block.
inline void encode_states(bool is_signed, const Draw& draw, std::size_t first, std::size_t count, const float* wide,
                          std::uint8_t* codes, float* scales) {
  (is_signed ? encode_states_of<true> : encode_states_of<false>)(draw, first, count, wide, codes, scales);
}

}  // namespace
}  // namespace onnxtrain
