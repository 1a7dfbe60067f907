// States that are kept in bfloat16: widened before an update, rounded after it, up or down by chance.
//
// Included by kernels.cpp only.
#pragma once

#include "kernels/drawing.h"
#include "kernels/elementwise.h"

namespace onnxtrain {
namespace {

inline void widen_states(std::size_t count, const std::uint16_t* states, float* wide) {
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) {
    wide[i] = __builtin_bit_cast(float, static_cast<std::uint32_t>(states[i]) << 16);
  }
}

// Element i is that of index `first` + i in the state. A number between two of bfloat16 becomes the one or the other, the
// nearer with the higher probability, so that the mean is the number; what is finite stays so.
inline void round_states(const Draw& draw, std::size_t first, std::size_t count, const float* wide,
                         std::uint16_t* states) {
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = __builtin_bit_cast(std::uint32_t, wide[i]);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    std::uint32_t rounded = (magnitude + (drawn(draw, first + i) >> 16)) >> 16;
    rounded = rounded > 0x7f7fu ? 0x7f7fu : rounded;                                            // the largest one
    const std::uint32_t special = magnitude >> 16 | (magnitude > 0x7f800000u ? 0x40u : 0u);  // a NaN stays one
    states[i] = static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | (magnitude < 0x7f800000u ? rounded : special));
  }
}

}  // namespace
}  // namespace onnxtrain
