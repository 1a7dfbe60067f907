// bfloat16 matrix multiplication: packs a panel of the right matrix, and multiplies a strip of rows by it.
#pragma once

#include <algorithm>

#include "matmul/bfloat16_packing.h"
#include "matmul/epilogue.h"
#include "tuning.h"

#if defined(__AMX_BF16__)
#include "matmul/bfloat16_tiles.h"
#else

namespace onnxtrain {
namespace {

// sum + left[1] * right[1] + left[0] * right[0] in each lane.
#if defined(__AVX512BF16__)
inline Vector<float> add_products(Vector<float> sum, Vector<Pair> left, Vector<Pair> right) {
  return (Vector<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
}
#else
inline Vector<float> add_products(Vector<float> sum, Vector<Pair> left, Vector<Pair> right) {
  sum += (Vector<float>)(left & 0xffff0000u) * (Vector<float>)(right & 0xffff0000u);
  return sum + (Vector<float>)(left << 16) * (Vector<float>)(right << 16);
}
#endif

template <std::size_t rows, std::size_t vectors>
void multiply_pairs(const PairTile& tile) {
  constexpr std::size_t lanes = kLanes<float>;
  Vector<float> sum[rows][vectors];
#pragma GCC unroll 8
  for (std::size_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (std::size_t v = 0; v < vectors; ++v) {
      sum[r][v] = tile.accumulate ? load(tile.sums + r * tile.sums_stride + v * lanes) : Vector<float>{};
    }
  }
  const std::uint16_t* columns = tile.columns;
  for (std::size_t k = 0; k < tile.pairs; ++k, columns += 2 * vectors * lanes) {
    Vector<Pair> right[vectors];
#pragma GCC unroll 4
    for (std::size_t v = 0; v < vectors; ++v) right[v] = load_pairs(columns + 2 * v * lanes);
#pragma GCC unroll 8
    for (std::size_t r = 0; r < rows; ++r) {
      Pair pair;
      __builtin_memcpy(&pair, tile.left + r * tile.left_stride + 2 * k, sizeof pair);
      const Vector<Pair> left = broadcast(pair);
#pragma GCC unroll 4
      for (std::size_t v = 0; v < vectors; ++v) sum[r][v] = add_products(sum[r][v], left, right[v]);
    }
  }
#pragma GCC unroll 8
  for (std::size_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (std::size_t v = 0; v < vectors; ++v) store(tile.sums + r * tile.sums_stride + v * lanes, sum[r][v]);
  }
}

using MultiplyPairs = void (*)(const PairTile&);

template <std::size_t vectors>
MultiplyPairs multiply_pairs_of_rows(std::size_t rows) {
  constexpr std::size_t most = tile_rows(vectors);
  static constexpr MultiplyPairs kernels[kMaxTileRows] = {
      multiply_pairs<1, vectors>, multiply_pairs<2, vectors>, multiply_pairs<3, vectors>,
      multiply_pairs<4, vectors>, multiply_pairs<5, vectors>, multiply_pairs<6, vectors>,
      multiply_pairs<most < 7 ? 6 : 7, vectors>, multiply_pairs<most < 8 ? 6 : 8, vectors>};
  return kernels[rows - 1];
}

inline MultiplyPairs multiply_pairs_of(std::size_t rows, std::size_t vectors) {
  if constexpr (kMaxTileVectors >= 4) {
    if (vectors == 4) return multiply_pairs_of_rows<4>(rows);
    if (vectors == 3) return multiply_pairs_of_rows<3>(rows);
  }
  return vectors == 2 ? multiply_pairs_of_rows<2>(rows) : multiply_pairs_of_rows<1>(rows);
}

struct Tiles {};

// Multiplies rows, at most as many as a tile has, by a panel of `width` columns.
inline void multiply_rows(const PairTile& tile, std::size_t rows, std::size_t width) {
  multiply_pairs_of(rows, width / kLanes<float>)(tile);
}

// Multiplies rows [begin, end) by a panel.
inline void multiply_panel(const Bfloat16Matmul& p, const PairPanel& panel, std::size_t begin, std::size_t end) {
  constexpr std::size_t lanes = kLanes<float>;
  alignas(kVectorBytes) float buffer[kMaxTileRows * kMaxTileVectors * lanes];
  const std::size_t width = panel.width, valid = panel.columns;
  const bool first = panel.begin == 0, accumulate = !first || p.bias != nullptr;
  const bool ends = p.ending != Ending::kNone && panel.begin + panel.depth >= p.depth;
  const Parts tiles(end - begin, tile_rows(width / lanes));
  for (std::size_t t = 0; t < tiles.count; ++t) {
    const std::size_t row = begin + tiles.begin(t), rows = tiles.size(t);
    const bool whole = valid == width;
    float* target = p.target + row * p.target_row + panel.column;
    for (std::size_t r = 0; r < rows; ++r) {
      float* line = target + r * p.target_row;
      if (first && p.bias != nullptr) begin_row(p.bias + (row + r) * p.bias_row + panel.column, valid, line);
      if (!whole && accumulate) copy(line, valid, buffer + r * width);
    }
    for (std::size_t r = rows; r < std::min(2 * rows, end - row); ++r) {  // the output of the next tile
      for (std::size_t v = 0; v < valid; v += lanes) __builtin_prefetch(target + r * p.target_row + v, 1);
    }
    multiply_rows({p.left + row * p.left_stride + panel.begin, p.left_stride, panel.pairs(), panel.packed, accumulate,
                   whole ? target : buffer, whole ? p.target_row : width},
                  rows, width);
    for (std::size_t r = 0; r < rows && !whole; ++r) copy(buffer + r * width, valid, target + r * p.target_row);
    if (ends) {
      const float* activation = p.activation == nullptr ? nullptr : p.activation + (target - p.target);
      end_rows(p.ending, rows, valid, static_cast<std::ptrdiff_t>(p.target_row), activation, target);
    }
  }
}

}  // namespace
}  // namespace onnxtrain
#endif

namespace onnxtrain {
namespace {

// Sizes in words: the packed panels of a block, and lines while they are packed.
inline std::size_t bfloat16_scratch(std::size_t rows, std::size_t columns, std::size_t block, std::size_t strip) {
  return packed_columns(rows, columns, strip) * 2 * padded_pairs(block) + packed_lines(block);
}

// One block of the depth after the other: strips of rows, each with all panels, which are packed for the first strip.
inline void multiply_bfloat16(const Bfloat16Matmul& p) {
  const Panels<float> panels(p.columns);
  const std::size_t strips = (p.rows + p.strip - 1) / p.strip;
  const std::size_t strip_rows = rounded_up((p.rows + strips - 1) / strips, kRowUnit);
  std::uint16_t* lines = p.scratch + packed_columns(p.rows, p.columns, p.strip) * 2 * padded_pairs(p.block);
  [[maybe_unused]] const Tiles tiles;
  for (std::size_t begin = 0; begin == 0 || begin < p.depth; begin += p.block) {
    const std::size_t depth = std::min(p.depth - begin, p.block);
    for (std::size_t first = 0; first < p.rows; first += strip_rows) {
      const std::size_t end = std::min(p.rows, first + strip_rows);
      for (std::size_t index = 0; index < panels.count(); ++index) {
        const std::size_t column = panels.begin(index), width = panels.width(index);
        std::uint16_t* packed = strips == 1 ? p.scratch : p.scratch + 2 * column * padded_pairs(depth);
        const PairPanel panel = {begin, depth, column, std::min(p.columns - column, width), width, packed, lines};
        if (first == 0) pack_panel(p, panel);
        multiply_panel(p, panel, first, end);
      }
    }
  }
}

}  // namespace
}  // namespace onnxtrain
