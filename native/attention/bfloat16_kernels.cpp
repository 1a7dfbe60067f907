// Attention in bfloat16 for one instruction set: compiled for CPUs with AVX512-BF16, and once more for those with AMX.
#include "attention/bfloat16_kernels.h"
#include "kernels/instruction_set.h"

namespace onnxtrain {

extern const Bfloat16Attention ONNXTRAIN_OF_SET(kBfloat16Attention_);

const Bfloat16Attention ONNXTRAIN_OF_SET(kBfloat16Attention_) = {
    .scratch = bfloat16_attention_scratch,
    .attend = attend_in_bfloat16,
    .gradient = attention_gradient_in_bfloat16,
};

}  // namespace onnxtrain
