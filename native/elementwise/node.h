// A chain of element-wise operators as one node: `program` lists its steps.
#pragma once

#include <vector>

#include "operators/fused_node.h"

namespace onnxtrain {

// The program "Sigmoid x0; Mul x0 s0" is x sigmoid(x): x0, x1, ... are the inputs, s0, s1, ... the earlier steps; the last
// step is the result. Inputs have the shape of the first one, or one element.
class ElementwiseNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit ElementwiseNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  struct Operand {
    bool is_step;
    std::size_t index;
  };
  struct Step {
    ElementwiseStep::Operator what;
    std::vector<Operand> operands;
  };
  // Joins a step and the only one that reads it where one operator does both, with the same rounding.
  void join_pairs();

  std::vector<Step> steps_;
};

}  // namespace onnxtrain
