#include "optimizers/optimizers.h"

#include <cstring>

#include "optimizer_rules.h"
#include "optimizers/rule_attributes.h"

namespace onnxtrain {
namespace {

template <typename Rule>
class UpdateBy final : public Update {
 public:
  UpdateBy(std::size_t number, const AttributeSource& source)
      : number_(number), attributes_(attributes_of<Rule>(source)) {}

  std::string states() const override { return Rule::states(attributes_); }

  void run(double R, std::int64_t T, const std::vector<Variable>& variables,
           const ParallelFor& parallel_for) const override {
    const OptimizerKernels& kernels = onnxtrain::kernels()->optimizers[number_];
    if constexpr (requires { Rule::run(attributes_, R, T, kernels, variables, parallel_for); }) {
      Rule::run(attributes_, R, T, kernels, variables, parallel_for);
    } else {
      int variant = 0;
      if constexpr (variants_of<Rule>() > 1) variant = Rule::variant(attributes_);
      const auto scalars = Rule::scalars(attributes_, R, T);
      const std::size_t states = std::strlen(Rule::states(attributes_));
      const Arity arity = {.inputs = 2 + states, .outputs = 1 + states};
      const Schedule schedule(variables);
      schedule.for_each_block(parallel_for, [&](std::size_t index) {
        const Schedule::Block& block = schedule.blocks()[index];
        const Variable& variable = variables[block.variable];
        run_kernel(kernels.update[variant][variable.type], &scalars, arity, variable, block.begin, block.end);
      });
    }
  }

 private:
  std::size_t number_;  // of the rule in the kernel table
  typename Rule::Attributes attributes_;
};

#define ONNXTRAIN_NUMBER_OF(rule) k_##rule,
enum RuleNumber : std::size_t { ONNXTRAIN_OPTIMIZER_RULES(ONNXTRAIN_NUMBER_OF) };

template <typename Rule, RuleNumber number>
Optimizer described() {
  return {.description = Rule::kDescription,
          .least_states = Rule::states(typename Rule::Attributes{}),
          .with = [](const AttributeSource& source) -> std::unique_ptr<Update> {
            return std::make_unique<UpdateBy<Rule>>(number, source);
          }};
}

}  // namespace

const std::vector<Optimizer>& optimizers() {
#define ONNXTRAIN_DESCRIBED(rule) described<rule::Rule, k_##rule>(),
  static const auto* const all =
      new std::vector<Optimizer>{ONNXTRAIN_OPTIMIZER_RULES(ONNXTRAIN_DESCRIBED)};  // sessions may outlive static objects
  return *all;
}

const Optimizer* find_optimizer(const std::string& name) {
  for (const Optimizer& optimizer : optimizers()) {
    if (name == optimizer.description.name) return &optimizer;
  }
  return nullptr;
}

}  // namespace onnxtrain
