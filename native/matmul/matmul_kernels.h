// Blocked matrix multiplication: the operands of a block of the depth are packed to be contiguous in the caches.
#pragma once

#include <algorithm>
#include <iterator>

#include "kernels/padding.h"
#include "matmul/prefetch.h"
#include "matmul/epilogue.h"
#include "matmul/low_bit_kernels.h"
#include "matmul/half_weight_kernels.h"
#include "matmul/outer_products.h"
#include "matmul/packing.h"
#include "matmul/table.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// True if each panel of the right matrix overwrites the one before, since it is multiplied by all rows at once.
inline bool one_panel_at_a_time(std::size_t rows, std::size_t strip) { return rows <= strip; }

// Scratch elements for the right matrix: the panels of a block.
template <typename T>
std::size_t panels_scratch(std::size_t rows, std::size_t columns, std::size_t block, std::size_t strip) {
  const std::size_t all = padded<T>(columns), one = kMaxTileVectors * kLanes<T>;
  return (one_panel_at_a_time(rows, strip) ? std::min(all, one) : all) * block;
}

// The same, and a strip of the left matrix, with room for an extra vector.
template <typename T>
std::size_t product_scratch(std::size_t rows, std::size_t columns, std::size_t block, std::size_t strip) {
  return panels_scratch<T>(rows, columns, block, strip) + std::min(rows, strip) * block + kLanes<T>;
}

// A block of the depth, with the panels of the right matrix and the rows of the left as the tiles read them.
template <typename T>
struct MatmulBlock {
  std::size_t begin, depth;
  T* panels;
  bool one_at_a_time;
  const T* columns;  // null: all columns are packed; otherwise read in place, except in a partial panel
  T* strip;  // packed rows of the left matrix, [tile][depth][rows of the tile]; null: read in place
  Ahead ahead[2];  // of the right matrix, and of a packed left one

  T* panel_at(std::size_t column) const { return one_at_a_time ? panels : panels + column * depth; }
};

// Multiplies rows [begin, end) by a panel.
template <typename T>
void multiply_panel(const Matmul<T>& p, MatmulBlock<T>& block, const Panels<T>& panels, std::size_t panel,
                    std::size_t begin, std::size_t end) {
  alignas(kVectorBytes) T buffer[kMaxTileRows * kMaxTileVectors * kLanes<T>];
  const std::size_t vectors = panels.vectors(panel), width = panels.width(panel), column = panels.begin(panel);
  const std::size_t valid = p.columns - column < width ? p.columns - column : width;
  const bool first = block.begin == 0, accumulate = !first || p.bias != nullptr;
  const bool ends = p.ending != Ending::kNone && block.begin + block.depth >= p.depth;
  const bool packed = block.strip != nullptr;
  const T* left = p.left.data + static_cast<std::ptrdiff_t>(block.begin) * p.left.column;
  const Parts tiles(end - begin, packed ? kPackedRows : tile_rows(vectors));
  for (std::size_t t = 0; t < tiles.count; ++t) {
    const std::size_t row = begin + tiles.begin(t), rows = tiles.size(t);
    T* target = p.target + static_cast<std::ptrdiff_t>(row) * p.target_row + column;
    for (std::size_t r = 0; r < rows; ++r) {
      T* line = target + static_cast<std::ptrdiff_t>(r) * p.target_row;
      if (first && p.bias != nullptr) {
        begin_row(p.bias + static_cast<std::ptrdiff_t>(row + r) * p.bias_row + column, valid, line);
      }
      if (valid != width && accumulate) copy(line, valid, buffer + r * width);
    }
    const bool whole = valid == width;
    if (t + 1 < tiles.count) {  // the output of the next tile
      for (std::size_t r = rows; r < rows + tiles.size(t + 1); ++r) {
        for (std::size_t v = 0; v < vectors; ++v) {
          __builtin_prefetch(target + static_cast<std::ptrdiff_t>(r) * p.target_row + v * kLanes<T>, 1);
        }
      }
    }
    const bool in_place = whole && block.columns != nullptr;
    Tile<T> tile = {nullptr, nullptr, block.depth,
                                   in_place ? block.columns + column : block.panel_at(column), accumulate,
                                   whole ? target : buffer, whole ? static_cast<std::size_t>(p.target_row) : width,
                                   in_place ? static_cast<std::size_t>(p.right.row) : width};
    tile.left = left + static_cast<std::ptrdiff_t>(row) * p.left.row;
    if (packed) tile.left = block.strip + tiles.begin(t) * block.depth;
    tile.left_line = p.left.row;
    for (Ahead& ahead : block.ahead) ahead.fetch(block.depth);
    // Rows that are read in place are prefetched one tile ahead, while the first panel is multiplied.
    const auto* next = tile.left + static_cast<std::ptrdiff_t>(rows) * p.left.row;
    const bool fetches = !packed && panel == 0 && t + 1 < tiles.count &&
                         Ahead(lines_of(next, tiles.size(t + 1), block.depth, p.left.row), block.depth)
                             .takes(block.depth, tile.ahead[0]);
    constexpr Fetching nothing = Fetching::kNothing;
    const auto multiply_tile = packed    ? multiply_of<T, nothing, Left::kPacked>
                               : fetches ? multiply_of<T, Fetching::kStream, Left::kRows>
                                         : multiply_of<T, nothing, Left::kRows>;
    multiply_tile(rows, vectors)(tile);
    for (std::size_t r = 0; r < rows && !whole; ++r) {
      copy(buffer + r * width, valid, target + static_cast<std::ptrdiff_t>(r) * p.target_row);
    }
    if (ends) {
      const T* activation = p.activation == nullptr ? nullptr : p.activation + (target - p.target);
      end_rows(p.ending, rows, valid, p.target_row, activation, target);
    }
  }
}

// Layout of a panel of the right matrix from depth element `begin` on.
template <typename T>
Lines panel_lines(const Matmul<T>& p, std::size_t begin, std::size_t depth, std::size_t column, std::size_t columns) {
  const MatrixPart part = {begin, depth, p.first_column + column, columns};
  if (p.low_bit != nullptr) return part.lines(*p.low_bit);
  if (p.half_weights != nullptr) return part.lines(p.half_weights->words, 16, p.half_weights->line * 2, p.half_weights->transposed);
  const T* first = p.right.data + static_cast<std::ptrdiff_t>(begin) * p.right.row +
                   static_cast<std::ptrdiff_t>(column) * p.right.column;
  return p.right.column == 1 ? lines_of(first, depth, columns, p.right.row)
                             : lines_of(first, columns, depth, p.right.column);
}

// Packs a panel of the right matrix.
template <typename T>
void arrange_panel(const Matmul<T>& p, const MatmulBlock<T>& block, std::size_t column, std::size_t width) {
  const std::size_t columns = p.columns - column < width ? p.columns - column : width;
  T* packed = block.panel_at(column);
  if (p.low_bit != nullptr) {
    pack_low_bit(*p.low_bit, block.begin, block.depth, p.first_column + column, columns, packed);
  } else if (p.half_weights != nullptr) {
    pack_half_weights(*p.half_weights, block.begin, block.depth, p.first_column + column, columns, packed);
  } else {
    const T* right = p.right.data + static_cast<std::ptrdiff_t>(block.begin) * p.right.row +
                     static_cast<std::ptrdiff_t>(column) * p.right.column;
    if (p.right.column == 1) {
      pack_rows(right, p.right.row, block.depth, columns, width, packed);
    } else {
      pack<T>({right, p.right_end, p.right.column, p.ones, columns, block.depth, 0, block.depth, 0, 1, packed});
    }
  }
}

template <typename T>
MatmulBlock<T> block_at(const Matmul<T>& p, std::size_t begin, const Panels<T>& panels) {
  MatmulBlock<T> block = {};
  block.begin = begin;
  block.depth = p.depth - begin < p.block ? p.depth - begin : p.block;
  block.panels = p.scratch;
  block.one_at_a_time = one_panel_at_a_time(p.rows, p.strip);
  const bool few = p.rows <= tuning::kFewTiles * kMaxTileRows && p.columns > 0;
  if (few && p.is_as_given() && p.right.column == 1) {
    block.columns = p.right.data + static_cast<std::ptrdiff_t>(begin) * p.right.row;
  }
  if (p.left.row == 1) block.strip = p.scratch + panels_scratch<T>(p.rows, p.columns, p.block, p.strip);
  return block;
}

// Packs `rows` rows of the left matrix, whose columns are lines of memory, for a tile.
template <typename T, std::size_t rows>
void pack_tile(const T* from, std::ptrdiff_t column, std::size_t depth, T* to) {
  for (std::size_t k = 0; k < depth; ++k, from += column, to += rows) __builtin_memcpy(to, from, rows * sizeof(T));
}

// Packs rows [first, last) of the left matrix, a few lines of memory at a time: a cache line belongs to several tiles.
template <typename T>
void pack_strip(const Matmul<T>& p, const MatmulBlock<T>& block, std::size_t first, std::size_t last) {
  static constexpr decltype(&pack_tile<T, 1>) kPack[] = {pack_tile<T, 1>, pack_tile<T, 2>, pack_tile<T, 3>,
                                                         pack_tile<T, 4>, pack_tile<T, 5>, pack_tile<T, 6>};
  static_assert(std::size(kPack) == kPackedRows);
  const Parts tiles(last - first, kPackedRows);
  for (std::size_t k = 0; k < block.depth; k += tuning::kPackedLines) {
    const std::size_t depth = std::min(block.depth - k, tuning::kPackedLines);
    const T* line = p.left.data + static_cast<std::ptrdiff_t>(block.begin + k) * p.left.column + first;
    for (std::size_t t = 0; t < tiles.count; ++t) {
      const std::size_t row = tiles.begin(t), rows = tiles.size(t);
      kPack[rows - 1](line + row, p.left.column, depth, block.strip + row * block.depth + k * rows);
    }
  }
}

// Strips of rows, each with all panels, which are packed for the first strip; prefetches the next panel and the next
// packed strip of the left matrix.
template <typename T>
void multiply_block(const Matmul<T>& p, MatmulBlock<T>& block, const Panels<T>& panels) {
  const std::size_t next = block.begin + block.depth, next_depth = p.depth - next < p.block ? p.depth - next : p.block;
  const auto valid = [&](std::size_t panel) {
    const std::size_t left = p.columns - panels.begin(panel), width = panels.width(panel);
    return left < width ? left : width;
  };
  const Parts strips(p.rows, p.strip);
  for (std::size_t strip = 0; strip < strips.count; ++strip) {
    const std::size_t first = strips.begin(strip), last = first + strips.size(strip);
    const bool more = strip + 1 < strips.count;
    const std::size_t steps = Parts(last - first, kPackedRows).count * block.depth;
    const std::size_t depth = more ? block.depth : next_depth;
    if (block.strip != nullptr) pack_strip(p, block, first, last);
    block.ahead[1] = {};
    if (block.strip != nullptr && depth != 0 && p.columns != 0) {
      const auto line = static_cast<std::ptrdiff_t>(more ? block.begin : next);
      const T* from = p.left.data + line * p.left.column + (more ? last : 0);
      const std::size_t rows = strips.size(more ? strip + 1 : 0);
      block.ahead[1] = {lines_of(from, depth, rows, p.left.column), panels.count() * steps};
    }
    for (std::size_t panel = 0; panel < panels.count(); ++panel) {
      const bool in_place = block.columns != nullptr && valid(panel) == panels.width(panel);
      if (strip == 0 && !in_place) arrange_panel(p, block, panels.begin(panel), panels.width(panel));
      block.ahead[0] = {};
      if (strip == 0 && panel + 1 < panels.count() && block.columns == nullptr) {
        block.ahead[0] = {panel_lines(p, block.begin, block.depth, panels.begin(panel + 1), valid(panel + 1)),
                          steps};
      } else if (!more && panel + 1 == panels.count() && next_depth != 0 && block.columns == nullptr) {
        block.ahead[0] = {panel_lines(p, next, next_depth, 0, valid(0)), steps};
      }
      multiply_panel(p, block, panels, panel, first, last);
    }
  }
}

template <typename T>
void multiply_matrices(const Matmul<T>& p) {
  if (p.sums_in_cache) {
    add_outer_products(p);
    return;
  }
  const Panels<T> panels(p.columns);
  std::size_t begin = 0, summed = 0;
  do {
    MatmulBlock<T> block = block_at(p, begin, panels);
    summed = sum_columns(p, summed, begin + block.depth);
    multiply_block(p, block, panels);
    begin += block.depth;
  } while (begin < p.depth);
}

}  // namespace
}  // namespace onnxtrain
