// Gradients of activations as nodes: inputs dy and the forward input or output, one output dx.
#pragma once

#include "fused_node.h"

namespace onnxtrain {

// dx = dy where y > 0, else 0 dy.
class ReluGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit ReluGradientNode(const Attributes&) {}
  void compute(const Call& call) const override;
};

// Runs an element-wise kernel over whole tensors of one type, cut into blocks that threads share.
void run_elementwise(const ElementwiseKernel (&kernels)[kElementTypes], const void* scalars, ElementType type,
                     std::size_t count, std::initializer_list<const void*> inputs,
                     std::initializer_list<void*> outputs, const ParallelFor& parallel_for);

}  // namespace onnxtrain
