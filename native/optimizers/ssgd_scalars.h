// Scalar arguments of SSGD's kernels.
#pragma once

namespace onnxtrain {

enum Measure : int { kLogSum = 0, kPNorm, kArctan, kGemanMcClure, kExponential, kTanh };
inline constexpr int kMeasures = 6;

// A diversity measure g(u) = f(z), with z = u^2 (reweighted l2) or |u| (reweighted l1). With h(z) = 1 / f'(z), w^2 is h
// for l2 and h^2 for l1. Kernels evaluate h without its constant factor, and for the exponential and tanh measures
// relative to the largest z of the layer, to avoid overflow.
struct MeasureScalars {
  bool l1;
  double epsilon;
  double inverse_epsilon;
  double exponent;  // p-norm: h(z) is z**exponent
  double largest;   // exponential and tanh: the z to which h is relative
  const double* z;  // of each element's block; null: each element has its own
};

struct LayerSum {
  double sum;      // of w^2, in the relative form above
  double largest;  // z
};

// One layer's update: s = min(w^2 * inverse_mean, cap).
struct SsgdScalars {
  MeasureScalars measure;
  double rate, norm_coefficient, alpha, inverse_mean, cap;
  double shrinkage;  // rate * regularization / (h's factor * mean), 0 without regularization
  bool momentum;
};

}  // namespace onnxtrain
