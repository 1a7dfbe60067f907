// exp and pow in float64, written so that the compiler vectorizes them.
//
// Included by files that are compiled once per instruction set. Branch-free arithmetic on doubles and their bits,
// without tables or library calls.
#pragma once

#include <cstdint>

#include "anywhere.h"

namespace onnxtrain {
namespace {

ONNXTRAIN_ANYWHERE inline std::int64_t bits_of(double value) {
  std::int64_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

ONNXTRAIN_ANYWHERE inline double from_bits(std::int64_t bits) {
  double value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// 2**k for the integer k in the low bits of `shifted`, |k| <= 1022.
ONNXTRAIN_ANYWHERE inline double power_of_two(double shifted) {
  const auto bits = static_cast<std::uint64_t>(bits_of(shifted)) << 52;
  return from_bits(static_cast<std::int64_t>(bits + (std::uint64_t{1023} << 52)));
}

// Adding and subtracting this rounds a double below 2**51 to the nearest integer and leaves the integer in the low
// bits.
constexpr double kRounder = 0x1.8p52;

// e**r for |r| <= 0.35: Taylor series of degree 13 for float64, remainder below 1e-17; of degree 8 for values that
// become float32, remainder below 3e-10.
template <typename T>
ONNXTRAIN_ANYWHERE inline double exp_series(double r) {
  double sum = 1.0 / 40320.0;
  if (sizeof(T) == sizeof(double)) {
    sum = 1.0 / 6227020800.0;
    sum = sum * r + 1.0 / 479001600.0;
    sum = sum * r + 1.0 / 39916800.0;
    sum = sum * r + 1.0 / 3628800.0;
    sum = sum * r + 1.0 / 362880.0;
    sum = sum * r + 1.0 / 40320.0;
  }
  sum = sum * r + 1.0 / 5040.0;
  sum = sum * r + 1.0 / 720.0;
  sum = sum * r + 1.0 / 120.0;
  sum = sum * r + 1.0 / 24.0;
  sum = sum * r + 1.0 / 6.0;
  sum = sum * r + 0.5;
  return 1.0 + (r + r * r * sum);
}

// e**t for t <= 0, to the precision of T; 0 below 1e-307. NaN stays NaN.
template <typename T>
ONNXTRAIN_ANYWHERE inline double exp_nonpositive(double t) {
  const double clamped = t < -707.0 ? -707.0 : t;
  const double shifted = clamped * 0x1.71547652b82fep0 + kRounder;  // log2(e)
  const double k = shifted - kRounder;
  // ln 2 split in two; the first part has trailing zeros, so that k times it is exact.
  const double r = (clamped - k * 0x1.62e42fefa0000p-1) - k * 0x1.cf79abc9e3b3ap-40;
  const double value = exp_series<T>(r) * power_of_two(shifted);
  return t < -707.0 ? 0.0 : value;
}

// log2 of a positive normal number; absolute error below 1e-10.
ONNXTRAIN_ANYWHERE inline double log2_approximate(double value) {
  // Split off the exponent so that the mantissa lies in [sqrt(1/2), sqrt(2)).
  const std::int64_t bits = bits_of(value);
  const std::int64_t offset = bits - 0x3fe6a09e667f3bcd;
  // Converts the exponent without a 64-bit integer conversion, which older instruction sets lack.
  const auto biased = (static_cast<std::uint64_t>(offset) >> 52) & 0xfff;
  const auto wrapped = static_cast<std::int64_t>((biased ^ 0x800) | 0x4330000000000000);
  const double exponent = from_bits(wrapped) - (0x1p52 + 2048.0);
  const auto removed = static_cast<std::int64_t>(static_cast<std::uint64_t>(offset) & 0xfff0000000000000);
  const double mantissa = from_bits(static_cast<std::int64_t>(static_cast<std::uint64_t>(bits) -
                                                              static_cast<std::uint64_t>(removed)));
  const double f = (mantissa - 1.0) / (mantissa + 1.0);  // |f| < 0.172
  const double q = f * f;
  double sum = 1.0 / 11.0;
  sum = sum * q + 1.0 / 9.0;
  sum = sum * q + 1.0 / 7.0;
  sum = sum * q + 1.0 / 5.0;
  sum = sum * q + 1.0 / 3.0;
  return exponent + 0x1.71547652b82fep0 * (2.0 * (f + f * q * sum));
}

// Natural logarithm of a normal number >= 1. NaN stays NaN.
inline double logarithm(double value) {
  const double near = log2_approximate(value) * 0x1.62e42fefa39efp-1;
  return near + (value * exp_nonpositive<double>(-near) - 1.0);
}

constexpr double kInfinity = __builtin_inf();

// z**exponent for a float32 value z >= 0 and 0 <= exponent <= 1: relative error below 1e-9, a hundredth of a float32
// ulp.
ONNXTRAIN_ANYWHERE inline double power_of_float(double z, double exponent) {
  const double usable = z > 0.0 && z < kInfinity ? z : 1.0;
  const double y = exponent * log2_approximate(usable);
  const double shifted = y + kRounder;
  const double value =
      exp_series<float>((y - (shifted - kRounder)) * 0x1.62e42fefa39efp-1) * power_of_two(shifted);
  // 0, infinity and NaN; anything to the power of 0 is 1.
  const double special = exponent > 0.0 ? z : 1.0;
  return z > 0.0 && z < kInfinity ? value : special;
}

// e**t in single precision for t <= 80, of a float or a vector of floats: relative error below 3e-7; 0 below 1e-37. NaN
// stays NaN. Bits: unsigned integers of the same size.
template <typename Float, typename Bits>
inline Float exp_of_single(Float t) {
  const Float lowest = Float{} - 87.0f;
  const Float clamped = t < lowest ? lowest : t;
  const Float shifted = clamped * 0x1.715476p0f + 0x1.8p23f;  // rounds to an integer in the low bits
  const Float k = shifted - 0x1.8p23f;
  const Float r = (clamped - k * 0x1.62e400p-1f) - k * 0x1.7f7d1cp-20f;
  Float sum = r * (1.0f / 5040.0f) + 1.0f / 720.0f;
  sum = sum * r + 1.0f / 120.0f;
  sum = sum * r + 1.0f / 24.0f;
  sum = sum * r + 1.0f / 6.0f;
  sum = sum * r + 0.5f;
  Bits bits;
  __builtin_memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + (std::uint32_t{127} << 23);
  Float power;
  __builtin_memcpy(&power, &bits, sizeof power);
  return t < lowest ? Float{} : (1.0f + (r + r * r * sum)) * power;
}

inline float exp_single(float t) { return exp_of_single<float, std::uint32_t>(t); }

// e**logarithm for a logarithm that is <= 0 up to rounding.
inline float probability(float logarithm) { return exp_single(logarithm); }
inline double probability(double logarithm) { return exp_nonpositive<double>(logarithm); }

}  // namespace
}  // namespace onnxtrain
