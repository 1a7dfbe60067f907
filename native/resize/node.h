// Resizing of planes by a matrix per axis, as a node.
#pragma once

#include "operators/fused_node.h"

namespace onnxtrain {

// Inputs: x [..., h, w], rows [h, i] and columns [w, j]. y [..., i, j] = rows' x columns, where ' transposes. With
// `transposed`, x is [..., i, j] and y [..., h, w] = rows x columns': the gradient. The matrices are mostly zero; only from
// the first to the last element of a sum that is not zero are multiplied.
class ResizeByMatricesNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit ResizeByMatricesNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  bool transposed_;
};

}  // namespace onnxtrain
