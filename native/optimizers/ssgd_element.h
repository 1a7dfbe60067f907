// SSGD of one element: its measure and its update. Templates over `Some` or `Wide` also accept vectors if lanes.h is
// included before.
#pragma once

#include "anywhere.h"
#include "kernels/transcendental.h"
#include "kernels/widening.h"
#include "optimizers/ssgd_scalars.h"

namespace onnxtrain {
namespace {

ONNXTRAIN_ANYWHERE constexpr bool is_simple(Measure measure) {
  return measure == kLogSum || measure == kArctan || measure == kGemanMcClure;
}

// h(z) = 1 / f'(z) without its constant factor.
template <Measure measure, typename Wide>
ONNXTRAIN_ANYWHERE inline Wide simple_h(const MeasureScalars& m, const Wide& z) {
  if constexpr (measure == kLogSum) return z + m.epsilon;
  if constexpr (measure == kArctan) return z * z + m.epsilon * m.epsilon;
  if constexpr (measure == kGemanMcClure) return (z + m.epsilon) * (z + m.epsilon);
}

// The same for the other measures, relative to the largest z (see MeasureScalars).
template <typename T, Measure measure>
ONNXTRAIN_ANYWHERE inline double relative_h(const MeasureScalars& m, double z) {
  switch (measure) {
    case kPNorm:
      return sizeof(T) == sizeof(float) ? power_of_float(z, m.exponent) : __builtin_pow(z, m.exponent);
    case kExponential:
      return exp_nonpositive<T>((z - m.largest) * m.inverse_epsilon);
    default: {  // tanh: cosh(t)^2 = e^(2t) (1 + e^(-2t))^2 / 4
      const double folded = 1.0 + exp_nonpositive<T>(-2.0 * (z * m.inverse_epsilon));
      return exp_nonpositive<T>(2.0 * ((z - m.largest) * m.inverse_epsilon)) * (folded * folded);
    }
  }
}

template <bool l1, typename Wide>
ONNXTRAIN_ANYWHERE inline Wide measured(const Wide& value) {
  if constexpr (l1) return absolute(value);
  return value * value;
}

// The update for a simple measure, of one element or of a vector.
template <typename T>
class SimpleDescent {
 public:
  ONNXTRAIN_ANYWHERE explicit SimpleDescent(const SsgdScalars& scalars)
      : measure_(scalars.measure),
        rate_(scalars.rate * scalars.inverse_mean),
        cap_(scalars.cap / scalars.inverse_mean),
        shrinkage_(scalars.shrinkage),
        factor_(static_cast<T>(2.0 * scalars.shrinkage)),
        norm_coefficient_(static_cast<T>(scalars.norm_coefficient)),
        alpha_(static_cast<T>(scalars.alpha)) {}

  // x becomes the new X, v the new V.
  template <Measure measure, bool l1, bool with_momentum, bool regularized, bool capped, typename Some>
  ONNXTRAIN_ANYWHERE inline void take(Some& x, Some g, Some& v) const {
    const auto h = simple_h<measure>(measure_, measured<l1>(widen(x)));
    const auto squares = l1 ? h * h : h;
    const Some step = narrow<T>(rate_ * (capped ? at_most(cap_, squares) : squares));
    g += norm_coefficient_ * x;
    if (with_momentum) g += alpha_ * v;
    v = g;
    const Some moved = x - step * g;
    if (!regularized) {
      x = moved;
    } else if (l1) {
      const Some size = narrow<T>(shrinkage_ * h);
      x = moved - (x > 0 ? size : x < 0 ? -size : x * 0);
    } else {
      x = moved - factor_ * x;
    }
  }

 private:
  MeasureScalars measure_;
  double rate_, cap_, shrinkage_;  // rate / mean(w^2), and the cap on its factor
  T factor_, norm_coefficient_, alpha_;
};

// The update for the other measures, given h.
template <typename T>
class RelativeDescent {
 public:
  ONNXTRAIN_ANYWHERE explicit RelativeDescent(const SsgdScalars& scalars)
      : rate_(scalars.rate),
        inverse_mean_(scalars.inverse_mean),
        cap_(scalars.cap),
        norm_coefficient_(static_cast<T>(scalars.norm_coefficient)),
        alpha_(static_cast<T>(scalars.alpha)) {}

  // X - rate * s * D; with `square`, for l1, s is derived from h^2. x becomes the new X, v the new V.
  template <bool square, bool with_momentum>
  ONNXTRAIN_ANYWHERE inline void take(double h, T& x, T g, T& v) const {
    const double s = (square ? h * h : h) * inverse_mean_;
    const T step = static_cast<T>(rate_ * at_most(cap_, s));
    g = norm_coefficient_ * x + g;
    v = with_momentum ? alpha_ * v + g : g;
    x = x - step * v;
  }

 private:
  double rate_, inverse_mean_, cap_;
  T norm_coefficient_, alpha_;
};

// The amount by which l1 regularization shrinks an element: h * sign(x), times a factor of the layer.
template <typename T>
ONNXTRAIN_ANYWHERE inline T shrinkage_of(double shrinkage, double h, T x) {
  const T size = static_cast<T>(shrinkage * h);
  return x > 0 ? size : x < 0 ? -size : x * 0;
}

}  // namespace
}  // namespace onnxtrain
