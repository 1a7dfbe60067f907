// Operands of the bfloat16 multiplication: the left matrix is rounded as a whole, and the right one is packed, one block
// of the depth at a time, as panels of pairs of neighbours along the depth, [panel][pair][columns of the panel].
//
// For tiles of AMX, 32 rows of the left matrix lie together for each 32 words of the depth, and 32 columns of a panel for
// the whole block: a tile is then a kibibyte in one piece, or next to its neighbour.
#pragma once

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#include <algorithm>

#include "kernels/padding.h"
#include "matmul/bfloat16_words.h"
#include "matmul/matrix_tile.h"
#include "matmul/prefetch.h"
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

// Pairs of a block with its padding.
inline std::size_t padded_pairs(std::size_t depth) {
  return rounded_up((depth + 1) / 2, kPairUnit);
}

// Columns that are packed at a time: a panel, if each is used for one strip of rows only.
inline std::size_t packed_columns(std::size_t rows, std::size_t columns, std::size_t strip) {
  const std::size_t all = padded<float>(columns), panel = kMaxTileVectors * kLanes<float>;
  return rows <= strip && panel < all ? panel : all;
}

// Words of a panel's lines while they are packed: two rows, or the columns of a vector, and those behind the last line
// that are written with it.
inline std::size_t packed_lines(std::size_t block) {
  constexpr std::size_t behind = 2 * kLanes<Pair>;
  return behind + 2 * std::max(kMaxTileVectors * kLanes<float>, kLanes<float> * padded<Pair>(2 * padded_pairs(block)));
}

inline void fill_zero_words(std::uint16_t* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = 0;
}

// Rows that are prefetched before they are packed.
inline constexpr std::size_t kRowsAhead = 8;

// A panel of the right matrix, for a block of the depth.
struct PairPanel {
  std::size_t begin, depth;
  std::size_t column, columns, width;  // of the part; zeros from `columns` to `width`
  std::uint16_t* packed;
  std::uint16_t* lines;  // room for lines converted to bfloat16

  std::size_t pairs() const { return padded_pairs(depth); }

  // Columns from `first` on that lie together.
  std::size_t breadth(std::size_t first) const { return kInTiles ? std::min(2 * kTileLines, width - first) : width; }

  // Where a vector of pairs lies, from column `first` on.
  std::uint16_t* at(std::size_t pair, std::size_t first) const {
    const std::size_t side = kInTiles ? first / (2 * kTileLines) * 2 * kTileLines : 0;
    return packed + 2 * (side * pairs() + pair * breadth(side) + first - side);
  }
};

// Rows of a rounded left matrix times columns of pairs.
struct PairTile {
  const std::uint16_t* left;  // rows `left_stride` words apart, of 16 at a time with AMX
  std::size_t left_stride;
  std::size_t pairs;  // half the depth
  const std::uint16_t* columns;  // [pairs][width]
  bool accumulate;  // adds to the contents of `sums`
  float* sums;      // rows `sums_stride` apart
  std::size_t sums_stride;
  std::size_t left_step = 2 * kTileLines;  // words between steps of 16 pairs, with AMX
};

// Layout of a panel in memory.
inline Lines panel_lines(const Bfloat16Matmul& p, const PairPanel& panel) {
  const MatrixPart part = {panel.begin, panel.depth, p.first_column + panel.column, panel.columns};
  if (p.right.low_bit != nullptr) return part.lines(*p.right.low_bit);
  const std::size_t bytes = p.right.stored == Stored::kFloat ? 4 : 2;
  return part.lines(p.right.data, 8 * bytes, p.right.line * bytes, p.right.transposed);
}

// Packs two rows of the depth, of `width` words, as pairs.
inline void interleave(const std::uint16_t* first, const std::uint16_t* second, const PairPanel& panel, std::size_t pair) {
  for (std::size_t i = 0; i < panel.width; i += kLanes<float>) {
    Pair pairs[kLanes<float>];
    for (std::size_t j = 0; j < kLanes<float>; ++j) {
      pairs[j] = static_cast<Pair>(first[i + j]) | static_cast<Pair>(second[i + j]) << 16;
    }
    __builtin_memcpy(panel.at(pair, i), pairs, sizeof pairs);
  }
}

// Rounds and packs two rows of floats in one go, where the CPU can; returns whether it did.
inline bool round_to_pairs([[maybe_unused]] const float* first, [[maybe_unused]] const float* second,
                           [[maybe_unused]] const PairPanel& panel, [[maybe_unused]] std::size_t pair) {
#if defined(__AVX512BF16__)
  alignas(64) static constexpr std::uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                           8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(kOrder);
  for (std::size_t i = 0; i < panel.width; i += 16) {
    const auto words = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(second + i), _mm512_loadu_ps(first + i));
    _mm512_storeu_si512(panel.at(pair, i), _mm512_permutexvar_epi16(order, words));
  }
  return true;
#else
  return false;
#endif
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
      if (round_to_pairs(row, row + p.right.line, panel, k)) continue;
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
    interleave(first, second, panel, k);
  }
}

// From columns: calls read(column, line) for the words of each.
template <typename Read>
inline void pack_columns(const PairPanel& panel, Read read) {
  constexpr std::size_t lanes = kLanes<Pair>;
  const std::size_t pairs = panel.pairs(), stride = 2 * padded<Pair>(pairs);
  for (std::size_t j = 0; j < panel.width; j += lanes) {
    for (std::size_t i = 0; i < lanes; ++i) {
      std::uint16_t* line = panel.lines + i * stride;
      const std::size_t count = j + i < panel.columns ? panel.depth : 0;
      if (count != 0) read(panel.column + j + i, line);
      fill_zero_words(line + count, stride - count);
    }
    for (std::size_t k = 0; k < pairs; k += lanes) {
      Vector<Pair> square[lanes];
#pragma GCC unroll 16
      for (std::size_t i = 0; i < lanes; ++i) square[i] = load_pairs(panel.lines + i * stride + 2 * k);
      transpose_in_registers<Pair>(square);
      const std::size_t rows = std::min(pairs - k, lanes);
      for (std::size_t i = 0; i < rows; ++i) store_pairs(panel.at(k + i, j), square[i]);
    }
  }
}

// From a matrix whose lines are columns.
inline void pack_transposed_pairs(const Bfloat16Matmul& p, const PairPanel& panel) {
  pack_columns(panel, [&](std::size_t column, std::uint16_t* line) {
    read_words(p.right, p.first_column + column, panel.begin, panel.depth, line);
  });
}

// Copies `count` words and, up to a whole vector, those behind them.
inline void copy_words(const std::uint16_t* from, std::size_t count, std::uint16_t* to) {
  for (std::size_t i = 0; i < count; i += 2 * kLanes<Pair>) store_pairs(to + i, load_pairs(from + i));
}

// Words that lie side by side in the source and in what is packed.
struct WordRun {
  std::ptrdiff_t from;
  std::uint32_t to, count;
};

// Copies runs of words; up to a vector of what lies behind a run is overwritten.
inline void copy_runs(const std::uint16_t* from, const WordRun* runs, std::size_t count, std::uint16_t* to) {
  constexpr std::size_t kFew = 8;  // as in rows of the smallest images
  for (const WordRun* run = runs; run != runs + count; ++run) {
    if (run->count <= kFew) {
      __builtin_memcpy(to + run->to, from + run->from, kFew * sizeof(std::uint16_t));
    } else {
      copy_words(from + run->from, run->count, to + run->to);
    }
  }
}

// From patches of words: neighbouring positions of a column lie side by side.
inline void pack_word_patches(const Bfloat16Matmul& p, const PairPanel& panel) {
  const Patches& patches = *p.patches;
  const std::size_t last = panel.begin + panel.depth;
  WordRun runs[tuning::kBfloat16Depth + 2 * kTileLines];
  std::size_t count = 0;
  for (std::size_t k = panel.begin; k < last; ++count) {
    const std::size_t end = std::min(patches.run_ends[k], last);
    runs[count] = {patches.depth[k], static_cast<std::uint32_t>(k - panel.begin), static_cast<std::uint32_t>(end - k)};
    k = end;
  }
  pack_columns(panel, [&](std::size_t column, std::uint16_t* line) {
    copy_runs(patches.source + patches.columns[p.first_column + column], runs, count, line);
  });
}

// From patches of pairs: neighbouring columns lie side by side. What is written behind a row is overwritten by the next
// one, or lies where the next panel will, or its lines.
inline void pack_pair_patches(const Bfloat16Matmul& p, const PairPanel& panel) {
  const Patches& patches = *p.patches;
  const std::size_t first = p.first_column + panel.column, given = (panel.depth + 1) / 2;
  for (std::size_t side = 0; side < panel.width; side += panel.breadth(side)) {
    const std::size_t breadth = panel.breadth(side), valid = std::min(panel.columns, side + breadth);
    WordRun runs[kMaxTileVectors * kLanes<float>];
    std::size_t count = 0;
    for (std::size_t j = side; j < valid; ++count) {
      const std::size_t end = std::min(patches.run_ends[first + j] - first, valid);
      runs[count] = {2 * patches.columns[first + j], static_cast<std::uint32_t>(2 * (j - side)),
                     static_cast<std::uint32_t>(2 * (end - j))};
      j = end;
    }
    std::uint16_t* to = panel.at(0, side);
    for (std::size_t k = 0; k < panel.pairs(); ++k, to += 2 * breadth) {
      if (k >= given) {
        fill_zero_words(to, 2 * breadth);
        continue;
      }
      const std::uint16_t* from = patches.source + 2 * patches.depth[panel.begin / 2 + k];
      copy_runs(from, runs, count, to);
      if (valid < side + breadth) {
        const std::size_t filled = valid > side ? valid - side : 0;
        fill_zero_words(to + 2 * filled, 2 * (breadth - filled));
      }
    }
  }
}

inline void pack_panel(const Bfloat16Matmul& p, const PairPanel& panel) {
  if (p.patches != nullptr) return (p.patches->pairs ? pack_pair_patches : pack_word_patches)(p, panel);
  (p.right.transposed ? pack_transposed_pairs : pack_pairs)(p, panel);
}

// Words of the depth that lie together in a row of the rounded left matrix, and where they lie.
inline constexpr std::size_t kLeftWords = 2 * kTileLines;

inline std::size_t left_at(std::size_t row, std::size_t k, std::size_t stride) {
  if (!kInTiles) return row * stride + k;
  return row / kRowUnit * kRowUnit * stride + k / kLeftWords * kLeftWords * kRowUnit + row % kRowUnit * kLeftWords +
         k % kLeftWords;
}

// Rounds `count` elements of a row from `begin` on, a multiple of `kLeftWords`, with zeros up to the next multiple.
inline void round_row(const Rounding& r, const float* from, std::size_t row, std::size_t begin, std::size_t count) {
  for (std::size_t k = 0; k < count; k += kLeftWords) {
    std::uint16_t* to = r.target + left_at(row, begin + k, r.stride);
    const std::size_t size = std::min(count - k, kLeftWords);
    round_to_words(from + k, size, to);
    fill_zero_words(to + size, kLeftWords - size);
  }
}

// Copies `count` words of a row from `begin` on, both multiples of `kLeftWords`.
inline void place_words(const std::uint16_t* from, std::size_t row, std::size_t begin, std::size_t count,
                        std::size_t stride, std::uint16_t* target) {
  for (std::size_t k = 0; k < count; k += kLeftWords) {
    __builtin_memcpy(target + left_at(row, begin + k, stride), from + k, kLeftWords * sizeof(std::uint16_t));
  }
}

// Calls write(from, row, begin, count) for parts of the rows.
template <typename Write>
inline void round_lines(const Rounding& r, std::size_t first_row, std::size_t end_row, Write write) {
  for (std::size_t begin = 0; begin < r.depth; begin += kWidened) {
    for (std::size_t row = first_row; row < end_row; ++row) {
      write(r.source + row * r.line + begin, row, begin, std::min(r.depth - begin, kWidened));
    }
  }
}

// As many rows as a vector has lanes, transposed in squares along the depth; calls `write` as above.
template <typename Write>
inline void round_transposed(const Rounding& r, std::size_t first_row, std::size_t end_row, Write write) {
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
      for (std::size_t i = 0; i < rows; ++i) write(lines + i * kWidened, row + i, begin, depth);
    }
  }
}

inline void round_matrix(const Rounding& r, std::size_t first_row, std::size_t end_row) {
  const auto write = [&r](const float* from, std::size_t row, std::size_t begin, std::size_t count) {
    round_row(r, from, row, begin, count);
  };
  if (r.transposed) {
    round_transposed(r, first_row, end_row, write);
  } else {
    round_lines(r, first_row, end_row, write);
  }
}

}  // namespace
}  // namespace onnxtrain
