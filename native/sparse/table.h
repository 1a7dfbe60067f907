// Products with sparse matrices: functions over pointers, compiled once per instruction set and called through a table.
// Multiply-add is fused; one instruction set always gives the same bits. Strides and offsets count elements.
#pragma once

#include <cstddef>
#include <cstdint>

namespace onnxtrain {

// Block rows of a sparse matrix times rows of x: sums[(rows[i] - first) * block + b] = sum over the entries e of place i of
// values[e][b] * x[offsets[e] ...].
struct SparseRows {
  const std::uint32_t* starts;  // of the entries of each place, one more than there are block rows
  const std::uint32_t* rows;    // the block row at each place; at places [first, last) are block rows [first, last)
  const std::int32_t* offsets;  // of the row of x, per entry
  const float* values;          // [entries][block]
  std::size_t first, last;
  bool add;                     // to what is in sums
  std::size_t last_vector;      // where the last vector begins, in x and in sums: it may overlap the one before
  const float* x;
  float* sums;                  // [(last - first) * block][vectors * lanes]
};

// Groups of as many outputs as a vector has lanes, times one row of x: each lane has its own entries, padded with zeros
// to the longest of its group.
struct SparseLanes {
  const std::uint32_t* starts;   // of each group's entries, in vectors
  const std::int32_t* positions; // in x: [entries][lanes]
  const float* values;           // [entries][lanes]
  const std::int32_t* outputs;   // of the lanes: [groups][lanes]; those beyond the last are -1
  std::size_t first, last;       // groups
  const float* x;
  float* sums;                   // by output
};

// Gradients of the entries of a mask, whose block rows have one output: dw[e] = sum over rows of dy[output] *
// x[offsets[e] ...].
struct SparseGradient {
  const std::uint32_t* starts;  // of the entries of each output, one more than there are outputs
  const std::int32_t* offsets;  // of the row of x, per entry
  std::size_t first, last;      // outputs
  bool add;                     // to what is in dw and db
  const float *dy, *x;          // transposed: [outputs][vectors * lanes], and rows as long
  float* dw;                    // by entry
  float* db;                    // [outputs][lanes] sums of dy over its rows; null: not requested
};

// y = min(max(sums + bias + shift + residual, lower), upper), times 1 where `gate` is above zero and times 0 elsewhere.
struct SparseEnding {
  const float *bias, *residual, *gate;  // null: none; `gate` only for rows
  float shift, lower, upper;
  bool has_limits;
};

// The most vectors of the most lanes of a sum, in elements.
inline constexpr std::size_t kMostSpan = 8 * 16;

// An image of planes in memory: elements from one row to the next, and from one plane to the next.
struct SparseImage {
  std::size_t columns, size;
};

// Positions [begin, end) of windows in rows of `columns`, of which the first `windows` belong to y; the elements beside
// them in a row of y, `before` and `after`, become zero.
struct SparseSpan {
  std::size_t begin, end, columns, windows, before, after;
  std::size_t sums_stride;  // between outputs; a vector may be read beyond the last sum
  SparseImage y, residual;
};

// Positions of windows in rows as long as those of y and of the residual: `vectors` of them, `count` in the last.
struct SparseRun {
  std::size_t vectors, last_vector, count;
  const std::int32_t* masks;  // [positions]: 0 where y is zero, -1 elsewhere; null: nowhere
  std::size_t y_stride, residual_stride;  // between outputs
};

// One axis of a plane that is copied: `total` places, of which `count` hold every `stride`-th element from `first` on,
// after `before` zeros and before others.
struct PaddedAxis {
  std::size_t first, stride, before, count, total;
};

// Four neighbouring windows of a row are multiplied together, by Toom and Cook: the columns of a kernel that are a stride
// apart, at most four, are a polynomial, which is evaluated at these numbers and at infinity, as are the columns of x. Of
// three columns, the last number is left out, and so on.
inline constexpr std::size_t kTileWindows = 4, kTileTaps = 4, kTilePoints = kTileWindows + kTileTaps - 1;
inline constexpr double kTileNumbers[kTilePoints - 1] = {0.0, 1.0, -1.0, 0.5, -2.0, -0.5};

// A row of x of `size` columns, behind `begin` zeros; the stride is 1, 2 or 4: the values of its tiles at the points of each remainder of the
// stride in turn, [points of all][to_stride]; a vector may be written beyond the last tile.
struct TileRow {
  const float* x;  // null: zeros
  std::size_t size, begin, stride, kernel, tiles;
  float* columns;  // scratch: twice [windows * stride][column_stride]
  std::size_t column_stride;  // at least one tile more than there are; whole vectors
  float* to;
  std::size_t to_stride;
};

// Products [points][outputs][vectors * lanes] of tiles, to the sums of their windows: [outputs][windows][window_stride].
struct TileSums {
  const float* sums;
  std::size_t outputs, vectors;
  float* to;
  std::size_t window_stride;
};

// The largest sums of each second group of `kernel` windows, 2 or 3, along a row of tiles, over one to three rows, plus
// the bias, and zero for those below; the first group begins `begin` windows, 0 or 1, before the row.
struct TilePool {
  const float* sums;  // of the first windows of the tiles in the first row; a vector may be read beyond the last
  std::size_t window_stride, rows, tiles, kernel, begin, groups;
  float bias;
  float* y;
};

using MultiplyRows = void (*)(const SparseRows&);
using AddGradients = void (*)(const SparseGradient&);

struct SparseTable {
  std::size_t lanes;
  const SparseTable* half;  // with half as many lanes, or null
  // The most vectors of x that a kernel multiplies at a time, and the kernel for a block of 1, 4 or 8 outputs and for a
  // number of vectors.
  std::size_t (*most_vectors)(std::size_t block);
  MultiplyRows (*rows)(std::size_t block, std::size_t vectors);
  void (*by_lanes)(const SparseLanes&);
  // The most vectors of rows whose gradients are added at a time, and the kernel for a number of vectors.
  std::size_t most_gradient_vectors;
  AddGradients (*gradients)(std::size_t vectors);
  std::size_t (*non_zeros)(const float* x, std::size_t count);
  // Transposes up to `lanes` rows of x, columns [first, last), to x_t[column * stride + row]; rows beyond `rows` are zero.
  void (*transpose)(const float* x, std::size_t rows, std::size_t row_stride, std::size_t first, std::size_t last,
                    float* x_t, std::size_t stride);
  // Copies a plane with rows of `row_size` elements.
  void (*pad)(const PaddedAxis& rows, const PaddedAxis& columns, const float* from, std::size_t row_size, float* to);
  // The same for even and odd columns, of which there are as many, or one less; the first is even.
  void (*split)(const PaddedAxis& rows, const PaddedAxis& even, const PaddedAxis& odd, const float* from,
                std::size_t row_size, float* evens, float* odds);
  void (*end)(const SparseEnding& ending, std::size_t count, const float* sums, float* y);
  // Ends [outputs][positions] sums; `bias` is by output, y and `residual` point to the first window of an image's first
  // row.
  void (*end_windows)(const SparseEnding& ending, const SparseSpan& span, std::size_t outputs, const float* sums,
                      float* y);
  // The same; y and `residual` point to the first position.
  void (*end_run)(const SparseEnding& ending, const SparseRun& run, std::size_t outputs, const float* sums, float* y);
  // Ends [outputs][vectors * lanes] sums as rows [row][outputs] of y; `residual` and `gate` are laid out like y.
  void (*end_transposed)(const SparseEnding& ending, std::size_t outputs, std::size_t rows, std::size_t sums_stride,
                         const float* sums, float* y, std::size_t y_stride);
  void (*split_tiles)(const TileRow& row);
  void (*join_tiles)(const TileSums& products);
  void (*pool_tiles)(const TilePool& pool);
};

}  // namespace onnxtrain
