// Operands of bfloat16 convolutions for one instruction set: compiled once per set, and once more for CPUs with
// AVX512-BF16, and for those with AMX.
#include "convolution/bfloat16_kernels.h"
#include "kernels/instruction_set.h"

namespace onnxtrain {

extern const Bfloat16Convolution ONNXTRAIN_OF_SET(kBfloat16Convolution_);

const Bfloat16Convolution ONNXTRAIN_OF_SET(kBfloat16Convolution_) = {
    .round_boxes = round_boxes,
    .round_weights = round_weights,
    .round_planes = round_planes,
    .scatter = scatter,
};

}  // namespace onnxtrain
