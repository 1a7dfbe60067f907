#include "convolution/node.h"

#include <stdexcept>
#include <string>

namespace onnxtrain {
namespace {

ConvolutionAttributes attributes_of(const Attributes& attributes) {
  ConvolutionAttributes result;
  result.kernel_shape = attributes.integers("kernel_shape");
  result.strides = attributes.integers("strides");
  result.dilations = attributes.integers("dilations");
  result.pads = attributes.integers("pads");
  result.group = attributes.integer("group", 1);
  const std::size_t rank = result.kernel_shape.size();
  if (result.strides.empty()) result.strides.assign(rank, 1);
  if (result.dilations.empty()) result.dilations.assign(rank, 1);
  if (result.pads.empty()) result.pads.assign(2 * rank, 0);
  result.check();
  return result;
}

Compute compute_of(const Attributes& attributes, const ConvolutionAttributes& convolution) {
  const Compute compute = compute_of(attributes);
  if (compute == Compute::kBfloat16 && convolution.group != 1) {
    throw std::invalid_argument("attribute 'compute' is 'bfloat16', and attribute 'group' is " +
                                std::to_string(convolution.group) +
                                ": convolutions in bfloat16 have one group; leave 'compute' out.");
  }
  return compute;
}

}  // namespace

const Signature ConvNode::kSignature = {"Conv", {"x", "w", "b"}, 2, 1, {-1}, {}};

ConvNode::ConvNode(const Attributes& attributes)
    : attributes_(attributes_of(attributes)), compute_(compute_of(attributes, attributes_)) {}

void ConvNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  inputs.require_same_type(1, 0);
  const std::vector<std::int64_t> y_shape = attributes_.output_shape(inputs[0].shape, inputs[1].shape);
  const Convolution convolution(attributes_, inputs[0].shape, y_shape);
  inputs.require_shape(1, convolution.weight_shape(attributes_));
  const void* bias = nullptr;
  if (inputs.has(2)) {
    inputs.require_same_type(2, 0);
    inputs.require_shape(2, {y_shape[1]});
    bias = inputs[2].data;
  }
  void* y = call.output(0, y_shape);
  convolve(type, in_bfloat16(compute_, type), convolution, inputs[0].data, inputs[1].data, bias, y, call.parallel_for());
}

const Signature ConvInputGradientNode::kSignature = {
    "ConvInputGradient", {"dy", "w", "x_shape"}, 3, 1, {-1}, {},
    {ort::kTypeUndefined, ort::kTypeUndefined, ort::kTypeInt64}};

ConvInputGradientNode::ConvInputGradientNode(const Attributes& attributes)
    : attributes_(attributes_of(attributes)), compute_(compute_of(attributes, attributes_)) {}

void ConvInputGradientNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  inputs.require_same_type(1, 0);
  const std::vector<std::int64_t> x_shape = inputs.sizes(2);
  const Convolution convolution(attributes_, x_shape, inputs[0].shape);
  inputs.require_shape(1, convolution.weight_shape(attributes_));
  void* dx = call.output(0, x_shape);
  convolution_input_gradient(type, in_bfloat16(compute_, type), convolution, inputs[0].data, inputs[1].data, dx, call.parallel_for());
}

const Signature ConvWeightGradientNode::kSignature = {"ConvWeightGradient", {"dy", "x"}, 2, 1, {-1}, {}};

ConvWeightGradientNode::ConvWeightGradientNode(const Attributes& attributes)
    : attributes_(attributes_of(attributes)), compute_(compute_of(attributes, attributes_)) {}

void ConvWeightGradientNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  inputs.require_same_type(1, 0);
  const Convolution convolution(attributes_, inputs[1].shape, inputs[0].shape);
  void* dw = call.output(0, convolution.weight_shape(attributes_));
  convolution_weight_gradient(type, in_bfloat16(compute_, type), convolution, inputs[1].data, inputs[0].data, dw, call.parallel_for());
}

}  // namespace onnxtrain
