// The gradient of Gather with respect to its data: inputs dy, indices, the shape of the data, optionally another term of
// the gradient (none if it is empty), and optionally the rows of dy that are taken, output ddata. Gather beside a Concat.
#pragma once

#include "operators/fused_node.h"

namespace onnxtrain {

// The other term or zeros, plus the rows of dy, or those at `taken`, added at the indices, in index order.
class GatherGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit GatherGradientNode(const Attributes& attributes) : axis_(attributes.integer("axis", 0)) {}
  void compute(const Call& call) const override;

 private:
  std::int64_t axis_;
};

// Data with the updates written or added, in order, at indices along an axis: the standard operator, of floats.
class ScatterElementsNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit ScatterElementsNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  std::int64_t axis_;
  bool adds_;
};

// Rows of data [rows, width] at the indices [count, each], side by side, behind or (if `before` is 0) in front of the
// columns of x: y [count, columns of x + each width].
class GatherConcatNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit GatherConcatNode(const Attributes& attributes) : before_(attributes.integer("before", 1) != 0) {}
  void compute(const Call& call) const override;

 private:
  bool before_;  // x comes first
};

}  // namespace onnxtrain
