#include "convolution/convolution.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "convolution/bfloat16.h"
#include "convolution/products.h"
#include "sizes.h"

namespace onnxtrain {
namespace {

// Limits on the extent of windows along an axis and in a plane, padding included: far beyond any image, small enough
// that offsets cannot overflow.
constexpr std::int64_t kMostAlongAxis = std::numeric_limits<std::int32_t>::max();
constexpr std::uint64_t kMostInPlane = std::uint64_t{1} << 40;

void require_list(const char* name, const std::vector<std::int64_t>& list, std::size_t count, std::int64_t least) {
  if (list.size() != count) {
    throw std::invalid_argument("attribute '" + std::string(name) + "' has " + std::to_string(list.size()) +
                                " numbers, and must have " + std::to_string(count) + " for this kernel_shape.");
  }
  for (const std::int64_t number : list) {
    if (number < least) {
      throw std::invalid_argument("attribute '" + std::string(name) + "' is " + text_of(list) +
                                  ": every number must be at least " + std::to_string(least) + ".");
    }
  }
}

void require_shapes(bool fit, const std::string& what, const std::vector<std::int64_t>& x,
                    const std::vector<std::int64_t>& y) {
  if (fit) return;
  throw std::invalid_argument("x has shape " + text_of(x) + " and y, or its gradient, has shape " +
                              text_of(y) + ": " + what);
}

}  // namespace

void ConvolutionAttributes::check() const {
  const std::size_t rank = kernel_shape.size();
  if (rank < 1 || rank > static_cast<std::size_t>(kAxes)) {
    throw std::invalid_argument("attribute 'kernel_shape' has " + std::to_string(rank) +
                                " numbers: this kernel works on 1 to 3 spatial axes.");
  }
  require_list("kernel_shape", kernel_shape, rank, 1);
  require_list("strides", strides, rank, 1);
  require_list("dilations", dilations, rank, 1);
  require_list("pads", pads, 2 * rank, 0);
  if (group < 1) {
    throw std::invalid_argument("attribute 'group' is " + std::to_string(group) + ": it must be at least 1.");
  }
}

std::int64_t ConvolutionAttributes::windows(std::size_t axis, std::int64_t size) const {
  const std::int64_t rest = padded(axis, size) - checked_product(dilations[axis], kernel_shape[axis] - 1) - 1;
  return rest < 0 ? 0 : rest / strides[axis] + 1;
}

std::int64_t ConvolutionAttributes::padded(std::size_t axis, std::int64_t size) const {
  return checked_sum(size, pads[axis], pads[kernel_shape.size() + axis]);
}

std::vector<std::int64_t> ConvolutionAttributes::output_shape(const std::vector<std::int64_t>& x,
                                                              const std::vector<std::int64_t>& w) const {
  const std::size_t rank = kernel_shape.size();
  if (x.size() != rank + 2 || w.size() != rank + 2) {
    throw std::invalid_argument("x has shape " + text_of(x) + " and w has shape " + text_of(w) +
                                ": both must have " + std::to_string(rank + 2) +
                                " axes, as attribute 'kernel_shape' says.");
  }
  std::vector<std::int64_t> shape = {x[0], w[0]};
  for (std::size_t axis = 0; axis < rank; ++axis) shape.push_back(windows(axis, x[2 + axis]));
  return shape;
}

Convolution::Convolution(const ConvolutionAttributes& attributes, const std::vector<std::int64_t>& x,
                         const std::vector<std::int64_t>& y) {
  const std::size_t rank = attributes.kernel_shape.size();
  require_shapes(x.size() == rank + 2 && y.size() == rank + 2,
                 "both must have " + std::to_string(rank + 2) + " axes, as attribute 'kernel_shape' says.", x, y);
  require_shapes(x[0] == y[0], "both must have the same batch size.", x, y);
  require_shapes(x[1] % attributes.group == 0 && y[1] % attributes.group == 0,
                 "their numbers of channels must be multiples of attribute 'group', " +
                     std::to_string(attributes.group) + ".",
                 x, y);
  batch = static_cast<std::size_t>(x[0]);
  group = static_cast<std::size_t>(attributes.group);
  inputs = static_cast<std::size_t>(x[1]) / group;
  outputs = static_cast<std::size_t>(y[1]) / group;
  bool windowed = true, within = true;
  std::uint64_t in_plane = 1;
  for (std::size_t i = 0; i < rank; ++i) {
    const std::size_t axis = kAxes - rank + i;
    input[axis] = x[2 + i];
    output[axis] = y[2 + i];
    kernel[axis] = attributes.kernel_shape[i];
    dilation[axis] = attributes.dilations[i];
    pad[axis] = attributes.pads[i];
    const std::int64_t expected = attributes.windows(i, x[2 + i]), padded = attributes.padded(i, x[2 + i]);
    require_shapes(output[axis] == expected,
                   "axis " + std::to_string(2 + i) + " of y must have size " + std::to_string(expected) +
                       ", the number of windows that the attributes give.",
                   x, y);
    // A stride beyond the padded size has only one window.
    stride[axis] = std::min(attributes.strides[i], std::max<std::int64_t>(padded, 1));
    windowed = windowed && expected > 0;
    in_plane = saturating_product(in_plane, static_cast<std::uint64_t>(padded));
    within = within && padded <= kMostAlongAxis;
  }
  if (!windowed) return;
  require_shapes(within && in_plane <= kMostInPlane,
                 "with its pads, " + text_of(attributes.pads) + ", x has more than " + std::to_string(kMostAlongAxis) +
                     " elements along an axis or " + std::to_string(kMostInPlane) +
                     " in a plane, the limit of this kernel: use ONNX's own Conv.",
                 x, y);
}

bool Convolution::is_empty() const {
  const auto none = [](const std::ptrdiff_t (&sizes)[kAxes]) { return std::find(sizes, sizes + kAxes, 0) != sizes + kAxes; };
  return batch == 0 || inputs == 0 || outputs == 0 || none(input) || none(output);
}

std::vector<std::int64_t> Convolution::weight_shape(const ConvolutionAttributes& attributes) const {
  std::vector<std::int64_t> shape = {static_cast<std::int64_t>(group * outputs), static_cast<std::int64_t>(inputs)};
  shape.insert(shape.end(), attributes.kernel_shape.begin(), attributes.kernel_shape.end());
  return shape;
}

template <typename T>
void convolve_as(const Convolution& c, const void* x, const void* w, const void* bias, void* y,
                 const ParallelFor& parallel_for) {
  ConvolutionProducts<T>(c, parallel_for)
      .forward(static_cast<const T*>(x), static_cast<const T*>(w), static_cast<const T*>(bias), static_cast<T*>(y));
}

template <typename T>
void input_gradient_as(const Convolution& c, const void* dy, const void* w, void* dx, const ParallelFor& parallel_for) {
  ConvolutionProducts<T>(c, parallel_for)
      .input_gradient(static_cast<const T*>(dy), static_cast<const T*>(w), static_cast<T*>(dx));
}

template <typename T>
void weight_gradient_as(const Convolution& c, const void* x, const void* dy, void* dw,
                        const ParallelFor& parallel_for) {
  ConvolutionProducts<T>(c, parallel_for)
      .weight_gradient(static_cast<const T*>(x), static_cast<const T*>(dy), static_cast<T*>(dw));
}

void convolve(ElementType type, bool in_bfloat16, const Convolution& convolution, const void* x, const void* w, const void* bias, void* y,
              const ParallelFor& parallel_for) {
  if (in_bfloat16 && !convolution.is_empty()) {
    return convolve_in_bfloat16(convolution, static_cast<const float*>(x), static_cast<const float*>(w),
                                static_cast<const float*>(bias), static_cast<float*>(y), parallel_for);
  }
  (type == kFloat ? convolve_as<float> : convolve_as<double>)(convolution, x, w, bias, y, parallel_for);
}

void convolution_input_gradient(ElementType type, bool in_bfloat16, const Convolution& convolution, const void* dy, const void* w,
                                void* dx, const ParallelFor& parallel_for) {
  if (in_bfloat16 && !convolution.is_empty()) {
    return convolution_input_gradient_in_bfloat16(convolution, static_cast<const float*>(dy), static_cast<const float*>(w),
                                                  static_cast<float*>(dx), parallel_for);
  }
  (type == kFloat ? input_gradient_as<float> : input_gradient_as<double>)(convolution, dy, w, dx, parallel_for);
}

void convolution_weight_gradient(ElementType type, bool in_bfloat16, const Convolution& convolution, const void* x, const void* dy,
                                 void* dw, const ParallelFor& parallel_for) {
  if (in_bfloat16 && !convolution.is_empty()) {
    return convolution_weight_gradient_in_bfloat16(convolution, static_cast<const float*>(x), static_cast<const float*>(dy),
                                                   static_cast<float*>(dw), parallel_for);
  }
  (type == kFloat ? weight_gradient_as<float> : weight_gradient_as<double>)(convolution, x, dy, dw, parallel_for);
}

}  // namespace onnxtrain
