// Sums of rows selected by index: the gradient of Gather, alone or added to another term.
//
// Included by kernels.cpp only.
#pragma once

#include "kernels/kernel_table.h"
#include "kernels/lanes.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

inline std::size_t row_of(std::uint64_t entry) { return entry >> 32; }
inline std::size_t position_of(std::uint64_t entry) { return static_cast<std::uint32_t>(entry); }

// Columns [begin, begin + kWideLanes * vectors) of the sum of the rows of `count` entries, in float64 and in order. The
// sum is rounded before the other term is added, as in an addition of its own.
template <std::size_t vectors, typename T>
inline void add_columns(const RowSumsCall& call, const std::uint64_t* entries, std::size_t count, std::size_t begin,
                        const T* other, T* out) {
  const T* rows = static_cast<const T*>(call.rows) + begin;
  WideVector sums[vectors] = {};
  for (std::size_t e = 0; e < count; ++e) {
    const T* row = rows + position_of(entries[e]) * call.width;
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

// Columns from `begin` on, by `vectors` vectors at a time, then by half as many. Returns the first column that is left.
template <std::size_t vectors, typename T>
inline std::size_t add_whole_vectors(const RowSumsCall& call, const std::uint64_t* entries, std::size_t count,
                                     std::size_t begin, const T* other, T* out) {
  for (; begin + vectors * kWideLanes <= call.width; begin += vectors * kWideLanes) {
    add_columns<vectors>(call, entries, count, begin, other, out);
  }
  if constexpr (vectors > 1) return add_whole_vectors<vectors / 2>(call, entries, count, begin, other, out);
  return begin;
}

// One row of the table; `other` is null or a row that is added, which may be `out`.
template <typename T>
inline void add_rows(const RowSumsCall& call, const std::uint64_t* entries, std::size_t count, const T* other, T* out) {
  constexpr std::size_t most = tuning::kGatherColumns / kWideLanes;
  const T* rows = static_cast<const T*>(call.rows);
  for (std::size_t i = add_whole_vectors<most>(call, entries, count, 0, other, out); i < call.width; ++i) {
    double sum = 0.0;
    for (std::size_t e = 0; e < count; ++e) sum += static_cast<double>(rows[position_of(entries[e]) * call.width + i]);
    out[i] = other == nullptr ? static_cast<T>(sum) : other[i] + static_cast<T>(sum);
  }
}

// Asks for the first cache lines of a row that is read soon: rows are read in the order of the table, not of memory.
template <typename T>
inline void ask_for_row(const RowSumsCall& call, std::size_t position) {
  const auto* row = static_cast<const char*>(call.rows) + position * call.width * sizeof(T);
  const std::size_t bytes = call.width * sizeof(T);
  for (std::size_t line = 0; line < bytes && line < tuning::kAheadRowBytes; line += 64) __builtin_prefetch(row + line);
}

// The first entry of row `first` or of one behind it.
inline std::size_t first_entry(const RowSumsCall& call, std::size_t first) {
  std::size_t begin = 0, end = call.count;
  while (begin < end) {
    const std::size_t middle = begin + (end - begin) / 2;
    if (row_of(call.entries[middle]) < first) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// A few rows at a time: all are cleared or copied, unless each gets a sum, and then those with a sum are written. Which
// rows of an embedding a batch reads cannot be predicted: a branch for each row takes longer than clearing it.
template <typename T>
void row_sums(const RowSumsCall& call, std::size_t first, std::size_t last) {
  T* table = static_cast<T*>(call.table);
  const T* other = static_cast<const T*>(call.other);
  // Long rows are either cleared or written: a wrong prediction costs less than doing both.
  const std::size_t length = call.width * sizeof(T);
  const std::size_t most = length > tuning::kAheadRowBytes ? 1 : tuning::kSummedBytes / length;
  std::size_t e = first_entry(call, first);
  for (std::size_t begin = first; begin < last; begin = first) {
    first = last - begin < most ? last : begin + most;
    std::size_t end = e, rows = 0;
    for (; end < call.count && row_of(call.entries[end]) < first; ++end) {
      rows += end == e || row_of(call.entries[end]) != row_of(call.entries[end - 1]);
    }
    if (rows < first - begin) {
      const std::size_t at = begin * call.width, bytes = (first - begin) * call.width * sizeof(T);
      if (other == nullptr) {
        __builtin_memset(table + at, 0, bytes);
      } else if (other != table) {
        __builtin_memcpy(table + at, other + at, bytes);
      }
    }
    while (e < end) {
      const std::size_t row = row_of(call.entries[e]), at = row * call.width;
      std::size_t count = 0;
      for (; e + count < end && row_of(call.entries[e + count]) == row; ++count) {
        const std::size_t ahead = e + count + tuning::kAheadRows;
        if (ahead < call.count) ask_for_row<T>(call, position_of(call.entries[ahead]));
      }
      add_rows(call, call.entries + e, count, other == nullptr ? nullptr : other + at, table + at);
      e += count;
    }
  }
}

}  // namespace
}  // namespace onnxtrain
