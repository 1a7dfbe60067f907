// An optimizer node on tensors in CUDA device memory. Inputs as in optimizers/node.h, without low-precision states; a
// gradient has the shape of its parameter.
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
  static constexpr const char* kProvider = nullptr;  // the CPU provider, for tests of the same code
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
