// The kernels of attention for one instruction set: compiled like convolution.cpp, once per set, with fused
// multiplications and additions.
#include "kernel_table.h"

#include "elementwise.h"
#include "transcendental.h"

#include "attention.h"

#define ONNXTRAIN_JOIN_(a, b) a##b
#define ONNXTRAIN_JOIN(a, b) ONNXTRAIN_JOIN_(a, b)

namespace onnxtrain {

extern const AttentionKernels ONNXTRAIN_JOIN(kAttention_, ONNXTRAIN_INSTRUCTION_SET)[kElementTypes];

const AttentionKernels ONNXTRAIN_JOIN(kAttention_, ONNXTRAIN_INSTRUCTION_SET)[kElementTypes] = {
    {score_stride<float>, attention_scratch<float>, attend<float>, attention_gradient<float>},
    {score_stride<double>, attention_scratch<double>, attend<double>, attention_gradient<double>},
};

}  // namespace onnxtrain
