// Gradients of activations as nodes: inputs dy and the forward input or output; output dx.
#pragma once

#include <string>

#include "operators/fused_node.h"

namespace onnxtrain {

// dx = dy where y > 0, else 0 dy.
class ReluGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit ReluGradientNode(const Attributes&) {}
  void compute(const Call& call) const override;
};

// dx = dy where min <= x <= max, else 0; either bound is optional.
class ClipGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit ClipGradientNode(const Attributes&) {}
  void compute(const Call& call) const override;
};

// dx = dy (P(x) + x P'(x)), with Gelu's P exact, or approximated by tanh or by the logistic function of alpha x; and
// y = x P(x). Of a gated unit y f, given the factor f: dx from dy f, y f itself, and df = dy y.
class GeluGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit GeluGradientNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  std::string approximate_;
  double alpha_;
};

// Runs an element-wise kernel over whole tensors of one type, in blocks shared among threads.
void run_elementwise(const ElementwiseKernel (&kernels)[kElementTypes], const void* scalars, ElementType type,
                     std::size_t count, std::initializer_list<const void*> inputs,
                     std::initializer_list<void*> outputs, const ParallelFor& parallel_for);

}  // namespace onnxtrain
