// The gradient of Gather by its data as a node: inputs dy, indices and the shape of the data, output ddata.
#pragma once

#include "operators/fused_node.h"

namespace onnxtrain {

// Zeros with the rows of dy added at the indices, in the order of the indices.
class GatherGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit GatherGradientNode(const Attributes& attributes) : axis_(attributes.integer("axis", 0)) {}
  void compute(const Call& call) const override;

 private:
  std::int64_t axis_;
};

}  // namespace onnxtrain
