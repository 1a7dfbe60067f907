// Nodes for LogSoftmax, for the gradients of Softmax and LogSoftmax (inputs dy and y, output dx), and of softmax
// cross-entropy.
#pragma once

#include "operators/fused_node.h"

namespace onnxtrain {

// y = x - log sum exp(x) along the axis.
class LogSoftmaxNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit LogSoftmaxNode(const Attributes& attributes) : axis_(attributes.integer("axis", -1)) {}
  void compute(const Call& call) const override;

 private:
  std::int64_t axis_;
};

// dx = y (dy - sum of dy y along the axis).
class SoftmaxGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit SoftmaxGradientNode(const Attributes& attributes) : axis_(attributes.integer("axis", -1)) {}
  void compute(const Call& call) const override;

 private:
  std::int64_t axis_;
};

// dx = dy - exp(y) sum of dy along the axis.
class LogSoftmaxGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit LogSoftmaxGradientNode(const Attributes& attributes) : axis_(attributes.integer("axis", -1)) {}
  void compute(const Call& call) const override;

 private:
  std::int64_t axis_;
};

// Inputs: the gradient of each label's term, [batch, 1, ...] or one number; the log-probabilities, [batch, classes,
// ...]; the labels, [batch, 1, ...]. dx = (p - 1 at the label) times the first.
class SoftmaxCrossEntropyGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit SoftmaxCrossEntropyGradientNode(const Attributes&) {}
  void compute(const Call& call) const override;
};

}  // namespace onnxtrain
