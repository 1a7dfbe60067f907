// Convolutions with dense weights and the MaxPool behind them, on threads of the caller.
#pragma once

#include <array>
#include <cstddef>
#include <vector>

#include "parallel.h"
#include "scratch.h"
#include "sparse/products.h"
#include "sparse/table.h"

namespace onnxtrain {

// Two spatial axes: sizes of x and the kernel, where the first window begins, and numbers of windows; and groups of 2 or
// 3 windows along each axis, two apart, of which the first begins `pool_begin` windows, 0 or 1, before the first.
struct PooledWindows {
  std::size_t images, channels, outputs;
  std::size_t size[2], kernel[2], strides[2], begin[2], windows[2];
  std::size_t pool[2], pool_begin[2], groups[2];
  SparseBorder y = {};  // around the groups of y, which becomes zero
};

// Weights [outputs, channels, kernel], evaluated at the points of tiles: outputs in blocks of kTileBlock, and at most
// kTileTaps columns for each remainder of the stride.
inline constexpr std::size_t kTileBlock = 8;

class TileWeights {
 public:
  TileWeights(const float* w, std::size_t outputs, std::size_t channels, const std::size_t (&kernel)[2],
              std::size_t column_stride);

  // Of a block, at each point in turn: [channels, remainders that have the point, rows of the kernel][kTileBlock].
  const float* values(std::size_t block) const { return values_.data() + block * block_size_; }
  std::size_t entries(std::size_t point) const { return entries_[point]; }

 private:
  std::vector<float> values_;
  std::array<std::size_t, kTilePoints> entries_;
  std::size_t block_size_;
};

// y [images, outputs, groups] from x [images, channels, size]: the largest sum of each group, plus a bias [outputs], and
// zero for those below. What is not a number in x may reach its tile, or be left out of its group.
void pooled_convolution(const TileWeights& weights, const PooledWindows& windows, const float* x,
                        const float* bias, float* y, const ParallelFor& parallel_for, const Memory* memory);

}  // namespace onnxtrain
