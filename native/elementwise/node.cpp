#include "elementwise/node.h"

#include <cstdint>
#include <memory>
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
    {"Atanh", ElementwiseStep::kAtanh, 1}, {"Cast", ElementwiseStep::kCast, 1},
    {"Cos", ElementwiseStep::kCos, 1}, {"Cosh", ElementwiseStep::kCosh, 1},
    {"Div", ElementwiseStep::kDiv, 2}, {"Equal", ElementwiseStep::kEqual, 2},
    {"Exp", ElementwiseStep::kExp, 1}, {"Greater", ElementwiseStep::kGreater, 2},
    {"Less", ElementwiseStep::kLess, 2}, {"Log", ElementwiseStep::kLog, 1},
    {"Log1p", ElementwiseStep::kLog1p, 1}, {"Max", ElementwiseStep::kMax, 2},
    {"Min", ElementwiseStep::kMin, 2}, {"Mod", ElementwiseStep::kMod, 2},
    {"Mul", ElementwiseStep::kMul, 2}, {"Neg", ElementwiseStep::kNeg, 1},
    {"Pow", ElementwiseStep::kPow, 2}, {"Relu", ElementwiseStep::kRelu, 1},
    {"Sigmoid", ElementwiseStep::kSigmoid, 1}, {"Sign", ElementwiseStep::kSign, 1},
    {"Sin", ElementwiseStep::kSin, 1}, {"Sinh", ElementwiseStep::kSinh, 1},
    {"Sub", ElementwiseStep::kSub, 2}, {"Tan", ElementwiseStep::kTan, 1},
    {"Where", ElementwiseStep::kWhere, 3},
};

const Known& operator_of(const std::string& name) {
  for (const Known& known : kKnown) {
    if (name == known.name) return known;
  }
  throw std::invalid_argument("attribute 'program' has the operator '" + name + "', which chains do not have.");
}

// The place of an operator of numbers in the names of pairs; 3 for others.
std::size_t place_in_pair(ElementwiseStep::Operator what) {
  return what == ElementwiseStep::kAdd ? 0 : what == ElementwiseStep::kSub ? 1 : what == ElementwiseStep::kMul ? 2 : 3;
}

// The operator that does the work of two, of which the second reads the first at `operand`; the second one for none.
ElementwiseStep::Operator pair_of(ElementwiseStep::Operator first, ElementwiseStep::Operator second, std::size_t operand) {
  if (second == ElementwiseStep::kCast) return first;
  if (second == ElementwiseStep::kWhere && operand == 0) {
    if (first == ElementwiseStep::kGreater) return ElementwiseStep::kGreaterWhere;
    if (first == ElementwiseStep::kLess) return ElementwiseStep::kLessWhere;
  }
  if (second == ElementwiseStep::kRelu && first == ElementwiseStep::kMin) return ElementwiseStep::kMinRelu;
  const std::size_t f = place_in_pair(first), s = place_in_pair(second);
  if (f == 3 || s == 3) return second;
  return static_cast<ElementwiseStep::Operator>(ElementwiseStep::kAddAdd + 4 * f + (s == 1 && operand == 1 ? 3 : s));
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
  join_pairs();
}

void ElementwiseNode::join_pairs() {
  std::vector<std::size_t> readers(steps_.size(), 0), places(steps_.size(), 0);
  for (const Step& step : steps_) {
    for (const Operand& operand : step.operands) if (operand.is_step) ++readers[operand.index];
  }
  std::vector<bool> joined(steps_.size(), false);
  for (Step& step : steps_) {
    for (std::size_t o = 0; o < step.operands.size(); ++o) {
      const Operand read = step.operands[o];
      if (!read.is_step || readers[read.index] != 1) continue;
      const Step& first = steps_[read.index];
      const ElementwiseStep::Operator both = pair_of(first.what, step.what, o);
      if (both == step.what) continue;
      std::vector<Operand> operands = first.operands;
      step.operands.erase(step.operands.begin() + static_cast<std::ptrdiff_t>(o));
      operands.insert(operands.end(), step.operands.begin(), step.operands.end());
      step = {both, operands};
      joined[read.index] = true;
      break;
    }
  }
  std::vector<Step> kept;
  for (std::size_t s = 0; s < steps_.size(); ++s) {
    places[s] = kept.size();
    if (joined[s]) continue;
    for (Operand& operand : steps_[s].operands) operand.index = operand.is_step ? places[operand.index] : operand.index;
    kept.push_back(steps_[s]);
  }
  steps_ = kept;
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
    constexpr std::size_t kLine = 64;  // vectors of AVX-512 that lie across lines of the cache take twice the time
    const auto scratch = std::make_unique_for_overwrite<unsigned char[]>(space + kLine);
    const auto address = reinterpret_cast<std::uintptr_t>(scratch.get());
    kernel(chain, first, last, scratch.get() + (kLine - address % kLine));
  });
}

}  // namespace onnxtrain
