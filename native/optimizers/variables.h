// The tensors of one optimizer call, and how the work on them is cut and shared among threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/drawing.h"
#include "kernels/kernel_table.h"
#include "optimizers/broadcast.h"
#include "parallel.h"

namespace onnxtrain {

inline constexpr std::size_t kMaxInputs = 4;   // X, G, V, H
inline constexpr std::size_t kMaxOutputs = 3;  // X_new, V_new, H_new
inline constexpr std::size_t kMaxStates = 2;   // V, H

// One parameter with its gradient and states.
struct Variable {
  ElementType type = kFloat;
  std::size_t count = 0;
  const void* inputs[kMaxInputs] = {};
  void* outputs[kMaxOutputs] = {};       // null: the result is not wanted
  std::unique_ptr<Broadcast> broadcast;  // null: the gradient has the parameter's shape
  const double* factor = nullptr;        // of the gradient; null: 1
  const unsigned char* mask = nullptr;            // where it is false the gradient is zero; null: true everywhere
  const Draw* draws = nullptr;  // of each state, which has fewer bits and is rounded by it; null: states are of `type`
  bool blockwise = false;       // whether states that are rounded are in 8 bits, with scales; they are in bfloat16 if not
  const float* scales[kMaxStates] = {};
  float* new_scales[kMaxStates] = {};  // null: the result is not wanted
  bool is_signed[kMaxStates] = {};     // of states in 8 bits

  // Whether the gradient is not what the rule gets.
  bool is_prepared() const { return factor != nullptr || mask != nullptr; }
};

// What a kernel needs besides the pointers.
struct Arity {
  std::size_t inputs, outputs;
};

// Runs `kernel` on elements [begin, end) of a variable; gathers and prepares the gradient where that is asked for, and
// gives unwanted results a place. States of fewer bits are floats for the kernel.
void run_kernel(ElementwiseKernel kernel, const void* scalars, Arity arity, const Variable& variable,
                std::size_t begin, std::size_t end);

// All elements of all variables, cut into blocks of one variable each, and blocks gathered into tasks of about equal
// size: a thousand small tensors make as many tasks as one large one. Nothing depends on the number of threads.
class Schedule {
 public:
  struct Block {
    std::size_t variable, begin, end;
  };

  explicit Schedule(const std::vector<Variable>& variables);

  const std::vector<Block>& blocks() const { return blocks_; }
  void for_each_block(const ParallelFor& parallel_for, const std::function<void(std::size_t block)>& work) const;

 private:
  std::vector<Block> blocks_;
  std::vector<std::size_t> task_ends_;  // task t holds blocks [task_ends_[t - 1], task_ends_[t])
};

}  // namespace onnxtrain
