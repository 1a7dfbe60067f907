// A node whose tensors are in the memory of a CUDA device. Its inputs are those of optimizers/node.h, but for states of
// fewer bits; a gradient has the shape of its parameter.
#pragma once

#include <memory>

#include "cuda/updates.h"
#include "operators/runtime.h"
#include "optimizers/inputs.h"

namespace onnxtrain::cuda {

class OptimizerNode {
 public:
  using Rule = Optimizer;

#if defined(ONNXTRAIN_CUDA_ON_PROCESSOR)
  static constexpr const char* kProvider = nullptr;  // the processor's, for tests of the same code
#else
  static constexpr const char* kProvider = "CUDAExecutionProvider";
#endif

  OptimizerNode(const Optimizer& optimizer, const Attributes& attributes, bool fused);

  void compute(const Call& call) const;

 private:
  std::unique_ptr<Update> update_;
  UpdateInputs inputs_;
};

}  // namespace onnxtrain::cuda
