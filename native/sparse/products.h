// Linear layers and convolutions with sparse weights, on threads of the caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "parallel.h"
#include "scratch.h"
#include "sparse/matrix.h"
#include "sparse/table.h"

namespace onnxtrain {

// How layers exchange rows: transposed, as panels [panel][columns][rows of a panel] of at most that many rows, which hold as
// many elements; or as they are, where that number is 0 or the rows do not fill equal panels of whole vectors.
struct TransposedRows {
  std::size_t x = 0, y = 0;
};

// y [rows, outputs] from x [rows, depth]; a residual is laid out like y.
void sparse_linear(const SparseMatrix& weights, std::size_t rows, const float* x, const SparseEnding& ending, float* y,
                   const TransposedRows& transposed, const ParallelFor& parallel_for, const Memory* memory);

// x_t from x [rows, columns], with panels of at most `most` rows.
void transpose_rows(std::size_t rows, std::size_t columns, std::size_t most, const float* x, float* x_t,
                    const ParallelFor& parallel_for);

// The same with dense weights w, laid out like the mask, that are zero where the mask is false. Returns false and leaves
// y alone if they are not, or if a dense product takes less time.
bool masked_linear(const SparseMatrix& mask, std::size_t rows, const float* x, const float* w,
                   const SparseEnding& ending, float* y, const ParallelFor& parallel_for);

// dw, laid out like the mask, whose blocks have one output: xᵀ dy where the mask is true, and zero elsewhere; and db
// [outputs], the sum of dy over its rows (null: not requested). Returns false and leaves both alone if a dense product
// takes less time.
bool masked_weight_gradient(const SparseMatrix& mask, std::size_t rows, const float* dy, const float* x, float* dw,
                            float* db, const ParallelFor& parallel_for);

// Elements by axis in front of others and behind them.
struct SparseBorder {
  std::size_t before[2] = {0, 0}, after[2] = {0, 0};
};

// Two spatial axes: sizes of x and the kernel, numbers of windows, and where the first begins; and what is in memory
// around x, which is not read, around the windows of y, which becomes zero, and around those of the residual.
struct SparseWindows {
  std::size_t images, channels;
  std::size_t size[2], windows[2], kernel[2], strides[2], dilations[2], begin[2], padded[2];
  SparseBorder x = {}, y = {}, residual = {};
};

// y [images, outputs, windows] from x [images, channels, size], with their borders; the depth of the weights is
// [channels, kernel].
void sparse_convolution(const SparseMatrix& weights, const SparseWindows& windows, const float* x,
                        const SparseEnding& ending, float* y, const ParallelFor& parallel_for, const Memory* memory);

}  // namespace onnxtrain
