// Chains of element-wise operators: every step runs over a block that stays in the L1 cache.
//
// Included by kernels.cpp only.
#pragma once

#include "kernels/elementwise.h"
#include "kernels/kernel_table.h"
#include "kernels/transcendental.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// 1 / (1 + exp(-x)), from exp of a negative number only.
inline float logistic(float x) {
  const float e = exp_single(x < 0.0f ? x : -x);
  return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

inline double logistic(double x) {
  const double e = __builtin_exp(x < 0.0 ? x : -x);
  return (x < 0.0 ? e : 1.0) / (1.0 + e);
}

// exp(x) of any x: the square of that of half, which does not overflow before it.
inline float exponential_of_any(float x) {
  const float half = 0.5f * (x < 176.0f ? x : x != x ? x : 176.0f);
  const float e = exp_single(half);
  return x < 88.8f || x != x ? e * e : __builtin_inff();
}

inline double exponential_of_any(double x) { return __builtin_exp(x); }

// log(1 + x) of x in [0, 1], to the precision of T.
inline float logarithm_of_more(float x) {
  const double wide = x;
  const double near = log2_approximate(1.0 + wide) * 0x1.62e42fefa39efp-1;
  return static_cast<float>(wide < 1e-3 ? wide * (1.0 - wide * (0.5 - wide * (1.0 / 3.0 - wide * 0.25))) : near);
}

inline double logarithm_of_more(double x) { return __builtin_log1p(x); }

template <typename T, typename Operation>
inline void map(std::size_t count, const T* a, const T* b, const T* c, T* y, Operation operation) {
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) y[i] = operation(a[i], b[i], c[i]);
}

// One step of a chain over `count` elements. Truth is 1 or 0.
template <typename T>
void elementwise_step(ElementwiseStep::Operator what, std::size_t count, const T* a, const T* b, const T* c, T* y) {
  switch (what) {
    case ElementwiseStep::kAbs: return map(count, a, a, a, y, [](T p, T, T) { return p < T(0) ? -p : p + T(0); });
    case ElementwiseStep::kAdd: return map(count, a, b, a, y, [](T p, T q, T) { return p + q; });
    case ElementwiseStep::kCast: return map(count, a, a, a, y, [](T p, T, T) { return p; });
    case ElementwiseStep::kDiv: return map(count, a, b, a, y, [](T p, T q, T) { return p / q; });
    case ElementwiseStep::kExp: return map(count, a, a, a, y, [](T p, T, T) { return exponential_of_any(p); });
    case ElementwiseStep::kGreater: return map(count, a, b, a, y, [](T p, T q, T) { return p > q ? T(1) : T(0); });
    case ElementwiseStep::kLess: return map(count, a, b, a, y, [](T p, T q, T) { return p < q ? T(1) : T(0); });
    case ElementwiseStep::kLog1p: return map(count, a, a, a, y, [](T p, T, T) { return logarithm_of_more(p); });
    case ElementwiseStep::kMax: return map(count, a, b, a, y, [](T p, T q, T) { return p > q || p != p ? p : q; });
    case ElementwiseStep::kMin: return map(count, a, b, a, y, [](T p, T q, T) { return p < q || p != p ? p : q; });
    case ElementwiseStep::kMul: return map(count, a, b, a, y, [](T p, T q, T) { return p * q; });
    case ElementwiseStep::kNeg: return map(count, a, a, a, y, [](T p, T, T) { return -p; });
    case ElementwiseStep::kRelu: return map(count, a, a, a, y, [](T p, T, T) { return p < T(0) ? T(0) : p; });
    case ElementwiseStep::kSigmoid: return map(count, a, a, a, y, [](T p, T, T) { return logistic(p); });
    case ElementwiseStep::kSign: return map(count, a, a, a, y, [](T p, T, T) { return p > T(0) ? T(1) : p < T(0) ? T(-1) : p; });
    case ElementwiseStep::kSub: return map(count, a, b, a, y, [](T p, T q, T) { return p - q; });
    case ElementwiseStep::kWhere: return map(count, a, b, c, y, [](T p, T q, T r) { return p != T(0) ? q : r; });
  }
}

// Elements [first, last). `scratch` holds tuning::kChainElements of every input and step.
template <typename T>
void elementwise(const ElementwiseCall& call, std::size_t first, std::size_t last, void* scratch) {
  constexpr std::size_t kBlock = tuning::kChainElements;
  const T* values[kMostChainInputs + kMostChainSteps];
  T* space = static_cast<T*>(scratch);
  for (std::size_t i = 0; i < call.inputs; ++i, space += kBlock) {
    values[i] = space;
    if (!call.is_number[i]) continue;
    const T number = *static_cast<const T*>(call.data[i]);
    for (std::size_t j = 0; j < kBlock; ++j) space[j] = number;
  }
  for (std::size_t begin = first; begin < last; begin += kBlock) {
    const std::size_t count = last - begin < kBlock ? last - begin : kBlock;
    for (std::size_t i = 0; i < call.inputs; ++i) {
      if (!call.is_number[i]) values[i] = static_cast<const T*>(call.data[i]) + begin;
    }
    T* result = static_cast<T*>(call.y) + begin;
    for (std::size_t s = 0; s < call.steps; ++s) {
      const ElementwiseStep& step = call.program[s];
      // The last step writes the result, which may be where an input was: no step reads it afterwards.
      T* y = s + 1 == call.steps ? result : space + s * kBlock;
      elementwise_step(step.what, count, values[step.operands[0]], values[step.operands[1]], values[step.operands[2]], y);
      values[call.inputs + s] = y;
    }
  }
}

}  // namespace
}  // namespace onnxtrain
