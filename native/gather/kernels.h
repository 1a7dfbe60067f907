// Sums of rows selected by index: the gradient of Gather, alone or added to another term.
//
// Included by kernels.cpp only.
#pragma once

#include "kernels/kernel_table.h"
#include "kernels/lanes.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Columns [begin, begin + kWideLanes * vectors) of the sum of the rows at `count` positions, in float64 and in order. The
// sum is rounded before the other term is added, as in an addition of its own.
template <std::size_t vectors, typename T>
inline void add_columns(const RowSumsCall& call, const std::size_t* positions, std::size_t count, std::size_t begin,
                        const T* other, T* out) {
  const T* rows = static_cast<const T*>(call.rows) + begin;
  WideVector sums[vectors] = {};
  for (std::size_t p = 0; p < count; ++p) {
    const T* row = rows + positions[p] * call.width;
    for (std::size_t v = 0; v < vectors; ++v) {
      WideVector value;
      load(row + v * kWideLanes, value);
      sums[v] += value;
    }
  }
  for (std::size_t v = 0; v < vectors; ++v) {
    const std::size_t at = begin + v * kWideLanes;
    const auto sum = narrow<T>(sums[v]);
    store(out + at, other == nullptr ? sum : few(other + at) + sum);
  }
}

// Asks for the first cache lines of a row that is read soon: rows are read in the order of the table, not of memory.
template <typename T>
inline void ask_for_row(const RowSumsCall& call, std::size_t position) {
  const auto* row = static_cast<const char*>(call.rows) + position * call.width * sizeof(T);
  const std::size_t bytes = call.width * sizeof(T);
  for (std::size_t line = 0; line < bytes && line < tuning::kAheadRowBytes; line += 64) __builtin_prefetch(row + line);
}

// One row of the table; `other` is null or a row that is added, which may be `out`.
template <typename T>
void add_rows(const RowSumsCall& call, const std::size_t* positions, std::size_t count, const T* other, T* out) {
  constexpr std::size_t most = tuning::kGatherColumns / kWideLanes;
  std::size_t begin = 0;
  for (; begin + tuning::kGatherColumns <= call.width; begin += tuning::kGatherColumns)
    add_columns<most>(call, positions, count, begin, other, out);
  for (; begin + kWideLanes <= call.width; begin += kWideLanes)
    add_columns<1>(call, positions, count, begin, other, out);
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
  const std::size_t end = starts[last];
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
      for (std::size_t p = starts[row]; p < starts[row + 1] && p + tuning::kAheadRows < end; ++p) {
        ask_for_row<T>(call, call.positions[p + tuning::kAheadRows]);
      }
      add_rows(call, call.positions + starts[row], starts[row + 1] - starts[row],
               other == nullptr ? nullptr : other + at, table + at);
    }
  }
}

}  // namespace
}  // namespace onnxtrain
