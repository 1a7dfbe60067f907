// A sum over the processes of one training, in the middle of a graph.
#pragma once

#include "operators/fused_node.h"

namespace onnxtrain {

// Input: a tensor; output: its sum over all processes. What adds up is a function that the program has named with
// `onnxtrain_set_all_reduce`; it blocks until all processes have called it.
class AllReduceNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit AllReduceNode(const Attributes&) {}
  void compute(const Call& call) const override;
};

}  // namespace onnxtrain
