// Convolutions and their gradients as nodes. Attributes as of ONNX's Conv, without auto_pad; kernel_shape is required. With
// `compute` = "bfloat16" the operands of a convolution of one group are rounded to bfloat16.
#pragma once

#include "convolution/convolution.h"
#include "operators/compute.h"
#include "operators/fused_node.h"

namespace onnxtrain {

// y = x * w + b; b is optional.
class ConvNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit ConvNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  ConvolutionAttributes attributes_;
  Compute compute_;
};

// dx from dy, w and the shape of x.
class ConvInputGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit ConvInputGradientNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  ConvolutionAttributes attributes_;
  Compute compute_;
};

// dw from dy and x.
class ConvWeightGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit ConvWeightGradientNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  ConvolutionAttributes attributes_;
  Compute compute_;
};

}  // namespace onnxtrain
