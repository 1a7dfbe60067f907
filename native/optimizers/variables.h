// The tensors of one optimizer call, and how their work is split and shared among threads.
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
  std::vector<std::int64_t> shape;  // empty if the caller does not know it
  const void* inputs[kMaxInputs] = {};
  void* outputs[kMaxOutputs] = {};       // null: not requested
  std::unique_ptr<Broadcast> broadcast;  // null if the gradient has the parameter's shape
  const double* factor = nullptr;        // of the gradient; null: 1
  const unsigned char* mask = nullptr;            // the gradient is zero where it is false; null: all true
  const Draw* draws = nullptr;  // PRNG per low-precision state; null: states are of `type`
  bool blockwise = false;       // low-precision states have 8 bits and scales, otherwise bfloat16
  const float* scales[kMaxStates] = {};
  float* new_scales[kMaxStates] = {};  // null: not requested
  bool is_signed[kMaxStates] = {};     // for 8-bit states

  const Draw* parameter_draw = nullptr;  // PRNG of a bfloat16 X; null: X is of `type`

  // Returns whether the gradient must be prepared before the rule.
  bool is_prepared() const { return factor != nullptr || mask != nullptr; }
};

// Other arguments of a kernel.
struct Arity {
  std::size_t inputs, outputs;
};

// Runs `kernel` on elements [begin, end) of a variable; gathers and prepares the gradient where required, and provides
// scratch space for results that are not requested. Low-precision tensors are converted to float for the kernel.
void run_kernel(ElementwiseKernel kernel, const void* scalars, Arity arity, const Variable& variable,
                std::size_t begin, std::size_t end);

// Splits all elements of all variables into blocks of one variable each, and groups blocks into tasks of about equal
// size: a thousand small tensors make as many tasks as one large one. Independent of the number of threads.
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
