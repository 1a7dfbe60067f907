#include "softmax/node.h"

#include "operators/shapes.h"
#include "ranges.h"

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
  if (inputs[0].count() == 0) return;  // an empty axis may be beside one of any size
  for_each_range(call.parallel_for(), product(shape, 0, along), items_per_task(saturating_product(rows.size, rows.inner)),
                 [&](std::size_t first, std::size_t last) { by_type[type](rows, first, last); });
}

}  // namespace

const Signature LogSoftmaxNode::kSignature = {"LogSoftmax", {"x"}, 1, 1, {0}, {{0, 0}}};

void LogSoftmaxNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  const std::vector<std::int64_t>& shape = inputs[0].shape;
  const std::size_t along = axis_of(axis_, shape);
  LogSoftmaxCall rows = {static_cast<std::size_t>(shape[along]), product(shape, along + 1, shape.size()), inputs[0].data,
                         call.output(0, shape)};
  if (inputs[0].count() == 0) return;
  const auto kernel = kernels()->log_softmax[type];
  for_each_range(call.parallel_for(), product(shape, 0, along), items_per_task(saturating_product(rows.size, rows.inner)),
                 [&](std::size_t first, std::size_t last) { kernel(rows, first, last); });
}

const Signature SoftmaxGradientNode::kSignature = {"SoftmaxGradient", {"dy", "y"}, 2, 1, {0}, {{0, 0}, {1, 0}}};

void SoftmaxGradientNode::compute(const Call& call) const {
  run(kSignature, call, axis_, kernels()->softmax_gradient);
}

const Signature LogSoftmaxGradientNode::kSignature = {
    "LogSoftmaxGradient", {"dy", "y"}, 2, 1, {0}, {{0, 0}, {1, 0}}};

void LogSoftmaxGradientNode::compute(const Call& call) const {
  run(kSignature, call, axis_, kernels()->log_softmax_gradient);
}

const Signature SoftmaxCrossEntropyGradientNode::kSignature = {
    "SoftmaxCrossEntropyGradient", {"dy", "log_probability", "labels"}, 3, 1, {1}, {{1, 0}},
    {ort::kTypeUndefined, ort::kTypeUndefined, ort::kTypeInt64}};

void SoftmaxCrossEntropyGradientNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  inputs.require_same_type(1, 0);
  const std::vector<std::int64_t>& shape = inputs[1].shape;
  if (shape.size() < 2) {
    throw std::invalid_argument("input 1 (log_probability) has shape " + text_of(shape) +
                                ", and must have a batch and a class axis.");
  }
  std::vector<std::int64_t> by_label = shape;
  by_label[1] = 1;
  inputs.require_shape(2, by_label);
  const bool one = inputs[0].shape.empty();
  if (!one) inputs.require_shape(0, by_label);
  CrossEntropyCall rows = {};
  rows.classes = static_cast<std::size_t>(shape[1]);
  rows.inner = product(shape, 2, shape.size());
  rows.coefficient_step = one ? 0 : 1;
  rows.coefficient = inputs[0].data;
  rows.log_probability = inputs[1].data;
  rows.labels = static_cast<const std::int64_t*>(inputs[2].data);
  for (std::size_t i = 0; i < inputs[2].count(); ++i) {
    if (rows.labels[i] >= 0 && rows.labels[i] < shape[1]) continue;
    throw std::invalid_argument("a label is " + std::to_string(rows.labels[i]) + ", and must be from 0 to " +
                                std::to_string(shape[1] - 1) + ".");
  }
  rows.dx = call.output(0, shape);
  const auto kernel = kernels()->cross_entropy_gradient[type];
  const std::size_t volume = checked_product(rows.classes, rows.inner);
  for_each_range(call.parallel_for(), volume == 0 ? 0 : product(shape, 0, 1), items_per_task(volume),
                 [&](std::size_t first, std::size_t last) { kernel(rows, first, last); });
}

}  // namespace onnxtrain
