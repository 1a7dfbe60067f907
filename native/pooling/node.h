// The gradient of MaxPool as a node: inputs dy and x, output dx. The index of the maximum is recomputed from x, which
// is cheaper than storing it in MaxPool.
#pragma once

#include "operators/fused_node.h"

namespace onnxtrain {

class MaxPoolGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit MaxPoolGradientNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  // Fills in everything but the buffers from the shapes of dy and x.
  void describe(const std::vector<std::int64_t>& dy, const std::vector<std::int64_t>& x, MaxPoolCall& images) const;

  std::vector<std::int64_t> kernel_, strides_, dilations_, pads_;
  std::string auto_pad_;
};

}  // namespace onnxtrain
