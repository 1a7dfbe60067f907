// The kernels of convolutions for one instruction set: compiled like kernels.cpp, once per set, but with fused
// multiplications and additions. As there, everything but the table lives in unnamed namespaces, and nothing of the
// standard library is called.
#include "convolution_table.h"

#include "correlation.h"
#include "depthwise.h"
#include "filtering.h"
#include "pointwise.h"
#include "winograd.h"

#define ONNXTRAIN_JOIN_(a, b) a##b
#define ONNXTRAIN_JOIN(a, b) ONNXTRAIN_JOIN_(a, b)

namespace onnxtrain {

extern const ConvolutionTable ONNXTRAIN_JOIN(kConvolution_, ONNXTRAIN_INSTRUCTION_SET);

#define ONNXTRAIN_CONVOLUTION_KERNELS(T)                                                                      \
  {                                                                                                           \
    kLanes<T>, kPixelVectors * kLanes<T>, panel_count<T>, copy_boxes<T>, pack<T>, correlate<T>,               \
        odd_lines<T>, winograd_weights<T>, winograd_source<T>, winograd_products<T>, accumulate<T>,     \
        unpack<T>, add<T>, pointwise<T>, spread<T>, filter<T>, filter_gradient<T>, depthwise<T>,              \
        depthwise_gradient<T>                                                                                 \
  }

const ConvolutionTable ONNXTRAIN_JOIN(kConvolution_, ONNXTRAIN_INSTRUCTION_SET) = {
    {ONNXTRAIN_CONVOLUTION_KERNELS(float), ONNXTRAIN_CONVOLUTION_KERNELS(double)},
};

}  // namespace onnxtrain
