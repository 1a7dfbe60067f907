// Convolutions and their gradients by input and weights: how the work is cut into products and shared among threads.
// Nothing here knows ONNX Runtime. Results do not depend on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "convolution/table.h"
#include "kernels/kernel_table.h"
#include "parallel.h"

namespace onnxtrain {

// What the operator's attributes say; pads as in ONNX: all beginnings, then all ends.
struct ConvolutionAttributes {
  std::vector<std::int64_t> kernel_shape, strides, dilations, pads;
  std::int64_t group = 1;

  // A std::invalid_argument where the lists do not fit each other, or a number cannot be.
  void check() const;
  // What a convolution of x with w has as its output.
  std::vector<std::int64_t> output_shape(const std::vector<std::int64_t>& x, const std::vector<std::int64_t>& w) const;
  // Windows along one axis of that size.
  std::int64_t windows(std::size_t axis, std::int64_t size) const;
  // That size with its padding.
  std::int64_t padded(std::size_t axis, std::int64_t size) const;
};

// A convolution of x [batch, group * inputs, input...] with w [group * outputs, inputs, kernel...] to
// y [batch, group * outputs, output...]. Axes that it lacks come first and have size 1.
struct Convolution {
  std::size_t batch = 0, group = 1, inputs = 0, outputs = 0;
  std::ptrdiff_t input[kAxes] = {1, 1, 1}, output[kAxes] = {1, 1, 1}, kernel[kAxes] = {1, 1, 1};
  std::ptrdiff_t stride[kAxes] = {1, 1, 1}, dilation[kAxes] = {1, 1, 1}, pad[kAxes] = {0, 0, 0};

  // A std::invalid_argument where the shapes of x and y do not fit the attributes or each other, or what windows reach
  // is larger than kernels address.
  Convolution(const ConvolutionAttributes& attributes, const std::vector<std::int64_t>& x,
              const std::vector<std::int64_t>& y);

  std::vector<std::int64_t> weight_shape(const ConvolutionAttributes& attributes) const;
  // Whether there is no product to add up: no image, no channel, no window, or no element of the kernel within x.
  bool is_empty() const;
};

// y = x * w + bias (null: none).
void convolve(ElementType type, const Convolution& convolution, const void* x, const void* w, const void* bias, void* y,
              const ParallelFor& parallel_for);

// dx, the gradient by x where dy is that by y.
void convolution_input_gradient(ElementType type, const Convolution& convolution, const void* dy, const void* w,
                                void* dx, const ParallelFor& parallel_for);

// dw, the gradient by w.
void convolution_weight_gradient(ElementType type, const Convolution& convolution, const void* x, const void* dy,
                                 void* dw, const ParallelFor& parallel_for);

}  // namespace onnxtrain
