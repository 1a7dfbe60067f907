#include "optimizer_node.h"

#include <utility>

#include "fused_node.h"
#include "known_shape.h"

namespace onnxtrain {
namespace {

std::string groups(const std::string& letters) {
  std::string text;
  for (const char letter : letters) text += (text.empty() ? "" : ", ") + std::string(1, letter) + "...";
  return text;
}

}  // namespace

void infer_shapes(const OrtApi* api, const Grouping& grouping, OrtShapeInferContext* context) {
  std::size_t inputs = 0;
  require(api, ort::ShapeInferContext_GetInputCount::call(api, context, &inputs));
  const std::size_t variables = (inputs - 2) / grouping.inputs.size();
  if (variables == 0) return;  // refused when the kernel is created, with a sentence
  for (std::size_t output = 0; output < grouping.outputs.size(); ++output) {
    OrtTensorTypeAndShapeInfo* info = nullptr;  // stays the runtime's
    require(api, ort::ShapeInferContext_GetInputTypeShape::call(api, context, 2 + output % variables, &info));
    if (!is_known_shape(api, info)) continue;
    require(api, ort::ShapeInferContext_SetOutputTypeShape::call(api, context, output, info));
  }
}

OptimizerNode::OptimizerNode(Grouping grouping, const Attributes& attributes) : grouping_(std::move(grouping)) {
  const std::size_t inputs = attributes.input_count(), outputs = attributes.output_count();
  const std::size_t tensors = inputs < 2 ? 0 : inputs - 2, group = grouping_.inputs.size();
  if (tensors == 0 || tensors % group != 0) {
    throw std::invalid_argument(grouping_.operator_name + ": " + std::to_string(tensors) +
                                " tensors follow R and T, and they come in groups of equal length (" +
                                groups(grouping_.inputs) + "): their number must be a multiple of " +
                                std::to_string(group) + ".");
  }
  count_ = tensors / group;
  if (outputs != count_ * grouping_.outputs.size()) {
    throw std::invalid_argument(grouping_.operator_name + ": the node has " + std::to_string(outputs) +
                                " outputs, and " + std::to_string(count_) + " variables have " +
                                std::to_string(count_ * grouping_.outputs.size()) + " (" + groups(grouping_.outputs) +
                                "): name them all, with an empty name for one that is not wanted.");
  }
}

std::string OptimizerNode::label(char letter, std::size_t index) const {
  return grouping_.operator_name + ": " + letter + " of variable " + std::to_string(index + 1) + " of " +
         std::to_string(count_);
}

double OptimizerNode::learning_rate(const Call& call) const {
  Tensor rate;
  call.input(0, rate);
  if (rate.type != ort::kTypeFloat && rate.type != ort::kTypeDouble) {
    throw std::invalid_argument(grouping_.operator_name + ": R, the learning rate, has type " + type_name(rate.type) +
                                ", and must be float or double.");
  }
  if (rate.count() != 1) {
    throw std::invalid_argument(grouping_.operator_name + ": R, the learning rate, has shape " + text_of(rate.shape) +
                                ", and must have exactly one element.");
  }
  return rate.type == ort::kTypeFloat ? static_cast<double>(*static_cast<const float*>(rate.data))
                                      : *static_cast<const double*>(rate.data);
}

std::int64_t OptimizerNode::update_count(const Call& call) const {
  Tensor count;
  call.input(1, count);
  if (count.type != ort::kTypeInt64) {
    throw std::invalid_argument(grouping_.operator_name + ": T, the update count, has type " + type_name(count.type) +
                                ", and must be int64.");
  }
  if (count.count() != 1) {
    throw std::invalid_argument(grouping_.operator_name + ": T, the update count, has shape " + text_of(count.shape) +
                                ", and must have exactly one element.");
  }
  return *static_cast<const std::int64_t*>(count.data);
}

void OptimizerNode::check(const Tensor& parameter, const Tensor& other, char letter, std::size_t index) const {
  if (other.type != parameter.type) {
    throw std::invalid_argument(label(letter, index) + " has type " + type_name(other.type) + " and X has type " +
                                type_name(parameter.type) + ": the tensors of one variable must have one type.");
  }
  if (letter == 'G') {
    if (!Broadcast::fits(other.shape, parameter.shape)) {
      throw std::invalid_argument(label(letter, index) + " has shape " + text_of(other.shape) + " and X has shape " +
                                  text_of(parameter.shape) + ": a gradient may broadcast to X, never beyond it.");
    }
  } else if (other.shape != parameter.shape) {
    throw std::invalid_argument(label(letter, index) + " has shape " + text_of(other.shape) + " and X has shape " +
                                text_of(parameter.shape) + ": a state must have the shape of X.");
  }
}

Variable OptimizerNode::variable(const Call& call, std::size_t index, Tensor& parameter, Tensor& other) const {
  call.input(2 + index, parameter);
  if (parameter.type != ort::kTypeFloat && parameter.type != ort::kTypeDouble) {
    throw std::invalid_argument(label('X', index) + " has type " + type_name(parameter.type) +
                                ", and must be float or double.");
  }
  Variable result;
  result.type = parameter.type == ort::kTypeFloat ? kFloat : kDouble;
  result.count = parameter.count();
  result.inputs[0] = parameter.data;
  for (std::size_t group = 1; group < grouping_.inputs.size(); ++group) {
    const char letter = grouping_.inputs[group];
    call.input(2 + group * count_ + index, other);
    check(parameter, other, letter, index);
    result.inputs[group] = other.data;
    if (letter == 'G' && other.count() != result.count) {
      result.broadcast = std::make_unique<Broadcast>(other.shape, parameter.shape);
    }
  }
  for (std::size_t group = 0; group < grouping_.outputs.size(); ++group) {
    result.outputs[group] = call.output(group * count_ + index, parameter.shape);
  }
  return result;
}

void OptimizerNode::compute(const Call& call) const {
  const double R = learning_rate(call);
  const std::int64_t T = update_count(call);
  std::vector<Variable> variables;
  variables.reserve(count_);
  Tensor parameter, other;
  for (std::size_t index = 0; index < count_; ++index) {
    variables.push_back(variable(call, index, parameter, other));
  }
  try {
    run(R, T, variables, call.parallel_for());
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(grouping_.operator_name + ": " + error.what());
  }
}

}  // namespace onnxtrain
