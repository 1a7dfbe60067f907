// The matmul kernels for one instruction set: compiled once per set, like convolution/kernels.cpp, with fused
// multiply-add.
#include "kernels/instruction_set.h"
#include "matmul/matmul_kernels.h"

namespace onnxtrain {

extern const MatmulTable ONNXTRAIN_OF_SET(kProduct_);

namespace {

template <typename T>
constexpr MatmulKernels<T> kKernels = {
    .scratch = product_scratch<T>,
    .multiply = multiply_matrices<T>,
};

}  // namespace

const MatmulTable ONNXTRAIN_OF_SET(kProduct_) = {{.single = kKernels<float>, .wide = kKernels<double>}};

}  // namespace onnxtrain
