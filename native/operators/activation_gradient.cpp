#include "activation_gradient.h"

namespace onnxtrain {

void run_elementwise(const ElementwiseKernel (&kernels)[kElementTypes], const void* scalars, ElementType type,
                     std::size_t count, std::initializer_list<const void*> inputs,
                     std::initializer_list<void*> outputs, const ParallelFor& parallel_for) {
  std::vector<Variable> variables(1);
  Variable& variable = variables[0];
  variable.type = type;
  variable.count = count;
  std::copy(inputs.begin(), inputs.end(), variable.inputs);
  std::copy(outputs.begin(), outputs.end(), variable.outputs);
  const Schedule schedule(variables);
  const Arity arity = {inputs.size(), outputs.size()};
  schedule.for_each_block(parallel_for, [&](std::size_t index) {
    const Schedule::Block& block = schedule.blocks()[index];
    run_kernel(kernels[type], scalars, arity, variable, block.begin, block.end);
  });
}

const Signature ReluGradientNode::kSignature = {"ReluGradient", {"dy", "y"}, 2, 1, {0}, {{0, 0}}};

void ReluGradientNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  inputs.require_same_type(1, 0);
  inputs.require_same_shape(1, 0);
  void* dx = call.output(0, inputs[0].shape);
  run_elementwise(kernels()->relu_gradient, nullptr, type, inputs[0].count(), {inputs[0].data, inputs[1].data}, {dx},
                  call.parallel_for());
}

}  // namespace onnxtrain
