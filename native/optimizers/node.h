// What all optimizer operators share: inputs R, T and grouped tensors, checks, and where results go.
//
// Those of this project's own domain whose name begins with Fused do what is done to gradients before the update, too:
// a third input, `factor`, multiplies them all, and with the attribute `masked` a group M follows G, of bool tensors of
// X's shape: where M is false, the gradient is zero. With the attribute `seeds`, a number for each tensor of the states in
// the order of the inputs, states are bfloat16 tensors, rounded by RoundStochastic of this seed and T after the update; with
// `blockwise`, too, they are uint8 tensors, of EncodeBlockwise, whose scales follow the states of all variables in the
// outputs, and come before them in the inputs.
#pragma once

#include <memory>

#include "operators/runtime.h"
#include "optimizers/inputs.h"
#include "optimizers/optimizers.h"

namespace onnxtrain {

// One node of a model.
class OptimizerNode {
 public:
  using Rule = Optimizer;

  OptimizerNode(const Optimizer& optimizer, const Attributes& attributes, bool fused);
  OptimizerNode(const OptimizerNode&) = delete;
  OptimizerNode& operator=(const OptimizerNode&) = delete;

  void compute(const Call& call) const;

 private:
  std::unique_ptr<Update> update_;
  UpdateInputs inputs_;
};

}  // namespace onnxtrain
