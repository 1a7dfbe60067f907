#include "optimizers/node.h"

namespace onnxtrain {

OptimizerNode::OptimizerNode(const Optimizer& optimizer, const Attributes& attributes, bool fused)
    : update_(optimizer.with(attributes)),
      inputs_(optimizer.description.name, update_->states(), fused, attributes) {}

void OptimizerNode::compute(const Call& call) const {
  const double R = inputs_.rate(call);
  const std::int64_t T = inputs_.update_count(call);
  const double factor = inputs_.is_fused() ? number_in(inputs_.factor(call)) : 1.0;
  const std::vector<Draw> drawn = inputs_.draws(T);
  std::vector<Variable> variables = inputs_.variables(call, drawn);
  if (factor != 1.0) {
    for (Variable& variable : variables) variable.factor = &factor;
  }
  try {
    update_->run(R, T, variables, call.parallel_for());
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(inputs_.operator_name() + ": " + error.what());
  }
}

}  // namespace onnxtrain
