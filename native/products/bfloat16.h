// Products whose factors are rounded to bfloat16 and whose sums are float: how the work is cut into parts and shared among
// threads. Nothing here knows ONNX Runtime. Results do not depend on the number of threads.
#pragma once

#include <cstddef>

#include "parallel.h"
#include "products/bfloat16_table.h"
#include "products/products.h"

namespace onnxtrain {

// y = x w + bias (null: none), then its ending, with weights of any type.
void linear_in_bfloat16(const Linear& sizes, const float* x, Stored stored, const void* w, const float* bias, float* y,
                        const ParallelFor& parallel_for, const LinearEnding& ending = {});

// y = x w or, transposed, x wᵀ, of `rows` rows, with scales and zero points of type float.
void multiply_few_bits_in_bfloat16(std::size_t rows, const float* x, const PackedWeights& w, bool transposed, float* y,
                                   const ParallelFor& parallel_for);

// dw = xᵀ dy, in the order of w, and dbias (null: not wanted) = the sum of dy, which is not rounded, over its rows.
void linear_weight_gradient_in_bfloat16(const Linear& sizes, const float* dy, const float* x, float* dw, float* dbias,
                                        const ParallelFor& parallel_for);

}  // namespace onnxtrain
