// The kernels of convolutions for one instruction set: compiled like kernels.cpp, once per set, but with fused
// multiplications and additions. As there, everything but the table lives in unnamed namespaces, and nothing of the
// standard library is called.
#include "convolution/correlation_kernels.h"
#include "convolution/depthwise_kernels.h"
#include "convolution/filtering_kernels.h"
#include "convolution/pointwise_kernels.h"
#include "convolution/table.h"
#include "convolution/winograd_kernels.h"
#include "kernels/instruction_set.h"

namespace onnxtrain {

extern const ConvolutionTable ONNXTRAIN_OF_SET(kConvolution_);

#define ONNXTRAIN_CONVOLUTION_KERNELS(T)                                                                      \
  {                                                                                                           \
    kLanes<T>, kPixelVectors * kLanes<T>, panel_count<T>, copy_boxes<T>, pack<T>, correlate<T>,               \
        odd_lines<T>, winograd_weights<T>, winograd_source<T>, winograd_products<T>, accumulate<T>,     \
        unpack<T>, add<T>, pointwise<T>, spread<T>, filter<T>, filter_gradient<T>, depthwise<T>,              \
        depthwise_gradient<T>                                                                                 \
  }

const ConvolutionTable ONNXTRAIN_OF_SET(kConvolution_) = {
    {ONNXTRAIN_CONVOLUTION_KERNELS(float), ONNXTRAIN_CONVOLUTION_KERNELS(double)},
};

}  // namespace onnxtrain
