// The update rules that have kernels for CUDA: as optimizers/optimizers.h has them for the processor.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attributes.h"
#include "optimizers/rule.h"
#include "optimizers/variables.h"

namespace onnxtrain::cuda {

// A number in the memory of the device that all gradients are multiplied by.
struct Factor {
  const void* data;  // null: 1
  bool is_double;
};

// A rule with its attributes.
class Update {
 public:
  virtual ~Update() = default;

  // The letters of the states that each variable has, in the operator's order.
  virtual std::string states() const = 0;
  // Puts the work on a stream. The variables' memory is the device's; their factors and draws are not looked at.
  virtual void run(double R, std::int64_t T, Factor factor, const std::vector<Variable>& variables,
                   void* stream) const = 0;
};

// A rule without its attributes.
struct Optimizer {
  Description description;
  std::string least_states;  // that it has whatever its attributes are
  std::unique_ptr<Update> (*with)(const AttributeSource& attributes);
};

const std::vector<Optimizer>& optimizers();

}  // namespace onnxtrain::cuda
