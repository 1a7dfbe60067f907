// Convolutions of one group with operands rounded to bfloat16 and float accumulation, as matrix multiplications
// (matmul/bfloat16.h) of weights and patches. Results do not depend on the number of threads.
#pragma once

#include "convolution/convolution.h"

namespace onnxtrain {

// y = x * w + bias; bias may be null, and is not rounded.
void convolve_in_bfloat16(const Convolution& convolution, const float* x, const float* w, const float* bias, float* y,
                          const ParallelFor& parallel_for);

// dx from dy.
void convolution_input_gradient_in_bfloat16(const Convolution& convolution, const float* dy, const float* w, float* dx,
                                            const ParallelFor& parallel_for);

// dw from dy.
void convolution_weight_gradient_in_bfloat16(const Convolution& convolution, const float* x, const float* dy, float* dw,
                                             const ParallelFor& parallel_for);

}  // namespace onnxtrain
