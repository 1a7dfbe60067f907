// The attention kernels for one instruction set: compiled once per set, like convolution/kernels.cpp, with fused
// multiply-add.
#include "attention/attention_kernels.h"
#include "attention/lane_kernels.h"
#include "kernels/instruction_set.h"
#include "kernels/kernel_table.h"

namespace onnxtrain {

extern const AttentionKernels ONNXTRAIN_OF_SET(kAttention_)[kElementTypes];

namespace {

template <typename T>
constexpr AttentionKernels kKernels = {
    .score_stride = score_stride<T>,
    .scratch = attention_scratch<T>,
    .find_ranges = find_ranges<T>,
    .attend = attend<T>,
    .gradient = attention_gradient<T>,
    .lanes = kLanes<T>,
    .is_short = is_short,
    .lane_scratch = lane_scratch<T>,
    .attend_lanes = attend_lanes<T>,
    .gradient_lanes = attention_gradient_lanes<T>,
};

}  // namespace

const AttentionKernels ONNXTRAIN_OF_SET(kAttention_)[kElementTypes] = {
    kKernels<float>,
    kKernels<double>,
};

}  // namespace onnxtrain
