// Sums in float64, in lanes that are combined in a fixed order: the same bits for every vector width.
//
// Included by kernels.cpp only. Element i of a sum goes to lane i % kSumLanes; the compiler sees vectors as wide as the
// instruction set has them.
#pragma once

#include <cstddef>

namespace onnxtrain {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t kVectorBytes = 64;
#else
constexpr std::size_t kVectorBytes = 32;
#endif
constexpr std::size_t kVectorWidth = kVectorBytes / sizeof(double);

typedef double WideVector __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
typedef double DoubleVector __attribute__((vector_size(kVectorBytes), aligned(8), may_alias));
typedef float FloatVector __attribute__((vector_size(kVectorBytes / 2), aligned(4), may_alias));

inline void load(const float* source, WideVector& value) {
  value = __builtin_convertvector(*reinterpret_cast<const FloatVector*>(source), WideVector);
}

inline void load(const double* source, WideVector& value) { value = *reinterpret_cast<const DoubleVector*>(source); }

constexpr std::size_t kSumLanes = 8;
constexpr std::size_t kLaneVectors = kSumLanes / kVectorWidth;

// One sum in the making.
struct LaneSum {
  WideVector lanes[kLaneVectors] = {};

  double total() const {
    double each[kSumLanes];
    for (std::size_t v = 0; v < kLaneVectors; ++v) {
      for (std::size_t i = 0; i < kVectorWidth; ++i) each[v * kVectorWidth + i] = lanes[v][i];
    }
    return ((each[0] + each[4]) + (each[2] + each[6])) + ((each[1] + each[5]) + (each[3] + each[7]));
  }
};

// The last elements of a run as a full set of lanes: those that are missing are `fill`.
template <typename T>
inline void pad_lanes(const T* source, std::size_t count, T fill, T* lanes) {
  for (std::size_t i = 0; i < kSumLanes; ++i) lanes[i] = i < count ? source[i] : fill;
}

// A float64 number as a sum of two of the tensor's type, so that x - value keeps its digits where x is near it.
template <typename T>
struct Split {
  T high, low;
  explicit Split(double value) : high(static_cast<T>(value)), low(static_cast<T>(value - static_cast<double>(high))) {}
};

}  // namespace
}  // namespace onnxtrain
