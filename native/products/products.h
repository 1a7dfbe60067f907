// Products of activations with weights, and their gradients: how the work is cut into parts and shared among threads.
// Nothing here knows ONNX Runtime. Results do not depend on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernel_table.h"
#include "parallel.h"
#include "products/table.h"

namespace onnxtrain {

// x is [rows, inputs], w [inputs, outputs] or, transposed, [outputs, inputs]; y is [rows, outputs].
struct Linear {
  std::size_t rows, inputs, outputs;
  bool transposed;
};

// How a product ends, and, for kReluGradient, the result of Relu [rows, outputs].
struct LinearEnding {
  Ending ending = Ending::kNone;
  const void* activation = nullptr;
};

// y = x w + bias (null: none), then its ending. The weights are of the type, which is what `kFloat` stands for, or of 16
// bits; then what is read of them is widened part by part.
void linear(ElementType type, const Linear& sizes, const void* x, Stored stored, const void* w, const void* bias,
            void* y, const ParallelFor& parallel_for, const LinearEnding& ending = {});

// Weights of a few bits, as `FewBits` has them, whose numbers are of the product's element type.
struct PackedWeights {
  const std::uint8_t* integers;
  const void* scales;
  const std::uint8_t* packed_zeros;
  const void* zeros;
  std::size_t bits, block, rows, columns;
};

template <typename T>
FewBits<T> few_bits(const PackedWeights& w, bool transposed) {
  return {w.integers, static_cast<const T*>(w.scales), w.packed_zeros, static_cast<const T*>(w.zeros), w.bits, w.block,
          w.columns / w.block + (w.columns % w.block != 0 ? 1 : 0), transposed};
}

// y = x w or, transposed, x wᵀ, of `rows` rows; what is read of the weights becomes numbers part by part.
void multiply_few_bits(ElementType type, std::size_t rows, const void* x, const PackedWeights& w, bool transposed,
                       void* y, const ParallelFor& parallel_for);

// dw = xᵀ dy, in the order of w, and dbias (null: not wanted) = the sum of dy over its rows.
void linear_weight_gradient(ElementType type, const Linear& sizes, const void* dy, const void* x, void* dw,
                            void* dbias, const ParallelFor& parallel_for);

// Columns of a matrix whose rows lie `stride` elements apart.
struct Columns {
  const void* data;
  std::size_t count, stride;
};

// target [left columns, right columns] = leftᵀ right, summed over `rows` rows, and the sums of left over its rows (null:
// not wanted). Without columns of right there are only the sums.
void weight_gradient(ElementType type, std::size_t rows, const Columns& left, const Columns& right, void* target,
                     void* left_sums, const ParallelFor& parallel_for);

}  // namespace onnxtrain
