// The kernels of products for one instruction set: compiled like convolution.cpp, once per set, with fused
// multiplications and additions.
#include "kernels/instruction_set.h"
#include "products/product_kernels.h"

namespace onnxtrain {

extern const ProductTable ONNXTRAIN_OF_SET(kProduct_);

const ProductTable ONNXTRAIN_OF_SET(kProduct_) = {
    {{copy_stride<float>, product_scratch<float>, multiply_matrices<float>},
     {copy_stride<double>, product_scratch<double>, multiply_matrices<double>}},
};

}  // namespace onnxtrain
