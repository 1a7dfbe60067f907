#include "softmax_gradient.h"

#include "../ranges.h"
#include "shapes.h"

namespace onnxtrain {
namespace {

void run(const Signature& signature, const Call& call, std::int64_t axis,
         const RangeKernel<SoftmaxCall> (&by_type)[kElementTypes]) {
  const Inputs inputs(signature, call);
  const ElementType type = inputs.element_type(0);
  inputs.require_same_type(1, 0);
  inputs.require_same_shape(1, 0);
  const std::vector<std::int64_t>& shape = inputs[0].shape;
  const std::size_t along = axis_of(axis, shape);
  SoftmaxCall rows = {};
  rows.size = static_cast<std::size_t>(shape[along]);
  rows.inner = product(shape, along + 1, shape.size());
  rows.dy = inputs[0].data;
  rows.y = inputs[1].data;
  rows.dx = call.output(0, shape);
  for_each_range(call.parallel_for(), product(shape, 0, along), items_per_task(rows.size * rows.inner),
                 [&](std::size_t first, std::size_t last) { by_type[type](rows, first, last); });
}

}  // namespace

const Signature SoftmaxGradientNode::kSignature = {"SoftmaxGradient", {"dy", "y"}, 2, 1, {0}, {{0, 0}, {1, 0}}};

void SoftmaxGradientNode::compute(const Call& call) const {
  run(kSignature, call, axis_, kernels()->softmax_gradient);
}

const Signature LogSoftmaxGradientNode::kSignature = {
    "LogSoftmaxGradient", {"dy", "y"}, 2, 1, {0}, {{0, 0}, {1, 0}}};

void LogSoftmaxGradientNode::compute(const Call& call) const {
  run(kSignature, call, axis_, kernels()->log_softmax_gradient);
}

}  // namespace onnxtrain
