#include "attention/node.h"

#include "optimizers/variables.h"
#include "sizes.h"

namespace onnxtrain {
namespace {

constexpr std::size_t kRank = 4;

void require_rank(const Inputs& inputs, std::size_t index, const char* name, const char* axes) {
  if (inputs[index].shape.size() == kRank) return;
  throw std::invalid_argument("input " + std::to_string(index) + " (" + name + ") has shape " +
                              text_of(inputs[index].shape) + ", and must have four axes: [batch, " + axes + "].");
}

// Reads the inputs q, k, v, starting at `first`, and the bias at `bias`, and checks that they match.
AttentionCall call_of(const Inputs& inputs, std::size_t first, std::size_t bias,
                      const AttentionAttributes& attributes) {
  const std::size_t q = first, k = first + 1, v = first + 2;
  require_rank(inputs, q, "q", "queries, heads, size");
  require_rank(inputs, k, "k", "keys, heads, size");
  require_rank(inputs, v, "v", "keys, heads, value size");
  const std::vector<std::int64_t>& shape = inputs[q].shape;
  inputs.require_same_type(k, q);
  inputs.require_same_type(v, q);
  inputs.require_shape(k, {shape[0], inputs[k].shape[1], shape[2], shape[3]});
  inputs.require_shape(v, {shape[0], inputs[k].shape[1], shape[2], inputs[v].shape[3]});
  AttentionCall call = {};
  const auto size = [](std::int64_t number) { return static_cast<std::size_t>(number); };
  call.shape = {size(shape[0]), size(shape[1]), size(inputs[k].shape[1]),
                size(shape[2]), size(shape[3]), size(inputs[v].shape[3])};
  call.scale = attributes.scale;
  call.zero_empty_rows = attributes.zero_empty_rows;
  call.in_bfloat16 = in_bfloat16(attributes.compute, inputs.element_type(q));
  call.q = inputs[q].data;
  call.k = inputs[k].data;
  call.v = inputs[v].data;
  if (inputs.has(bias)) {
    inputs.require_same_type(bias, q);
    const std::vector<std::int64_t> scores = {shape[0], shape[2], shape[1], inputs[k].shape[1]};
    if (!Broadcast::fits(inputs[bias].shape, scores)) {
      throw std::invalid_argument("input " + std::to_string(bias) + " (bias) has shape " +
                                  text_of(inputs[bias].shape) + ", and must broadcast to " + text_of(scores) +
                                  ": [batch, heads, queries, keys].");
    }
    call.bias = inputs[bias].data;
    set_bias_strides(inputs[bias].shape, call);
  }
  return call;
}

}  // namespace

const Signature AttentionNode::kSignature = {"Attention", {"q", "k", "v", "bias"}, 3, 2, {-1}, {}};

void AttentionNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  AttentionCall attention = call_of(inputs, 0, 3, attributes_);
  const std::vector<std::int64_t>& q = inputs[0].shape;
  attention.log_sum = call.output(1, {q[0], q[2], q[1]});
  attention.y = call.output(0, {q[0], q[1], q[2], inputs[2].shape[3]});
  attend(type, attention, call.parallel_for());
}

const Signature AttentionGradientNode::kSignature = {
    "AttentionGradient", {"dy", "q", "k", "v", "y", "log_sum", "bias"}, 6, 4, {1}, {}};

void AttentionGradientNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(1);
  AttentionCall attention = call_of(inputs, 1, 6, attributes_);
  const std::vector<std::int64_t>& q = inputs[1].shape;
  const std::vector<std::int64_t> y_shape = {q[0], q[1], q[2], inputs[3].shape[3]};
  for (const std::size_t index : {0, 4, 5}) inputs.require_same_type(index, 1);
  inputs.require_shape(0, y_shape);
  inputs.require_shape(4, y_shape);
  inputs.require_shape(5, {q[0], q[2], q[1]});
  attention.dy = inputs[0].data;
  attention.y = inputs[4].data;
  attention.log_sum = inputs[5].data;
  attention.dq = call.output(0, q);
  attention.dk = call.output(1, inputs[2].shape);
  attention.dv = call.output(2, inputs[3].shape);
  attention.dbias = call.output(3, inputs.has(6) ? inputs[6].shape : std::vector<std::int64_t>{});
  if (attention.dbias != nullptr && !inputs.has(6)) {
    throw std::invalid_argument("output 3 (dbias) is the gradient of input 6 (bias), which is missing.");
  }
  attention_gradient(type, attention, call.parallel_for());
}

}  // namespace onnxtrain
