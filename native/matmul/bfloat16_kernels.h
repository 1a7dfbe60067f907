// bfloat16 matrix multiplication: the right matrix is packed, one block of the depth at a time, as panels of pairs of
// neighbours along the depth, [panel][pair][columns of the panel].
#pragma once

#if defined(__AMX_BF16__)
#include <immintrin.h>
#endif

#include <algorithm>

#include "kernels/padding.h"
#include "matmul/prefetch.h"
#include "matmul/bfloat16_words.h"
#include "matmul/epilogue.h"
#include "matmul/matrix_tile.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// With AMX a tile has 16 rows of the left matrix, or 16 columns of the right one, and 16 pairs; the depth is padded.
#if defined(__AMX_BF16__)
inline constexpr bool kInTiles = true;
#else
inline constexpr bool kInTiles = false;
#endif
inline constexpr std::size_t kTileLines = 16;
inline constexpr std::size_t kRowUnit = kInTiles ? 2 * kTileLines : 1, kPairUnit = kInTiles ? kTileLines : 1;

using Pair = std::uint32_t;  // two neighbours along the depth, the first in the lower half

inline Vector<Pair> load_pairs(const std::uint16_t* from) {
  Vector<Pair> pairs;
  __builtin_memcpy(&pairs, from, sizeof pairs);
  return pairs;
}

inline void store_pairs(std::uint16_t* to, Vector<Pair> pairs) { __builtin_memcpy(to, &pairs, sizeof pairs); }

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

struct PairTile {
  const std::uint16_t* left;  // rows `left_stride` words apart
  std::size_t left_stride;
  std::size_t pairs;  // half the depth
  const std::uint16_t* columns;  // [pairs][vectors * lanes]
  bool accumulate;  // adds to the contents of `sums`
  float* sums;      // rows `sums_stride` apart
  std::size_t sums_stride;
};

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

// Pairs of a block with its padding.
inline std::size_t padded_pairs(std::size_t depth) {
  return rounded_up((depth + 1) / 2, kPairUnit);
}

// Columns that are packed at a time: a panel, if each is used for one strip of rows only.
inline std::size_t packed_columns(std::size_t rows, std::size_t columns, std::size_t strip) {
  const std::size_t all = padded<float>(columns), panel = kMaxTileVectors * kLanes<float>;
  return rows <= strip && panel < all ? panel : all;
}

// Sizes in words: the packed panels of a block, and two rows of one, or the same amount of a vector's columns.
inline std::size_t bfloat16_scratch(std::size_t rows, std::size_t columns, std::size_t block, std::size_t strip) {
  const std::size_t pairs = padded_pairs(block), panel = kMaxTileVectors * kLanes<float>;
  return packed_columns(rows, columns, strip) * 2 * pairs + 2 * std::max(panel, kLanes<float> * padded<Pair>(2 * pairs));
}

inline void fill_zero_words(std::uint16_t* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = 0;
}

// Rows that are prefetched before they are packed.
inline constexpr std::size_t kRowsAhead = 8;

// Interleaves two rows of the depth into pairs.
inline void interleave(const std::uint16_t* first, const std::uint16_t* second, std::size_t count, std::uint16_t* to) {
  for (std::size_t i = 0; i < count; i += kLanes<float>) {
    Pair pairs[kLanes<float>];
    for (std::size_t j = 0; j < kLanes<float>; ++j) {
      pairs[j] = static_cast<Pair>(first[i + j]) | static_cast<Pair>(second[i + j]) << 16;
    }
    __builtin_memcpy(to + 2 * i, pairs, sizeof pairs);
  }
}

// A panel of the right matrix, for a block of the depth.
struct PairPanel {
  std::size_t begin, depth;
  std::size_t column, columns, width;  // of the part; zeros from `columns` to `width`
  std::uint16_t* packed;
  std::uint16_t* lines;  // room for lines converted to bfloat16

  std::size_t pairs() const { return padded_pairs(depth); }
};

// Layout of a panel in memory.
inline Lines panel_lines(const Bfloat16Matmul& p, const PairPanel& panel) {
  const MatrixPart part = {panel.begin, panel.depth, p.first_column + panel.column, panel.columns};
  if (p.right.low_bit != nullptr) return part.lines(*p.right.low_bit);
  const std::size_t bytes = p.right.stored == Stored::kFloat ? 4 : 2;
  return part.lines(p.right.data, 8 * bytes, p.right.line * bytes, p.right.transposed);
}

// Rounds two rows of floats into pairs, as many as there are whole vectors of; returns their number.
inline std::size_t round_to_pairs([[maybe_unused]] const float* first, [[maybe_unused]] const float* second,
                                  [[maybe_unused]] std::size_t count, [[maybe_unused]] std::uint16_t* to) {
  std::size_t i = 0;
#if defined(__AVX512BF16__)
  alignas(64) static constexpr std::uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                           8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(kOrder);
  for (; i + 16 <= count; i += 16) {
    const auto words = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(second + i), _mm512_loadu_ps(first + i));
    _mm512_storeu_si512(to + 2 * i, _mm512_permutexvar_epi16(order, words));
  }
#endif
  return i;
}

// From a matrix whose lines are rows.
inline void pack_pairs(const Bfloat16Matmul& p, const PairPanel& panel) {
  std::uint16_t *first = panel.lines, *second = first + panel.width;
  fill_zero_words(first + panel.columns, panel.width - panel.columns);
  fill_zero_words(second + panel.columns, panel.width - panel.columns);
  const Lines lines = panel_lines(p, panel);
  for (std::size_t k = 0; k < panel.pairs(); ++k) {
    for (std::size_t row = 2 * k + kRowsAhead; row < std::min(2 * k + kRowsAhead + 2, panel.depth); ++row) {
      const char* from = lines.first + static_cast<std::ptrdiff_t>(row) * lines.stride;
      for (std::size_t at = 0; at < lines.length; at += kLineBytes) __builtin_prefetch(from + at);
    }
    if (p.right.stored == Stored::kFloat && panel.columns == panel.width && 2 * k + 1 < panel.depth) {
      const float* row = static_cast<const float*>(p.right.data) + (panel.begin + 2 * k) * p.right.line;
      row += p.first_column + panel.column;
      if (round_to_pairs(row, row + p.right.line, panel.width, panel.packed + 2 * k * panel.width) != 0) continue;
    }
    if (2 * k < panel.depth) {
      read_words(p.right, panel.begin + 2 * k, p.first_column + panel.column, panel.columns, first);
    } else {
      fill_zero_words(first, panel.columns);
    }
    if (2 * k + 1 < panel.depth) {
      read_words(p.right, panel.begin + 2 * k + 1, p.first_column + panel.column, panel.columns, second);
    } else {
      fill_zero_words(second, panel.columns);
    }
    interleave(first, second, panel.width, panel.packed + 2 * k * panel.width);
  }
}

// From a matrix whose lines are columns.
inline void pack_transposed_pairs(const Bfloat16Matmul& p, const PairPanel& panel) {
  constexpr std::size_t lanes = kLanes<Pair>;
  const std::size_t pairs = panel.pairs(), stride = 2 * padded<Pair>(pairs);
  for (std::size_t j = 0; j < panel.width; j += lanes) {
    std::uint16_t* to = panel.packed + 2 * j;
    for (std::size_t i = 0; i < lanes; ++i) {
      std::uint16_t* line = panel.lines + i * stride;
      const std::size_t read = j + i < panel.columns ? panel.depth : 0;
      if (read != 0) read_words(p.right, p.first_column + panel.column + j + i, panel.begin, panel.depth, line);
      fill_zero_words(line + read, stride - read);
    }
    for (std::size_t k = 0; k < pairs; k += lanes) {
      Vector<Pair> square[lanes];
#pragma GCC unroll 16
      for (std::size_t i = 0; i < lanes; ++i) square[i] = load_pairs(panel.lines + i * stride + 2 * k);
      transpose_in_registers<Pair>(square);
      const std::size_t rows = std::min(pairs - k, lanes);
      for (std::size_t i = 0; i < rows; ++i) store_pairs(to + 2 * (k + i) * panel.width, square[i]);
    }
  }
}

#if defined(__AMX_BF16__)

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
  const std::uint16_t *left = tile.left, *columns = tile.columns;
  for (std::size_t k = 0; k < tile.pairs; k += kTileLines) {
    _tile_loadd(4, left, left_bytes);
    _tile_loadd(6, columns, right_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (column_tiles == 2) {
      _tile_loadd(7, columns + 2 * kTileLines, right_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (row_tiles == 2) {
      _tile_loadd(5, left + kTileLines * tile.left_stride, left_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (column_tiles == 2) _tile_dpbf16ps(3, 5, 7);
    }
    left += 2 * kTileLines;
    columns += 2 * kTileLines * width;
  }
  _tile_stored(0, sums, sums_bytes);
  if constexpr (column_tiles == 2) _tile_stored(1, sums + kTileLines, sums_bytes);
  if constexpr (row_tiles == 2) _tile_stored(2, below, sums_bytes);
  if constexpr (row_tiles == 2 && column_tiles == 2) _tile_stored(3, below + kTileLines, sums_bytes);
}

// Multiplies up to two tiles of rows by a panel of `width` columns.
inline void multiply_rows(PairTile tile, std::size_t rows, std::size_t width) {
  for (std::size_t column = 0; column < width; column += 2 * kTileLines) {
    const bool pair = width - column > kTileLines;
    const auto multiply = rows > kTileLines ? (pair ? multiply_in_tiles<2, 2> : multiply_in_tiles<2, 1>)
                                            : (pair ? multiply_in_tiles<1, 2> : multiply_in_tiles<1, 1>);
    multiply(tile, width);
    tile.columns += 4 * kTileLines;
    tile.sums += 2 * kTileLines;
  }
}

#else

struct Tiles {};

inline void multiply_rows(const PairTile& tile, std::size_t rows, std::size_t width) {
  multiply_pairs_of(rows, width / kLanes<float>)(tile);
}

#endif

// Multiplies rows [begin, end) by a panel. Tiles read rows behind the end, which the left matrix has room for.
inline void multiply_panel(const Bfloat16Matmul& p, const PairPanel& panel, std::size_t begin, std::size_t end) {
  constexpr std::size_t unit = kInTiles ? kTileLines : 1, lanes = kLanes<float>;
  alignas(kVectorBytes) float buffer[std::max(kRowUnit, kMaxTileRows) * kMaxTileVectors * lanes];
  const std::size_t width = panel.width, valid = panel.columns;
  const bool first = panel.begin == 0, accumulate = !first || p.bias != nullptr;
  const bool ends = p.ending != Ending::kNone && panel.begin + panel.depth >= p.depth;
  const Parts tiles((end - begin + unit - 1) / unit, kInTiles ? kRowUnit / unit : tile_rows(width / lanes));
  for (std::size_t t = 0; t < tiles.count; ++t) {
    const std::size_t row = begin + tiles.begin(t) * unit, rows = std::min(tiles.size(t) * unit, end - row);
    const bool whole = valid == width && rows % unit == 0;
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

// One block of the depth after the other: strips of rows, each with all panels, which are packed for the first strip.
inline void multiply_bfloat16(const Bfloat16Matmul& p) {
  const Panels<float> panels(p.columns);
  const std::size_t strips = (p.rows + p.strip - 1) / p.strip;
  const std::size_t strip_rows = rounded_up((p.rows + strips - 1) / strips, kRowUnit);
  [[maybe_unused]] const Tiles tiles;
  for (std::size_t begin = 0; begin == 0 || begin < p.depth; begin += p.block) {
    const std::size_t depth = std::min(p.depth - begin, p.block);
    for (std::size_t first = 0; first < p.rows; first += strip_rows) {
      const std::size_t end = std::min(p.rows, first + strip_rows);
      for (std::size_t index = 0; index < panels.count(); ++index) {
        const std::size_t column = panels.begin(index), width = panels.width(index);
        std::uint16_t* packed = strips == 1 ? p.scratch : p.scratch + 2 * column * padded_pairs(depth);
        std::uint16_t* lines = p.scratch + packed_columns(p.rows, p.columns, p.strip) * 2 * padded_pairs(p.block);
        const PairPanel panel = {begin, depth, column, std::min(p.columns - column, width), width, packed, lines};
        if (first == 0) (p.right.transposed ? pack_transposed_pairs : pack_pairs)(p, panel);
        multiply_panel(p, panel, first, end);
      }
    }
  }
}

inline void round_lines(const Rounding& r, std::size_t first_row, std::size_t end_row) {
  for (std::size_t row = first_row; row < end_row; ++row) {
    std::uint16_t* to = r.target + row * r.stride;
    round_to_words(r.source + row * r.line, r.depth, to);
    fill_zero_words(to + r.depth, r.padded_depth - r.depth);
  }
}

// As many rows as a vector has lanes, transposed in squares along the depth.
inline void round_transposed(const Rounding& r, std::size_t first_row, std::size_t end_row) {
  constexpr std::size_t lanes = kLanes<float>;
  alignas(kVectorBytes) float lines[lanes * kWidened];
  for (std::size_t row = first_row; row < end_row; row += lanes) {
    const std::size_t rows = std::min(end_row - row, lanes);
    for (std::size_t begin = 0; begin < r.depth; begin += kWidened) {
      const std::size_t depth = std::min(r.depth - begin, kWidened);
      for (std::size_t k = 0; k < depth; k += lanes) {
        Vector<float> square[lanes];
        for (std::size_t i = 0; i < lanes; ++i) {
          const float* from = r.source + (begin + k + i) * r.line + row;
          square[i] = Vector<float>{};
          if (k + i >= depth) continue;
          if (rows == lanes) {
            square[i] = load(from);
          } else {
            __builtin_memcpy(&square[i], from, rows * sizeof(float));
          }
        }
        transpose_in_registers<float>(square);
        for (std::size_t i = 0; i < lanes; ++i) store(lines + i * kWidened + k, square[i]);
      }
      for (std::size_t i = 0; i < rows; ++i) {
        round_to_words(lines + i * kWidened, depth, r.target + (row + i) * r.stride + begin);
      }
    }
    for (std::size_t i = 0; i < rows; ++i) {
      fill_zero_words(r.target + (row + i) * r.stride + r.depth, r.padded_depth - r.depth);
    }
  }
}

inline void round_matrix(const Rounding& r, std::size_t first_row, std::size_t end_row) {
  (r.transposed ? round_transposed : round_lines)(r, first_row, end_row);
}

}  // namespace
}  // namespace onnxtrain
