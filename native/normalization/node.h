// Batch normalization in training mode with the activation behind it, and gradients of normalizations: inputs dy, x, scale,
// outputs dx, dscale, dbias.
#pragma once

#include "operators/fused_node.h"

namespace onnxtrain {

// ONNX's operator with training_mode = 1: y, and the running statistics of momentum times those given. An addend is added to
// y before the activation. The last two outputs are the statistics of the batch, as the gradient reads them.
class BatchNormalizationNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit BatchNormalizationNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  double epsilon_, momentum_;
  ActivationCall activation_;
};

// mean and variance, if given, are used as in inference; with training_mode = 1 they are the statistics of the batch that the
// forward pass kept; otherwise these are computed. dy is the gradient of the activation's result, which is y, and is given
// again where it is wanted. The first channels of the last input, another term of x's gradient, are added to dx.
class BatchNormalizationGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit BatchNormalizationGradientNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  double epsilon_;
  bool of_batch_;
  ActivationCall activation_;
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
