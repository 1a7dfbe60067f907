// Batch normalization in training mode, and gradients of normalizations: inputs dy, x, scale, outputs dx, dscale, dbias.
#pragma once

#include "operators/fused_node.h"

namespace onnxtrain {

// ONNX's operator with training_mode = 1: y, and the running statistics of momentum times those given.
class BatchNormalizationNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit BatchNormalizationNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  double epsilon_, momentum_;
};

// mean and variance, if given, are used as in inference; otherwise the statistics of the batch.
class BatchNormalizationGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit BatchNormalizationGradientNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  double epsilon_;
};

// Over the axes from `axis` on; scale and bias have their shape. An output behind the others is the result of the
// normalization again; bias is read for it only.
class LayerNormalizationGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit LayerNormalizationGradientNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  std::int64_t axis_;
  double epsilon_;
};

// The same without mean and bias (RMS normalization).
class RMSNormalizationGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit RMSNormalizationGradientNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  std::int64_t axis_;
  double epsilon_;
};

}  // namespace onnxtrain
