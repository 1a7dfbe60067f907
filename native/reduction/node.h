// Nodes of standard operators that ONNX Runtime computes element by element, of floats: reductions over the first axes
// (sums, means, sums of squares, products), products over the last axes, and running sums and products.
#pragma once

#include "operators/fused_node.h"

namespace onnxtrain {

// Inputs x and the axes, which are the first ones; those of a product may be the last ones.
template <ReductionKind kind>
class ReductionNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit ReductionNode(const Attributes& attributes) : keeps_(attributes.integer("keepdims", 1) != 0) {}
  void compute(const Call& call) const override;

 private:
  bool keeps_;
};

// Inputs x and the axis.
template <bool multiplies>
class ScanNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit ScanNode(const Attributes& attributes)
      : exclusive_(attributes.integer("exclusive", 0) != 0), reverse_(attributes.integer("reverse", 0) != 0) {}
  void compute(const Call& call) const override;

 private:
  bool exclusive_, reverse_;
};

}  // namespace onnxtrain
