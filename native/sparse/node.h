// Linear layers and convolutions with sparse constant weights as nodes, and the convolution in front of them that stays
// dense. Attributes of those with sparse weights: shape [block rows, depth, block] of
// the weights, lower and upper limits of y. Inputs: x; values [blocks, block] and uint16 deltas [blocks] of the blocks'
// flat indices in [block rows, depth], both constant; bias [outputs]; and a residual, of the shape of y or one value,
// that is added before the limits.
#pragma once

#include <memory>
#include <vector>

#include "convolution/convolution.h"
#include "operators/fused_node.h"
#include "sparse/matrix.h"
#include "sparse/pooled.h"
#include "sparse/products.h"
#include "sparse/table.h"

namespace onnxtrain {

class SparseNode : public FusedNode {
 protected:
  explicit SparseNode(const Attributes& attributes);
  SparseEnding ending(const Inputs& inputs, const std::vector<std::int64_t>& residual_shape) const;
  void require_float(const Inputs& inputs) const;

  SparseMatrix weights_;
  std::vector<Tensor> constants_;  // by input: constants are not read again in every call
  float lower_, upper_;
  std::unique_ptr<const Memory> memory_;
};

// y [..., outputs] from x [..., depth]. Attributes x_panel and y_panel: the rows of panels as which x is, and y becomes,
// transposed in memory (TransposedRows); their shapes stay the same.
class SparseLinearNode final : public SparseNode {
 public:
  static const Signature kSignature;

  explicit SparseLinearNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  TransposedRows transposed_;
};

// y, of the shape of x [..., columns]: x as nodes SparseLinear read it with an x_panel of attribute `panel`.
class TransposeRowsNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit TransposeRowsNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  std::size_t panel_;
};

// y [images, outputs, ...] from x [images, channels, ...]: a convolution over one or two axes with the attributes of
// ONNX's Conv, without auto_pad and group; the depth of the weights is [channels, kernel]. Attributes x_pads,
// y_pads and residual_pads, laid out like pads, say what is around the images in memory: zeros around x, which are not
// part of it and are read in place of padding; zeros around the windows of y; and elements around those of the residual.
class SparseConvNode final : public SparseNode {
 public:
  static const Signature kSignature;

  explicit SparseConvNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  ConvolutionAttributes attributes_;
  std::vector<std::int64_t> x_pads_, y_pads_, residual_pads_;
};

// A convolution over two axes with dense constant weights, Relu, and MaxPool with strides of 2. Inputs: x [images,
// channels, ...], w [outputs, channels, kernel], bias [outputs]. Attributes: kernel_shape, strides and pads of the
// convolution, pool_shape and pool_pads of MaxPool, and y_pads, zeros around y in memory.
class ConvReluMaxPoolNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit ConvReluMaxPoolNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  ConvolutionAttributes attributes_;
  std::vector<std::int64_t> w_shape_, pool_shape_, pool_pads_, y_pads_;
  std::unique_ptr<const TileWeights> weights_;
  std::unique_ptr<const Memory> memory_;
};

}  // namespace onnxtrain
