// Positions of the indices of a Gather, sorted by the row that they take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace onnxtrain {

inline std::size_t index_from(std::int64_t value, std::size_t size) {
  const auto signed_size = static_cast<std::int64_t>(size);
  if (value < -signed_size || value >= signed_size) {
    throw std::invalid_argument("an index is " + std::to_string(value) + ", and must be from " +
                                std::to_string(-signed_size) + " to " + std::to_string(signed_size - 1) + ".");
  }
  return static_cast<std::size_t>(value < 0 ? value + signed_size : value);
}

// Counting sort of a list of indices: index i stands at positions[starts[i]] ... positions[starts[i + 1] - 1], in
// order.
struct SortedPositions {
  std::vector<std::size_t> starts, positions;

  SortedPositions(const std::int64_t* indices, std::size_t count, std::size_t size)
      : starts(size + 2, 0), positions(count) {
    // Offset by one: storing a position advances the start of its index to the next index's start.
    for (std::size_t i = 0; i < count; ++i) ++starts[index_from(indices[i], size) + 2];
    for (std::size_t i = 2; i < size + 2; ++i) starts[i] += starts[i - 1];
    for (std::size_t i = 0; i < count; ++i) positions[starts[index_from(indices[i], size) + 1]++] = i;
  }
};

}  // namespace onnxtrain
