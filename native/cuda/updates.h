// The update rules that have CUDA kernels; the counterpart of optimizers/optimizers.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "attributes.h"
#include "optimizers/rule.h"
#include "optimizers/variables.h"

namespace onnxtrain::cuda {

// A factor of all gradients, in device memory.
struct Factor {
  const void* data;  // null: 1
  bool is_double;
};

// A rule with its attributes.
class Update {
 public:
  virtual ~Update() = default;

  // The letters of each variable's states, in the operator's order.
  virtual std::string states() const = 0;
  // Enqueues the work on a stream. The variables' memory is on the device; their factors and PRNG seeds are ignored.
  virtual void run(double R, std::int64_t T, Factor factor, const std::vector<Variable>& variables,
                   void* stream) const = 0;
};

// A rule without its attributes.
struct Optimizer {
  Description description;
  std::string least_states;  // the states that it has for any attributes
  std::unique_ptr<Update> (*with)(const AttributeSource& attributes);
};

const std::vector<Optimizer>& optimizers();

}  // namespace onnxtrain::cuda
