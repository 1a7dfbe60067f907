// Scaled dot-product attention and its gradient as nodes. Attributes: scale, zero_empty_rows (0), and compute, as of
// linear layers.
#pragma once

#include "attention/attention.h"
#include "operators/compute.h"
#include "operators/fused_node.h"

namespace onnxtrain {

struct AttentionAttributes {
  explicit AttentionAttributes(const Attributes& attributes)
      : scale(attributes.number("scale")),
        zero_empty_rows(attributes.integer("zero_empty_rows", 0) != 0),
        compute(compute_of(attributes)) {}

  double scale;
  bool zero_empty_rows;
  Compute compute;
};

// y = softmax(scale q kᵀ + bias) v per head, and the logarithm of the sum of exp(scores) per row. q is [batch, queries,
// heads, size], k [batch, keys, heads, size], v [batch, keys, heads, value size]; the optional bias broadcasts to
// [batch, heads, queries, keys].
class AttentionNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit AttentionNode(const Attributes& attributes) : attributes_(attributes) {}
  void compute(const Call& call) const override;

 private:
  AttentionAttributes attributes_;
};

// The same, of q, k and v in one tensor [batch, positions, 3, heads, size].
class PackedAttentionNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit PackedAttentionNode(const Attributes& attributes) : attributes_(attributes) {}
  void compute(const Call& call) const override;

 private:
  AttentionAttributes attributes_;
};

// dq, dk, dv and dbias from dy, q, k, v, y, log_sum and the bias.
class AttentionGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit AttentionGradientNode(const Attributes& attributes) : attributes_(attributes) {}
  void compute(const Call& call) const override;

 private:
  AttentionAttributes attributes_;
};

// dq, dk and dv in one tensor, and dbias, from dy, that of q, k and v, y, log_sum and the bias.
class PackedAttentionGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit PackedAttentionGradientNode(const Attributes& attributes) : attributes_(attributes) {}
  void compute(const Call& call) const override;

 private:
  AttentionAttributes attributes_;
};

}  // namespace onnxtrain
