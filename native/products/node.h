// Products of activations with weights, and the gradients by the weights, as nodes. Attributes: transB (0), whether the
// weights are [outputs, inputs]; compute, "float32" or, for inputs of type float, "bfloat16": factors are rounded to
// bfloat16, and sums are float; activation, "" or "Relu".
#pragma once

#include "operators/fused_node.h"

namespace onnxtrain {

enum class Compute { kAsGiven, kBfloat16 };

// y = activation(x w + b); x is [..., inputs], w [inputs, outputs]; b [outputs] may be left out.
// Beside x of type float w may be of half precision or bfloat16, too.
class LinearNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit LinearNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  Compute compute_;
  bool transposed_, relu_;
};

// From dy, w and x = activation(z): dz = dy wᵀ by what the activation got and, where they are wanted, dw and db.
// Beside dy of type float w may be of half precision or bfloat16, too.
class LinearGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit LinearGradientNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  Compute compute_;
  bool transposed_, relu_;
};

// From dy and x: dw in the order of w and, where it is wanted, db.
class LinearWeightGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit LinearWeightGradientNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  Compute compute_;
  bool transposed_, with_bias_;
};

// Products with the packed weights w [N, K] of ONNX Runtime's MatMulNBits. Attributes: K, N, bits (2, 4 or 8),
// block_size, and compute. Zero points are packed, or numbers, or left out: then they are the middle of the integers.
class FewBitsNode : public FusedNode {
 protected:
  explicit FewBitsNode(const Attributes& attributes);
  void multiply(const Inputs& inputs, const char* name, bool transposed, const Call& call) const;

 private:
  Compute compute_;
  std::int64_t inputs_, outputs_, bits_, block_;
};

// y [..., N] = x [..., K] wᵀ.
class MatMulNBitsNode final : public FewBitsNode {
 public:
  static const Signature kSignature;

  explicit MatMulNBitsNode(const Attributes& attributes) : FewBitsNode(attributes) {}
  void compute(const Call& call) const override;
};

// dx [..., K] = dy [..., N] w.
class MatMulNBitsGradientNode final : public FewBitsNode {
 public:
  static const Signature kSignature;

  explicit MatMulNBitsGradientNode(const Attributes& attributes) : FewBitsNode(attributes) {}
  void compute(const Call& call) const override;
};

}  // namespace onnxtrain
