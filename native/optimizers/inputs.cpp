#include "optimizers/inputs.h"

#include <utility>

#include "operators/fused_node.h"
#include "sizes.h"

namespace onnxtrain {
namespace {

std::string groups(const std::string& letters) {
  std::string text;
  for (const char letter : letters) text += (text.empty() ? "" : ", ") + std::string(1, letter) + "...";
  return text;
}

std::vector<std::int64_t> shape_of_scales(const Tensor& parameter) {
  return {static_cast<std::int64_t>((parameter.count() + kStateBlock - 1) / kStateBlock)};
}

}  // namespace

UpdateInputs::UpdateInputs(const char* operator_name, const std::string& states, bool fused,
                           const Attributes& attributes)
    : grouping_(Grouping::of(operator_name, states)) {
  blockwise_ = fused && attributes.integer("blockwise", 0) != 0;
  if (fused) grouping_ = grouping_.fused_with(attributes.integer("masked", 0) != 0, blockwise_);
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
                                "): name them all, with an empty name for an unused one.");
  }
  if (!fused) return;
  for (const std::int64_t seed : attributes.integers("seeds")) {
    starts_.push_back(start_of(static_cast<std::uint64_t>(seed)));
  }
  const std::size_t expected = count_ * states.size();
  if ((blockwise_ || !starts_.empty()) && starts_.size() != expected) {
    throw std::invalid_argument(grouping_.operator_name + ": seeds has " + std::to_string(starts_.size()) +
                                " numbers, and there are " + std::to_string(expected) + " states: give one for each.");
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

std::string UpdateInputs::label(char letter, std::size_t index) const {
  const std::string what = is_scale(letter) ? std::string("the scale of ") + state_of(letter) : std::string(1, letter);
  return grouping_.operator_name + ": " + what + " of variable " + std::to_string(index + 1) + " of " +
         std::to_string(count_);
}

Tensor UpdateInputs::number(const Call& call, std::size_t index, const char* what) const {
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
  return tensor;
}

double UpdateInputs::rate(const Call& call) const { return number_in(number(call, 0, "R, the learning rate")); }

Tensor UpdateInputs::factor(const Call& call) const { return number(call, 2, "the factor of the gradients"); }

std::int64_t UpdateInputs::update_count(const Call& call) const {
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

void UpdateInputs::check_type(const Tensor& parameter, const Tensor& other, char letter, std::size_t index) const {
  const bool is_mask = letter == 'M', is_rounded = !starts_.empty() && letter != 'M' && letter != 'G';
  const std::int32_t type = parameter_starts_.empty() ? parameter.type : ort::kTypeFloat;  // compute type
  if (is_mask && other.type != ort::kTypeBool) {
    throw std::invalid_argument(label(letter, index) + " has type " + type_name(other.type) +
                                ": a mask must be of type bool.");
  }
  if (is_rounded && blockwise_) {
    const int wanted = is_scale(letter) ? ort::kTypeFloat : ort::kTypeUint8;
    if (other.type == wanted && type == ort::kTypeFloat) return;
    throw std::invalid_argument(label(letter, index) + " has type " + type_name(other.type) + " and X has type " +
                                type_name(parameter.type) +
                                ": with blockwise, a state is uint8, its scale is float and X is float.");
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
}

void UpdateInputs::check(const Tensor& parameter, const Tensor& other, char letter, std::size_t index) const {
  check_type(parameter, other, letter, index);
  const bool is_mask = letter == 'M';
  if (is_scale(letter)) {
    const std::vector<std::int64_t> wanted = shape_of_scales(parameter);
    if (other.shape == wanted) return;
    throw std::invalid_argument(label(letter, index) + " has shape " + text_of(other.shape) + " and X has shape " +
                                text_of(parameter.shape) + ": one number for each " + std::to_string(kStateBlock) +
                                " elements makes " + text_of(wanted) + ".");
  }
  if (other.shape == parameter.shape) return;
  if (letter == 'G' && Broadcast::fits(other.shape, parameter.shape)) return;
  throw std::invalid_argument(label(letter, index) + " has shape " + text_of(other.shape) + " and X has shape " +
                              text_of(parameter.shape) +
                              (letter == 'G' ? ": a gradient may broadcast to X, never beyond it."
                               : is_mask     ? ": a mask must have the shape of X."
                                             : ": a state must have the shape of X."));
}

std::vector<Draw> UpdateInputs::draws(std::int64_t T) const {
  std::vector<Draw> result;
  result.reserve(starts_.size() + parameter_starts_.size());
  for (std::size_t index = 0; index < count_; ++index) {
    for (std::size_t state = index; state < starts_.size(); state += count_) {
      result.push_back(draw_of(starts_[state], T));
    }
    if (!parameter_starts_.empty()) result.push_back(draw_of(parameter_starts_[index], T));
  }
  return result;
}

Variable UpdateInputs::variable(const Call& call, std::size_t index, Tensor& parameter, Tensor& other) const {
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
  result.shape = parameter.shape;
  result.inputs[0] = parameter.data;
  std::size_t next = 1, scales = 0;
  for (std::size_t group = 1; group < grouping_.inputs.size(); ++group) {
    const char letter = grouping_.inputs[group];
    call.input(grouping_.scalars() + group * count_ + index, other);
    check(parameter, other, letter, index);
    if (letter == 'M') {
      result.mask = static_cast<const unsigned char*>(other.data);
      continue;
    }
    if (is_scale(letter)) {
      result.scales[scales++] = static_cast<const float*>(other.data);
      continue;
    }
    result.inputs[next++] = other.data;
    if (letter == 'G' && other.count() != result.count) {
      result.broadcast = std::make_unique<Broadcast>(other.shape, parameter.shape);
    }
  }
  scales = 0;
  for (std::size_t group = 0; group < grouping_.outputs.size(); ++group) {
    const char letter = grouping_.outputs[group];
    if (is_scale(letter)) {
      result.new_scales[scales++] = static_cast<float*>(call.output(group * count_ + index, shape_of_scales(parameter)));
      continue;
    }
    if (blockwise_ && group > 0) result.is_signed[group - 1] = has_sign(letter);
    result.outputs[group] = call.output(group * count_ + index, parameter.shape);
  }
  result.blockwise = blockwise_;
  return result;
}

std::vector<Variable> UpdateInputs::variables(const Call& call, const std::vector<Draw>& draws) const {
  std::vector<Variable> result;
  result.reserve(count_);
  Tensor parameter, other;
  for (std::size_t index = 0; index < count_; ++index) {
    result.push_back(variable(call, index, parameter, other));
    const std::size_t own = draws.size() / count_;
    if (!draws.empty() && !starts_.empty()) result.back().draws = &draws[index * own];
    if (!draws.empty() && !parameter_starts_.empty()) result.back().parameter_draw = &draws[(index + 1) * own - 1];
  }
  return result;
}

double number_in(const Tensor& tensor) {
  return tensor.type == ort::kTypeFloat ? static_cast<double>(*static_cast<const float*>(tensor.data))
                                        : *static_cast<const double*>(tensor.data);
}

}  // namespace onnxtrain
