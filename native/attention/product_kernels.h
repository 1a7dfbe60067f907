// Matrix multiplications within a block of queries: rows at arbitrary addresses times columns packed as panels.
//
// Included by kernels.cpp only. The broadcast operand is read through row pointers; the other is packed into panels
// once per head.
#pragma once

#include "attention/rows.h"
#include "matmul/packing.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// sums[row, column] (+)= sum over the depth of source[row * row_stride + depth_offsets[depth]] * panels[depth, column],
// for the vectors that contain columns of [first_wanted, wanted).
template <typename T>
struct Matmul {
  const T* source;
  std::ptrdiff_t row_stride;
  const std::ptrdiff_t* depth_offsets;
  std::size_t rows, depth;
  const T* panels;
  std::size_t panel_depth, panel_begin;  // depth of the panels in memory, and the first row of it that is read
  std::size_t columns, first_wanted, wanted;
  bool accumulate;
  T* sums;
  std::size_t sums_stride;
};

template <typename T>
void multiply_panels(const Matmul<T>& product) {
  const Panels<T> panels(product.columns);
  const Parts depths(product.depth, tuning::kAccumulationDepth);
  if (product.depth == 0 && !product.accumulate) {
    for (std::size_t row = 0; row < product.rows; ++row) {
      fill_zero(product.sums + row * product.sums_stride, padded<T>(product.columns));
    }
  }
  for (std::size_t part = 0; part < depths.count; ++part) {
    for (std::size_t panel = 0; panel < panels.count() && panels.begin(panel) < product.wanted; ++panel) {
      const std::size_t begin = panels.begin(panel), width = panels.width(panel), end = begin + width;
      if (end <= product.first_wanted) continue;
      const std::size_t skipped = product.first_wanted > begin ? (product.first_wanted - begin) / kLanes<T> : 0;
      const std::size_t first = begin + skipped * kLanes<T>;
      const std::size_t last = product.wanted < end ? padded<T>(product.wanted) : end;
      const std::size_t vectors = (last - first) / kLanes<T>;
      const T* columns = product.panels + begin * product.panel_depth +
                         (product.panel_begin + depths.begin(part)) * width + (first - begin);
      const Multiply<T> full = multiply_of<T>(tile_rows(vectors), vectors);
      const Parts tiles(product.rows, tile_rows(vectors));
      for (std::size_t t = 0; t < tiles.count; ++t) {
        const std::size_t row = tiles.begin(t), rows = tiles.size(t);
        const T* starts[kMaxTileRows];
        for (std::size_t r = 0; r < rows; ++r) {
          starts[r] = product.source + static_cast<std::ptrdiff_t>(row + r) * product.row_stride;
        }
        const Tile<T> tile = {starts,
                              product.depth_offsets + depths.begin(part),
                              depths.size(part),
                              columns,
                              part > 0 || product.accumulate,
                              product.sums + row * product.sums_stride + first,
                              product.sums_stride,
                              width};
        (rows == tile_rows(vectors) ? full : multiply_of<T>(rows, vectors))(tile);
      }
    }
  }
}

// Packs a matrix [columns][depth], or one [depth][columns] with contiguous columns, into panels.
template <typename T>
void pack_all(const T* source, const T* end, std::ptrdiff_t column_stride, const std::ptrdiff_t* offsets,
              std::size_t columns, std::size_t depth, T* panels) {
  pack(Packing<T>{source, end, column_stride, offsets, columns, depth, 0, depth, 0, panel_count<T>(columns), panels});
}

}  // namespace
}  // namespace onnxtrain
