// Recurrent weights: packed once, multiplied by the rows of a batch at every step.
#pragma once

#include "matmul/matmul_kernels.h"
#include "recurrent/table.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Panels one vector narrower than the maximum allow tiles with two more rows: eight rows, a common batch size, then
// read each panel once.
inline constexpr std::size_t kFactorVectors = kMaxTileVectors > 2 ? kMaxTileVectors - 1 : kMaxTileVectors;

template <typename T>
std::size_t packed_size(std::size_t depth, std::size_t columns) {
  return depth * padded<T>(columns);
}

template <typename T>
void pack_factor(const FactorSource<T>& from) {
  const Panels<T> panels(from.columns, kFactorVectors);
  for (std::size_t begin = 0; begin < from.depth; begin += tuning::kFactorDepth) {
    const std::size_t depth = from.depth - begin < tuning::kFactorDepth ? from.depth - begin : tuning::kFactorDepth;
    T* block = from.panels + begin * padded<T>(from.columns);
    for (std::size_t panel = 0; panel < panels.count(); ++panel) {  // each as a matrix of its own
      const std::size_t first = panels.begin(panel), width = panels.width(panel);
      const std::size_t columns = from.columns - first < width ? from.columns - first : width;
      const T* corner = from.source + static_cast<std::ptrdiff_t>(begin) * from.row +
                        static_cast<std::ptrdiff_t>(first) * from.column;
      if (from.column == 1) {
        pack_rows(corner, from.row, depth, columns, width, block + first * depth);
      } else {
        pack<T>({corner, from.end, from.column, from.ones, columns, depth, 0, depth, 0, 1, block + first * depth});
      }
    }
  }
}

// target (+)= left times the packed weights, for `rows` rows.
template <typename T>
void multiply_factor(const T* left, std::ptrdiff_t left_row, std::size_t rows, const std::ptrdiff_t* ones,
                     const PackedFactor<T>& factor, bool accumulate, T* target, std::ptrdiff_t target_row) {
  alignas(kVectorBytes) T buffer[kMaxTileRows * kMaxTileVectors * kLanes<T>];
  const Panels<T> panels(factor.columns, kFactorVectors);
  for (std::size_t begin = 0; begin < factor.depth; begin += tuning::kFactorDepth) {
    const std::size_t depth = factor.depth - begin < tuning::kFactorDepth ? factor.depth - begin : tuning::kFactorDepth;
    const bool adds = accumulate || begin > 0;
    for (std::size_t panel = 0; panel < panels.count(); ++panel) {
      const std::size_t vectors = panels.vectors(panel), width = panels.width(panel), column = panels.begin(panel);
      const std::size_t valid = factor.columns - column < width ? factor.columns - column : width;
      const T* columns = factor.panels + begin * padded<T>(factor.columns) + column * depth;
      const Parts tiles(rows, tile_rows(vectors));
      for (std::size_t t = 0; t < tiles.count; ++t) {
        const std::size_t row = tiles.begin(t), count = tiles.size(t);
        T* corner = target + static_cast<std::ptrdiff_t>(row) * target_row + column;
        const T* starts[kMaxTileRows];
        for (std::size_t r = 0; r < count; ++r) {
          starts[r] = left + static_cast<std::ptrdiff_t>(row + r) * left_row + begin;
          if (valid != width && adds) copy(corner + static_cast<std::ptrdiff_t>(r) * target_row, valid, buffer + r * width);
        }
        const bool whole = valid == width;
        const Tile<T> tile = {starts, ones, depth, columns, adds, whole ? corner : buffer,
                              whole ? static_cast<std::size_t>(target_row) : width};
        (factor.far ? multiply_of<T, Fetching::kColumns> : multiply_of<T>)(count, vectors)(tile);
        for (std::size_t r = 0; r < count && !whole; ++r) {
          copy(buffer + r * width, valid, corner + static_cast<std::ptrdiff_t>(r) * target_row);
        }
      }
    }
  }
}

}  // namespace
}  // namespace onnxtrain
