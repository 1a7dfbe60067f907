// The custom operators and the entry point that ONNX Runtime calls.
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "activations/node.h"
#include "attention/node.h"
#include "communication/node.h"
#include "convolution/node.h"
#include "dropout/node.h"
#include "exported.h"
#include "gather/node.h"
#include "normalization/node.h"
#include "operators/fused_node.h"
#include "optimizers/after_node.h"
#include "optimizers/gradients_ready_node.h"
#include "optimizers/node.h"
#include "pooling/node.h"
#include "products/node.h"
#include "recurrent/node.h"
#include "softmax/node.h"

namespace onnxtrain {
namespace {

// The runtime gives a kernel no way back to its table of functions, so an instance carries it.
template <typename Node>
struct Kernel {
  const OrtApi* api;
  Node node;
};

// The message of a failed construction names the operator; OptimizerNode's own messages do so already.
std::string named(const std::string& name, const std::string& message) {
  return message.compare(0, name.size() + 1, name + ":") == 0 ? message : name + ": " + message;
}

// Runs `work`; a refusal gets the operator's name in front.
template <typename Work>
OrtStatus* named_status_of(const OrtApi* api, const std::string& name, Work work) {
  return status_of(api, [&] {
    try {
      work();
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(named(name, error.what()));
    }
  });
}

// The description of one operator for one runtime. Shape inference is handed nothing but this.
struct Operator : OrtCustomOp {
  const OrtApi* api = nullptr;
  int type = ort::kTypeUndefined;  // that of all tensors whose type the signature leaves open
  int weights = ort::kTypeUndefined;  // type of the second input, where it is another
};

// What all operators say alike.
void describe(Operator& op, const OrtApi* api) {
  op.api = api;
  op.version = ort::kApiVersion;
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  op.GetInputMemoryType = [](const OrtCustomOp*, std::size_t) { return ort::kMemoryDefault; };
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
}

// For tensors of one element type: older runtimes, as 1.20, know no operator with several inputs of an open type.
template <typename Node>
Operator fused_operator(const OrtApi* api, int type, int weights = ort::kTypeUndefined) {
  Operator op = {};
  describe(op, api);
  op.type = type;
  op.weights = weights;
  op.GetName = [](const OrtCustomOp*) { return Node::kSignature.name; };
  op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
    return named_status_of(api, Node::kSignature.name,
                           [&] { *kernel = new Kernel<Node>{api, Node(Attributes(api, info))}; });
  };
  op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    const auto& instance = *static_cast<const Kernel<Node>*>(kernel);
    return named_status_of(instance.api, Node::kSignature.name,
                           [&] { instance.node.compute(Call(instance.api, context)); });
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel<Node>*>(kernel); };
  op.GetInputTypeCount = [](const OrtCustomOp*) { return Node::kSignature.inputs.size(); };
  op.GetInputType = [](const OrtCustomOp* self, std::size_t index) {
    const int weights = static_cast<const Operator*>(self)->weights;
    if (index == 1 && weights != ort::kTypeUndefined) return weights;
    const auto& types = Node::kSignature.types;
    const int given = index < types.size() ? types[index] : ort::kTypeUndefined;
    return given == ort::kTypeUndefined ? static_cast<const Operator*>(self)->type : given;
  };
  op.GetInputCharacteristic = [](const OrtCustomOp*, std::size_t index) {
    return index < Node::kSignature.required_inputs ? ort::kRequired : ort::kOptional;
  };
  op.GetOutputTypeCount = [](const OrtCustomOp*) { return Node::kSignature.outputs; };
  op.GetOutputType = [](const OrtCustomOp* self, std::size_t) { return static_cast<const Operator*>(self)->type; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, std::size_t) {
    return Node::kSignature.outputs == 1 ? ort::kRequired : ort::kOptional;
  };
  op.GetMayInplace = [](int** inputs, int** outputs) {
    const auto& pairs = Node::kSignature.in_place;
    *inputs = new int[pairs.size()];
    *outputs = new int[pairs.size()];
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      (*inputs)[i] = pairs[i].first;
      (*outputs)[i] = pairs[i].second;
    }
    return pairs.size();
  };
  op.ReleaseMayInplace = [](int* inputs, int* outputs) {
    delete[] inputs;
    delete[] outputs;
  };
  op.InferOutputShapeFn = [](const OrtCustomOp* self, OrtShapeInferContext* context) {
    const OrtApi* api = static_cast<const Operator*>(self)->api;
    return status_of(api, [&] { infer_shapes(api, Node::kSignature, context); });
  };
  return op;
}

// An optimizer, or the optimizer together with what is done to gradients before it.
struct OptimizerOperator : Operator {
  const Optimizer* optimizer = nullptr;
  bool fused = false;
  Grouping grouping = {};  // the groups that every node has
};

const OptimizerOperator& optimizer_of(const OrtCustomOp* op) { return *static_cast<const OptimizerOperator*>(op); }

OptimizerOperator* optimizer_operator(const OrtApi* api, const Optimizer& optimizer, bool fused) {
  auto* const made = new OptimizerOperator;  // never destroyed: see Domains
  OptimizerOperator& op = *made;
  describe(op, api);
  op.optimizer = &optimizer;
  op.fused = fused;
  op.grouping = Grouping::of(optimizer, optimizer.least_states);
  if (fused) op.grouping = op.grouping.fused_with(false);
  op.GetName = [](const OrtCustomOp* self) { return optimizer_of(self).grouping.operator_name.c_str(); };
  op.CreateKernelV2 = [](const OrtCustomOp* self, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
    const OptimizerOperator& op = optimizer_of(self);
    return named_status_of(api, op.grouping.operator_name, [&] {
      *kernel = new Kernel<OptimizerNode>{api, OptimizerNode(*op.optimizer, Attributes(api, info), op.fused)};
    });
  };
  op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {  // its messages name the operator
    const auto& instance = *static_cast<const Kernel<OptimizerNode>*>(kernel);
    return status_of(instance.api, [&] { instance.node.compute(Call(instance.api, context)); });
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel<OptimizerNode>*>(kernel); };
  // R, T, perhaps the factor, and the tensors.
  op.GetInputTypeCount = [](const OrtCustomOp* self) { return optimizer_of(self).grouping.scalars() + 1; };
  op.GetInputType = [](const OrtCustomOp*, std::size_t index) {
    return index == 1 ? ort::kTypeInt64 : ort::kTypeUndefined;
  };
  op.GetInputCharacteristic = [](const OrtCustomOp* self, std::size_t index) {
    return index == optimizer_of(self).grouping.scalars() ? ort::kVariadic : ort::kRequired;
  };
  op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) { return std::size_t{1}; };
  op.GetOutputType = [](const OrtCustomOp*, std::size_t) { return ort::kTypeUndefined; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, std::size_t) { return ort::kVariadic; };
  op.GetVariadicOutputMinArity = [](const OrtCustomOp* self) {
    return static_cast<int>(optimizer_of(self).grouping.outputs.size());
  };
  op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.InferOutputShapeFn = [](const OrtCustomOp* self, OrtShapeInferContext* context) {
    const OptimizerOperator& op = optimizer_of(self);
    return status_of(op.api, [&] { infer_shapes(op.api, op.grouping, context); });
  };
  return made;
}

// What `After` and `GradientsReady` have in common: a number of one type, then any values, whose types are open, that
// are there when the node runs; the output is a number of that type, too.
template <typename Traits>
Operator waiting_operator(const OrtApi* api) {
  using Node = typename Traits::Node;
  Operator op = {};
  describe(op, api);
  op.GetName = [](const OrtCustomOp*) { return Traits::kName; };
  op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
    return named_status_of(api, Traits::kName,
                           [&] { *kernel = new Kernel<Node>{api, Node(Attributes(api, info))}; });
  };
  op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    const auto& instance = *static_cast<const Kernel<Node>*>(kernel);
    return named_status_of(instance.api, Traits::kName,
                           [&] { instance.node.compute(Call(instance.api, context)); });
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel<Node>*>(kernel); };
  op.GetInputTypeCount = [](const OrtCustomOp*) { return std::size_t{2}; };
  op.GetInputType = [](const OrtCustomOp*, std::size_t index) {
    return index == 0 ? Traits::kType : ort::kTypeUndefined;
  };
  op.GetInputCharacteristic = [](const OrtCustomOp*, std::size_t index) {
    return index == 0 ? ort::kRequired : ort::kVariadic;
  };
  op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) { return std::size_t{1}; };
  op.GetOutputType = [](const OrtCustomOp*, std::size_t) { return Traits::kType; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, std::size_t) { return ort::kRequired; };
  return op;
}

// The number that is its first input, once all others are there; it reads none of them.
struct After {
  using Node = AfterNode;
  static constexpr const char* kName = "After";
  static constexpr int kType = ort::kTypeFloat;
};

// Calls a function when gradients are there.
struct GradientsReady {
  using Node = GradientsReadyNode;
  static constexpr const char* kName = "GradientsReady";
  static constexpr int kType = ort::kTypeInt64;
};

// Sessions keep pointers to domains and operators, so both live as long as the process.
struct Domains {
  OrtCustomOpDomain* training = nullptr;
  OrtCustomOpDomain* own = nullptr;
};

template <typename Node>
void add_operator(const OrtApi* api, OrtCustomOpDomain* domain) {
  for (const int type : {ort::kTypeFloat, ort::kTypeDouble}) {
    require(api, ort::CustomOpDomain_Add::call(api, domain, new Operator(fused_operator<Node>(api, type))));
  }
}

// Also for floats with weights of 16 bits.
template <typename Node>
void add_operator_with_weights(const OrtApi* api, OrtCustomOpDomain* domain) {
  add_operator<Node>(api, domain);
  for (const int weights : {ort::kTypeFloat16, ort::kTypeBfloat16}) {
    auto* const op = new Operator(fused_operator<Node>(api, ort::kTypeFloat, weights));
    require(api, ort::CustomOpDomain_Add::call(api, domain, op));
  }
}

void add_optimizers(const OrtApi* api, const Domains& domains) {
  for (const Optimizer& optimizer : optimizers()) {
    const bool standard = std::string(optimizer.description.domain) == kTrainingDomain;
    OrtCustomOpDomain* const domain = standard ? domains.training : domains.own;
    require(api, ort::CustomOpDomain_Add::call(api, domain, optimizer_operator(api, optimizer, false)));
    require(api, ort::CustomOpDomain_Add::call(api, domains.own, optimizer_operator(api, optimizer, true)));
  }
}

Domains create_domains(const OrtApi* api) {
  Domains domains;
  require(api, ort::CreateCustomOpDomain::call(api, kTrainingDomain, &domains.training));
  require(api, ort::CreateCustomOpDomain::call(api, kOwnDomain, &domains.own));
  add_optimizers(api, domains);
  require(api, ort::CustomOpDomain_Add::call(api, domains.own, new Operator(waiting_operator<After>(api))));
  require(api, ort::CustomOpDomain_Add::call(api, domains.own, new Operator(waiting_operator<GradientsReady>(api))));
  add_operator<AllReduceNode>(api, domains.own);
  add_operator<AttentionNode>(api, domains.own);
  add_operator<AttentionGradientNode>(api, domains.own);
  add_operator<BatchNormalizationGradientNode>(api, domains.own);
  add_operator<ClipGradientNode>(api, domains.own);
  add_operator<ConvNode>(api, domains.own);
  add_operator<ConvInputGradientNode>(api, domains.own);
  add_operator<ConvWeightGradientNode>(api, domains.own);
  add_operator<CountedDropoutNode>(api, domains.own);
  add_operator<GatherGradientNode>(api, domains.own);
  add_operator<GeluGradientNode>(api, domains.own);
  add_operator<LayerNormalizationGradientNode>(api, domains.own);
  add_operator_with_weights<LinearNode>(api, domains.own);
  add_operator<LinearWeightGradientNode>(api, domains.own);
  add_operator<LogSoftmaxGradientNode>(api, domains.own);
  add_operator<MatMulNBitsNode>(api, domains.own);
  add_operator<MatMulNBitsGradientNode>(api, domains.own);
  add_operator<MaxPoolGradientNode>(api, domains.own);
  add_operator<RMSNormalizationGradientNode>(api, domains.own);
  add_operator<ReluGradientNode>(api, domains.own);
  add_operator<SoftmaxCrossEntropyGradientNode>(api, domains.own);
  add_operator<SoftmaxGradientNode>(api, domains.own);
  add_operator<GruNode>(api, domains.own);
  add_operator<GruGradientNode>(api, domains.own);
  add_operator<LstmNode>(api, domains.own);
  add_operator<LstmGradientNode>(api, domains.own);
  add_operator<RnnNode>(api, domains.own);
  add_operator<RnnGradientNode>(api, domains.own);
  return domains;
}

void add_to(OrtSessionOptions* options, const OrtApi* api) {
  static std::mutex mutex;
  static auto* const known = new std::map<const OrtApi*, Domains>;  // never destroyed: sessions may outlive it
  if (kernels() == nullptr) throw std::runtime_error(kernels_error());
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known->find(api);
  if (found == known->end()) found = known->emplace(api, create_domains(api)).first;
  require(api, ort::AddCustomOpDomain::call(api, options, found->second.training));
  require(api, ort::AddCustomOpDomain::call(api, options, found->second.own));
}

}  // namespace
}  // namespace onnxtrain

ONNXTRAIN_API OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(onnxtrain::ort::kApiVersion);
  if (api != nullptr) {
    onnxtrain::use_version(api, base->GetVersionString());
    return onnxtrain::status_of(api, [&] { onnxtrain::add_to(options, api); });
  }
  // Older than the version we need: its first table still holds CreateStatus.
  const OrtApi* first = base->GetApi(1);
  if (first == nullptr) return nullptr;
  return onnxtrain::ort::CreateStatus::call(first, onnxtrain::ort::kStatusFail,
                                            "onnxtrain's operators need ONNX Runtime 1.17 or newer: upgrade it.");
}
