// Grouping of the tensors of an optimizer node.
#pragma once

#include <cstddef>
#include <string>

#include "operators/runtime.h"

namespace onnxtrain {

// Letters of the tensors of one variable, in group order: "XGVH" means X..., G..., V..., H...
struct Grouping {
  std::string operator_name;
  std::string inputs;   // one letter per group; lower case for the scales of a state
  std::string outputs;  // likewise; each output has type and shape of the input with its letter
  bool fused = false;

  // Inputs before the groups.
  std::size_t scalars() const { return fused ? 3 : 2; }

  // For an operator whose variables have these states.
  static Grouping of(const char* operator_name, const std::string& states);
  // For the operator with gradient preparation fused in.
  Grouping fused_with(bool masks, bool scales) const;
};

// Returns whether a letter denotes the scales of a state, and of which state.
bool is_scale(char letter);
char state_of(char scale);
// H is an average or a sum of squares, as the specification names it; the other states are signed.
bool has_sign(char state);

// Infers types and shapes of the outputs of one variable while the runtime loads a model; only those that every node
// has, since the runtime does not report how many outputs a node has, and crashes at one too many. The others get the
// types that the model declares, as graph outputs or in value_info.
void infer_shapes(const OrtApi* api, const Grouping& grouping, OrtShapeInferContext* context);

}  // namespace onnxtrain
