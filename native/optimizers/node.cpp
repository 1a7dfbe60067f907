#include "optimizers/node.h"

#include <algorithm>
#include <utility>

#include "operators/fused_node.h"
#include "operators/known_shape.h"
#include "sizes.h"

namespace onnxtrain {
namespace {

std::string groups(const std::string& letters) {
  std::string text;
  for (const char letter : letters) text += (text.empty() ? "" : ", ") + std::string(1, letter) + "...";
  return text;
}

}  // namespace

// The groups that attributes may ask for beside those that every node has: masks, and two states (RMSprop).
constexpr std::size_t kMostMore = 3;

Grouping Grouping::of(const Optimizer& optimizer, const std::string& states) {
  return {optimizer.description.name, "XG" + states, "X" + states};
}

Grouping Grouping::fused_with(bool masks) const {
  Grouping result = {std::string("Fused").append(operator_name), inputs, outputs, true};
  if (masks) result.inputs.insert(2, 1, 'M');
  return result;
}

void infer_shapes(const OrtApi* api, const Grouping& grouping, OrtShapeInferContext* context) {
  std::size_t inputs = 0;
  require(api, ort::ShapeInferContext_GetInputCount::call(api, context, &inputs));
  const std::size_t tensors = inputs < grouping.scalars() ? 0 : inputs - grouping.scalars();
  const std::size_t groups = grouping.inputs.size();
  if (tensors < groups) return;  // refused when the kernel is created, with a sentence
  // Attributes, which may ask for masks and more states, are not shown here. Too few tensors for two variables are those of
  // one, whose states are last and alike. Of more, it is sure how many variables there are at least, and X comes first.
  const bool one = tensors < 2 * groups;
  const std::size_t sure = one ? grouping.outputs.size() : (tensors + groups + kMostMore - 1) / (groups + kMostMore);
  for (std::size_t output = 0; output < std::min(sure, grouping.outputs.size()); ++output) {
    OrtTensorTypeAndShapeInfo* info = nullptr;  // stays the runtime's
    const std::size_t input = one && output > 0 ? inputs - 1 : grouping.scalars() + output;
    require(api, ort::ShapeInferContext_GetInputTypeShape::call(api, context, input, &info));
    if (!is_known_shape(api, info)) continue;
    require(api, ort::ShapeInferContext_SetOutputTypeShape::call(api, context, output, info));
  }
}

OptimizerNode::OptimizerNode(const Optimizer& optimizer, const Attributes& attributes, bool fused)
    : update_(optimizer.with(attributes)), grouping_(Grouping::of(optimizer, update_->states())) {
  if (fused) grouping_ = grouping_.fused_with(attributes.integer("masked", 0) != 0);
  const std::size_t inputs = attributes.input_count(), outputs = attributes.output_count();
  const std::size_t scalars = grouping_.scalars(), group = grouping_.inputs.size();
  const std::size_t tensors = inputs < scalars ? 0 : inputs - scalars;
  if (tensors == 0 || tensors % group != 0) {
    throw std::invalid_argument(grouping_.operator_name + ": " + std::to_string(tensors) +
                                (grouping_.fused ? " tensors follow R, T and the factor" : " tensors follow R and T") +
                                ", and they come in groups of equal length (" +
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
  if (!fused) return;
  for (const std::int64_t seed : attributes.integers("seeds")) {
    starts_.push_back(start_of(static_cast<std::uint64_t>(seed)));
  }
  const std::size_t states = count_ * (grouping_.outputs.size() - 1);
  if (!starts_.empty() && starts_.size() != states) {
    throw std::invalid_argument(grouping_.operator_name + ": seeds has " + std::to_string(starts_.size()) +
                                " numbers, and there are " + std::to_string(states) + " states: give one for each.");
  }
  for (const std::int64_t seed : attributes.integers("parameter_seeds")) {
    parameter_starts_.push_back(start_of(static_cast<std::uint64_t>(seed)));
  }
  if (!parameter_starts_.empty() && parameter_starts_.size() != count_) {
    throw std::invalid_argument(grouping_.operator_name + ": parameter_seeds has " +
                                std::to_string(parameter_starts_.size()) + " numbers, and there are " +
                                std::to_string(count_) + " variables: give one for each.");
  }
}

std::string OptimizerNode::label(char letter, std::size_t index) const {
  return grouping_.operator_name + ": " + letter + " of variable " + std::to_string(index + 1) + " of " +
         std::to_string(count_);
}

double OptimizerNode::number(const Call& call, std::size_t index, const char* what) const {
  Tensor tensor;
  call.input(index, tensor);
  if (tensor.type != ort::kTypeFloat && tensor.type != ort::kTypeDouble) {
    throw std::invalid_argument(grouping_.operator_name + ": " + what + ", has type " + type_name(tensor.type) +
                                ", and must be float or double.");
  }
  if (tensor.count() != 1) {
    throw std::invalid_argument(grouping_.operator_name + ": " + what + ", has shape " + text_of(tensor.shape) +
                                ", and must have exactly one element.");
  }
  return tensor.type == ort::kTypeFloat ? static_cast<double>(*static_cast<const float*>(tensor.data))
                                        : *static_cast<const double*>(tensor.data);
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
  const bool is_mask = letter == 'M', is_rounded = !starts_.empty() && letter != 'M' && letter != 'G';
  const std::int32_t type = parameter_starts_.empty() ? parameter.type : ort::kTypeFloat;  // of what is computed
  if (is_mask && other.type != ort::kTypeBool) {
    throw std::invalid_argument(label(letter, index) + " has type " + type_name(other.type) +
                                ": a mask must be of type bool.");
  }
  if (is_rounded && (other.type != ort::kTypeBfloat16 || type != ort::kTypeFloat)) {
    throw std::invalid_argument(label(letter, index) + " has type " + type_name(other.type) + " and X has type " +
                                type_name(parameter.type) + ": with seeds, a state is bfloat16 and X is float.");
  }
  if (!is_mask && !is_rounded && !parameter_starts_.empty() && other.type != type) {
    throw std::invalid_argument(label(letter, index) + " has type " + type_name(other.type) +
                                ": with parameter_seeds, X is bfloat16 and the others are float.");
  }
  if (!is_mask && !is_rounded && other.type != type) {
    throw std::invalid_argument(label(letter, index) + " has type " + type_name(other.type) + " and X has type " +
                                type_name(parameter.type) + ": the tensors of one variable must have one type.");
  }
  if (other.shape == parameter.shape) return;
  if (letter == 'G' && Broadcast::fits(other.shape, parameter.shape)) return;
  throw std::invalid_argument(label(letter, index) + " has shape " + text_of(other.shape) + " and X has shape " +
                              text_of(parameter.shape) +
                              (letter == 'G' ? ": a gradient may broadcast to X, never beyond it."
                               : is_mask     ? ": a mask must have the shape of X."
                                             : ": a state must have the shape of X."));
}

std::vector<Draw> OptimizerNode::draws(std::int64_t T) const {
  std::vector<Draw> result;
  result.reserve(starts_.size());
  for (std::size_t index = 0; index < count_; ++index) {
    for (std::size_t place = index; place < starts_.size(); place += count_) {
      result.push_back(draw_of(starts_[place], T));
    }
  }
  return result;
}

Variable OptimizerNode::variable(const Call& call, std::size_t index, Tensor& parameter, Tensor& other) const {
  call.input(grouping_.scalars() + index, parameter);
  const bool rounded = !parameter_starts_.empty();
  if (rounded ? parameter.type != ort::kTypeBfloat16
              : parameter.type != ort::kTypeFloat && parameter.type != ort::kTypeDouble) {
    throw std::invalid_argument(label('X', index) + " has type " + type_name(parameter.type) +
                                (rounded ? ", and must be bfloat16 with parameter_seeds."
                                         : ", and must be float or double."));
  }
  Variable result;
  result.type = parameter.type == ort::kTypeDouble ? kDouble : kFloat;
  result.count = parameter.count();
  result.inputs[0] = parameter.data;
  std::size_t place = 1;
  for (std::size_t group = 1; group < grouping_.inputs.size(); ++group) {
    const char letter = grouping_.inputs[group];
    call.input(grouping_.scalars() + group * count_ + index, other);
    check(parameter, other, letter, index);
    if (letter == 'M') {
      result.mask = static_cast<const unsigned char*>(other.data);
      continue;
    }
    result.inputs[place++] = other.data;
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
  const double R = number(call, 0, "R, the learning rate");
  const std::int64_t T = update_count(call);
  const double factor = grouping_.fused ? number(call, 2, "the factor of the gradients") : 1.0;
  const std::vector<Draw> drawn = draws(T);
  std::vector<Draw> of_parameters;
  for (const std::uint32_t start : parameter_starts_) of_parameters.push_back(draw_of(start, T));
  std::vector<Variable> variables;
  variables.reserve(count_);
  Tensor parameter, other;
  for (std::size_t index = 0; index < count_; ++index) {
    variables.push_back(variable(call, index, parameter, other));
    if (factor != 1.0) variables.back().factor = &factor;
    if (!drawn.empty()) variables.back().draws = &drawn[index * (drawn.size() / count_)];
    if (!of_parameters.empty()) variables.back().parameter_draw = &of_parameters[index];
  }
  try {
    update_->run(R, T, variables, call.parallel_for());
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(grouping_.operator_name + ": " + error.what());
  }
}

}  // namespace onnxtrain
