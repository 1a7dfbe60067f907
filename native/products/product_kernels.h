// Products of two matrices, block by block of the depth: what a block reads is arranged so that it lies in the caches
// side by side.
#pragma once

#include "kernels/padding.h"
#include "products/few_bits_kernels.h"
#include "products/halves_kernels.h"
#include "products/packing.h"
#include "products/table.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Between rows of the copy of a block of the left matrix. Behind each row is room for a vector.
template <typename T>
std::size_t copy_stride(std::size_t rows) {
  return odd_lines<T>(rows + kLanes<T>);
}

// Per element of the depth.
template <typename T>
std::size_t product_scratch(std::size_t rows, std::size_t columns) {
  return padded<T>(columns) + copy_stride<T>(rows);
}

// Rows of the right matrix, `depth` of them, as panels from `first` on; the last is filled up with zeros.
template <typename T>
void pack_rows(const T* source, std::ptrdiff_t stride, std::size_t depth, std::size_t columns, std::size_t first,
               T* packed) {
  const Panels<T> panels(columns);
  for (std::size_t panel = first; panel < panels.count(); ++panel) {
    const std::size_t column = panels.begin(panel), width = panels.width(panel);
    const std::size_t valid = columns - column < width ? columns - column : width;
    const T* from = source + column;
    T* to = packed + column * depth;
    if (valid == kMaxTileVectors * kLanes<T>) {
      for (std::size_t k = 0; k < depth; ++k, from += stride, to += width) {
#pragma GCC unroll 4
        for (std::size_t v = 0; v < kMaxTileVectors; ++v) store(to + v * kLanes<T>, load(from + v * kLanes<T>));
      }
    } else {
      for (std::size_t k = 0; k < depth; ++k, from += stride, to += width) {
        copy(from, valid, to);
        fill_zero(to + valid, width - valid);
      }
    }
  }
}

// sums[i] (+)= the sum over `depth` rows, `stride` apart, of their element i. Rows end within a whole vector.
template <typename T>
inline void add_rows(const T* rows, std::size_t stride, std::size_t depth, std::size_t count, bool accumulate,
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

// Rows that are read after the current ones, to be fetched part by part in between: while a product is computed, memory
// would have nothing to do.
template <typename T>
struct Ahead {
  const T* row = nullptr;
  std::size_t rows = 0, size = 0;
  std::ptrdiff_t stride = 0;
  std::size_t part = 0;  // elements at a time
  std::size_t at = 0;    // within the row

  Ahead() = default;
  Ahead(const T* first, std::size_t count, std::size_t size_, std::ptrdiff_t stride_, std::size_t parts)
      : row(first), rows(count), size(size_), stride(stride_), part((rows * size + parts - 1) / parts) {}

  // Where the next part begins; `otherwise` where all was fetched.
  const T* next(const T* otherwise) {
    if (rows == 0 || part == 0) return otherwise;
    const T* result = row + at;
    for (at += part; rows != 0 && at >= size; at -= size, --rows) row += stride;
    return result;
  }
};

// A block of the depth, with the panels of the right matrix and the rows of the left as the tiles read them.
template <typename T>
struct ProductBlock {
  std::size_t depth;
  bool first;
  const T* panels;
  const T* columns;  // null: the panels have all; else these where they lie, but for a panel that is not full
  bool copied;  // whether the left matrix is, block by block
  const T* left;
  std::ptrdiff_t left_row;
  const std::ptrdiff_t* left_offsets;
  Ahead<T> ahead[2];
};

// Rows [begin, end) of a panel.
template <typename T>
void multiply_panel(const Product<T>& p, ProductBlock<T>& block, const Panels<T>& panels, std::size_t panel,
                    std::size_t begin, std::size_t end) {
  alignas(kVectorBytes) T buffer[kMaxTileRows * kMaxTileVectors * kLanes<T>];
  const std::size_t vectors = panels.vectors(panel), width = panels.width(panel), column = panels.begin(panel);
  const std::size_t valid = p.columns - column < width ? p.columns - column : width;
  const bool accumulate = !block.first || p.bias != nullptr;
  const Parts tiles(end - begin, tile_rows(vectors));
  for (std::size_t t = 0; t < tiles.count; ++t) {
    const std::size_t row = begin + tiles.begin(t), rows = tiles.size(t);
    T* target = p.target + static_cast<std::ptrdiff_t>(row) * p.target_row + column;
    const T* starts[kMaxTileRows];
    for (std::size_t r = 0; r < rows; ++r) {
      starts[r] = block.left + static_cast<std::ptrdiff_t>(row + r) * block.left_row;
      T* line = target + static_cast<std::ptrdiff_t>(r) * p.target_row;
      if (block.first && p.bias != nullptr) copy(p.bias + column, valid, line);
      if (valid != width && accumulate) copy(line, valid, buffer + r * width);
    }
    const bool whole = valid == width;
    if (t + 1 < tiles.count) {  // what the next tile writes
      for (std::size_t r = rows; r < rows + tiles.size(t + 1); ++r) {
        for (std::size_t v = 0; v < vectors; ++v) {
          __builtin_prefetch(target + static_cast<std::ptrdiff_t>(r) * p.target_row + v * kLanes<T>, 1);
        }
      }
    }
    const bool in_place = whole && block.columns != nullptr;
    Tile<T> tile = {starts, block.left_offsets, block.depth,
                                   in_place ? block.columns + column : block.panels + column * block.depth, accumulate,
                                   whole ? target : buffer, whole ? static_cast<std::size_t>(p.target_row) : width,
                                   in_place ? static_cast<std::size_t>(p.right.row) : width};
    for (int i = 0; i < 2; ++i) {
      tile.ahead[i] = reinterpret_cast<const char*>(block.ahead[i].next(tile.columns));
      tile.ahead_step[i] = block.ahead[i].part * sizeof(T) / (block.depth + 1);
    }
    multiply_of<T, Fetching::kStreams>(rows, vectors)(tile);
    for (std::size_t r = 0; r < rows && !whole; ++r) {
      copy(buffer + r * width, valid, target + static_cast<std::ptrdiff_t>(r) * p.target_row);
    }
  }
}

// Arranges what a block of the depth reads, and adds it up where that is wanted.
template <typename T>
ProductBlock<T> arranged(const Product<T>& p, std::size_t begin, const Panels<T>& panels) {
  const auto at = static_cast<std::ptrdiff_t>(begin);
  T* packed = p.scratch;
  ProductBlock<T> block = {};
  block.depth = p.depth - begin < p.block ? p.depth - begin : p.block;
  block.first = begin == 0;
  block.panels = packed;
  const T* right = p.is_as_given() ? p.right.data + at * p.right.row : nullptr;
  if (p.few_bits != nullptr) {
    pack_few_bits(*p.few_bits, begin, block.depth, p.first_column, p.columns, packed);
  } else if (p.halves != nullptr) {
    pack_halves(*p.halves, begin, block.depth, p.first_column, p.columns, packed);
  } else if (p.right.column == 1) {
    const bool few = p.rows <= tuning::kFewTiles * kMaxTileRows && p.columns > 0 && p.right_sums == nullptr;
    if (few) block.columns = right;
    pack_rows(right, p.right.row, block.depth, p.columns, few ? panels.count() - 1 : 0, packed);
  } else {
    pack<T>({right, p.right_end, p.right.column, p.ones, p.columns, block.depth, 0, block.depth, 0, panels.count(),
             packed});
  }
  for (std::size_t panel = 0; panel < panels.count() && p.right_sums != nullptr; ++panel) {
    const std::size_t column = panels.begin(panel), left = p.columns - column, width = panels.width(panel);
    add_rows(packed + column * block.depth, width, block.depth, left < width ? left : width, !block.first,
             p.right_sums + column);
  }
  block.copied = p.left.row == 1;
  if (!block.copied) {
    block.left = p.left.data + at;
    block.left_row = p.left.row;
    block.left_offsets = p.ones;
    return block;
  }
  const std::size_t stride = p.copy_stride;
  T* copies = packed + padded<T>(p.columns) * p.block;
  for (std::size_t k = 0; k < block.depth; ++k) {
    copy(p.left.data + (at + static_cast<std::ptrdiff_t>(k)) * p.left.column, p.rows, copies + k * stride);
  }
  if (p.left_sums != nullptr) add_rows(copies, stride, block.depth, p.rows, !block.first, p.left_sums);
  block.left = copies;
  block.left_row = 1;
  block.left_offsets = p.copied;
  return block;
}

// Strips of rows, each with all panels; meanwhile what the next strip reads is fetched or, where rows are copied, what
// the next block copies.
template <typename T>
void multiply_block(const Product<T>& p, ProductBlock<T>& block, std::size_t begin, const Panels<T>& panels) {
  const std::size_t next = begin + block.depth, next_depth = p.depth - next < p.block ? p.depth - next : p.block;
  const auto tiles = [&](std::size_t rows) { return panels.count() * Parts(rows, tile_rows(kMaxTileVectors)).count; };
  if (block.copied && p.is_as_given() && next_depth != 0 && p.rows * p.columns != 0) {
    const auto at = static_cast<std::ptrdiff_t>(next);
    block.ahead[0] = {p.left.data + at * p.left.column, next_depth, p.rows, p.left.column, tiles(p.rows)};
    block.ahead[1] = {p.right.data + at * p.right.row, next_depth, p.columns, p.right.row, tiles(p.rows)};
  }
  const Parts strips(p.rows, tuning::kStripRows);
  for (std::size_t strip = 0; strip < strips.count; ++strip) {
    const std::size_t first = strips.begin(strip), last = first + strips.size(strip);
    const bool more = strip + 1 < strips.count;
    const std::size_t depth = more ? block.depth : next_depth;
    if (!block.copied) block.ahead[0] = block.ahead[1] = {};
    if (!block.copied && depth != 0 && p.columns != 0) {
      const std::size_t rows = strips.size(more ? strip + 1 : 0), half = rows / 2, parts = tiles(last - first);
      const T* from = more ? block.left + static_cast<std::ptrdiff_t>(last) * p.left.row : block.left + block.depth;
      const T* from_half = from + static_cast<std::ptrdiff_t>(half) * p.left.row;
      block.ahead[0] = {from, half, depth, p.left.row, parts};
      block.ahead[1] = {from_half, rows - half, depth, p.left.row, parts};
    }
    for (std::size_t panel = 0; panel < panels.count(); ++panel) multiply_panel(p, block, panels, panel, first, last);
  }
}

template <typename T>
void multiply_matrices(const Product<T>& p) {
  const Panels<T> panels(p.columns);
  std::size_t begin = 0;
  do {
    ProductBlock<T> block = arranged(p, begin, panels);
    multiply_block(p, block, begin, panels);
    begin += block.depth;
  } while (begin < p.depth);
}

}  // namespace
}  // namespace onnxtrain
