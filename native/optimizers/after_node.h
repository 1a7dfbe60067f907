// A number that is there when other values are: what an update waits for without reading it.
#pragma once

#include <stdexcept>

#include "operators/runtime.h"

namespace onnxtrain {

// Inputs: a float, and values of any type; output: that float.
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
