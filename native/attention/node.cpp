#include "attention/node.h"

#include <initializer_list>
#include <type_traits>

#include "optimizers/variables.h"
#include "sizes.h"

namespace onnxtrain {
namespace {

constexpr std::size_t kRank = 4;

std::vector<std::int64_t> sizes_of(std::initializer_list<std::size_t> sizes) { return {sizes.begin(), sizes.end()}; }

void require_rank(const Inputs& inputs, std::size_t index, const char* name, const char* axes) {
  if (inputs[index].shape.size() == kRank) return;
  throw std::invalid_argument("input " + std::to_string(index) + " (" + name + ") has shape " +
                              text_of(inputs[index].shape) + ", and must have four axes: [batch, " + axes + "].");
}

// Reads q, k and v from three inputs, and checks that they match.
void read_operands(const Inputs& inputs, std::size_t q, AttentionCall& call) {
  const std::size_t k = q + 1, v = q + 2;
  require_rank(inputs, q, "q", "queries, heads, size");
  require_rank(inputs, k, "k", "keys, heads, size");
  require_rank(inputs, v, "v", "keys, heads, value size");
  const std::vector<std::int64_t>& shape = inputs[q].shape;
  inputs.require_same_type(k, q);
  inputs.require_same_type(v, q);
  inputs.require_shape(k, {shape[0], inputs[k].shape[1], shape[2], shape[3]});
  inputs.require_shape(v, {shape[0], inputs[k].shape[1], shape[2], inputs[v].shape[3]});
  const auto size = [](std::int64_t number) { return static_cast<std::size_t>(number); };
  call.shape = {size(shape[0]), size(shape[1]), size(inputs[k].shape[1]),       size(shape[2]),
                size(shape[3]), size(inputs[v].shape[3]), false};
  call.q = inputs[q].data;
  call.k = inputs[k].data;
  call.v = inputs[v].data;
}

// The start of part `part` of a packed tensor, or null.
template <typename Data>
Data* part_of(Data* packed, std::size_t part, const AttentionShape& s, ElementType type) {
  using Byte = std::conditional_t<std::is_const_v<Data>, const char, char>;
  return packed == nullptr ? nullptr : static_cast<Byte*>(packed) + part * s.output_line() * size_of(type);
}

// Reads q, k and v from one input.
void read_packed(const Inputs& inputs, std::size_t index, AttentionCall& call) {
  const std::vector<std::int64_t>& shape = inputs[index].shape;
  if (shape.size() != kRank + 1 || shape[2] != 3) {
    throw std::invalid_argument("input " + std::to_string(index) + " (qkv) has shape " + text_of(shape) +
                                ", and must have five axes: [batch, positions, 3, heads, size].");
  }
  const auto size = [&](std::size_t axis) { return static_cast<std::size_t>(shape[axis]); };
  call.shape = {size(0), size(1), size(1), size(3), size(4), size(4), true};
  const ElementType type = inputs.element_type(index);
  call.q = inputs[index].data;
  call.k = part_of(call.q, 1, call.shape, type);
  call.v = part_of(call.q, 2, call.shape, type);
}

// Reads q, k and v from input `q` on, or all from that one, and the bias at `bias`.
AttentionCall call_of(const Inputs& inputs, bool packed, std::size_t q, std::size_t bias,
                      const AttentionAttributes& attributes) {
  AttentionCall call = {};
  (packed ? read_packed : read_operands)(inputs, q, call);
  call.scale = attributes.scale;
  call.zero_empty_rows = attributes.zero_empty_rows;
  call.in_bfloat16 = in_bfloat16(attributes.compute, inputs.element_type(q));
  if (inputs.has(bias)) {
    inputs.require_same_type(bias, q);
    const AttentionShape& s = call.shape;
    const std::vector<std::int64_t> scores = sizes_of({s.batch, s.heads, s.queries, s.keys});
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

void compute_attention(const Signature& signature, bool packed, const AttentionAttributes& attributes,
                       const Call& call) {
  const Inputs inputs(signature, call);
  const ElementType type = inputs.element_type(0);
  AttentionCall attention = call_of(inputs, packed, 0, packed ? 1 : 3, attributes);
  const AttentionShape& s = attention.shape;
  attention.log_sum = call.output(1, sizes_of({s.batch, s.heads, s.queries}));
  attention.y = call.output(0, sizes_of({s.batch, s.queries, s.heads, s.value_size}));
  attend(type, attention, call.parallel_for());
}

void compute_gradient(const Signature& signature, bool packed, const AttentionAttributes& attributes,
                      const Call& call) {
  const Inputs inputs(signature, call);
  const ElementType type = inputs.element_type(1);
  const std::size_t y = packed ? 2 : 4, log_sum = y + 1, bias = y + 2;
  AttentionCall attention = call_of(inputs, packed, 1, bias, attributes);
  const AttentionShape& s = attention.shape;
  const std::vector<std::int64_t> y_shape = sizes_of({s.batch, s.queries, s.heads, s.value_size});
  for (const std::size_t index : {std::size_t{0}, y, log_sum}) inputs.require_same_type(index, 1);
  inputs.require_shape(0, y_shape);
  inputs.require_shape(y, y_shape);
  inputs.require_shape(log_sum, sizes_of({s.batch, s.heads, s.queries}));
  attention.dy = inputs[0].data;
  attention.y = inputs[y].data;
  attention.log_sum = inputs[log_sum].data;
  attention.dq = call.output(0, inputs[1].shape);
  attention.dk = packed ? part_of(attention.dq, 1, s, type) : call.output(1, inputs[2].shape);
  attention.dv = packed ? part_of(attention.dq, 2, s, type) : call.output(2, inputs[3].shape);
  const std::size_t dbias = packed ? 1 : 3;
  attention.dbias = call.output(dbias, inputs.has(bias) ? inputs[bias].shape : std::vector<std::int64_t>{});
  if (attention.dbias != nullptr && !inputs.has(bias)) {
    throw std::invalid_argument("output " + std::to_string(dbias) + " (dbias) is the gradient of input " +
                                std::to_string(bias) + " (bias), which is missing.");
  }
  attention_gradient(type, attention, call.parallel_for());
}

}  // namespace

const Signature AttentionNode::kSignature = {"Attention", {"q", "k", "v", "bias"}, 3, 2, {-1}, {}};

void AttentionNode::compute(const Call& call) const { compute_attention(kSignature, false, attributes_, call); }

const Signature PackedAttentionNode::kSignature = {"PackedAttention", {"qkv", "bias"}, 1, 2, {-1}, {}};

void PackedAttentionNode::compute(const Call& call) const { compute_attention(kSignature, true, attributes_, call); }

const Signature AttentionGradientNode::kSignature = {
    "AttentionGradient", {"dy", "q", "k", "v", "y", "log_sum", "bias"}, 6, 4, {1}, {}};

void AttentionGradientNode::compute(const Call& call) const { compute_gradient(kSignature, false, attributes_, call); }

const Signature PackedAttentionGradientNode::kSignature = {
    "PackedAttentionGradient", {"dy", "qkv", "y", "log_sum", "bias"}, 4, 2, {1}, {}};

void PackedAttentionGradientNode::compute(const Call& call) const {
  compute_gradient(kSignature, true, attributes_, call);
}

}  // namespace onnxtrain
