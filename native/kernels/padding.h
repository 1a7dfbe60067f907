// Row lengths of packed buffers.
#pragma once

#include <cstddef>

#include "kernels/vector.h"

namespace onnxtrain {
namespace {

inline constexpr std::size_t kLineBytes = 64;

inline std::size_t rounded_up(std::size_t count, std::size_t to) { return (count + to - 1) / to * to; }

// Rounds up to whole vectors.
template <typename T>
std::size_t padded(std::size_t count) {
  return rounded_up(count, kLanes<T>);
}

// Rounds up to an odd number of cache lines, hence to whole vectors: rows read together then map to different cache
// sets, whereas a power of two would map all to a few.
template <typename T>
std::size_t odd_lines(std::size_t count) {
  constexpr std::size_t line = kLineBytes / sizeof(T);
  return ((count + line - 1) / line | 1) * line;
}

}  // namespace
}  // namespace onnxtrain
