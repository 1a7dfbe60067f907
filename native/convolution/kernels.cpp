// The convolution kernels for one instruction set: compiled once per set, like kernels/kernels.cpp, but with fused
// multiply-add. As there, everything but the table is in unnamed namespaces and the standard library is not called.
#include "convolution/correlation_kernels.h"
#include "convolution/depthwise_kernels.h"
#include "convolution/filtering_kernels.h"
#include "convolution/pointwise_kernels.h"
#include "convolution/position_kernels.h"
#include "convolution/table.h"
#include "convolution/winograd_kernels.h"
#include "kernels/instruction_set.h"

namespace onnxtrain {

extern const ConvolutionTable ONNXTRAIN_OF_SET(kConvolution_);

namespace {

template <typename T>
constexpr ConvolutionKernels<T> kKernels = {
    .lanes = kLanes<T>,
    .pointwise_width = kPixelVectors * kLanes<T>,
    .panels = panel_count<T>,
    .copy_boxes = copy_boxes<T>,
    .pack = pack<T>,
    .correlate = correlate<T>,
    .correlate_positions = correlate_positions<T>,
    .winograd_stride = odd_lines<T>,
    .winograd_weights = winograd_weights<T>,
    .winograd_source = transform_tiles<T, 4>,
    .winograd_products = winograd_products<T>,
    .winograd_factors = transform_tiles<T, 2>,
    .winograd_gradient = winograd_gradient<T>,
    .winograd_taps = winograd_taps<T>,
    .accumulate = accumulate<T>,
    .unpack = unpack<T>,
    .add = add<T>,
    .turn = turn<T>,
    .pointwise = pointwise<T>,
    .spread = spread<T>,
    .filter = filter<T>,
    .filter_gradient = filter_gradient<T>,
    .depthwise = depthwise<T>,
    .depthwise_gradient = depthwise_gradient<T>,
};

}  // namespace

const ConvolutionTable ONNXTRAIN_OF_SET(kConvolution_) = {{.single = kKernels<float>, .wide = kKernels<double>}};

}  // namespace onnxtrain
