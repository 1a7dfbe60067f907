// The update rules by name: attributes, learning rate R and update count T become scalars in float64, and the kernels
// run over all variables together. Nothing here knows ONNX Runtime; a wrong attribute is a std::invalid_argument.
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

  // The letters of the states that each variable has, in the operator's order.
  virtual std::string states() const = 0;
  virtual void run(double R, std::int64_t T, const std::vector<Variable>& variables,
                   const ParallelFor& parallel_for) const = 0;
};

// A rule without its attributes.
struct Optimizer {
  Description description;
  std::string least_states;  // that it has whatever its attributes are
  std::unique_ptr<Update> (*with)(const AttributeSource& attributes);
};

const std::vector<Optimizer>& optimizers();

// Null where there is none of this name.
const Optimizer* find_optimizer(const std::string& name);

}  // namespace onnxtrain
