// How long rows are where kernels arrange them in memory.
#pragma once

#include <cstddef>

#include "kernels/vector.h"

namespace onnxtrain {
namespace {

inline constexpr std::size_t kLineBytes = 64;

inline std::size_t rounded_up(std::size_t count, std::size_t to) { return (count + to - 1) / to * to; }

// As many elements as fill vectors.
template <typename T>
std::size_t padded(std::size_t count) {
  return rounded_up(count, kLanes<T>);
}

// As many elements as fill an odd number of cache lines, and so whole vectors: rows that are read side by side then lie in different sets of
// the cache, where a power of two would put all into a few.
template <typename T>
std::size_t odd_lines(std::size_t count) {
  constexpr std::size_t line = kLineBytes / sizeof(T);
  return ((count + line - 1) / line | 1) * line;
}

}  // namespace
}  // namespace onnxtrain
