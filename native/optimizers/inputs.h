// What an optimizer node is given: checked, and as variables. Only the numbers R and T are read here, so that the
// tensors may lie in the memory of a device.
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
  // Of a node with these attributes whose rule has these states.
  UpdateInputs(const char* operator_name, const std::string& states, bool fused, const Attributes& attributes);

  const std::string& operator_name() const { return grouping_.operator_name; }
  bool is_fused() const { return grouping_.fused; }
  bool is_rounded() const { return !starts_.empty(); }

  double rate(const Call& call) const;
  std::int64_t update_count(const Call& call) const;
  // Of the gradients: one element, float or double.
  Tensor factor(const Call& call) const;
  // All variables. `draws` are those of `T`, which must live as long.
  std::vector<Variable> variables(const Call& call, const std::vector<Draw>& draws) const;
  std::vector<Draw> draws(std::int64_t T) const;  // of the states of each variable, one variable after the other

 private:
  Tensor number(const Call& call, std::size_t index, const char* what) const;
  Variable variable(const Call& call, std::size_t index, Tensor& parameter, Tensor& other) const;
  void check(const Tensor& parameter, const Tensor& other, char letter, std::size_t index) const;
  void check_type(const Tensor& parameter, const Tensor& other, char letter, std::size_t index) const;
  std::string label(char letter, std::size_t index) const;  // "Adam: G of variable 2 of 3"

  Grouping grouping_;
  std::size_t count_ = 0;              // of variables
  std::vector<std::uint32_t> starts_;  // of the draws, in the order of `seeds`; empty: states are of X's type
  bool blockwise_ = false;             // states have 8 bits, and scales
};

// The number that a tensor of one element holds, float or double, in the processor's memory.
double number_in(const Tensor& tensor);

}  // namespace onnxtrain
