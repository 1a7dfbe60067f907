// Matrix multiplication with operands rounded to bfloat16 and float accumulation: splits the work into parts and shares
// it among threads. Independent of ONNX Runtime. Results do not depend on the number of threads.
#pragma once

#include <cstddef>

#include "parallel.h"
#include "matmul/bfloat16_table.h"
#include "matmul/matmul.h"

namespace onnxtrain {

// y = x w + bias, then the epilogue, with weights of any type.
void linear_in_bfloat16(const Linear& sizes, const float* x, Stored stored, const void* w, const LinearBias& bias,
                        float* y, const ParallelFor& parallel_for, const LinearEnding& ending = {});

// y = x w or, if transposed, x wᵀ, with `rows` rows; scales and zero points are float.
void multiply_low_bit_in_bfloat16(std::size_t rows, const float* x, const PackedWeights& w, bool transposed, float* y,
                                   const ParallelFor& parallel_for);

// dw = xᵀ dy, in the layout of w, and dbias (null: not requested) = the sum over rows of dy, which is not rounded.
void linear_weight_gradient_in_bfloat16(const Linear& sizes, const float* dy, const float* x, float* dw, float* dbias,
                                        const ParallelFor& parallel_for);

}  // namespace onnxtrain
