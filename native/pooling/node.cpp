#include "pooling/node.h"

#include <algorithm>
#include <limits>

#include "operators/shapes.h"
#include "ranges.h"

namespace onnxtrain {
namespace {

constexpr std::size_t kMostAxes = 3;
constexpr std::int64_t kMostAlongAxis = std::numeric_limits<std::int32_t>::max();

std::vector<std::int64_t> numbers_or(const Attributes& attributes, const char* name, std::size_t count,
                                     std::int64_t otherwise) {
  std::vector<std::int64_t> numbers = attributes.integers(name);
  if (numbers.empty()) numbers.assign(count, otherwise);
  if (numbers.size() != count) {
    throw std::invalid_argument(std::string("attribute '") + name + "' has " + std::to_string(numbers.size()) +
                                " numbers, and must have " + std::to_string(count) + ".");
  }
  return numbers;
}

void require_at_least(const char* name, const std::vector<std::int64_t>& numbers, std::int64_t least) {
  for (const std::int64_t number : numbers) {
    if (number < least) {
      throw std::invalid_argument(std::string("attribute '") + name + "' holds " + std::to_string(number) +
                                  ", and must hold numbers of " + std::to_string(least) + " or more.");
    }
  }
}

}  // namespace

const Signature MaxPoolGradientNode::kSignature = {"MaxPoolGradient", {"dy", "x"}, 2, 1, {1}, {}};

MaxPoolGradientNode::MaxPoolGradientNode(const Attributes& attributes)
    : kernel_(attributes.integers("kernel_shape")), auto_pad_(attributes.text("auto_pad", "NOTSET")) {
  const std::size_t axes = kernel_.size();
  if (axes < 1 || axes > kMostAxes) {
    throw std::invalid_argument("attribute 'kernel_shape' has " + std::to_string(axes) +
                                " numbers, and must have one for each of 1 to 3 spatial axes.");
  }
  strides_ = numbers_or(attributes, "strides", axes, 1);
  dilations_ = numbers_or(attributes, "dilations", axes, 1);
  pads_ = numbers_or(attributes, "pads", 2 * axes, 0);
  require_at_least("kernel_shape", kernel_, 1);
  require_at_least("strides", strides_, 1);
  require_at_least("dilations", dilations_, 1);
  require_at_least("pads", pads_, 0);
  if (auto_pad_ == "VALID") pads_.assign(2 * axes, 0);
  if (auto_pad_ != "NOTSET" && auto_pad_ != "VALID" && auto_pad_ != "SAME_UPPER" && auto_pad_ != "SAME_LOWER") {
    throw std::invalid_argument("attribute 'auto_pad' is '" + auto_pad_ +
                                "': it must be 'NOTSET', 'VALID', 'SAME_UPPER' or 'SAME_LOWER'.");
  }
}

void MaxPoolGradientNode::describe(const std::vector<std::int64_t>& dy, const std::vector<std::int64_t>& x,
                                   MaxPoolCall& images) const {
  const std::size_t axes = kernel_.size();
  if (x.size() != axes + 2 || dy.size() != axes + 2 || dy[0] != x[0] || dy[1] != x[1]) {
    throw std::invalid_argument("input 0 (dy) has shape " + text_of(dy) + " and input 1 (x) has shape " + text_of(x) +
                                ": both must have a batch, a channel and " + std::to_string(axes) +
                                " spatial axes, and the same batch and channels.");
  }
  for (std::size_t axis = 0; axis < kMostAxes; ++axis) {
    images.size[axis] = images.windows[axis] = images.kernel[axis] = 1;
    images.strides[axis] = images.dilations[axis] = 1;
    images.begin[axis] = 0;
  }
  for (std::size_t axis = 0; axis < axes; ++axis) {
    const std::size_t slot = kMostAxes - axes + axis;
    const std::int64_t size = x[axis + 2], windows = dy[axis + 2];
    const std::int64_t extent = checked_sum(checked_product(dilations_[axis], kernel_[axis] - 1), std::int64_t{1});
    std::int64_t begin = pads_[axis], end = pads_[axes + axis];
    if (auto_pad_ == "SAME_UPPER" || auto_pad_ == "SAME_LOWER") {
      const std::int64_t last = size == 0 ? -strides_[axis] : (size - 1) / strides_[axis] * strides_[axis];
      const std::int64_t total = std::max<std::int64_t>(0, checked_sum(last - size, extent));
      begin = auto_pad_ == "SAME_UPPER" ? total / 2 : total - total / 2;
      end = total - begin;
    }
    const std::int64_t padded = checked_sum(size, begin, end), room = padded - extent;
    // A stride beyond the padded size has only one window.
    const std::int64_t stride = std::min(strides_[axis], std::max<std::int64_t>(padded, 1));
    const std::int64_t fewest = room < 0 ? 0 : room / stride + 1;
    const std::int64_t most = room < 0 ? 0 : room / stride + (room % stride != 0 ? 1 : 0) + 1;
    if (windows != fewest && windows != most) {
      throw std::invalid_argument("input 0 (dy) has " + std::to_string(windows) + " elements along axis " +
                                  std::to_string(axis + 2) + ", and windows over input 1 (x) of shape " + text_of(x) +
                                  " make " + std::to_string(fewest) + ", or " + std::to_string(most) +
                                  " with ceil_mode.");
    }
    images.size[slot] = size;
    images.windows[slot] = windows;
    images.kernel[slot] = kernel_[axis];
    images.strides[slot] = stride;
    images.dilations[slot] = kernel_[axis] == 1 ? 1 : dilations_[axis];
    images.begin[slot] = begin;
    if (windows > 0 && padded > kMostAlongAxis) {
      throw std::invalid_argument("with its pads, input 1 (x) has " + std::to_string(padded) +
                                  " elements along axis " + std::to_string(axis + 2) + ", and this kernel reaches " +
                                  std::to_string(kMostAlongAxis) + ".");
    }
  }
}

void MaxPoolGradientNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  inputs.require_same_type(1, 0);
  const std::vector<std::int64_t>& x = inputs[1].shape;
  MaxPoolCall images = {};
  describe(inputs[0].shape, x, images);
  const std::size_t volume = product(x, 2, x.size());
  if (volume > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    throw std::invalid_argument("an image of shape " + text_of(x) + " has more than 2147483647 elements per channel.");
  }
  images.dy = inputs[0].data;
  images.x = inputs[1].data;
  images.dx = call.output(0, x);
  if (volume == 0) return;
  const auto kernel = kernels()->max_pool_gradient[type];
  for_each_range(call.parallel_for(), product(x, 0, 2), items_per_task(volume),
                 [&](std::size_t first, std::size_t last) { kernel(images, first, last); });
}

}  // namespace onnxtrain
