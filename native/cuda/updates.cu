// All update rules compiled for the device: purely element-wise ones, and those that reduce over whole tensors first.
#include "cuda/updates.h"

#include <cstring>
#include <type_traits>

#include "cuda/lamb.h"
#include "cuda/ssgd.h"
#include "cuda/update_kernel.h"
#include "optimizer_rules.h"
#include "optimizers/rule_attributes.h"

namespace onnxtrain::cuda {
namespace {

template <typename Rule, int variant, typename T>
struct ByElement {
  typename Rule::template Scalars<T> scalars;

  ONNXTRAIN_DEVICE const ByElement& of(std::uint32_t) const { return *this; }

  ONNXTRAIN_DEVICE void operator()(T& x, T g, T* states) const {
    constexpr int count = states_of_update<Rule, variant>();
    if constexpr (count == 0) {
      Rule::template update<variant>(scalars, x, g);
    } else if constexpr (count == 1) {
      Rule::template update<variant>(scalars, x, g, states[0]);
    } else {
      Rule::template update<variant>(scalars, x, g, states[0], states[1]);
    }
  }
};

template <typename Rule>
constexpr bool is_by_element() {
  return states_of_update<Rule, 0>() >= 0;
}

// Rules with kernels of their own have a function `update_all` of their attributes here.
template <typename Rule>
constexpr bool reduces_first() {
  return requires(const typename Rule::Attributes& attributes, const std::vector<Variable>& variables) {
    update_all<float>(attributes, 0.0, std::int64_t{0}, Factor{}, variables, Stream{});
  };
}

template <typename Rule, int variant, typename T>
void update_by_element(const typename Rule::template Scalars<double>& scalars, Factor factor,
                       const std::vector<Variable>& variables, Stream stream) {
  constexpr int states = states_of_update<Rule, variant>();
  update_all<T, states>(variables, factor, ByElement<Rule, variant, T>{rounded<Rule, T>(scalars)}, stream);
}

template <typename Rule, int variant>
void update_variant(int wanted, const typename Rule::template Scalars<double>& scalars, Factor factor,
                    const std::vector<Variable>& variables, Stream stream) {
  if constexpr (variant < variants_of<Rule>()) {
    if (variant != wanted) return update_variant<Rule, variant + 1>(wanted, scalars, factor, variables, stream);
    update_by_element<Rule, variant, float>(scalars, factor, variables, stream);
    update_by_element<Rule, variant, double>(scalars, factor, variables, stream);
  }
}

// The first tensor with elements, since one without has no memory on any device; nullptr where all are empty.
const void* some_memory(const std::vector<Variable>& variables) {
  for (const Variable& variable : variables) {
    if (variable.count != 0) return variable.inputs[0];
  }
  return nullptr;
}

template <typename Rule>
class UpdateBy final : public Update {
 public:
  explicit UpdateBy(const AttributeSource& source) : attributes_(attributes_of<Rule>(source)) {}

  std::string states() const override { return Rule::states(attributes_); }

  void run(double R, std::int64_t T, Factor factor, const std::vector<Variable>& variables,
           void* stream) const override {
    const void* const memory = some_memory(variables);
    if (memory == nullptr) return;
    const auto on = static_cast<Stream>(stream);
    const OnDeviceOf device(memory);
    if constexpr (is_by_element<Rule>()) {
      int variant = 0;
      if constexpr (variants_of<Rule>() > 1) variant = Rule::variant(attributes_);
      update_variant<Rule, 0>(variant, Rule::scalars(attributes_, R, T), factor, variables, on);
    } else {
      update_all<float>(attributes_, R, T, factor, variables, on);
      update_all<double>(attributes_, R, T, factor, variables, on);
    }
  }

 private:
  typename Rule::Attributes attributes_;
};

template <typename Rule>
void add(std::vector<Optimizer>& all) {
  if constexpr (is_by_element<Rule>() || reduces_first<Rule>()) {
    all.push_back({Rule::kDescription, Rule::states(typename Rule::Attributes{}),
                   [](const AttributeSource& source) -> std::unique_ptr<Update> {
                     return std::make_unique<UpdateBy<Rule>>(source);
                   }});
  }
}

std::vector<Optimizer>* made() {
  auto* const all = new std::vector<Optimizer>;
#define ONNXTRAIN_ADD(rule) add<rule::Rule>(*all);
  ONNXTRAIN_OPTIMIZER_RULES(ONNXTRAIN_ADD)
  return all;
}

}  // namespace

const std::vector<Optimizer>& optimizers() {
  static const auto* const all = made();  // sessions may outlive static objects
  return *all;
}

}  // namespace onnxtrain::cuda
