// A value that is available once other values are: an update waits for them without reading them.
#pragma once

#include <stdexcept>

#include "operators/runtime.h"

namespace onnxtrain {

// Inputs: a float, and values of any type; output: the float.
class AfterNode {
 public:
  explicit AfterNode(const Attributes&) {}

  void compute(const Call& call) const {
    Tensor number;
    call.input(0, number);
    if (number.count() != 1) throw std::invalid_argument("input 1 must have exactly one element.");
    *static_cast<float*>(call.output(0, number.shape)) = *static_cast<const float*>(number.data);
  }
};

}  // namespace onnxtrain
