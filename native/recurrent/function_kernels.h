// Activation functions of recurrent operators and their slopes, over runs of elements.
#pragma once

#include "kernels/elementwise.h"
#include "kernels/transcendental.h"
#include "recurrent/table.h"

namespace onnxtrain {
namespace {

inline float sigmoid(float x) {
  const float e = exp_single(-__builtin_fabsf(x));
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

inline double sigmoid(double x) {
  const double e = __builtin_exp(x < 0.0 ? x : -x);
  return (x < 0.0 ? e : 1.0) / (1.0 + e);
}

// Near 0, where 1 - e^-2z cancels, a series of degree 7 with a relative remainder below 6e-8.
inline float hyperbolic_tangent(float x) {
  const float z = __builtin_fabsf(x), e = exp_single(-2.0f * z);
  const float far = (1.0f - e) / (1.0f + e), q = x * x;
  const float near = x * (1.0f + q * (-1.0f / 3.0f + q * (2.0f / 15.0f + q * (-17.0f / 315.0f))));
  return z < 0.2f ? near : __builtin_copysignf(far, x);
}

inline double hyperbolic_tangent(double x) { return __builtin_tanh(x); }

template <typename T, typename Element>
inline void over_elements(std::size_t count, const T* x, T* y, Element element) {
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) y[i] = element(x[i]);
}

// y = f(x); y may be x.
template <typename T>
void apply(const Activation& f, std::size_t count, const T* x, T* y) {
  const T alpha = static_cast<T>(f.alpha), beta = static_cast<T>(f.beta);
  switch (f.function) {
    case Function::kSigmoid: return over_elements(count, x, y, [](T v) { return sigmoid(v); });
    case Function::kTanh: return over_elements(count, x, y, [](T v) { return hyperbolic_tangent(v); });
    case Function::kRelu: return over_elements(count, x, y, [](T v) { return v < T(0) ? T(0) : v; });
    case Function::kAffine: return over_elements(count, x, y, [=](T v) { return alpha * v + beta; });
    case Function::kLeakyRelu: return over_elements(count, x, y, [=](T v) { return v < T(0) ? alpha * v : v; });
    case Function::kThresholdedRelu: return over_elements(count, x, y, [=](T v) { return v <= alpha ? T(0) : v; });
    case Function::kScaledTanh: return over_elements(count, x, y, [=](T v) { return alpha * hyperbolic_tangent(beta * v); });
    case Function::kHardSigmoid:
      return over_elements(count, x, y, [=](T v) {
        const T line = alpha * v + beta, above = line < T(0) ? T(0) : line;
        return above > T(1) ? T(1) : above;
      });
    case Function::kElu:
      return over_elements(count, x, y, [=](T v) {
        return v < T(0) ? static_cast<T>(f.alpha * __builtin_expm1(static_cast<double>(v))) : v;
      });
    case Function::kSoftsign: return over_elements(count, x, y, [](T v) { return v / (T(1) + (v < T(0) ? -v : v)); });
    case Function::kSoftplus:
      return over_elements(count, x, y, [](T v) {
        const double wide = static_cast<double>(v);
        return static_cast<T>((wide > 0 ? wide : 0) + __builtin_log1p(__builtin_exp(wide > 0 ? -wide : wide)));
      });
  }
}

// s = f'(x), from x and y = f(x); x is not read for the first three functions. s may be y.
template <typename T>
void slopes(const Activation& f, std::size_t count, const T* x, const T* y, T* s) {
  const T alpha = static_cast<T>(f.alpha), beta = static_cast<T>(f.beta);
  switch (f.function) {
    case Function::kSigmoid: return over_elements(count, y, s, [](T v) { return v * (T(1) - v); });
    case Function::kTanh: return over_elements(count, y, s, [](T v) { return (T(1) - v) * (T(1) + v); });
    case Function::kRelu: return over_elements(count, y, s, [](T v) { return v > T(0) ? T(1) : T(0); });
    case Function::kAffine: return over_elements(count, x, s, [=](T) { return alpha; });
    case Function::kLeakyRelu: return over_elements(count, x, s, [=](T v) { return v < T(0) ? alpha : T(1); });
    case Function::kThresholdedRelu: return over_elements(count, x, s, [=](T v) { return v > alpha ? T(1) : T(0); });
    case Function::kScaledTanh:
      return over_elements(count, x, s, [=](T v) {
        const T t = hyperbolic_tangent(beta * v);
        return alpha * beta * ((T(1) - t) * (T(1) + t));
      });
    case Function::kHardSigmoid:
      return over_elements(count, x, s, [=](T v) {
        const T line = alpha * v + beta;
        return line > T(0) && line < T(1) ? alpha : T(0);
      });
    case Function::kElu:
      return over_elements(count, x, s, [=](T v) {
        return v < T(0) ? static_cast<T>(f.alpha * __builtin_exp(static_cast<double>(v))) : T(1);
      });
    case Function::kSoftsign:
      return over_elements(count, x, s, [](T v) {
        const T size = T(1) + (v < T(0) ? -v : v);
        return T(1) / (size * size);
      });
    case Function::kSoftplus: return over_elements(count, x, s, [](T v) { return sigmoid(v); });
  }
}

}  // namespace
}  // namespace onnxtrain
