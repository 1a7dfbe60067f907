// Sums of the columns of both operands, as for bias gradients, beside a multiplication that reads them anyway.
#pragma once

#include <algorithm>
#include <cstddef>

#include "matmul/matrix_tile.h"
#include "matmul/table.h"

namespace onnxtrain {
namespace {

// sums[i] (+)= the sum of element i over `depth` rows, `stride` apart, for i < count: `vectors` whole vectors, or a part
// of one. Every fourth row is added to the same vector.
template <typename T, std::size_t vectors>
inline void add_vectors(const T* rows, std::size_t stride, std::size_t depth, std::size_t count, bool accumulate,
                        T* sums) {
  constexpr std::size_t lanes = kLanes<T>, together = 4;
  const std::size_t end = (depth - 1) * stride + count;  // no vector reads beyond it
  const auto row = [&](std::size_t k, std::size_t v) {
    const std::size_t at = k * stride + v * lanes;
    const T* from = rows + at;
    if (vectors > 1 || at + lanes <= end) return load(from);
    Vector<T> part = {};
    for (std::size_t i = 0; i < count; ++i) part[i] = from[i];
    return part;
  };
  Vector<T> sum[together][vectors] = {};
  std::size_t k = 0;
  for (; k + together <= depth; k += together) {
#pragma GCC unroll 4
    for (std::size_t j = 0; j < together; ++j) {
#pragma GCC unroll 4
      for (std::size_t v = 0; v < vectors; ++v) sum[j][v] += row(k + j, v);
    }
  }
  for (; k < depth; ++k) {
#pragma GCC unroll 4
    for (std::size_t v = 0; v < vectors; ++v) sum[0][v] += row(k, v);
  }
  T totals[vectors * lanes];
#pragma GCC unroll 4
  for (std::size_t v = 0; v < vectors; ++v) {
    store(totals + v * lanes, (sum[0][v] + sum[1][v]) + (sum[2][v] + sum[3][v]));
  }
  for (std::size_t i = 0; i < count; ++i) sums[i] = accumulate ? sums[i] + totals[i] : totals[i];
}

// The same, for any number of columns.
template <typename T>
void add_columns(const T* rows, std::size_t stride, std::size_t depth, std::size_t count, bool accumulate, T* sums) {
  constexpr std::size_t most = kMaxTileVectors * kLanes<T>;
  std::size_t i = 0;
  for (; i + most <= count; i += most) {
    add_vectors<T, kMaxTileVectors>(rows + i, stride, depth, most, accumulate, sums + i);
  }
  for (; i < count; i += kLanes<T>) {
    add_vectors<T, 1>(rows + i, stride, depth, std::min(count - i, kLanes<T>), accumulate, sums + i);
  }
}

// Adds blocks of `sum_block` depth elements to the requested sums, from element `done` on, until they reach `end`.
// Returns where the next block begins.
template <typename T>
std::size_t sum_columns(const Matmul<T>& p, std::size_t done, std::size_t end) {
  if (p.left_sums == nullptr && p.right_sums == nullptr) return end;
  while (done < end || p.depth == 0) {
    const std::size_t depth = std::min(p.depth - done, p.sum_block);
    const auto add = [&](const T* data, std::ptrdiff_t line, std::size_t count, T* sums) {
      if (sums == nullptr) return;
      const T* first = data + static_cast<std::ptrdiff_t>(done) * line;
      add_columns(first, static_cast<std::size_t>(line), depth, count, done != 0, sums);
    };
    add(p.left.data, p.left.column, p.rows, p.left_sums);
    add(p.right.data, p.right.row, p.columns, p.right_sums);
    if (p.depth == 0) return end;
    done += depth;
  }
  return done;
}

}  // namespace
}  // namespace onnxtrain
