#include "cuda/node.h"

#include <stdexcept>

namespace onnxtrain::cuda {

OptimizerNode::OptimizerNode(const Optimizer& optimizer, const Attributes& attributes, bool fused)
    : update_(optimizer.with(attributes)),
      inputs_(optimizer.description.name, update_->states(), fused, attributes) {
  if (inputs_.is_rounded()) {
    throw std::invalid_argument(inputs_.operator_name() +
                                ": attribute 'seeds' asks for states in bfloat16 or 8 bits, which the CUDA kernels "
                                "lack: keep them in the type of X.");
  }
}

void OptimizerNode::compute(const Call& call) const {
  const double R = inputs_.rate(call);
  const std::int64_t T = inputs_.update_count(call);
  Factor factor = {};
  if (inputs_.is_fused()) {
    const Tensor given = inputs_.factor(call);
    factor = {given.data, given.type == ort::kTypeDouble};
  }
  const std::vector<Variable> variables = inputs_.variables(call, {});
  for (std::size_t index = 0; index < variables.size(); ++index) {
    if (variables[index].broadcast == nullptr) continue;
    throw std::invalid_argument(inputs_.operator_name() + ": G of variable " + std::to_string(index + 1) + " of " +
                                std::to_string(variables.size()) +
                                " is smaller than X: the kernels for CUDA need a gradient of X's shape.");
  }
  try {
    update_->run(R, T, factor, variables, call.stream());
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(inputs_.operator_name() + ": " + error.what());
  }
}

}  // namespace onnxtrain::cuda
