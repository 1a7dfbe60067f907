// Transforms as nodes: samples at the points of a grid, the discrete Fourier transform, and the gradient of determinants.
#pragma once

#include <vector>

#include "operators/fused_node.h"
#include "transforms/table.h"

namespace onnxtrain {

// Bilinear: inputs x [n, c, h, w] and grid [n, i, j, 2], output y [n, c, i, j]; as ONNX's GridSample.
class GridSampleNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit GridSampleNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  GridSampleCall attributes_;
};

// Inputs dy, x and grid, outputs dx and dgrid.
class GridSampleGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit GridSampleGradientNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  GridSampleCall attributes_;
};

// From x, zeros behind it or its end cut off, to the first `bins` bins of the transform of `length` elements along `axis`; the
// last axis has the real and the imaginary part, or the real one. The inverse has the other sign; `divided` by the length.
class FourierNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit FourierNode(const Attributes& attributes);
  void compute(const Call& call) const override;

 private:
  std::int64_t axis_, length_, bins_, parts_;
  double scale_;
  std::vector<std::size_t> factors_;
  std::vector<float> turns_;
  std::vector<double> double_turns_;
};

// Inputs dy [...] and x [..., n, n], output dx: dy times the cofactors of x, also of a singular one.
class DetGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit DetGradientNode(const Attributes&) {}
  void compute(const Call& call) const override;
};

}  // namespace onnxtrain
