// Convolutions and their gradients with respect to input and weights: splits the work into matrix multiplications and
// shares it among threads. Independent of ONNX Runtime. Results do not depend on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "convolution/table.h"
#include "kernels/kernel_table.h"
#include "parallel.h"

namespace onnxtrain {

// The operator's attributes; pads as in ONNX: all begins, then all ends.
struct ConvolutionAttributes {
  std::vector<std::int64_t> kernel_shape, strides, dilations, pads;
  std::int64_t group = 1;

  // Throws std::invalid_argument if the lists do not match or a value is invalid.
  void check() const;
  // Output shape of a convolution of x with w.
  std::vector<std::int64_t> output_shape(const std::vector<std::int64_t>& x, const std::vector<std::int64_t>& w) const;
  // Number of windows along an axis of that size.
  std::int64_t windows(std::size_t axis, std::int64_t size) const;
  // Size including padding.
  std::int64_t padded(std::size_t axis, std::int64_t size) const;
};

// A convolution of x [batch, group * inputs, input...] with w [group * outputs, inputs, kernel...] to y [batch, group *
// outputs, output...]. Missing spatial axes are leading axes of size 1.
struct Convolution {
  std::size_t batch = 0, group = 1, inputs = 0, outputs = 0;
  std::ptrdiff_t input[kAxes] = {1, 1, 1}, output[kAxes] = {1, 1, 1}, kernel[kAxes] = {1, 1, 1};
  std::ptrdiff_t stride[kAxes] = {1, 1, 1}, dilation[kAxes] = {1, 1, 1}, pad[kAxes] = {0, 0, 0};

  // Throws std::invalid_argument if the shapes of x and y do not match the attributes or each other, or if windows
  // reach beyond the addressable range.
  Convolution(const ConvolutionAttributes& attributes, const std::vector<std::int64_t>& x,
              const std::vector<std::int64_t>& y);

  std::vector<std::int64_t> weight_shape(const ConvolutionAttributes& attributes) const;
  // True if nothing is summed: no image, channel or window, or no kernel element within x.
  bool is_empty() const;
};

// y = x * w + bias; bias may be null. Operands of one group of floats may be rounded to bfloat16.
void convolve(ElementType type, bool in_bfloat16, const Convolution& convolution, const void* x, const void* w, const void* bias, void* y,
              const ParallelFor& parallel_for);

// dx from dy.
void convolution_input_gradient(ElementType type, bool in_bfloat16, const Convolution& convolution, const void* dy, const void* w,
                                void* dx, const ParallelFor& parallel_for);

// dw from dy.
void convolution_weight_gradient(ElementType type, bool in_bfloat16, const Convolution& convolution, const void* x, const void* dy,
                                 void* dw, const ParallelFor& parallel_for);

}  // namespace onnxtrain
