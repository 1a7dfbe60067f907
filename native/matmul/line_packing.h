// Packing of matrices whose elements are converted on the way: at most one block of the depth is held in the wider
// type.
#pragma once

#include <algorithm>
#include <cstddef>

#include "matmul/matrix_tile.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Packs rows [first_row, first_row + depth) of a matrix from column `first_column` on into panels; the last one is
// zero-padded. Lines of memory are the matrix's rows or, if transposed, its columns.
template <typename T>
struct LinesPacking {
  bool transposed;
  std::size_t first_row, depth, first_column, columns;
  T* packed;
};

template <typename T, typename Read>
void pack_lines_as_rows(const LinesPacking<T>& p, const Read& read) {
  const Panels<T> panels(p.columns);
  for (std::size_t panel = 0; panel < panels.count(); ++panel) {
    const std::size_t column = panels.begin(panel), width = panels.width(panel);
    const std::size_t valid = std::min(p.columns - column, width);
    T* to = p.packed + column * p.depth;
    for (std::size_t k = 0; k < p.depth; ++k, to += width) {
      read(p.first_row + k, p.first_column + column, valid, to);
      fill_zero(to + valid, width - valid);
    }
  }
}

template <typename T, typename Read>
void pack_lines_as_columns(const LinesPacking<T>& p, const Read& read) {
  constexpr std::size_t lanes = kLanes<T>, kLength = (tuning::kProductDepth + lanes - 1) / lanes * lanes;
  alignas(kVectorBytes) T numbers[lanes * kLength];
  const Panels<T> panels(p.columns);
  for (std::size_t panel = 0; panel < panels.count(); ++panel) {
    const std::size_t column = panels.begin(panel), width = panels.width(panel);
    T* to = p.packed + column * p.depth;
    for (std::size_t j = 0; j < width; j += lanes, to += lanes) {
      const std::size_t valid = column + j < p.columns ? std::min(p.columns - column - j, lanes) : 0;
      for (std::size_t i = 0; i < valid; ++i) {
        read(p.first_column + column + j + i, p.first_row, p.depth, numbers + i * kLength);
      }
      for (std::size_t k = 0; k < p.depth; k += lanes) {
        Vector<T> square[lanes];
#pragma GCC unroll 16
        for (std::size_t i = 0; i < lanes; ++i) {
          square[i] = i < valid ? load(numbers + i * kLength + k) : Vector<T>{};
        }
        transpose_in_registers<T>(square);
        const std::size_t rows = std::min(p.depth - k, lanes);
        for (std::size_t i = 0; i < rows; ++i) store(to + (k + i) * width, square[i]);
      }
    }
  }
}

// `read(line, first, count, to)` converts elements [first, first + count) of a line.
template <typename T, typename Read>
void pack_lines(const LinesPacking<T>& packing, const Read& read) {
  if (packing.transposed) {
    pack_lines_as_columns(packing, read);
  } else {
    pack_lines_as_rows(packing, read);
  }
}

}  // namespace
}  // namespace onnxtrain
