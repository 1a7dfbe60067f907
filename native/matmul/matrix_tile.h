// Multiplies a few rows by a panel of columns with the sums in registers: the inner kernel of matrix multiplications
// and convolutions.
#pragma once

#include <cstddef>

#include "kernels/vector.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// A tile has as many vectors of columns as fit the registers with sums, columns and one broadcast element, and enough
// rows that loading the columns costs less than multiplying.
inline constexpr std::size_t kMaxTileVectors = kVectorRegisters == 32 ? 4 : 2;
inline constexpr std::size_t kMaxTileRows = 8;

inline constexpr std::size_t tile_rows(std::size_t vectors) {
  if (kVectorRegisters == 32) return vectors == 4 ? 6 : 8;
  return vectors == 2 ? 6 : 8;
}

// Rows of a tile whose left rows are packed, for any number of vectors.
inline constexpr std::size_t kPackedRows = tile_rows(kMaxTileVectors);

inline constexpr std::size_t kMaxTileColumnBytes = kMaxTileVectors * kVectorBytes;

// Data to prefetch during a multiplication: a number of bytes of a line per depth element, then those of the next line.
struct Stream {
  const char* at = nullptr;
  std::size_t step = 0;
  std::size_t left = static_cast<std::size_t>(-1);  // of the line, in bytes; by default the line does not end
  std::size_t line = 0;                             // length of a line
  std::ptrdiff_t between = 0;                       // from the end of a line to the next one

  void fetch() {
    __builtin_prefetch(at);
    at += step;
    if (left > step) {
      left -= step;
    } else {
      at += between;
      left += line - step;
    }
  }
};

// How the left rows of a tile lie in memory.
enum class Left {
  kAnywhere,  // each where `rows` points, its elements at `offsets`
  kRows,      // `left_line` apart, from `left` on, their elements side by side
  kPacked,    // [depth][rows], from `left` on
  kColumns,   // side by side, from `left` on, their elements `left_line` apart
};

// What a tile prefetches.
enum class Fetching {
  kNothing,
  kStream,   // the first of the streams in `ahead`
  kStreams,  // the streams in `ahead`
  kColumns,  // the columns themselves, if they come from beyond the core's caches
};

template <typename T>
struct Tile {
  const T* const* rows;           // start of each row; null unless anywhere
  const std::ptrdiff_t* offsets;  // of the elements of a row, `depth` of them, the same for all rows; null likewise
  std::size_t depth;
  const T* columns;  // [depth][vectors * lanes], rows `columns_stride` apart
  bool accumulate;   // adds to the contents of `sums`
  T* sums;           // [rows][vectors * lanes], rows `sums_stride` apart
  std::size_t sums_stride;
  std::size_t columns_stride = 0;  // 0: contiguous
  Stream ahead[2] = {};  // data to prefetch
  const T* left = nullptr;
  std::ptrdiff_t left_line = 0;
};

// Depth elements per iteration, unless the left rows are anywhere.
inline constexpr std::size_t kUnrolledDepth = 4;

template <typename T, std::size_t rows, std::size_t vectors, Fetching fetching, Left layout>
void multiply(const Tile<T>& tile) {
  constexpr std::size_t lanes = kLanes<T>;
  Vector<T> sum[rows][vectors];
#pragma GCC unroll 8
  for (std::size_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (std::size_t v = 0; v < vectors; ++v) {
      sum[r][v] = tile.accumulate ? load(tile.sums + r * tile.sums_stride + v * lanes) : Vector<T>{};
    }
  }
  const T* columns = tile.columns;
  const std::size_t stride = tile.columns_stride == 0 ? vectors * lanes : tile.columns_stride;
  // Multiplies `left(r)` of each row by the next row of columns.
  const auto add_products = [&](const auto& left) {
    Vector<T> right[vectors];
#pragma GCC unroll 4
    for (std::size_t v = 0; v < vectors; ++v) right[v] = load(columns + v * lanes);
    if constexpr (fetching == Fetching::kColumns) {
#pragma GCC unroll 4
      for (std::size_t v = 0; v < vectors; ++v) {
        __builtin_prefetch(reinterpret_cast<const char*>(columns + v * lanes) + tuning::kColumnsAheadBytes);
      }
    }
    columns += stride;
#pragma GCC unroll 8
    for (std::size_t r = 0; r < rows; ++r) {
      const Vector<T> element = broadcast(left(r));
#pragma GCC unroll 4
      for (std::size_t v = 0; v < vectors; ++v) sum[r][v] += element * right[v];
    }
  };
  if constexpr (layout == Left::kAnywhere) {
    const T* row[rows];
#pragma GCC unroll 8
    for (std::size_t r = 0; r < rows; ++r) row[r] = tile.rows[r];
    [[maybe_unused]] Stream first = tile.ahead[0], second = tile.ahead[1];
    for (const std::ptrdiff_t *offset = tile.offsets, *end = offset + tile.depth; offset != end; ++offset) {
      if constexpr (fetching == Fetching::kStreams) {
        first.fetch();
        second.fetch();
      }
      add_products([&](std::size_t r) { return row[r][*offset]; });
    }
  } else {
    // Three rows per pointer: with multiples of the stride that addresses have room for.
    constexpr std::size_t pointers = layout == Left::kRows ? (rows + 2) / 3 : 1;
    const std::ptrdiff_t step = layout == Left::kRows ? 1 : layout == Left::kPacked ? rows : tile.left_line;
    const T* left[pointers];
#pragma GCC unroll 3
    for (std::size_t i = 0; i < pointers; ++i) left[i] = tile.left + static_cast<std::ptrdiff_t>(3 * i) * tile.left_line;
    const auto element = [&](std::size_t r, std::size_t i) {
      if constexpr (layout != Left::kRows) return left[0][static_cast<std::ptrdiff_t>(i) * step + static_cast<int>(r)];
      return left[r / 3][static_cast<std::ptrdiff_t>(r % 3) * tile.left_line + static_cast<std::ptrdiff_t>(i)];
    };
    const auto advance = [&](std::size_t by) {
#pragma GCC unroll 3
      for (std::size_t i = 0; i < pointers; ++i) left[i] += static_cast<std::ptrdiff_t>(by) * step;
    };
    [[maybe_unused]] Stream first = tile.ahead[0], second = tile.ahead[1];
    std::size_t k = 0;
    for (; k + kUnrolledDepth <= tile.depth; k += kUnrolledDepth) {
#pragma GCC unroll 4
      for (std::size_t i = 0; i < kUnrolledDepth; ++i) {
        if constexpr (fetching == Fetching::kStream || fetching == Fetching::kStreams) first.fetch();
        if constexpr (fetching == Fetching::kStreams) second.fetch();
        add_products([&](std::size_t r) { return element(r, i); });
      }
      advance(kUnrolledDepth);
    }
    for (; k < tile.depth; ++k) {
      add_products([&](std::size_t r) { return element(r, 0); });
      advance(1);
    }
  }
#pragma GCC unroll 8
  for (std::size_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (std::size_t v = 0; v < vectors; ++v) store(tile.sums + r * tile.sums_stride + v * lanes, sum[r][v]);
  }
}

template <typename T>
using Multiply = void (*)(const Tile<T>&);

template <typename T, std::size_t vectors, Fetching fetching, Left layout>
inline Multiply<T> multiply_of_rows(std::size_t rows) {
  constexpr std::size_t most = layout == Left::kPacked ? kPackedRows : tile_rows(vectors);
  static constexpr Multiply<T> kernels[kMaxTileRows] = {
      multiply<T, 1, vectors, fetching, layout>,
      multiply<T, 2, vectors, fetching, layout>,
      multiply<T, 3, vectors, fetching, layout>,
      multiply<T, 4, vectors, fetching, layout>,
      multiply<T, 5, vectors, fetching, layout>,
      multiply<T, 6, vectors, fetching, layout>,
      multiply<T, most < 7 ? 6 : 7, vectors, fetching, layout>,
      multiply<T, most < 8 ? 6 : 8, vectors, fetching, layout>};
  return kernels[rows - 1];
}

// The kernel for a tile of 1 to tile_rows(vectors) rows, at most kPackedRows of a packed one.
template <typename T, Fetching fetching = Fetching::kNothing, Left layout = Left::kAnywhere>
inline Multiply<T> multiply_of(std::size_t rows, std::size_t vectors) {
  if constexpr (kMaxTileVectors >= 4) {
    if (vectors == 4) return multiply_of_rows<T, 4, fetching, layout>(rows);
    if (vectors == 3) return multiply_of_rows<T, 3, fetching, layout>(rows);
  }
  return vectors == 2 ? multiply_of_rows<T, 2, fetching, layout>(rows) : multiply_of_rows<T, 1, fetching, layout>(rows);
}

// Splits `total` items into equal parts of at most `most`.
struct Parts {
  std::size_t count, smaller, larger;  // the first `larger` parts have one item more

  Parts(std::size_t total, std::size_t most)
      : count((total + most - 1) / most),
        smaller(count == 0 ? 0 : total / count),
        larger(count == 0 ? 0 : total % count) {}
  std::size_t begin(std::size_t part) const { return part * smaller + (part < larger ? part : larger); }
  std::size_t size(std::size_t part) const { return smaller + (part < larger ? 1 : 0); }
};

// Columns split into panels of whole vectors, the last one padded. In memory a panel is [depth][vectors * lanes];
// panels are contiguous.
template <typename T>
struct Panels {
  Parts parts;

  explicit Panels(std::size_t columns, std::size_t most_vectors = kMaxTileVectors)
      : parts((columns + kLanes<T> - 1) / kLanes<T>, most_vectors) {}
  std::size_t count() const { return parts.count; }
  std::size_t vectors(std::size_t panel) const { return parts.size(panel); }
  std::size_t begin(std::size_t panel) const { return parts.begin(panel) * kLanes<T>; }
  std::size_t width(std::size_t panel) const { return parts.size(panel) * kLanes<T>; }
};

template <typename T>
std::size_t panel_count(std::size_t columns) {
  return Panels<T>(columns).count();
}

}  // namespace
}  // namespace onnxtrain
