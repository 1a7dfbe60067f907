// Dropout with a mask from a counter-based PRNG: inputs x, ratio and count, output y. Its gradient is the same operator
// applied to dy.
#pragma once

#include "kernels/drawing.h"
#include "operators/fused_node.h"

namespace onnxtrain {

// The PRNG parameters of one call: see CountedDropout in the documentation for the formula.
struct Drop {
  Draw draw;
  std::uint32_t limit;  // an element is kept where its 31 random bits are >= limit
  double scale;         // 1 / (1 - ratio)
};

class CountedDropoutNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit CountedDropoutNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  std::uint32_t start_;  // of the keys: the two halves of the seed
};

}  // namespace onnxtrain
