#include "activations/node.h"

#include "optimizers/variables.h"

#include <limits>

namespace onnxtrain {
namespace {

// Reads an optional input of one element.
double number_or(const Inputs& inputs, std::size_t index, double otherwise) {
  if (!inputs.has(index)) return otherwise;
  inputs.require_same_type(index, 0);
  if (inputs[index].count() != 1) inputs.require_shape(index, {});
  return inputs.element_type(index) == kFloat ? static_cast<double>(*static_cast<const float*>(inputs[index].data))
                                              : *static_cast<const double*>(inputs[index].data);
}

// Computes dx and, where requested, the forward result y from dy and x.
void run_with_result(const ElementwiseKernel (&kernels)[2][kElementTypes], const void* scalars, ElementType type,
                     const Inputs& inputs, const Call& call) {
  void* dx = call.output(0, inputs[0].shape);
  void* y = call.output(1, inputs[0].shape);
  const std::size_t count = inputs[0].count();
  if (y == nullptr) {
    run_elementwise(kernels[0], scalars, type, count, {inputs[0].data, inputs[1].data}, {dx}, call.parallel_for());
  } else {
    run_elementwise(kernels[1], scalars, type, count, {inputs[0].data, inputs[1].data}, {dx, y}, call.parallel_for());
  }
}

}  // namespace

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

const Signature ClipGradientNode::kSignature = {
    "ClipGradient", {"dy", "x", "min", "max"}, 2, 2, {0, 1}, {{0, 0}, {1, 0}, {1, 1}}};

void ClipGradientNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  inputs.require_same_type(1, 0);
  inputs.require_same_shape(1, 0);
  constexpr double kInfinite = std::numeric_limits<double>::infinity();
  const ClipScalars bounds = {number_or(inputs, 2, -kInfinite), number_or(inputs, 3, kInfinite)};
  run_with_result(kernels()->clip_gradient, &bounds, type, inputs, call);
}

const Signature GeluGradientNode::kSignature = {
    "GeluGradient", {"dy", "x", "factor"}, 2, 3, {0, 1, 0}, {{0, 0}, {1, 0}, {1, 1}, {2, 2}}};

GeluGradientNode::GeluGradientNode(const Attributes& attributes)
    : approximate_(attributes.text("approximate", "none")), alpha_(attributes.number("alpha", 1.0f)) {
  if (approximate_ != "none" && approximate_ != "tanh" && approximate_ != "sigmoid") {
    throw std::invalid_argument("attribute 'approximate' is '" + approximate_ +
                                "': it must be 'none', 'tanh' or 'sigmoid'.");
  }
}

void GeluGradientNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  inputs.require_same_type(1, 0);
  inputs.require_same_shape(1, 0);
  const KernelTable& table = *kernels();
  const auto& kernels = approximate_ == "none"   ? table.gelu_gradient
                        : approximate_ == "tanh" ? table.gelu_tanh_gradient
                                                 : table.gelu_logistic_gradient;
  if (inputs.has(2)) {
    inputs.require_same_type(2, 0);
    inputs.require_same_shape(2, 0);
    const std::vector<std::int64_t>& shape = inputs[0].shape;
    void *dx = call.output(0, shape), *result = call.output(1, shape), *dfactor = call.output(2, shape);
    return run_elementwise(kernels[1], &alpha_, type, inputs[0].count(), {inputs[0].data, inputs[1].data, inputs[2].data},
                           {dx, result, dfactor}, call.parallel_for());
  }
  run_with_result(kernels, &alpha_, type, inputs, call);
}

}  // namespace onnxtrain
