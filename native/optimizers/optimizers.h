// The update rules by name: attributes, learning rate R and update count T become float64 scalars, and the kernels run
// over all variables together. Independent of ONNX Runtime; an invalid attribute throws std::invalid_argument.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attributes.h"
#include "optimizers/rule.h"
#include "optimizers/variables.h"

namespace onnxtrain {

// A rule with its attributes.
class Update {
 public:
  virtual ~Update() = default;

  // The letters of each variable's states, in the operator's order.
  virtual std::string states() const = 0;
  virtual void run(double R, std::int64_t T, const std::vector<Variable>& variables,
                   const ParallelFor& parallel_for) const = 0;
};

// A rule without its attributes.
struct Optimizer {
  Description description;
  std::string least_states;  // the states that it has for any attributes
  std::unique_ptr<Update> (*with)(const AttributeSource& attributes);
};

const std::vector<Optimizer>& optimizers();

// Null if there is none of this name.
const Optimizer* find_optimizer(const std::string& name);

}  // namespace onnxtrain
