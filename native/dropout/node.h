// Dropout whose mask follows from a seed and a counter: inputs x, ratio and count, output y. Its gradient by x is the
// same operator over dy.
#pragma once

#include "kernels/drawing.h"
#include "operators/fused_node.h"

namespace onnxtrain {

// What one call draws with: see CountedDropout in the documentation for the formula.
struct Drop {
  Draw draw;
  std::uint32_t limit;  // an element is kept where its 31 bits are not below
  double scale;         // 1 / (1 - ratio)
};

class CountedDropoutNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit CountedDropoutNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  std::uint32_t start_;  // of the keys: the seed's two halves
};

}  // namespace onnxtrain
