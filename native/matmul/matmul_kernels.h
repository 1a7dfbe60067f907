// Blocked matrix multiplication: the operands of a block of the depth are packed to be contiguous in the caches.
#pragma once

#include "kernels/padding.h"
#include "matmul/prefetch.h"
#include "matmul/epilogue.h"
#include "matmul/low_bit_kernels.h"
#include "matmul/half_weight_kernels.h"
#include "matmul/packing.h"
#include "matmul/table.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Row stride of the copy of a block of the left matrix; each row has room for an extra vector.
template <typename T>
std::size_t copy_stride(std::size_t rows) {
  return odd_lines<T>(rows + kLanes<T>);
}

// Scratch elements per depth element.
template <typename T>
std::size_t product_scratch(std::size_t rows, std::size_t columns) {
  return padded<T>(columns) + copy_stride<T>(rows);
}

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

// sums[i] (+)= the sum of element i over `depth` rows, `stride` apart. Row lengths are whole vectors.
template <typename T>
inline void add_block(const T* rows, std::size_t stride, std::size_t depth, std::size_t count, bool accumulate,
                      T* sums) {
  constexpr std::size_t lanes = kLanes<T>;
  for (std::size_t i = 0; i < count; i += lanes) {
    Vector<T> sum[4] = {};
    std::size_t k = 0;
    for (; k + 4 <= depth; k += 4) {
#pragma GCC unroll 4
      for (std::size_t j = 0; j < 4; ++j) sum[j] += load(rows + (k + j) * stride + i);
    }
    for (; k < depth; ++k) sum[0] += load(rows + k * stride + i);
    const Vector<T> total = (sum[0] + sum[1]) + (sum[2] + sum[3]);
    for (std::size_t lane = 0; lane < lanes && i + lane < count; ++lane) {
      sums[i + lane] = accumulate ? sums[i + lane] + total[lane] : total[lane];
    }
  }
}

// The same, several rows at a time.
template <typename T>
void add_rows(const T* rows, std::size_t stride, std::size_t depth, std::size_t at_a_time, std::size_t count,
              bool accumulate, T* sums) {
  std::size_t done = 0;
  do {
    const std::size_t next = depth - done < at_a_time ? depth - done : at_a_time;
    add_block(rows + done * stride, stride, next, count, accumulate || done != 0, sums);
    done += next;
  } while (done < depth);
}

// A block of the depth, with the panels of the right matrix and the rows of the left as the tiles read them.
template <typename T>
struct MatmulBlock {
  std::size_t begin, depth;
  T* panels;
  bool one_at_a_time;  // true if each panel overwrites the one before
  const T* columns;  // null: all columns are packed; otherwise read in place, except in a partial panel
  bool copied;  // true if the left matrix is copied, strip by strip
  const T* left;  // row `left_first` of it
  std::size_t left_first;
  std::ptrdiff_t left_row;
  const std::ptrdiff_t* left_offsets;
  Ahead ahead[2];  // of the right and the left matrix

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
  const Parts tiles(end - begin, tile_rows(vectors));
  for (std::size_t t = 0; t < tiles.count; ++t) {
    const std::size_t row = begin + tiles.begin(t), rows = tiles.size(t);
    T* target = p.target + static_cast<std::ptrdiff_t>(row) * p.target_row + column;
    const T* starts[kMaxTileRows];
    for (std::size_t r = 0; r < rows; ++r) {
      starts[r] = block.left + static_cast<std::ptrdiff_t>(row - block.left_first + r) * block.left_row;
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
    Tile<T> tile = {starts, block.left_offsets, block.depth,
                                   in_place ? block.columns + column : block.panel_at(column), accumulate,
                                   whole ? target : buffer, whole ? static_cast<std::size_t>(p.target_row) : width,
                                   in_place ? static_cast<std::size_t>(p.right.row) : width};
    if (block.depth != 0) {
      for (int i = 0; i < 2; ++i) tile.ahead[i] = block.ahead[i].next(tile.columns, block.depth);
    }
    multiply_of<T, Fetching::kStreams>(rows, vectors)(tile);
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

// Packs a panel of the right matrix, and sums it over the depth if requested.
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
  if (p.right_sums != nullptr) {
    add_rows(packed, width, block.depth, p.sum_block, columns, block.begin != 0, p.right_sums + column);
  }
}

// Rows per strip: all of them if there are few, so that each panel is used once.
inline std::size_t strip_rows(std::size_t rows) {
  return rows <= tuning::kStripRows ? tuning::kStripRows : tuning::kProductStripRows;
}

// A block whose left matrix is read in place, until a strip of it is copied.
template <typename T>
MatmulBlock<T> arranged(const Matmul<T>& p, std::size_t begin) {
  const auto at = static_cast<std::ptrdiff_t>(begin);
  MatmulBlock<T> block = {};
  block.begin = begin;
  block.depth = p.depth - begin < p.block ? p.depth - begin : p.block;
  block.panels = p.scratch;
  block.one_at_a_time = p.rows <= tuning::kStripRows;
  const bool few = p.rows <= tuning::kFewTiles * kMaxTileRows && p.columns > 0 && p.right_sums == nullptr;
  if (few && p.is_as_given() && p.right.column == 1) block.columns = p.right.data + at * p.right.row;
  block.copied = p.left.row == 1;
  block.left = p.left.data + at * p.left.column;
  block.left_row = p.left.row;
  block.left_offsets = p.ones;
  return block;
}

// Copies rows [first, last) of a left matrix whose columns are lines of memory, and sums them if requested.
template <typename T>
void copy_strip(const Matmul<T>& p, MatmulBlock<T>& block, std::size_t first, std::size_t last) {
  const T* from = p.left.data + static_cast<std::ptrdiff_t>(block.begin) * p.left.column + first;
  T* copies = p.scratch + padded<T>(p.columns) * p.block;
  for (std::size_t k = 0; k < block.depth; ++k) {
    copy(from + static_cast<std::ptrdiff_t>(k) * p.left.column, last - first, copies + k * p.copy_stride);
  }
  if (p.left_sums != nullptr) {
    add_rows(copies, p.copy_stride, block.depth, p.sum_block, last - first, block.begin != 0, p.left_sums + first);
  }
  block.left = copies;
  block.left_first = first;
  block.left_row = 1;
  block.left_offsets = p.copied;
}

// Strips of rows, each with all panels, which are packed for the first strip; prefetches the next panel and the next
// strip of the left matrix.
template <typename T>
void multiply_block(const Matmul<T>& p, MatmulBlock<T>& block, const Panels<T>& panels) {
  const std::size_t next = block.begin + block.depth, next_depth = p.depth - next < p.block ? p.depth - next : p.block;
  const auto tiles = [&](std::size_t rows) { return Parts(rows, tile_rows(kMaxTileVectors)).count; };
  const auto valid = [&](std::size_t panel) {
    const std::size_t left = p.columns - panels.begin(panel), width = panels.width(panel);
    return left < width ? left : width;
  };
  const Parts strips(p.rows, strip_rows(p.rows));
  if (strips.count == 0 && p.right_sums != nullptr) {
    for (std::size_t panel = 0; panel < panels.count(); ++panel) {
      arrange_panel(p, block, panels.begin(panel), panels.width(panel));
    }
  }
  for (std::size_t strip = 0; strip < strips.count; ++strip) {
    const std::size_t first = strips.begin(strip), last = first + strips.size(strip);
    const bool more = strip + 1 < strips.count;
    const std::size_t depth = more ? block.depth : next_depth;
    if (block.copied) copy_strip(p, block, first, last);
    block.ahead[1] = {};
    if (depth != 0 && p.columns != 0) {
      const auto at = static_cast<std::ptrdiff_t>(more ? block.begin : next);
      const T* from = p.left.data + at * p.left.column + static_cast<std::ptrdiff_t>(more ? last : 0) * p.left.row;
      const std::size_t rows = strips.size(more ? strip + 1 : 0);
      block.ahead[1] = {block.copied ? lines_of(from, depth, rows, p.left.column) : lines_of(from, rows, depth, p.left.row),
                        panels.count() * tiles(last - first)};
    }
    for (std::size_t panel = 0; panel < panels.count(); ++panel) {
      const bool in_place = block.columns != nullptr && valid(panel) == panels.width(panel);
      if (strip == 0 && !in_place) arrange_panel(p, block, panels.begin(panel), panels.width(panel));
      block.ahead[0] = {};
      if (strip == 0 && panel + 1 < panels.count() && block.columns == nullptr) {
        block.ahead[0] = {panel_lines(p, block.begin, block.depth, panels.begin(panel + 1), valid(panel + 1)),
                          tiles(last - first)};
      } else if (!more && panel + 1 == panels.count() && next_depth != 0 && block.columns == nullptr) {
        block.ahead[0] = {panel_lines(p, next, next_depth, 0, valid(0)), tiles(last - first)};
      }
      multiply_panel(p, block, panels, panel, first, last);
    }
  }
}

template <typename T>
void multiply_matrices(const Matmul<T>& p) {
  const Panels<T> panels(p.columns);
  std::size_t begin = 0;
  do {
    MatmulBlock<T> block = arranged(p, begin);
    multiply_block(p, block, panels);
    begin += block.depth;
  } while (begin < p.depth);
}

}  // namespace
}  // namespace onnxtrain
