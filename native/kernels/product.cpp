// The kernels of products for one instruction set: compiled like convolution.cpp, once per set, with fused
// multiplications and additions.
#include "product.h"

#define ONNXTRAIN_JOIN_(a, b) a##b
#define ONNXTRAIN_JOIN(a, b) ONNXTRAIN_JOIN_(a, b)

namespace onnxtrain {

extern const ProductTable ONNXTRAIN_JOIN(kProduct_, ONNXTRAIN_INSTRUCTION_SET);

const ProductTable ONNXTRAIN_JOIN(kProduct_, ONNXTRAIN_INSTRUCTION_SET) = {
    {{copy_stride<float>, product_scratch<float>, multiply_matrices<float>},
     {copy_stride<double>, product_scratch<double>, multiply_matrices<double>}},
};

}  // namespace onnxtrain
