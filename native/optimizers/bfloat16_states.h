// States in bfloat16: widened before an update, stochastically rounded after it.
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

// Element i has index `first` + i in the state. A value between two bfloat16 neighbours becomes either, with
// probabilities that make the expectation exact; finite values stay finite.
inline void round_states(const Draw& draw, std::size_t first, std::size_t count, const float* wide,
                         std::uint16_t* states) {
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) {
    const auto bits = __builtin_bit_cast(std::uint32_t, wide[i]);
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    std::uint32_t rounded = (magnitude + (drawn(draw, first + i) >> 16)) >> 16;
    rounded = rounded > 0x7f7fu ? 0x7f7fu : rounded;                                            // largest finite value
    const std::uint32_t special = magnitude >> 16 | (magnitude > 0x7f800000u ? 0x40u : 0u);  // keeps NaN a NaN
    states[i] = static_cast<std::uint16_t>((bits >> 16 & 0x8000u) | (magnitude < 0x7f800000u ? rounded : special));
  }
}

}  // namespace
}  // namespace onnxtrain
