// The kernels of products of bfloat16 for one instruction set: compiled like kernels.cpp, once per set, with fused
// multiplications and additions, and for processors with AVX512-BF16.
#include "kernels/instruction_set.h"
#include "products/bfloat16_kernels.h"

namespace onnxtrain {

extern const Bfloat16Kernels ONNXTRAIN_OF_SET(kBfloat16_);

const Bfloat16Kernels ONNXTRAIN_OF_SET(kBfloat16_) = {
#if defined(__AVX512BF16__)
    .by_processor = true,
#else
    .by_processor = false,
#endif
    .scratch = bfloat16_scratch,
    .round = round_matrix,
    .multiply = multiply_bfloat16,
};

}  // namespace onnxtrain
