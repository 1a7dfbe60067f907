// Sums of rows selected by index: the gradient of Gather, alone or added to another term.
//
// Included by kernels.cpp only.
#pragma once

#include "kernels/kernel_table.h"
#include "kernels/lanes.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Columns [begin, begin + tuning::kGatherColumns) of the sum of the rows at `count` positions, in float64 and in order.
// The sum is rounded before the other term is added, as in an addition of its own.
template <typename T>
void add_columns(const RowSumsCall& call, const std::size_t* positions, std::size_t count, std::size_t begin,
                 const T* other, T* out) {
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
  for (std::size_t i = 0; i < tuning::kGatherColumns; ++i) {
    const T sum = static_cast<T>(sums[i / kWideLanes][i % kWideLanes]);
    out[begin + i] = other == nullptr ? sum : other[begin + i] + sum;
  }
}

// One row of the table; `other` is null or a row that is added, which may be `out`.
template <typename T>
void add_rows(const RowSumsCall& call, const std::size_t* positions, std::size_t count, const T* other, T* out) {
  std::size_t begin = 0;
  for (; begin + tuning::kGatherColumns <= call.width; begin += tuning::kGatherColumns)
    add_columns(call, positions, count, begin, other, out);
  const T* rows = static_cast<const T*>(call.rows);
  for (; begin < call.width; ++begin) {
    double sum = 0.0;
    for (std::size_t p = 0; p < count; ++p) sum += static_cast<double>(rows[positions[p] * call.width + begin]);
    out[begin] = other == nullptr ? static_cast<T>(sum) : other[begin] + static_cast<T>(sum);
  }
}

template <typename T>
void row_sums(const RowSumsCall& call, std::size_t first, std::size_t last) {
  const std::size_t* starts = call.starts;
  T* table = static_cast<T*>(call.table);
  const T* other = static_cast<const T*>(call.other);
  for (std::size_t row = first; row < last;) {
    std::size_t next = row;
    while (next < last && starts[next + 1] == starts[next]) ++next;
    // Consecutive untouched rows are cleared or copied together, which is much faster than one by one.
    const std::size_t begin = row * call.width, bytes = (next - row) * call.width * sizeof(T);
    if (other == nullptr) {
      __builtin_memset(table + begin, 0, bytes);
    } else if (other != table) {
      __builtin_memcpy(table + begin, other + begin, bytes);
    }
    row = next;
    for (; row < last && starts[row + 1] != starts[row]; ++row) {
      const std::size_t at = row * call.width;
      add_rows(call, call.positions + starts[row], starts[row + 1] - starts[row],
               other == nullptr ? nullptr : other + at, table + at);
    }
  }
}

}  // namespace
}  // namespace onnxtrain
