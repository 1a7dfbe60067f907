// Linear layers and their weight gradients as nodes. Attributes: transB (0), for weights stored as [outputs, inputs];
// compute, "float32" or, for float inputs, "bfloat16": operands are rounded to bfloat16 and accumulated in float;
// activation, "" or "Relu".
//
// With float operands, a constant bool `mask` of the shape of w says where w may differ from zero: where it is sparse
// enough, products skip the rest, and dw is zero there. A w that is not zero elsewhere is multiplied as a dense one.
#pragma once

#include <memory>

#include "operators/compute.h"
#include "operators/fused_node.h"
#include "sparse/matrix.h"

namespace onnxtrain {

// y = activation(x w + b); x is [..., inputs], w [inputs, outputs]; b [outputs] is optional. With float x, w may be
// float16 or bfloat16.
class LinearNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit LinearNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  Compute compute_;
  bool transposed_, relu_;
  std::unique_ptr<const SparseMatrix> mask_;
};

// From dy, w and x = activation(z): dz = dy wᵀ times the activation's gradient and, if requested, dw and db. With float
// dy, w may be float16 or bfloat16.
class LinearGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit LinearGradientNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  Compute compute_;
  bool transposed_, relu_;
  std::unique_ptr<const SparseMatrix> mask_, gradient_mask_;
};

// From dy and x: dw in the layout of w and, if requested, db.
class LinearWeightGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit LinearWeightGradientNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  Compute compute_;
  bool transposed_, with_bias_;
  std::unique_ptr<const SparseMatrix> mask_;
};

// Linear layers with the packed weights w [N, K] of ONNX Runtime's MatMulNBits. Attributes: K, N, bits (2, 4 or 8),
// block_size, and compute. Zero points are packed, or floating-point, or absent: then they are the midpoint of the
// integers.
class LowBitNode : public FusedNode {
 protected:
  explicit LowBitNode(const Attributes& attributes);
  void multiply(const Inputs& inputs, const char* name, bool transposed, const Call& call) const;

 private:
  Compute compute_;
  std::int64_t inputs_, outputs_, bits_, block_;
};

// y [..., N] = x [..., K] wᵀ.
class MatMulNBitsNode final : public LowBitNode {
 public:
  static const Signature kSignature;

  explicit MatMulNBitsNode(const Attributes& attributes) : LowBitNode(attributes) {}
  void compute(const Call& call) const override;
};

// dx [..., K] = dy [..., N] w.
class MatMulNBitsGradientNode final : public LowBitNode {
 public:
  static const Signature kSignature;

  explicit MatMulNBitsGradientNode(const Attributes& attributes) : LowBitNode(attributes) {}
  void compute(const Call& call) const override;
};

}  // namespace onnxtrain
