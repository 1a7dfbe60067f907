// Linear layers and their gradients: splits matrix multiplications into parts and shares them among threads.
// Independent of ONNX Runtime. Results do not depend on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernel_table.h"
#include "parallel.h"
#include "matmul/table.h"

namespace onnxtrain {

// x is [rows, inputs], w [inputs, outputs] or, if transposed, [outputs, inputs]; y is [rows, outputs].
struct Linear {
  std::size_t rows, inputs, outputs;
  bool transposed;
};

// Begins the sums: null, [outputs] or, if by row, [rows, outputs], which may be the memory of y.
struct LinearBias {
  const void* data = nullptr;
  bool by_row = false;
};

// The epilogue and, for kReluGradient, the result of Relu [rows, outputs].
struct LinearEnding {
  Ending ending = Ending::kNone;
  const void* activation = nullptr;
};

// y = x w + bias, then the epilogue. kFloat stands for weights of the operands' type; 16-bit weights are
// widened tile by tile.
void linear(ElementType type, const Linear& sizes, const void* x, Stored stored, const void* w, const LinearBias& bias,
            void* y, const ParallelFor& parallel_for, const LinearEnding& ending = {});

// Low-bit weights, as described by `LowBit`, dequantized to the operands' type.
struct PackedWeights {
  const std::uint8_t* integers;
  const void* scales;
  const std::uint8_t* packed_zeros;
  const void* zeros;
  std::size_t bits, block, rows, columns;
};

template <typename T>
LowBit<T> low_bit(const PackedWeights& w, bool transposed) {
  return {w.integers, static_cast<const T*>(w.scales), w.packed_zeros, static_cast<const T*>(w.zeros), w.bits, w.block,
          w.columns / w.block + (w.columns % w.block != 0 ? 1 : 0), transposed};
}

// y = x w or, if transposed, x wᵀ, with `rows` rows; weights are dequantized tile by tile.
void multiply_low_bit(ElementType type, std::size_t rows, const void* x, const PackedWeights& w, bool transposed,
                       void* y, const ParallelFor& parallel_for);

// dw = xᵀ dy, in the layout of w, and dbias (null: not requested) = the sum of dy over its rows.
void linear_weight_gradient(ElementType type, const Linear& sizes, const void* dy, const void* x, void* dw,
                            void* dbias, const ParallelFor& parallel_for);

// Columns of a matrix with row stride `stride`.
struct Columns {
  const void* data;
  std::size_t count, stride;
};

// target [left columns, right columns] = leftᵀ right, summed over `rows` rows, and the sums of left over its rows
// (null: not requested). Without columns of right, only the sums.
void weight_gradient(ElementType type, std::size_t rows, const Columns& left, const Columns& right, void* target,
                     void* left_sums, const ParallelFor& parallel_for);

}  // namespace onnxtrain
