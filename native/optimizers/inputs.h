// Checks the inputs of an optimizer node and groups them into variables. Only the numbers R and T are read here, so
// tensors may be in device memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "operators/runtime.h"
#include "optimizers/grouping.h"
#include "optimizers/variables.h"

namespace onnxtrain {

class UpdateInputs {
 public:
  // For a node with these attributes whose rule has these states.
  UpdateInputs(const char* operator_name, const std::string& states, bool fused, const Attributes& attributes);

  const std::string& operator_name() const { return grouping_.operator_name; }
  bool is_fused() const { return grouping_.fused; }
  bool is_rounded() const { return !starts_.empty() || !parameter_starts_.empty(); }

  double rate(const Call& call) const;
  std::int64_t update_count(const Call& call) const;
  // Factor of the gradients: one element, float or double.
  Tensor factor(const Call& call) const;
  // All variables. `draws` is the result of draws(T) and must outlive them.
  std::vector<Variable> variables(const Call& call, const std::vector<Draw>& draws) const;
  std::vector<Draw> draws(std::int64_t T) const;  // PRNG samples of the states and of X, one variable after the other

 private:
  Tensor number(const Call& call, std::size_t index, const char* what) const;
  Variable variable(const Call& call, std::size_t index, Tensor& parameter, Tensor& other) const;
  void check(const Tensor& parameter, const Tensor& other, char letter, std::size_t index) const;
  void check_type(const Tensor& parameter, const Tensor& other, char letter, std::size_t index) const;
  std::string label(char letter, std::size_t index) const;  // "Adam: G of variable 2 of 3"

  Grouping grouping_;
  std::size_t count_ = 0;              // number of variables
  std::vector<std::uint32_t> starts_;  // PRNG keys, in the order of `seeds`; empty if states have X's type
  bool blockwise_ = false;             // states have 8 bits, with scales
  std::vector<std::uint32_t> parameter_starts_;  // PRNG keys of `parameter_seeds`; empty if X is float or double
};

// The value of a one-element tensor, float or double, in CPU memory.
double number_in(const Tensor& tensor);

}  // namespace onnxtrain
