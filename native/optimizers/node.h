// What all optimizer operators share: inputs R, T and grouped tensors, checks, and where results go.
//
// Those of this project's own domain whose name begins with Fused do what is done to gradients before the update, too:
// a third input, `factor`, multiplies them all, and with the attribute `masked` a group M follows G, of bool tensors of
// X's shape: where M is false, the gradient is zero. With the attribute `seeds`, a number for each tensor of the states in
// the order of the inputs, states are bfloat16 tensors, rounded by RoundStochastic of this seed and T after the update. With
// the attribute `parameter_seeds`, a number for each X, so is X.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "operators/runtime.h"
#include "optimizers/optimizers.h"

namespace onnxtrain {

// How the tensors of one variable are named, in the order of the groups: "XGVH" means X..., G..., V..., H...
struct Grouping {
  std::string operator_name;
  std::string inputs;   // one letter a group
  std::string outputs;  // likewise; each output has type and shape of the input of its letter
  bool fused = false;

  // Inputs before the groups.
  std::size_t scalars() const { return fused ? 3 : 2; }

  // Of an optimizer whose variables have these states.
  static Grouping of(const Optimizer& optimizer, const std::string& states);
  // The operator that does more than this one.
  Grouping fused_with(bool masks) const;
};

// Tells the runtime types and shapes of the outputs of one variable while it loads a model: those that every node has,
// because the runtime does not say here how many outputs a node has, and crashes at one too many. The others take the
// types that the model declares, as graph outputs or in value_info.
void infer_shapes(const OrtApi* api, const Grouping& grouping, OrtShapeInferContext* context);

// One node of a model.
class OptimizerNode {
 public:
  OptimizerNode(const Optimizer& optimizer, const Attributes& attributes, bool fused);
  OptimizerNode(const OptimizerNode&) = delete;
  OptimizerNode& operator=(const OptimizerNode&) = delete;

  void compute(const Call& call) const;

 private:
  double number(const Call& call, std::size_t index, const char* what) const;
  std::int64_t update_count(const Call& call) const;
  std::vector<Draw> draws(std::int64_t T) const;  // of the states of each variable, one variable after the other
  Variable variable(const Call& call, std::size_t index, Tensor& parameter, Tensor& other) const;
  void check(const Tensor& parameter, const Tensor& other, char letter, std::size_t index) const;
  std::string label(char letter, std::size_t index) const;  // "Adam: G of variable 2 of 3"

  std::unique_ptr<Update> update_;
  Grouping grouping_;
  std::size_t count_ = 0;              // of variables
  std::vector<std::uint32_t> starts_;  // of the draws, in the order of `seeds`; empty: states are of X's type
  std::vector<std::uint32_t> parameter_starts_;  // likewise, of `parameter_seeds`; empty: X is float or double
};

}  // namespace onnxtrain
