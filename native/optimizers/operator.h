// Registration of an optimizer with the runtime, independent of where its kernels run. A `Node` has the type `Rule`: a
// description, the minimal states, and a constructor from attributes. If it has a `kProvider`, that provider runs it,
// in its own memory.
#pragma once

#include <vector>

#include "operators/domains.h"
#include "operators/operator.h"
#include "optimizers/grouping.h"
#include "optimizers/rule.h"

namespace onnxtrain {

// An optimizer, optionally with gradient preparation fused in.
template <typename Node>
struct OptimizerOperator : Operator {
  const typename Node::Rule* rule = nullptr;
  bool fused = false;
  Grouping grouping = {};  // groups that every node has

  static const OptimizerOperator& of(const OrtCustomOp* op) { return *static_cast<const OptimizerOperator*>(op); }
};

template <typename Node>
OptimizerOperator<Node>* optimizer_operator(const OrtApi* api, const typename Node::Rule& rule, bool fused) {
  using Made = OptimizerOperator<Node>;
  auto* const made = new Made;  // never destroyed: see Domains
  Made& op = *made;
  describe(op, api);
  if constexpr (requires { Node::kProvider; }) {
    op.GetExecutionProviderType = [](const OrtCustomOp*) { return Node::kProvider; };
    op.GetInputMemoryType = [](const OrtCustomOp*, std::size_t index) {  // R and T are read on the CPU
      return index < 2 ? ort::kMemoryOfProcessor : ort::kMemoryDefault;
    };
  }
  op.rule = &rule;
  op.fused = fused;
  op.grouping = Grouping::of(rule.description.name, rule.least_states);
  if (fused) op.grouping = op.grouping.fused_with(false, false);
  op.GetName = [](const OrtCustomOp* self) { return Made::of(self).grouping.operator_name.c_str(); };
  op.CreateKernelV2 = [](const OrtCustomOp* self, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
    const Made& op = Made::of(self);
    return named_status_of(api, op.grouping.operator_name, [&] {
      *kernel = new Kernel<Node>{api, Node(*op.rule, Attributes(api, info), op.fused)};
    });
  };
  op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {  // its messages name the operator
    const auto& instance = *static_cast<const Kernel<Node>*>(kernel);
    return status_of(instance.api, [&] { instance.node.compute(Call(instance.api, context)); });
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel<Node>*>(kernel); };
  // R, T, optionally the factor, and the tensors.
  op.GetInputTypeCount = [](const OrtCustomOp* self) { return Made::of(self).grouping.scalars() + 1; };
  op.GetInputType = [](const OrtCustomOp*, std::size_t index) {
    return index == 1 ? ort::kTypeInt64 : ort::kTypeUndefined;
  };
  op.GetInputCharacteristic = [](const OrtCustomOp* self, std::size_t index) {
    return index == Made::of(self).grouping.scalars() ? ort::kVariadic : ort::kRequired;
  };
  op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) { return std::size_t{1}; };
  op.GetOutputType = [](const OrtCustomOp*, std::size_t) { return ort::kTypeUndefined; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, std::size_t) { return ort::kVariadic; };
  op.GetVariadicOutputMinArity = [](const OrtCustomOp* self) {
    return static_cast<int>(Made::of(self).grouping.outputs.size());
  };
  op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.InferOutputShapeFn = [](const OrtCustomOp* self, OrtShapeInferContext* context) {
    const Made& op = Made::of(self);
    return status_of(op.api, [&] { infer_shapes(op.api, op.grouping, context); });
  };
  return made;
}

template <typename Node>
void add_optimizers(const OrtApi* api, const Domains& domains, const std::vector<typename Node::Rule>& rules) {
  for (const auto& rule : rules) {
    const bool standard = std::string(rule.description.domain) == kTrainingDomain;
    OrtCustomOpDomain* const domain = standard ? domains.training : domains.own;
    require(api, ort::CustomOpDomain_Add::call(api, domain, optimizer_operator<Node>(api, rule, false)));
    require(api, ort::CustomOpDomain_Add::call(api, domains.own, optimizer_operator<Node>(api, rule, true)));
  }
}

}  // namespace onnxtrain
