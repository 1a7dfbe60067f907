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

// y [rows, outputs] from x [rows, depth].
void sparse_linear(const SparseMatrix& weights, std::size_t rows, const float* x, const SparseEnding& ending, float* y,
                   const ParallelFor& parallel_for, const Memory* memory);

// Two spatial axes: sizes of x, y and the kernel, and where windows begin.
struct SparseWindows {
  std::size_t images, channels;
  std::size_t size[2], windows[2], kernel[2], strides[2], dilations[2], begin[2], padded[2];
};

// y [images, outputs, windows] from x [images, channels, size]; the depth of the weights is [channels, kernel].
void sparse_convolution(const SparseMatrix& weights, const SparseWindows& windows, const float* x,
                        const SparseEnding& ending, float* y, const ParallelFor& parallel_for, const Memory* memory);

}  // namespace onnxtrain
