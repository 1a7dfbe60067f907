// The gradient of Gather with respect to its data: inputs dy, indices, the shape of the data, and optionally another
// term of the gradient, output ddata.
#pragma once

#include "operators/fused_node.h"

namespace onnxtrain {

// The other term or zeros, plus the rows of dy added at the indices, in index order.
class GatherGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit GatherGradientNode(const Attributes& attributes) : axis_(attributes.integer("axis", 0)) {}
  void compute(const Call& call) const override;

 private:
  std::int64_t axis_;
};

}  // namespace onnxtrain
