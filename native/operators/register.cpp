// The custom operators and the entry point that ONNX Runtime calls.
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>

#include "activations/node.h"
#include "attention/node.h"
#include "convolution/node.h"
#include "dropout/node.h"
#include "gather/node.h"
#include "normalization/node.h"
#include "operators/fused_node.h"
#include "optimizers/node.h"
#include "optimizers/optimizers.h"
#include "pooling/node.h"
#include "products/node.h"
#include "softmax/node.h"

namespace onnxtrain {
namespace {

class AdagradNode : public OptimizerNode {
 public:
  static inline const Grouping kGrouping = {"Adagrad", "XGH", "XH"};

  explicit AdagradNode(const Attributes& attributes, bool fused = false)
      : OptimizerNode(kGrouping, attributes, fused) {
    attributes_.decay_factor = attributes.number("decay_factor", attributes_.decay_factor);
    attributes_.epsilon = attributes.number("epsilon", attributes_.epsilon);
    attributes_.norm_coefficient = attributes.number("norm_coefficient", attributes_.norm_coefficient);
  }

 private:
  void run(double R, std::int64_t T, const std::vector<Variable>& variables,
           const ParallelFor& parallel_for) const override {
    run_adagrad(attributes_, R, T, variables, parallel_for);
  }
  AdagradAttributes attributes_;
};

class AdamNode : public OptimizerNode {
 public:
  static inline const Grouping kGrouping = {"Adam", "XGVH", "XVH"};

  explicit AdamNode(const Attributes& attributes, bool fused = false)
      : OptimizerNode(kGrouping, attributes, fused) {
    attributes_.alpha = attributes.number("alpha", attributes_.alpha);
    attributes_.beta = attributes.number("beta", attributes_.beta);
    attributes_.epsilon = attributes.number("epsilon", attributes_.epsilon);
    attributes_.norm_coefficient = attributes.number("norm_coefficient", attributes_.norm_coefficient);
    attributes_.norm_coefficient_post = attributes.number("norm_coefficient_post", attributes_.norm_coefficient_post);
  }

 private:
  void run(double R, std::int64_t T, const std::vector<Variable>& variables,
           const ParallelFor& parallel_for) const override {
    run_adam(attributes_, R, T, variables, parallel_for);
  }
  AdamAttributes attributes_;
};

class MomentumNode : public OptimizerNode {
 public:
  static inline const Grouping kGrouping = {"Momentum", "XGV", "XV"};

  explicit MomentumNode(const Attributes& attributes, bool fused = false)
      : OptimizerNode(kGrouping, attributes, fused) {
    attributes_.alpha = attributes.number("alpha");
    attributes_.beta = attributes.number("beta");
    attributes_.norm_coefficient = attributes.number("norm_coefficient");
    attributes_.nesterov = nesterov_from(attributes.text("mode"));
  }

 private:
  void run(double R, std::int64_t T, const std::vector<Variable>& variables,
           const ParallelFor& parallel_for) const override {
    run_momentum(attributes_, R, T, variables, parallel_for);
  }
  MomentumAttributes attributes_;
};

class SsgdNode : public OptimizerNode {
 public:
  static inline const Grouping kGrouping = {"SSGD", "XG", "X"};
  static inline const Grouping kGroupingWithMomentum = {"SSGD", "XGV", "XV"};

  explicit SsgdNode(const Attributes& attributes, bool fused = false)
      : OptimizerNode(attributes.number("alpha", 0.0) > 0.0 ? kGroupingWithMomentum : kGrouping, attributes, fused) {
    attributes_.measure = measure_from(attributes.text("measure", "log-sum"));
    attributes_.l1 = l1_from(attributes.text("reweighting", "l2"));
    attributes_.epsilon = attributes.number("epsilon", attributes_.epsilon);
    attributes_.p = attributes.number("p", attributes_.p);
    attributes_.regularization = attributes.number("regularization", attributes_.regularization);
    attributes_.alpha = attributes.number("alpha", attributes_.alpha);
    attributes_.norm_coefficient = attributes.number("norm_coefficient", attributes_.norm_coefficient);
    attributes_.max_scale = attributes.number("max_scale", attributes_.max_scale);
    attributes_.check();
  }

 private:
  void run(double R, std::int64_t, const std::vector<Variable>& variables,
           const ParallelFor& parallel_for) const override {
    run_ssgd(attributes_, R, variables, parallel_for);
  }
  SsgdAttributes attributes_;
};

// The update together with what is done to gradients before it.
template <typename Node>
class Fused final : public Node {
 public:
  explicit Fused(const Attributes& attributes) : Node(attributes, true) {}

  // The groups that every node has.
  static const Grouping& grouping() {
    static const Grouping grouping = Node::kGrouping.fused_with(false);
    return grouping;
  }
};

template <typename Node>
struct GroupingOf {
  static const Grouping& value() { return Node::kGrouping; }
};

template <typename Node>
struct GroupingOf<Fused<Node>> {
  static const Grouping& value() { return Fused<Node>::grouping(); }
};

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

template <typename Node>
constexpr bool kIsOptimizer = std::is_base_of_v<OptimizerNode, Node>;

template <typename Node>
const char* name_of() {
  if constexpr (kIsOptimizer<Node>) {
    return GroupingOf<Node>::value().operator_name.c_str();
  } else {
    return Node::kSignature.name;
  }
}

// Runs `work`; a refusal gets the operator's name in front.
template <typename Node, typename Work>
OrtStatus* named_status_of(const OrtApi* api, Work work) {
  return status_of(api, [&] {
    try {
      work();
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(named(name_of<Node>(), error.what()));
    }
  });
}

// The description of one operator for one runtime. Shape inference is handed nothing but this.
struct Operator : OrtCustomOp {
  const OrtApi* api = nullptr;
  int type = ort::kTypeUndefined;  // that of all tensors whose type the signature leaves open
};

// What does not depend on how inputs and outputs are listed.
template <typename Node>
Operator described_operator(const OrtApi* api) {
  Operator op = {};
  op.api = api;
  op.version = ort::kApiVersion;
  op.GetName = [](const OrtCustomOp*) { return name_of<Node>(); };
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  op.GetInputMemoryType = [](const OrtCustomOp*, std::size_t) { return ort::kMemoryDefault; };
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
  op.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
    return named_status_of<Node>(api, [&] { *kernel = new Kernel<Node>{api, Node(Attributes(api, info))}; });
  };
  op.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    const auto& instance = *static_cast<const Kernel<Node>*>(kernel);
    return named_status_of<Node>(instance.api, [&] { instance.node.compute(Call(instance.api, context)); });
  };
  op.KernelDestroy = [](void* kernel) { delete static_cast<Kernel<Node>*>(kernel); };
  return op;
}

// For tensors of one element type: older runtimes, as 1.20, know no operator with several inputs of an open type.
template <typename Node>
Operator fused_operator(const OrtApi* api, int type) {
  Operator op = described_operator<Node>(api);
  op.type = type;
  op.GetInputTypeCount = [](const OrtCustomOp*) { return Node::kSignature.inputs.size(); };
  op.GetInputType = [](const OrtCustomOp* self, std::size_t index) {
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

template <typename Node>
Operator optimizer_operator(const OrtApi* api) {
  Operator op = described_operator<Node>(api);
  // R, T, perhaps the factor, and the tensors.
  op.GetInputTypeCount = [](const OrtCustomOp*) { return GroupingOf<Node>::value().scalars() + 1; };
  op.GetInputType = [](const OrtCustomOp*, std::size_t index) {
    return index == 1 ? ort::kTypeInt64 : ort::kTypeUndefined;
  };
  op.GetInputCharacteristic = [](const OrtCustomOp*, std::size_t index) {
    return index == GroupingOf<Node>::value().scalars() ? ort::kVariadic : ort::kRequired;
  };
  op.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  op.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.GetOutputTypeCount = [](const OrtCustomOp*) { return std::size_t{1}; };
  op.GetOutputType = [](const OrtCustomOp*, std::size_t) { return ort::kTypeUndefined; };
  op.GetOutputCharacteristic = [](const OrtCustomOp*, std::size_t) { return ort::kVariadic; };
  op.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return static_cast<int>(GroupingOf<Node>::value().outputs.size()); };
  op.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
  op.InferOutputShapeFn = [](const OrtCustomOp* self, OrtShapeInferContext* context) {
    const OrtApi* api = static_cast<const Operator*>(self)->api;
    return status_of(api, [&] { infer_shapes(api, GroupingOf<Node>::value(), context); });
  };
  return op;
}

// Sessions keep pointers to domains and operators, so both live as long as the process.
struct Domains {
  OrtCustomOpDomain* training = nullptr;
  OrtCustomOpDomain* own = nullptr;
};

template <typename Node>
void add_operator(const OrtApi* api, OrtCustomOpDomain* domain) {
  if constexpr (kIsOptimizer<Node>) {
    require(api, ort::CustomOpDomain_Add::call(api, domain, new Operator(optimizer_operator<Node>(api))));
  } else {
    for (const int type : {ort::kTypeFloat, ort::kTypeDouble}) {
      require(api, ort::CustomOpDomain_Add::call(api, domain, new Operator(fused_operator<Node>(api, type))));
    }
  }
}

Domains create_domains(const OrtApi* api) {
  Domains domains;
  require(api, ort::CreateCustomOpDomain::call(api, "ai.onnx.preview.training", &domains.training));
  add_operator<AdagradNode>(api, domains.training);
  add_operator<AdamNode>(api, domains.training);
  add_operator<MomentumNode>(api, domains.training);
  require(api, ort::CreateCustomOpDomain::call(api, "onnxtrain", &domains.own));
  add_operator<SsgdNode>(api, domains.own);
  add_operator<Fused<AdagradNode>>(api, domains.own);
  add_operator<Fused<AdamNode>>(api, domains.own);
  add_operator<Fused<MomentumNode>>(api, domains.own);
  add_operator<Fused<SsgdNode>>(api, domains.own);
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
  add_operator<LinearNode>(api, domains.own);
  add_operator<LinearWeightGradientNode>(api, domains.own);
  add_operator<LogSoftmaxGradientNode>(api, domains.own);
  add_operator<MaxPoolGradientNode>(api, domains.own);
  add_operator<RMSNormalizationGradientNode>(api, domains.own);
  add_operator<ReluGradientNode>(api, domains.own);
  add_operator<SoftmaxCrossEntropyGradientNode>(api, domains.own);
  add_operator<SoftmaxGradientNode>(api, domains.own);
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

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                                 const OrtApiBase* base) {
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
