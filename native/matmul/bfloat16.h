// Matrix multiplication with operands rounded to bfloat16 and float accumulation: splits the work into parts and shares
// it among threads. Independent of ONNX Runtime. Results do not depend on the number of threads.
#pragma once

#include <cstddef>

#include "parallel.h"
#include "matmul/bfloat16_table.h"
#include "matmul/matmul.h"
#include "scratch.h"

namespace onnxtrain {

// Memory of a rounded left matrix.
class RoundedLeft {
 public:
  RoundedLeft(std::size_t rows, std::size_t depth);

  std::uint16_t* words() const { return words_.as<std::uint16_t>(); }
  std::size_t stride() const { return stride_; }

 private:
  std::size_t stride_;
  Buffer words_;
};

// Sets the blocks of a multiplication, and returns the bytes of scratch for that many rows and columns.
std::size_t choose_blocks(Bfloat16Matmul& product, std::size_t rows, std::size_t columns);

// The whole product of a rounded left matrix.
void multiply_rounded(Bfloat16Matmul product, const ParallelFor& parallel_for);

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
