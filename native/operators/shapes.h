// Shape helpers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "sizes.h"

namespace onnxtrain {

// Number of elements over axes [first, last).
inline std::size_t product(const std::vector<std::int64_t>& shape, std::size_t first, std::size_t last) {
  const auto begin = shape.begin() + static_cast<std::ptrdiff_t>(first);
  const auto end = shape.begin() + static_cast<std::ptrdiff_t>(last);
  if (std::find(begin, end, 0) != end) return 0;
  std::size_t count = 1;
  for (auto size = begin; size != end; ++size) count = checked_product(count, static_cast<std::size_t>(*size));
  return count;
}

// Normalizes an axis, which may be negative.
inline std::size_t axis_of(std::int64_t axis, const std::vector<std::int64_t>& shape) {
  const auto rank = static_cast<std::int64_t>(shape.size());
  if (axis < -rank || axis >= rank) {
    throw std::invalid_argument("attribute 'axis' is " + std::to_string(axis) + ", and dy has shape " +
                                text_of(shape) + ": it must be from " + std::to_string(-rank) + " to " +
                                std::to_string(rank - 1) + ".");
  }
  return static_cast<std::size_t>(axis < 0 ? axis + rank : axis);
}

}  // namespace onnxtrain
