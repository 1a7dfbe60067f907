// Products of matrices whose depth goes over the lines of both, as in weight gradients: sums of outer products.
// The left matrix is read in place, a few lines at a time, and the sums stay in the L2 cache meanwhile.
#pragma once

#include <algorithm>
#include <cstddef>

#include "matmul/column_sums.h"
#include "matmul/packing.h"
#include "matmul/prefetch.h"
#include "matmul/table.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Packs `depth` rows of the right matrix into a zero-padded panel.
template <typename T>
void pack_rows(const T* from, std::ptrdiff_t stride, std::size_t depth, std::size_t columns, std::size_t width, T* to) {
  if (columns == kMaxTileVectors * kLanes<T>) {
    for (std::size_t k = 0; k < depth; ++k, from += stride, to += width) {
#pragma GCC unroll 4
      for (std::size_t v = 0; v < kMaxTileVectors; ++v) store(to + v * kLanes<T>, load(from + v * kLanes<T>));
    }
  } else {
    for (std::size_t k = 0; k < depth; ++k, from += stride, to += width) {
      copy(from, columns, to);
      fill_zero(to + columns, width - columns);
    }
  }
}

// Lines of both operands that are multiplied together, and those that follow.
template <typename T>
struct OuterBlock {
  std::size_t begin, depth;
  Ahead ahead[2];  // prefetches the lines that follow

  OuterBlock(const Matmul<T>& p, const Panels<T>& panels, std::size_t from)
      : begin(from), depth(std::min(p.depth - from, p.block)) {
    const std::size_t next = begin + depth, next_depth = std::min(p.depth - next, p.block);
    std::size_t steps = 0;
    for (std::size_t panel = 0; panel < panels.count(); ++panel) {
      steps += Parts(p.rows, tile_rows(panels.vectors(panel))).count * depth;
    }
    if (next_depth == 0) return;
    const auto at = static_cast<std::ptrdiff_t>(next);
    ahead[0] = Ahead(lines_of(p.right.data + at * p.right.row, next_depth, p.columns, p.right.row), steps);
    ahead[1] = Ahead(lines_of(p.left.data + at * p.left.column, next_depth, p.rows, p.left.column), steps);
  }
};

// Adds the products of a block with a panel of the right matrix, whose lines are `stride` apart.
template <typename T>
void add_panel(const Matmul<T>& p, OuterBlock<T>& block, const T* columns, std::size_t stride, const Panels<T>& panels,
               std::size_t panel) {
  alignas(kVectorBytes) T buffer[kMaxTileRows * kMaxTileVectors * kLanes<T>];
  const std::size_t vectors = panels.vectors(panel), width = panels.width(panel), column = panels.begin(panel);
  const std::size_t valid = std::min(p.columns - column, width);
  const bool whole = valid == width;
  const T* left = p.left.data + static_cast<std::ptrdiff_t>(block.begin) * p.left.column;
  const Parts tiles(p.rows, tile_rows(vectors));
  for (std::size_t t = 0; t < tiles.count; ++t) {
    const std::size_t row = tiles.begin(t), rows = tiles.size(t);
    T* target = p.target + static_cast<std::ptrdiff_t>(row) * p.target_row + column;
    const auto line = [&](std::size_t r) { return target + static_cast<std::ptrdiff_t>(r) * p.target_row; };
    for (std::size_t r = 0; r < rows && !whole && block.begin != 0; ++r) copy(line(r), valid, buffer + r * width);
    Tile<T> tile = {nullptr, nullptr, block.depth, columns, block.begin != 0, whole ? target : buffer,
                    whole ? static_cast<std::size_t>(p.target_row) : width, stride};
    tile.left = left + row;
    tile.left_line = p.left.column;
    bool fetches = true;
    for (std::size_t i = 0; i < 2; ++i) fetches = block.ahead[i].takes(block.depth, tile.ahead[i]) && fetches;
    const auto multiply_tile = fetches ? multiply_of<T, Fetching::kStreams, Left::kColumns>
                                       : multiply_of<T, Fetching::kNothing, Left::kColumns>;
    multiply_tile(rows, vectors)(tile);
    for (std::size_t r = 0; r < rows && !whole; ++r) copy(buffer + r * width, valid, line(r));
  }
}

// target = left times right, and the sums of their columns.
template <typename T>
void add_outer_products(const Matmul<T>& p) {
  const Panels<T> panels(p.columns);
  // Lines of the right matrix are packed where they are far apart: few sets of the L1 cache would hold them.
  const bool near = static_cast<std::size_t>(p.right.row) * sizeof(T) <= tuning::kNearLineBytes ||
                    p.rows <= tuning::kFewTiles * kMaxTileRows;
  std::size_t begin = 0, summed = 0;
  do {
    OuterBlock<T> block(p, panels, begin);
    summed = sum_columns(p, summed, begin + block.depth);
    for (std::size_t panel = 0; panel < panels.count(); ++panel) {
      const std::size_t column = panels.begin(panel), width = panels.width(panel);
      const std::size_t valid = std::min(p.columns - column, width);
      const T* columns = p.right.data + static_cast<std::ptrdiff_t>(begin) * p.right.row + column;
      if (near && valid == width) {
        add_panel(p, block, columns, static_cast<std::size_t>(p.right.row), panels, panel);
      } else {
        pack_rows(columns, p.right.row, block.depth, valid, width, p.scratch);
        add_panel(p, block, static_cast<const T*>(p.scratch), width, panels, panel);
      }
    }
    begin += block.depth;
  } while (begin < p.depth);
}

}  // namespace
}  // namespace onnxtrain
