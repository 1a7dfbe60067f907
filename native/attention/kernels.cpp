// The kernels of attention for one instruction set: compiled like convolution.cpp, once per set, with fused
// multiplications and additions.
#include "attention/attention_kernels.h"
#include "kernels/instruction_set.h"
#include "kernels/kernel_table.h"

namespace onnxtrain {

extern const AttentionKernels ONNXTRAIN_OF_SET(kAttention_)[kElementTypes];

const AttentionKernels ONNXTRAIN_OF_SET(kAttention_)[kElementTypes] = {
    {score_stride<float>, attention_scratch<float>, attend<float>, attention_gradient<float>},
    {score_stride<double>, attention_scratch<double>, attend<double>, attention_gradient<double>},
};

}  // namespace onnxtrain
