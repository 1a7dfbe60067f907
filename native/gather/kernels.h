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
// sum is rounded before the other term is added, as in an addition of its own; `other` and `out` begin at that column.
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
    const std::size_t at = v * kWideLanes;
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

// Columns [begin, end) of a row of the table; `other` is null or what is added to them, which may be `out`.
template <typename T>
void add_rows(const RowSumsCall& call, std::size_t row, std::size_t begin, std::size_t end, const T* other, T* out) {
  constexpr std::size_t most = tuning::kGatherColumns / kWideLanes;
  const std::size_t *positions = call.positions + call.starts[row], count = call.starts[row + 1] - call.starts[row];
  for (std::size_t p = call.starts[row] + tuning::kAheadRows; p < call.starts[row + 1] + tuning::kAheadRows; ++p) {
    if (p < call.count) ask_for_row<T>(call, call.positions[p]);
  }
  const auto advance = [&](std::size_t by) {
    begin += by;
    out += by;
    if (other != nullptr) other += by;
  };
  for (; begin + tuning::kGatherColumns <= end; advance(tuning::kGatherColumns)) {
    add_columns<most>(call, positions, count, begin, other, out);
  }
  for (; begin + kWideLanes <= end; advance(kWideLanes)) add_columns<1>(call, positions, count, begin, other, out);
  const T* rows = static_cast<const T*>(call.rows);
  for (; begin < end; advance(1)) {
    double sum = 0.0;
    for (std::size_t p = 0; p < count; ++p) sum += static_cast<double>(rows[positions[p] * call.width + begin]);
    *out = other == nullptr ? static_cast<T>(sum) : *other + static_cast<T>(sum);
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
      add_rows<T>(call, row, 0, call.width, other == nullptr ? nullptr : other + at, table + at);
    }
  }
}

template <typename T>
void row_sums_part(const RowSumsCall& call, std::size_t first, std::size_t last) {
  T* out = static_cast<T*>(call.table);
  for (std::size_t row = first / call.width, column = first % call.width; first < last; ++row, column = 0) {
    const std::size_t count = call.width - column < last - first ? call.width - column : last - first;
    if (call.starts[row + 1] == call.starts[row]) {
      __builtin_memset(out, 0, count * sizeof(T));
    } else {
      add_rows<T>(call, row, column, column + count, nullptr, out);
    }
    first += count;
    out += count;
  }
}

}  // namespace
}  // namespace onnxtrain
