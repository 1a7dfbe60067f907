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

// Columns from `begin` on, by `vectors` vectors at a time, then by half as many. Returns the first column that is left.
template <std::size_t vectors, typename T>
inline std::size_t add_whole_vectors(const RowSumsCall& call, const std::size_t* positions, std::size_t count,
                                     std::size_t begin, const T* other, T* out) {
  for (; begin + vectors * kWideLanes <= call.width; begin += vectors * kWideLanes) {
    add_columns<vectors>(call, positions, count, begin, other, out);
  }
  if constexpr (vectors > 1) return add_whole_vectors<vectors / 2>(call, positions, count, begin, other, out);
  return begin;
}

// One row of the table; `other` is null or a row that is added, which may be `out`.
template <typename T>
inline void add_rows(const RowSumsCall& call, const std::size_t* positions, std::size_t count, const T* other, T* out) {
  constexpr std::size_t most = tuning::kGatherColumns / kWideLanes;
  const T* rows = static_cast<const T*>(call.rows);
  for (std::size_t i = add_whole_vectors<most>(call, positions, count, 0, other, out); i < call.width; ++i) {
    double sum = 0.0;
    for (std::size_t p = 0; p < count; ++p) sum += static_cast<double>(rows[positions[p] * call.width + i]);
    out[i] = other == nullptr ? static_cast<T>(sum) : other[i] + static_cast<T>(sum);
  }
}

// A few rows at a time: all are cleared or copied, unless each gets a sum, and those that get one are listed without a
// branch, since no CPU predicts which rows of an embedding a batch reads.
template <typename T>
void row_sums(const RowSumsCall& call, std::size_t first, std::size_t last) {
  const std::size_t *starts = call.starts, *positions = call.positions;
  T* table = static_cast<T*>(call.table);
  const T* other = static_cast<const T*>(call.other);
  const std::size_t end = starts[last], fitting = tuning::kSummedBytes / (call.width * sizeof(T));
  const std::size_t most = fitting == 0 ? 1 : fitting < tuning::kSummedRows ? fitting : tuning::kSummedRows;
  std::size_t summed[tuning::kSummedRows];
  for (std::size_t begin = first; begin < last; begin = first) {
    first = last - begin < most ? last : begin + most;
    std::size_t count = 0;
    for (std::size_t row = begin; row < first; ++row) {
      summed[count] = row;
      count += starts[row + 1] != starts[row];
    }
    if (count < first - begin) {
      const std::size_t at = begin * call.width, bytes = (first - begin) * call.width * sizeof(T);
      if (other == nullptr) {
        __builtin_memset(table + at, 0, bytes);
      } else if (other != table) {
        __builtin_memcpy(table + at, other + at, bytes);
      }
    }
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t row = summed[i], at = row * call.width;
      for (std::size_t p = starts[row]; p < starts[row + 1] && p + tuning::kAheadRows < end; ++p) {
        ask_for_row<T>(call, positions[p + tuning::kAheadRows]);
      }
      add_rows(call, positions + starts[row], starts[row + 1] - starts[row], other == nullptr ? nullptr : other + at,
               table + at);
    }
  }
}

}  // namespace
}  // namespace onnxtrain
