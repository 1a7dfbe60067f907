// Sums in float64, in lanes that are combined in a fixed order: the same bits for every vector width.
//
// Included by files that are compiled once per instruction set. Element i is added to lane i % kSumLanes; vectors are
// as wide as the instruction set's.
#pragma once

#include <cstddef>

#include "kernels/vector.h"
#include "kernels/widening.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace onnxtrain {
namespace {

// float64 vectors: the native width, at least four, which matches one vector of floats.
constexpr std::size_t kWideLanes = kVectorBytes < 32 ? 4 : kVectorBytes / sizeof(double);

typedef double WideVector __attribute__((vector_size(kWideLanes * sizeof(double))));
typedef double DoubleVector __attribute__((vector_size(kWideLanes * sizeof(double)), aligned(8), may_alias));
typedef float FloatVector __attribute__((vector_size(kWideLanes * sizeof(float)), aligned(4), may_alias));

// As many elements of type T as a WideVector has.
template <typename T>
struct Few {
  typedef T type __attribute__((vector_size(sizeof(T) * kWideLanes)));
};

// Conversion between the tensor's type and float64, for one element or for a vector.
inline WideVector widen(const WideVector& value) { return value; }

#if defined(__AVX512F__)
// GCC emits two conversions and shuffles for a single instruction.
inline WideVector widen(const Few<float>::type& value) { return (WideVector)_mm512_cvtps_pd((__m256)value); }
#else
inline WideVector widen(const Few<float>::type& value) { return __builtin_convertvector(value, WideVector); }
#endif

template <typename T>
inline typename Few<T>::type narrow(const WideVector& value) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == sizeof(float)) return (typename Few<T>::type)_mm512_cvtpd_ps((__m512d)value);
#endif
  return __builtin_convertvector(value, typename Few<T>::type);
}

inline WideVector at_most(double bound, const WideVector& value) {
  const WideVector bounds = bound - WideVector{};
  return bounds < value ? bounds : value;
}

inline WideVector absolute(const WideVector& value) { return value < 0.0 ? -value : value; }

inline Few<float>::type few(const float* source) { return *reinterpret_cast<const FloatVector*>(source); }
inline Few<double>::type few(const double* source) { return *reinterpret_cast<const DoubleVector*>(source); }
inline void store(float* target, const Few<float>::type& value) { *reinterpret_cast<FloatVector*>(target) = value; }
inline void store(double* target, const Few<double>::type& value) { *reinterpret_cast<DoubleVector*>(target) = value; }

template <typename T>
inline void load(const T* source, WideVector& value) {
  value = widen(few(source));
}

constexpr std::size_t kSumLanes = 8;
constexpr std::size_t kLaneVectors = kSumLanes / kWideLanes;

// A sum in progress.
struct LaneSum {
  WideVector lanes[kLaneVectors] = {};

  double total() const {
    double each[kSumLanes];
    for (std::size_t v = 0; v < kLaneVectors; ++v) {
      for (std::size_t i = 0; i < kWideLanes; ++i) each[v * kWideLanes + i] = lanes[v][i];
    }
    return ((each[0] + each[4]) + (each[2] + each[6])) + ((each[1] + each[5]) + (each[3] + each[7]));
  }
};

// The last elements of a run, padded with `fill` to a full set of lanes.
template <typename T>
inline void pad_lanes(const T* source, std::size_t count, T fill, T* lanes) {
  for (std::size_t i = 0; i < kSumLanes; ++i) lanes[i] = i < count ? source[i] : fill;
}

// Splits a float64 value into two of the tensor's type, so that x - value keeps its digits where x is close.
template <typename T>
struct Split {
  T high, low;
  explicit Split(double value) : high(static_cast<T>(value)), low(static_cast<T>(value - static_cast<double>(high))) {}
};

}  // namespace
}  // namespace onnxtrain
