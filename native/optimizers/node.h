// Shared code of all optimizer operators: inputs R, T and grouped tensors, checks, and outputs.
//
// Operators of this project's domain whose names begin with Fused also prepare the gradients: a third input, `factor`,
// multiplies all of them, and with the attribute `masked` a group M of bool tensors of X's shape follows G; where M is
// false, the gradient is zero. With the attribute `seeds`, one number per state tensor in input order, states are
// bfloat16 tensors, rounded after the update by RoundStochastic with this seed and T; with `blockwise` as well they are
// uint8 tensors of EncodeBlockwise, whose scales follow the states of all variables in the outputs and precede them in
// the inputs. With the attribute `parameter_seeds`, one number per X, X is a bfloat16 tensor, rounded in the same way.
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
