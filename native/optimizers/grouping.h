// How the tensors of an optimizer node are grouped.
#pragma once

#include <cstddef>
#include <string>

#include "operators/runtime.h"

namespace onnxtrain {

// How the tensors of one variable are named, in the order of the groups: "XGVH" means X..., G..., V..., H...
struct Grouping {
  std::string operator_name;
  std::string inputs;   // one letter a group; a small one is for the scales of a state
  std::string outputs;  // likewise; each output has type and shape of the input of its letter
  bool fused = false;

  // Inputs before the groups.
  std::size_t scalars() const { return fused ? 3 : 2; }

  // Of an operator whose variables have these states.
  static Grouping of(const char* operator_name, const std::string& states);
  // The operator that does more than this one.
  Grouping fused_with(bool masks, bool scales) const;
};

// Whether a letter is that of the scales of a state, and of which.
bool is_scale(char letter);
char state_of(char scale);
// H is an average or a sum of squares, by the names of the specification; what is not has a sign.
bool has_sign(char state);

// Tells the runtime types and shapes of the outputs of one variable while it loads a model: those that every node has,
// because the runtime does not say here how many outputs a node has, and crashes at one too many. The others take the
// types that the model declares, as graph outputs or in value_info.
void infer_shapes(const OrtApi* api, const Grouping& grouping, OrtShapeInferContext* context);

}  // namespace onnxtrain
