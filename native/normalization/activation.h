// Activations behind a batch normalization: a value, and the gradient of the value that it was computed from.
//
// Included by kernels.cpp only. Each has the formulas, and the treatment of NaN, of the operator that it replaces.
#pragma once

#include "kernels/kernel_table.h"

namespace onnxtrain {
namespace {

template <typename T>
struct NoActivation {
  static constexpr bool kIsNone = true;
  T value(T x) const { return x; }
  T gradient(T dy, T) const { return dy; }
};

template <typename T>
struct ReluActivation {
  static constexpr bool kIsNone = false;
  T value(T x) const { return x < T(0) ? T(0) : x; }
  T gradient(T dy, T x) const { return x <= T(0) ? T(0) : dy; }  // chosen, as in ReluGradient
};

template <typename T>
struct ClipActivation {
  static constexpr bool kIsNone = false;
  T low, high;
  T value(T x) const {
    const T raised = x < low ? low : x;
    return raised > high ? high : raised;
  }
  T gradient(T dy, T x) const {
    const int within = static_cast<int>(x >= low) & static_cast<int>(x <= high);  // branch-free
    return within != 0 ? dy : T(0);
  }
};

// x min(max(x / 6 + 1/2, 0), 1).
template <typename T>
struct HardSwishActivation {
  static constexpr bool kIsNone = false;
  T value(T x) const {
    const T line = x * T(1.0 / 6.0) + T(0.5), raised = line < T(0) ? T(0) : line;
    return x * (raised > T(1) ? T(1) : raised);
  }
  T gradient(T dy, T x) const {
    const T beyond = x <= T(0) ? T(0) : dy, inside = dy * (x * T(1.0 / 3.0) + T(0.5));
    return (x < T(0) ? -x : x) < T(3) ? inside : beyond;
  }
};

// Returns run(activation) for the activation of a call.
template <typename T, typename Run>
void with_activation(const ActivationCall& call, Run run) {
  switch (call.kind) {
    case ActivationCall::kNone: return run(NoActivation<T>{});
    case ActivationCall::kRelu: return run(ReluActivation<T>{});
    case ActivationCall::kClip: return run(ClipActivation<T>{static_cast<T>(call.low), static_cast<T>(call.high)});
    case ActivationCall::kHardSwish: return run(HardSwishActivation<T>{});
  }
}

}  // namespace
}  // namespace onnxtrain
