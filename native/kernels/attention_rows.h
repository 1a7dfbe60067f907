// How rows of scores lie in a block: as long as vectors fill them, with -inf behind the last key.
//
// Included by attention.cpp only.
#pragma once

#include <cstddef>

#include "vector.h"

namespace onnxtrain {
namespace {

template <typename T>
constexpr T kMinusInfinity = -static_cast<T>(__builtin_inf());

inline constexpr std::size_t kLineBytes = 64;

inline std::size_t rounded_up(std::size_t count, std::size_t to) { return (count + to - 1) / to * to; }

template <typename T>
std::size_t padded(std::size_t columns) {
  return rounded_up(columns, kLanes<T>);
}

// An odd number of cache lines: rows that are read side by side then lie in different sets of the cache.
template <typename T>
std::size_t score_stride(std::size_t keys) {
  constexpr std::size_t line = kLineBytes / sizeof(T);
  return ((padded<T>(keys) + line - 1) / line | 1) * line;
}

}  // namespace
}  // namespace onnxtrain
