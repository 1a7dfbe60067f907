// The custom operators, and the entry point that ONNX Runtime calls.
#include <stdexcept>

#include "activations/node.h"
#include "attention/node.h"
#include "communication/node.h"
#include "convolution/node.h"
#include "dropout/node.h"
#include "elementwise/node.h"
#include "exported.h"
#include "gather/node.h"
#include "normalization/node.h"
#include "operators/domains.h"
#include "operators/fused_node.h"
#include "operators/operator.h"
#include "optimizers/after_node.h"
#include "optimizers/gradients_ready_node.h"
#include "optimizers/node.h"
#include "optimizers/operator.h"
#include "pooling/node.h"
#include "matmul/node.h"
#include "recurrent/node.h"
#include "reduction/node.h"
#include "resize/node.h"
#include "softmax/node.h"
#include "sparse/node.h"
#include "transforms/node.h"

namespace onnxtrain {
namespace {

// For tensors of one element type: runtimes such as 1.20 do not support several inputs of open type.
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
    if (pairs.empty()) return std::size_t{0};
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

// Shared by `After` and `GradientsReady`: a number of one type, then any values of open types that must exist when the
// node runs; the output is a number of that type.
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

// Returns its first input once all others exist; reads none of them.
struct After {
  using Node = AfterNode;
  static constexpr const char* kName = "After";
  static constexpr int kType = ort::kTypeFloat;
};

// Calls a function when gradients are ready.
struct GradientsReady {
  using Node = GradientsReadyNode;
  static constexpr const char* kName = "GradientsReady";
  static constexpr int kType = ort::kTypeInt64;
};

template <typename Node>
void add_float_operator(const OrtApi* api, OrtCustomOpDomain* domain) {
  require(api, ort::CustomOpDomain_Add::call(api, domain, new Operator(fused_operator<Node>(api, ort::kTypeFloat))));
}

template <typename Node>
void add_operator(const OrtApi* api, OrtCustomOpDomain* domain) {
  for (const int type : {ort::kTypeFloat, ort::kTypeDouble}) {
    require(api, ort::CustomOpDomain_Add::call(api, domain, new Operator(fused_operator<Node>(api, type))));
  }
}

// Also for float with 16-bit weights.
template <typename Node>
void add_operator_with_weights(const OrtApi* api, OrtCustomOpDomain* domain) {
  add_operator<Node>(api, domain);
  for (const int weights : {ort::kTypeFloat16, ort::kTypeBfloat16}) {
    auto* const op = new Operator(fused_operator<Node>(api, ort::kTypeFloat, weights));
    require(api, ort::CustomOpDomain_Add::call(api, domain, op));
  }
}

void add_operators(const OrtApi* api, const Domains& domains) {
  add_optimizers<OptimizerNode>(api, domains, optimizers());
  require(api, ort::CustomOpDomain_Add::call(api, domains.own, new Operator(waiting_operator<After>(api))));
  require(api, ort::CustomOpDomain_Add::call(api, domains.own, new Operator(waiting_operator<GradientsReady>(api))));
  add_operator<AllReduceNode>(api, domains.own);
  add_operator<AttentionNode>(api, domains.own);
  add_operator<AttentionGradientNode>(api, domains.own);
  add_operator<PackedAttentionNode>(api, domains.own);
  add_operator<PackedAttentionGradientNode>(api, domains.own);
  add_operator<BatchNormalizationNode>(api, domains.own);
  add_operator<BatchNormalizationGradientNode>(api, domains.own);
  add_operator<ClipGradientNode>(api, domains.own);
  add_operator<ConvNode>(api, domains.own);
  add_operator<ConvInputGradientNode>(api, domains.own);
  add_operator<ConvWeightGradientNode>(api, domains.own);
  add_operator<CountedDropoutNode>(api, domains.own);
  add_operator<DetGradientNode>(api, domains.own);
  add_operator<ElementwiseNode>(api, domains.own);
  add_operator<FourierNode>(api, domains.own);
  add_operator<GatherConcatNode>(api, domains.own);
  add_operator<GatherGradientNode>(api, domains.own);
  add_operator<GeluGradientNode>(api, domains.own);
  add_operator<GridSampleNode>(api, domains.own);
  add_operator<GridSampleGradientNode>(api, domains.own);
  add_operator<LayerNormalizationGradientNode>(api, domains.own);
  add_operator_with_weights<LinearNode>(api, domains.own);
  add_operator_with_weights<LinearGradientNode>(api, domains.own);
  add_operator<LinearWeightGradientNode>(api, domains.own);
  add_operator<LogSoftmaxNode>(api, domains.own);
  add_operator<LogSoftmaxGradientNode>(api, domains.own);
  add_operator<MatMulNBitsNode>(api, domains.own);
  add_operator<MatMulNBitsGradientNode>(api, domains.own);
  add_operator<MaxPoolGradientNode>(api, domains.own);
  add_operator<RMSNormalizationGradientNode>(api, domains.own);
  add_operator<ReluGradientNode>(api, domains.own);
  add_operator<ReductionNode<ReductionKind::kMean>>(api, domains.own);
  add_operator<ReductionNode<ReductionKind::kProduct>>(api, domains.own);
  add_operator<ReductionNode<ReductionKind::kSum>>(api, domains.own);
  add_operator<ReductionNode<ReductionKind::kSumOfSquares>>(api, domains.own);
  add_operator<ResizeByMatricesNode>(api, domains.own);
  add_operator<ScanNode<false>>(api, domains.own);
  add_operator<ScanNode<true>>(api, domains.own);
  add_operator<ScatterElementsNode>(api, domains.own);
  add_operator<SoftmaxCrossEntropyGradientNode>(api, domains.own);
  add_operator<SoftmaxGradientNode>(api, domains.own);
  add_operator<GruNode>(api, domains.own);
  add_operator<GruGradientNode>(api, domains.own);
  add_operator<LstmNode>(api, domains.own);
  add_operator<LstmGradientNode>(api, domains.own);
  add_operator<RnnNode>(api, domains.own);
  add_operator<RnnGradientNode>(api, domains.own);
  add_operator<RecurrentProductsGradientNode>(api, domains.own);
  add_float_operator<ConvReluMaxPoolNode>(api, domains.own);
  add_float_operator<SparseConvNode>(api, domains.own);
  add_float_operator<SparseLinearNode>(api, domains.own);
  add_float_operator<TransposeRowsNode>(api, domains.own);
}

}  // namespace
}  // namespace onnxtrain

ONNXTRAIN_API OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  return onnxtrain::add_domains(options, base, [](const OrtApi* api, const onnxtrain::Domains& domains) {
    if (onnxtrain::kernels() == nullptr) throw std::runtime_error(onnxtrain::kernels_error());
    onnxtrain::add_operators(api, domains);
  });
}
