#include "elementwise/node.h"

#include <sstream>

#include "ranges.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

struct Known {
  const char* name;
  ElementwiseStep::Operator what;
  std::size_t operands;
};

constexpr Known kKnown[] = {
    {"Abs", ElementwiseStep::kAbs, 1}, {"Add", ElementwiseStep::kAdd, 2},
    {"Cast", ElementwiseStep::kCast, 1}, {"Div", ElementwiseStep::kDiv, 2},
    {"Exp", ElementwiseStep::kExp, 1}, {"Greater", ElementwiseStep::kGreater, 2},
    {"Less", ElementwiseStep::kLess, 2}, {"Log1p", ElementwiseStep::kLog1p, 1},
    {"Max", ElementwiseStep::kMax, 2}, {"Min", ElementwiseStep::kMin, 2},
    {"Mul", ElementwiseStep::kMul, 2}, {"Neg", ElementwiseStep::kNeg, 1},
    {"Relu", ElementwiseStep::kRelu, 1}, {"Sigmoid", ElementwiseStep::kSigmoid, 1},
    {"Sign", ElementwiseStep::kSign, 1}, {"Sub", ElementwiseStep::kSub, 2},
    {"Where", ElementwiseStep::kWhere, 3},
};

const Known& operator_of(const std::string& name) {
  for (const Known& known : kKnown) {
    if (name == known.name) return known;
  }
  throw std::invalid_argument("attribute 'program' has the operator '" + name + "', which chains do not have.");
}

}  // namespace

const Signature ElementwiseNode::kSignature = {
    "Elementwise", {"x0", "x1", "x2", "x3", "x4", "x5", "x6", "x7"}, 1, 1, {0}, {{0, 0}}};

ElementwiseNode::ElementwiseNode(const Attributes& attributes) {
  const std::string program = attributes.text("program");
  std::istringstream steps(program);
  for (std::string text; std::getline(steps, text, ';');) {
    std::istringstream words(text);
    std::string name;
    words >> name;
    const Known& known = operator_of(name);
    Step step = {known.what, {}};
    for (std::string word; words >> word;) {
      const bool is_step = word[0] == 's';
      const std::string digits = word.substr(1);
      const bool is_number = !digits.empty() && digits.size() < 4 && digits.find_first_not_of("0123456789") == std::string::npos;
      const std::size_t index = is_number ? static_cast<std::size_t>(std::stoul(digits)) : kMostChainInputs + kMostChainSteps;
      if ((word[0] != 'x' && !is_step) || index >= (is_step ? steps_.size() : kMostChainInputs)) {
        throw std::invalid_argument("attribute 'program' has the operand '" + word + "' in step " +
                                    std::to_string(steps_.size()) + ": operands are x0 to x7 and earlier steps, as s0.");
      }
      step.operands.push_back({is_step, index});
    }
    if (step.operands.size() != known.operands) {
      throw std::invalid_argument("attribute 'program' has " + std::to_string(step.operands.size()) + " operands for " +
                                  name + ", which has " + std::to_string(known.operands) + ".");
    }
    steps_.push_back(step);
  }
  if (steps_.empty() || steps_.size() > kMostChainSteps) {
    throw std::invalid_argument("attribute 'program' has " + std::to_string(steps_.size()) + " steps: a chain has 1 to " +
                                std::to_string(kMostChainSteps) + ".");
  }
}

void ElementwiseNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  ElementwiseCall chain = {};
  while (chain.inputs < kMostChainInputs && inputs.has(chain.inputs)) {
    const std::size_t i = chain.inputs++;
    inputs.require_same_type(i, 0);
    chain.is_number[i] = i > 0 && inputs[i].count() == 1;
    if (!chain.is_number[i]) inputs.require_same_shape(i, 0);
    chain.data[i] = inputs[i].data;
  }
  for (const Step& step : steps_) {
    ElementwiseStep& compiled = chain.program[chain.steps++];
    compiled.what = step.what;
    for (std::size_t o = 0; o < step.operands.size(); ++o) {
      const Operand& operand = step.operands[o];
      if (!operand.is_step && operand.index >= chain.inputs) {
        throw std::invalid_argument("the program reads x" + std::to_string(operand.index) + ", and there are " +
                                    std::to_string(chain.inputs) + " inputs.");
      }
      compiled.operands[o] = operand.index + (operand.is_step ? chain.inputs : 0);
    }
  }
  chain.y = call.output(0, inputs[0].shape);
  const auto kernel = kernels()->elementwise[type];
  const std::size_t space = (chain.inputs + chain.steps) * tuning::kChainElements * size_of(type);
  for_each_range(call.parallel_for(), inputs[0].count(), tuning::kTaskElements, [&](std::size_t first, std::size_t last) {
    std::vector<unsigned char> scratch(space);
    kernel(chain, first, last, scratch.data());
  });
}

}  // namespace onnxtrain
