// Packs matrices into panels: columns side by side, as tiles read them.
#pragma once

#include "matmul/matrix_tile.h"
#include "matmul/table.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Number of leading offsets, among the first `count`, that ascend and stay within `reach` of the first.
inline std::size_t reached(const std::ptrdiff_t* offsets, std::size_t count, std::size_t reach) {
  std::size_t result = 1;
  while (result < count && offsets[result] > offsets[result - 1] &&
         offsets[result] < offsets[0] + static_cast<std::ptrdiff_t>(reach)) {
    ++result;
  }
  return result;
}

template <typename T>
void pack(const Packing<T>& packing) {
  constexpr std::size_t lanes = kLanes<T>, kFewInSquare = lanes / 8;  // fewer columns are copied one by one
  const Panels<T> panels(packing.columns);
  const std::ptrdiff_t stride = packing.column_stride;
  for (std::size_t panel = packing.first_panel; panel < packing.end_panel; ++panel) {
    const std::size_t first = panels.begin(panel), width = panels.width(panel);
    const std::size_t valid = packing.columns - first < width ? packing.columns - first : width;
    const T* source = packing.source + static_cast<std::ptrdiff_t>(first) * stride;
    T* target = packing.panels + first * packing.depth;
    for (std::size_t k = packing.begin; k < packing.end;) {
      const std::ptrdiff_t* offsets = packing.offsets + k;
      const auto row_of = [&](std::size_t i) {
        return target + (packing.positions == nullptr ? k + i : packing.positions[k + i]) * width;
      };
      const std::size_t step = reached(offsets, packing.end - k < lanes ? packing.end - k : lanes, lanes);
      std::size_t j = 0;
      // Squares of neighbouring elements that lie within the source; not all of their elements are needed.
      const std::ptrdiff_t left = packing.source_end - source - offsets[0] - static_cast<std::ptrdiff_t>(lanes);
      for (; step > 2 && j + kFewInSquare < valid; j += lanes) {
        const std::size_t count = valid - j < lanes ? valid - j : lanes;
        if (static_cast<std::ptrdiff_t>(j + count - 1) * stride > left) break;
        Vector<T> square[lanes];
#pragma GCC unroll 16
        for (std::size_t i = 0; i < lanes; ++i) {
          square[i] =
              i < count ? load(source + static_cast<std::ptrdiff_t>(j + i) * stride + offsets[0]) : Vector<T>{};
        }
        transpose_in_registers<T>(square);
        if (step == lanes) {
#pragma GCC unroll 16
          for (std::size_t i = 0; i < lanes; ++i) store(row_of(i) + j, square[i]);
        } else {
          for (std::size_t i = 0; i < step; ++i) store(row_of(i) + j, square[offsets[i] - offsets[0]]);
        }
      }
      for (std::size_t i = 0; i < step; ++i) {
        T* row = row_of(i);
        const T* from = source + offsets[i];
        std::size_t column = j;
        if (stride == 1 && column < valid) {
          copy(from + column, valid - column, row + column);
          column = valid;
        }
        for (; column < valid; ++column) row[column] = from[static_cast<std::ptrdiff_t>(column) * stride];
        for (; column < width; ++column) row[column] = T(0);
      }
      k += step;
    }
  }
}

}  // namespace
}  // namespace onnxtrain
