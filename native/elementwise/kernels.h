// Chains of element-wise operators: every step runs over a block that stays in the L1 cache.
//
// Included by kernels.cpp only.
#pragma once

#include <utility>

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

inline double absolute_of(double x) { return x < 0.0 ? -x : x; }

// sin, cos and tan of |x| < 2**28: pi / 2 in two parts leaves the rest r in [-pi / 4, pi / 4], of whose sine and cosine
// minimax polynomials (of FreeBSD's msun) are off by 2**-36 at most.
constexpr float kLargestAngle = 0x1p28f;

enum class Angle { kSine, kCosine, kTangent };

template <Angle wanted>
inline float of_angle(float x) {
  const double wide = x;
  const double shifted = wide * 0x1.45f306dc9c883p-1 + kRounder;
  const double n = shifted - kRounder;
  const double r = (wide - n * 0x1.921fb50000000p0) - n * 0x1.110b4611a6263p-26;
  const double z = r * r;
  const double sine = r * (1.0 + z * (-0.166666666416265235595 + z * (0.0083333293858894631756 +
                                      z * (-0.000198393348360966317347 + z * 0.0000027183114939898219064))));
  const double cosine = 1.0 + z * (-0.499999997251031003120 + z * (0.0416666233237390631894 +
                                   z * (-0.00138867637746099294692 + z * 0.0000243904487962774090654)));
  const std::int64_t quarter = bits_of(shifted) + (wanted == Angle::kCosine ? 1 : 0);
  const bool odd = (quarter & 1) != 0;
  if (wanted == Angle::kTangent) return static_cast<float>((odd ? -cosine : sine) / (odd ? sine : cosine));
  const double value = odd ? cosine : sine;
  return static_cast<float>((quarter & 2) != 0 ? -value : value);
}

inline float hyperbolic_cosine(float x) {
  const double e = exp_nonpositive<float>(-absolute_of(x));
  return static_cast<float>(0.5 * (1.0 / e + e));
}

inline float hyperbolic_sine(float x) {
  const double wide = x;
  const double e = exp_nonpositive<float>(-absolute_of(wide));
  const double far = 0.5 * (1.0 / e - e);
  const double near = wide + wide * wide * wide * (1.0 / 6.0);
  return static_cast<float>(absolute_of(wide) < 1e-3 ? near : wide < 0.0 ? -far : far);
}

inline float inverse_hyperbolic_tangent(float x) {
  const double wide = x, size = absolute_of(wide);
  const double far = log2_approximate((1.0 + size) / (1.0 - size)) * 0x1.62e42fefa39efp-2;
  const double near = wide + wide * wide * wide * (1.0 / 3.0);
  const double some = size < 1.0 ? far : size == 1.0 ? kInfinity : __builtin_nan("");
  return static_cast<float>(size < 1e-3 ? near : wide < 0.0 ? -some : some);
}

// log(x) of any x, in single precision.
inline float logarithm_of_any(float x) {
  const bool is_small = x < 0x1p-126f;
  const float usable = is_small ? x * 0x1p23f : x;
  std::uint32_t bits;
  __builtin_memcpy(&bits, &usable, sizeof bits);
  const std::int32_t power = static_cast<std::int32_t>(bits - 0x3f3504f3u) >> 23;  // mantissas in [sqrt(1/2), sqrt(2))
  bits -= static_cast<std::uint32_t>(power) << 23;
  float mantissa;
  __builtin_memcpy(&mantissa, &bits, sizeof mantissa);
  const float e = static_cast<float>(power) - (is_small ? 23.0f : 0.0f);
  const float f = mantissa - 1.0f, z = f * f;
  float sum = 7.0376836292e-2f * f - 1.1514610310e-1f;  // the series of Cephes
  sum = sum * f + 1.1676998740e-1f;
  sum = sum * f - 1.2420140846e-1f;
  sum = sum * f + 1.4249322787e-1f;
  sum = sum * f - 1.6668057665e-1f;
  sum = sum * f + 2.0000714765e-1f;
  sum = sum * f - 2.4999993993e-1f;
  sum = sum * f + 3.3333331174e-1f;
  const float value = (f + ((sum * f * z - 2.12194440e-4f * e) - 0.5f * z)) + 0.693359375f * e;
  return x > 0.0f ? (x < __builtin_inff() ? value : x) : x == 0.0f ? -__builtin_inff() : __builtin_nanf("");
}

// a**b of a > 0, both finite.
inline float power(float a, float b) {
  const double y = b * log2_approximate(a);
  const double clamped = y < -200.0 ? -200.0 : y > 200.0 ? 200.0 : y;
  const double shifted = clamped + kRounder;
  return static_cast<float>(exp_series<float>((clamped - (shifted - kRounder)) * 0x1.62e42fefa39efp-1) *
                            power_of_two(shifted));
}

// The rest of |a| < 2**28 |b|, which is finite: exact, since the product has 52 digits.
inline float remainder_of(float a, float b) {
  const double size = absolute_of(a), divisor = absolute_of(b);
  const double rest = size - divisor * static_cast<double>(static_cast<std::int32_t>(size / divisor));
  return static_cast<float>(__builtin_copysign(rest < 0.0 ? rest + divisor : rest, static_cast<double>(a)));
}

template <typename T, typename Operation>
inline void map(std::size_t count, const T* const (&from)[4], T* y, Operation operation) {
  const T *a = from[0], *b = from[1], *c = from[2], *d = from[3];
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) y[i] = operation(a[i], b[i], c[i], d[i]);
}

// `fast` where `inside` holds, which it does for most blocks; the library's function elsewhere, and of doubles.
template <typename T, typename Inside, typename Fast, typename Exact>
inline void map_inside(std::size_t count, const T* const (&from)[4], T* y, Inside inside, Fast fast, Exact exact) {
  const T *a = from[0], *b = from[1];
  if constexpr (sizeof(T) == sizeof(float)) {
    std::uint32_t outside = 0;
    for (std::size_t i = 0; i < count; ++i) outside |= inside(a[i], b[i]) ? 0u : 1u;
    if (outside == 0) return map(count, from, y, [=](T p, T q, T, T) { return fast(p, q); });
    for (std::size_t i = 0; i < count; ++i) y[i] = inside(a[i], b[i]) ? fast(a[i], b[i]) : exact(a[i], b[i]);
  } else {
    for (std::size_t i = 0; i < count; ++i) y[i] = exact(a[i], b[i]);
  }
}

// The float function, or the library's for doubles.
#define ONNXTRAIN_BY_TYPE(single, wide)                                  \
  map(count, from, y, [](T p, T, T, T) {                                 \
    if constexpr (sizeof(T) == sizeof(float)) return single(p); else return wide(p); \
  })

// (a first b) second c.
template <typename T, int first, int second>
inline T pair_of(T a, T b, T c) {
  const T r = first == 0 ? a + b : first == 1 ? a - b : a * b;
  return second == 0 ? r + c : second == 1 ? r - c : second == 2 ? r * c : c - r;
}

template <typename T, int... which>
inline void map_pair(int wanted, std::size_t count, const T* const (&from)[4], T* y,
                     std::integer_sequence<int, which...>) {
  ((wanted == which
        ? map(count, from, y, [](T p, T q, T r, T) { return pair_of<T, which / 4, which % 4>(p, q, r); })
        : void()),
   ...);
}

// One step of a chain over `count` elements. Truth is 1 or 0.
template <typename T>
void elementwise_step(ElementwiseStep::Operator what, std::size_t count, const T* const (&from)[4], T* y) {
  const auto is_angle = [](T p, T) { return p < T(kLargestAngle) && p > T(-kLargestAngle); };
  switch (what) {
    case ElementwiseStep::kAbs: return map(count, from, y, [](T p, T, T, T) { return p < T(0) ? -p : p + T(0); });
    case ElementwiseStep::kAdd: return map(count, from, y, [](T p, T q, T, T) { return p + q; });
    case ElementwiseStep::kAtanh: return ONNXTRAIN_BY_TYPE(inverse_hyperbolic_tangent, __builtin_atanh);
    case ElementwiseStep::kCast: return map(count, from, y, [](T p, T, T, T) { return p; });
    case ElementwiseStep::kCos:
      return map_inside(count, from, y, is_angle, [](T p, T) { return of_angle<Angle::kCosine>(p); },
                        [](T p, T) { return static_cast<T>(__builtin_cos(p)); });
    case ElementwiseStep::kCosh: return ONNXTRAIN_BY_TYPE(hyperbolic_cosine, __builtin_cosh);
    case ElementwiseStep::kDiv: return map(count, from, y, [](T p, T q, T, T) { return p / q; });
    case ElementwiseStep::kEqual: return map(count, from, y, [](T p, T q, T, T) { return p == q ? T(1) : T(0); });
    case ElementwiseStep::kExp: return map(count, from, y, [](T p, T, T, T) { return exponential_of_any(p); });
    case ElementwiseStep::kGreater: return map(count, from, y, [](T p, T q, T, T) { return p > q ? T(1) : T(0); });
    case ElementwiseStep::kLess: return map(count, from, y, [](T p, T q, T, T) { return p < q ? T(1) : T(0); });
    case ElementwiseStep::kLog: return ONNXTRAIN_BY_TYPE(logarithm_of_any, __builtin_log);
    case ElementwiseStep::kLog1p: return map(count, from, y, [](T p, T, T, T) { return logarithm_of_more(p); });
    case ElementwiseStep::kMax: return map(count, from, y, [](T p, T q, T, T) { return p > q || p != p ? p : q; });
    case ElementwiseStep::kMin: return map(count, from, y, [](T p, T q, T, T) { return p < q || p != p ? p : q; });
    case ElementwiseStep::kMod:
      return map_inside(count, from, y,
                        [](T p, T q) {
                          const T size = q < T(0) ? -q : q;
                          return (p < T(0) ? -p : p) < T(0x1p28) * size && size < T(kInfinity);
                        },
                        [](T p, T q) { return remainder_of(p, q); },
                        [](T p, T q) { return static_cast<T>(__builtin_fmod(p, q)); });
    case ElementwiseStep::kMul: return map(count, from, y, [](T p, T q, T, T) { return p * q; });
    case ElementwiseStep::kNeg: return map(count, from, y, [](T p, T, T, T) { return -p; });
    case ElementwiseStep::kPow:
      return map_inside(count, from, y,
                        [](T p, T q) { return p > T(0) && p < T(kInfinity) && q < T(kInfinity) && q > T(-kInfinity); },
                        [](T p, T q) { return power(p, q); },
                        [](T p, T q) { return static_cast<T>(__builtin_pow(p, q)); });
    case ElementwiseStep::kRelu: return map(count, from, y, [](T p, T, T, T) { return p < T(0) ? T(0) : p; });
    case ElementwiseStep::kSigmoid: return map(count, from, y, [](T p, T, T, T) { return logistic(p); });
    case ElementwiseStep::kSign:
      return map(count, from, y, [](T p, T, T, T) { return p > T(0) ? T(1) : p < T(0) ? T(-1) : p; });
    case ElementwiseStep::kSin:
      return map_inside(count, from, y, is_angle, [](T p, T) { return of_angle<Angle::kSine>(p); },
                        [](T p, T) { return static_cast<T>(__builtin_sin(p)); });
    case ElementwiseStep::kSinh: return ONNXTRAIN_BY_TYPE(hyperbolic_sine, __builtin_sinh);
    case ElementwiseStep::kSub: return map(count, from, y, [](T p, T q, T, T) { return p - q; });
    case ElementwiseStep::kTan:
      return map_inside(count, from, y, is_angle, [](T p, T) { return of_angle<Angle::kTangent>(p); },
                        [](T p, T) { return static_cast<T>(__builtin_tan(p)); });
    case ElementwiseStep::kWhere: return map(count, from, y, [](T p, T q, T r, T) { return p != T(0) ? q : r; });
    case ElementwiseStep::kGreaterWhere: return map(count, from, y, [](T p, T q, T r, T s) { return p > q ? r : s; });
    case ElementwiseStep::kLessWhere: return map(count, from, y, [](T p, T q, T r, T s) { return p < q ? r : s; });
    case ElementwiseStep::kMinRelu:
      return map(count, from, y, [](T p, T q, T, T) {
        const T low = p < q || p != p ? p : q;
        return low < T(0) ? T(0) : low;
      });
    default: return map_pair(what - ElementwiseStep::kAddAdd, count, from, y, std::make_integer_sequence<int, 12>());
  }
}

#undef ONNXTRAIN_BY_TYPE

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
      const T* const from[4] = {values[step.operands[0]], values[step.operands[1]], values[step.operands[2]],
                                values[step.operands[3]]};
      elementwise_step(step.what, count, from, y);
      values[call.inputs + s] = y;
    }
  }
}

}  // namespace
}  // namespace onnxtrain
