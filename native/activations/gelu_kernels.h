// The gradient of Gelu from dy and x, element-wise, optionally with Gelu itself recomputed.
//
// Included by kernels.cpp only. y = x P(x), P the normal distribution function, its tanh
// approximation, or the logistic function of alpha x (SiLU where alpha is 1).
#pragma once

#include "kernels/elementwise.h"
#include "kernels/kernel_table.h"
#include "kernels/transcendental.h"

namespace onnxtrain {
namespace {

// Clamps to [-bound, bound], beyond which the slope is 0 or 1 to the last digit; NaN stays NaN.
template <typename T>
inline T within(T x, T bound) {
  const T below = x > bound ? bound : x;
  return below < -bound ? -bound : below;
}

// P(x), and the slope P(x) + x P'(x).
template <typename T>
struct Gelu {
  T probability, slope;
};

// P is the normal distribution function, p its density. With z = |x|, the slope is p(z) (M(z) - z) at -z and 1 minus
// that at z. Mills' ratio M(z) = P(-z) / p(z) is t times a polynomial in t = 1 / (1 + 0.3 z), fitted to a relative
// error of 4e-9 for z up to 14.5. The sign of x is tested last: a compiler that sees it earlier computes both branches.
inline Gelu<float> gelu(float x) {
  const float size = __builtin_fabsf(x), z = size > 14.5f ? 14.5f : size;
  const float t = 1.0f / (1.0f + 0.3f * z);
  float ratio = -0.05169537f;
  ratio = ratio * t + 0.28183429f;
  ratio = ratio * t - 0.57204666f;
  ratio = ratio * t + 0.48073254f;
  ratio = ratio * t - 0.19908517f;
  ratio = ratio * t + 0.24102943f;
  ratio = ratio * t + 0.19649371f;
  ratio = ratio * t + 0.27631923f;
  ratio = ratio * t + 0.29972209f;
  ratio = ratio * t + 0.30001004f;
  const float density = 0.39894228f * exp_single(-0.5f * (z * z));
  const float beyond_z = density * (ratio * t), of_minus_z = density * (ratio * t - z);
  return {x < 0.0f ? beyond_z : 1.0f - beyond_z, x < 0.0f ? of_minus_z : 1.0f - of_minus_z};
}

inline Gelu<double> gelu(double x) {
  const double bounded = within(x, 40.0);
  const double density = 0.3989422804014327 * __builtin_exp(-0.5 * (bounded * bounded));
  const double probability = 0.5 * __builtin_erfc(-0.7071067811865476 * bounded);
  return {probability, probability + bounded * density};
}

inline float exponential(float t) { return exp_single(t); }
inline double exponential(double t) { return __builtin_exp(t); }

// The slope is P (1 + x (1 - P) v') with P = 1 / (1 + exp(-v)), v = 2 sqrt(2 / pi) (x + 0.044715 x^3).
template <typename T>
inline Gelu<T> gelu_tanh(T x) {
  constexpr T kFactor = static_cast<T>(1.5957691216057308), kCubic = static_cast<T>(0.044715);
  const T bounded = within(x, static_cast<T>(sizeof(T) == sizeof(float) ? 10 : 20));
  const T square = bounded * bounded;
  const T v = kFactor * bounded * (T(1) + kCubic * square);
  const T e = exponential(v < T(0) ? v : -v);
  const T smaller = e / (T(1) + e), larger = T(1) / (T(1) + e);  // the smaller and the larger of P and 1 - P
  const T probability = v < T(0) ? smaller : larger, rest = v < T(0) ? larger : smaller;
  return {probability, probability * (T(1) + bounded * rest * (kFactor * (T(1) + T(3) * kCubic * square)))};
}

// The slope is P (1 + v (1 - P)) with P = 1 / (1 + exp(-v)), v = alpha x.
template <typename T>
inline Gelu<T> gelu_logistic(T x, T alpha) {
  const T v = within(alpha * x, static_cast<T>(sizeof(T) == sizeof(float) ? 200 : 2000));
  const T e = exponential(v < T(0) ? v : -v);
  const T smaller = e / (T(1) + e), larger = T(1) / (T(1) + e);  // the smaller and the larger of P and 1 - P
  const T probability = v < T(0) ? smaller : larger, rest = v < T(0) ? larger : smaller;
  return {probability, probability * (T(1) + v * rest)};
}

enum class GeluKind { kExact, kTanh, kLogistic };

template <typename T, GeluKind kind>
inline Gelu<T> gelu_of(T x, T alpha) {
  return kind == GeluKind::kExact ? gelu(x) : kind == GeluKind::kTanh ? gelu_tanh(x) : gelu_logistic(x, alpha);
}

// dx = dy (P(x) + x P'(x)), and y = x P(x). With a third input, the factor f of a gated unit y f: dy is its gradient, dx
// takes dy f for it, the second result is y f, and the third is df = dy y.
template <typename T, GeluKind kind, bool with_result>
void gelu_gradient(const void* scalars, std::size_t count, const void* const* inputs, void* const* outputs) {
  const T *dy = static_cast<const T*>(inputs[0]), *x = static_cast<const T*>(inputs[1]);
  T *dx = static_cast<T*>(outputs[0]), *y = static_cast<T*>(outputs[with_result ? 1 : 0]);
  const T alpha = kind == GeluKind::kLogistic ? static_cast<T>(*static_cast<const double*>(scalars)) : T(1);
  // Both loops ask for what is read next: an exponential and a division an element fill the window of the CPU before.
  const T* factors = with_result ? static_cast<const T*>(inputs[2]) : nullptr;
  if (factors != nullptr) {
    T* df = static_cast<T*>(outputs[2]);
    for_each_element<T>(count, {dy, x, factors}, [=](std::size_t i) {
      const T value = x[i], factor = factors[i], gradient = dy[i];
      const Gelu<T> found = gelu_of<T, kind>(value, alpha);
      const T result = value * found.probability;
      dx[i] = gradient * factor * found.slope;
      y[i] = result * factor;
      df[i] = gradient * result;
    });
    return;
  }
  for_each_element<T>(count, {dy, x}, [=](std::size_t i) {
    const T value = x[i];
    const Gelu<T> found = gelu_of<T, kind>(value, alpha);
    dx[i] = dy[i] * found.slope;
    if (with_result) y[i] = value * found.probability;
  });
}

}  // namespace
}  // namespace onnxtrain
