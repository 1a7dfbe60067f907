// Sums of rows selected by index: the gradient of Gather.
//
// Included by kernels.cpp only.
#pragma once

#include "kernels/kernel_table.h"
#include "kernels/lanes.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Columns [begin, begin + tuning::kGatherColumns) of the sum of the rows at `count` positions, in float64 and in order.
template <typename T>
void add_columns(const RowSumsCall& call, const std::size_t* positions, std::size_t count, std::size_t begin, T* out) {
  const T* rows = static_cast<const T*>(call.rows) + begin;
  WideVector sums[tuning::kGatherColumns / kWideLanes] = {};
  for (std::size_t p = 0; p < count; ++p) {
    const T* row = rows + positions[p] * call.width;
    for (std::size_t v = 0; v < tuning::kGatherColumns / kWideLanes; ++v) {
      WideVector value;
      load(row + v * kWideLanes, value);
      sums[v] += value;
    }
  }
  for (std::size_t i = 0; i < tuning::kGatherColumns; ++i)
    out[begin + i] = static_cast<T>(sums[i / kWideLanes][i % kWideLanes]);
}

// One row of the table.
template <typename T>
void add_rows(const RowSumsCall& call, const std::size_t* positions, std::size_t count, T* out) {
  std::size_t begin = 0;
  for (; begin + tuning::kGatherColumns <= call.width; begin += tuning::kGatherColumns)
    add_columns(call, positions, count, begin, out);
  const T* rows = static_cast<const T*>(call.rows);
  for (; begin < call.width; ++begin) {
    double sum = 0.0;
    for (std::size_t p = 0; p < count; ++p) sum += static_cast<double>(rows[positions[p] * call.width + begin]);
    out[begin] = static_cast<T>(sum);
  }
}

template <typename T>
void row_sums(const RowSumsCall& call, std::size_t first, std::size_t last) {
  const std::size_t* starts = call.starts;
  T* table = static_cast<T*>(call.table);
  for (std::size_t row = first; row < last;) {
    std::size_t next = row;
    while (next < last && starts[next + 1] == starts[next]) ++next;
    // Consecutive untouched rows are cleared together, which is much faster than one by one.
    __builtin_memset(table + row * call.width, 0, (next - row) * call.width * sizeof(T));
    row = next;
    for (; row < last && starts[row + 1] != starts[row]; ++row) {
      add_rows(call, call.positions + starts[row], starts[row + 1] - starts[row], table + row * call.width);
    }
  }
}

}  // namespace
}  // namespace onnxtrain
