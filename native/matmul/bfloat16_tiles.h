// Multiplication of packed operands by the tile instructions of AMX.
#pragma once

#include <immintrin.h>

#include <algorithm>

#include "matmul/bfloat16_packing.h"
#include "matmul/epilogue.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

struct TileShapes {
  std::uint8_t palette = 1, start = 0, reserved[14] = {};
  std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

alignas(64) inline constexpr TileShapes kTileShapes;

// GCC does not know that tile instructions read memory: what is stored before must be there.
inline void finish_stores() { __asm__ volatile("" : : : "memory"); }

// The shapes of the eight tile registers, all of 16 rows of 64 bytes; released at the end.
class Tiles {
 public:
  Tiles() { _tile_loadconfig(&kTileShapes); }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Sums in tiles 0 to 3, rows in 4 and 5, columns in 6 and 7.
template <std::size_t row_tiles, std::size_t column_tiles>
void multiply_in_tiles(const PairTile& tile, std::size_t width) {
  const std::size_t sums_bytes = tile.sums_stride * sizeof(float), left_bytes = tile.left_stride * sizeof(std::uint16_t);
  const std::size_t right_bytes = width * sizeof(Pair);
  float *sums = tile.sums, *below = sums + kTileLines * tile.sums_stride;
  const std::uint16_t *left = tile.left, *right = tile.columns;
  finish_stores();
  if (tile.accumulate) {
    _tile_loadd(0, sums, sums_bytes);
    if constexpr (column_tiles == 2) _tile_loadd(1, sums + kTileLines, sums_bytes);
    if constexpr (row_tiles == 2) _tile_loadd(2, below, sums_bytes);
    if constexpr (row_tiles == 2 && column_tiles == 2) _tile_loadd(3, below + kTileLines, sums_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::size_t k = 0; k < tile.pairs; k += kTileLines) {
    _tile_loadd(4, left, left_bytes);
    _tile_loadd(6, right, right_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (column_tiles == 2) {
      _tile_loadd(7, right + 2 * kTileLines, right_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (row_tiles == 2) {
      _tile_loadd(5, left + kTileLines * tile.left_stride, left_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (column_tiles == 2) _tile_dpbf16ps(3, 5, 7);
    }
    left += tile.left_step;
    right += 2 * kTileLines * width;
  }
  _tile_stored(0, sums, sums_bytes);
  if constexpr (column_tiles == 2) _tile_stored(1, sums + kTileLines, sums_bytes);
  if constexpr (row_tiles == 2) _tile_stored(2, below, sums_bytes);
  if constexpr (row_tiles == 2 && column_tiles == 2) _tile_stored(3, below + kTileLines, sums_bytes);
}

// Multiplies up to two tiles of rows by columns that lie `width` apart from pair to pair.
inline void multiply_rows(PairTile tile, std::size_t rows, std::size_t width) {
  for (std::size_t column = 0; column < width; column += 2 * kTileLines) {
    const bool two = width - column > kTileLines;
    const auto multiply = rows > kTileLines ? (two ? multiply_in_tiles<2, 2> : multiply_in_tiles<2, 1>)
                                            : (two ? multiply_in_tiles<1, 2> : multiply_in_tiles<1, 1>);
    multiply(tile, width);
    tile.columns += 4 * kTileLines;
    tile.sums += 2 * kTileLines;
  }
}

// Multiplies rows [begin, end) by a panel; `begin` is a multiple of two tiles' rows. Tiles read rows behind the end, which
// the left matrix has room for.
inline void multiply_panel(const Bfloat16Matmul& p, const PairPanel& panel, std::size_t begin, std::size_t end) {
  constexpr std::size_t kSide = 2 * kTileLines;
  alignas(kVectorBytes) float buffer[kRowUnit * kSide];
  const bool first = panel.begin == 0, accumulate = !first || p.bias != nullptr;
  const bool ends = p.ending != Ending::kNone && panel.begin + panel.depth >= p.depth;
  for (std::size_t row = begin; row < end; row += kRowUnit) {
    const std::size_t rows = std::min(kRowUnit, end - row);
    const std::uint16_t* left = p.left + left_at(row, panel.begin, p.left_stride);
    float* target = p.target + row * p.target_row + panel.column;
    for (std::size_t r = 0; first && p.bias != nullptr && r < rows; ++r) {
      begin_row(p.bias + (row + r) * p.bias_row + panel.column, panel.columns, target + r * p.target_row);
    }
    for (std::size_t r = rows; r < std::min(2 * rows, end - row); ++r) {  // the output of the next tiles
      for (std::size_t v = 0; v < panel.columns; v += kTileLines) __builtin_prefetch(target + r * p.target_row + v, 1);
    }
    for (std::size_t column = 0; column < panel.width; column += kSide) {
      const std::size_t breadth = panel.breadth(column), valid = std::min(panel.columns - column, breadth);
      const bool whole = valid == breadth && rows % kTileLines == 0;
      float* sums = target + column;
      for (std::size_t r = 0; r < rows && accumulate && !whole; ++r) copy(sums + r * p.target_row, valid, buffer + r * kSide);
      multiply_rows({left, kLeftWords, panel.pairs(), panel.at(0, column), accumulate, whole ? sums : buffer,
                     whole ? p.target_row : kSide, kRowUnit * kLeftWords},
                    rows, breadth);
      for (std::size_t r = 0; r < rows && !whole; ++r) copy(buffer + r * kSide, valid, sums + r * p.target_row);
    }
    if (ends) {
      const float* activation = p.activation == nullptr ? nullptr : p.activation + (target - p.target);
      end_rows(p.ending, rows, panel.columns, static_cast<std::ptrdiff_t>(p.target_row), activation, target);
    }
  }
}

}  // namespace
}  // namespace onnxtrain
