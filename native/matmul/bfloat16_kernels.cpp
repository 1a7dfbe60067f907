// The bfloat16 kernels for one instruction set: compiled once per set, like convolution/kernels.cpp, with fused
// multiply-add, and once more for CPUs with AVX512-BF16, and for those with AMX.
#include "kernels/instruction_set.h"
#include "matmul/bfloat16_kernels.h"

namespace onnxtrain {

extern const Bfloat16Kernels ONNXTRAIN_OF_SET(kBfloat16_);

const Bfloat16Kernels ONNXTRAIN_OF_SET(kBfloat16_) = {
#if defined(__AVX512BF16__)
    .by_processor = true,
#else
    .by_processor = false,
#endif
    .row_unit = kInTiles ? kRowUnit : 6,
    .scratch = bfloat16_scratch,
    .round = round_matrix,
    .multiply = multiply_bfloat16,
};

}  // namespace onnxtrain
