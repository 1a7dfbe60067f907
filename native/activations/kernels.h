// Gradients of activations, element-wise.
//
// Included by kernels.cpp only.
#pragma once

#include "kernels/elementwise.h"
#include "kernels/kernel_table.h"

namespace onnxtrain {
namespace {

// dx = 0 where y <= 0, else dy. Chosen, not multiplied: dy is infinite in sqrt(relu(x)) where x < 0.
template <typename T>
void relu_gradient(const void*, std::size_t count, const void* const* inputs, void* const* outputs) {
  const T *dy = static_cast<const T*>(inputs[0]), *y = static_cast<const T*>(inputs[1]);
  T* dx = static_cast<T*>(outputs[0]);
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) {
    const T slope = dy[i];
    dx[i] = y[i] <= T(0) ? T(0) : slope;
  }
}

// dx = dy where low <= x <= high, else 0, and y = min(max(x, low), high).
template <typename T, bool with_result>
void clip_gradient(const void* scalars, std::size_t count, const void* const* inputs, void* const* outputs) {
  const auto& s = *static_cast<const ClipScalars*>(scalars);
  const T low = static_cast<T>(s.low), high = static_cast<T>(s.high);
  const T *dy = static_cast<const T*>(inputs[0]), *x = static_cast<const T*>(inputs[1]);
  T *dx = static_cast<T*>(outputs[0]), *y = static_cast<T*>(outputs[with_result ? 1 : 0]);
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) {
    const T slope = dy[i], value = x[i];
    const int within = static_cast<int>(value >= low) & static_cast<int>(value <= high);  // branch-free
    dx[i] = within != 0 ? slope : T(0);
    if (with_result) {
      const T raised = value < low ? low : value;
      y[i] = raised > high ? high : raised;
    }
  }
}

}  // namespace
}  // namespace onnxtrain
