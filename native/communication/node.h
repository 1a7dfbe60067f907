// All-reduce within a graph.
#pragma once

#include "operators/fused_node.h"

namespace onnxtrain {

// Input: a tensor; output: its sum over all ranks. The reduction is a function set by `onnxtrain_set_all_reduce`; it
// blocks until every rank has called it.
class AllReduceNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit AllReduceNode(const Attributes&) {}
  void compute(const Call& call) const override;
};

}  // namespace onnxtrain
