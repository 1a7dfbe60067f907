// Conversion of one element between a tensor's type and float64, and clamping; lanes.h has the vector forms.
#pragma once

#include "anywhere.h"

namespace onnxtrain {
namespace {

ONNXTRAIN_ANYWHERE inline double widen(double value) { return value; }

template <typename T>
ONNXTRAIN_ANYWHERE inline T narrow(double value) {
  return static_cast<T>(value);
}

// The smaller value; NaN if `value` is NaN.
ONNXTRAIN_ANYWHERE inline double at_most(double bound, double value) { return bound < value ? bound : value; }

ONNXTRAIN_ANYWHERE inline double absolute(double value) { return __builtin_fabs(value); }

}  // namespace
}  // namespace onnxtrain
