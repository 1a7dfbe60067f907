// Adagrad, Adam and Momentum, element by element, in the order of operations of the ONNX operator pages.
//
// Included by kernels.cpp only.
#pragma once

#include "kernels/elementwise.h"
#include "kernels/kernel_table.h"

namespace onnxtrain {
namespace {

template <typename T>
void adagrad(const void* scalars, std::size_t count, const void* const* inputs, void* const* outputs) {
  const auto& s = *static_cast<const AdagradScalars*>(scalars);
  const T rate = static_cast<T>(s.rate), norm_coefficient = static_cast<T>(s.norm_coefficient);
  const T epsilon = static_cast<T>(s.epsilon);
  const T *X = static_cast<const T*>(inputs[0]), *G = static_cast<const T*>(inputs[1]);
  const T* H = static_cast<const T*>(inputs[2]);
  T *X_new = static_cast<T*>(outputs[0]), *H_new = static_cast<T*>(outputs[1]);
  for_each_element<T>(count, {X, G, H}, [=](std::size_t i) {
    const T x = X[i];
    const T g = norm_coefficient * x + G[i];
    const T h = H[i] + g * g;
    H_new[i] = h;
    X_new[i] = x - rate * g / (square_root(h) + epsilon);
  });
}

template <typename T>
void adam(const void* scalars, std::size_t count, const void* const* inputs, void* const* outputs) {
  const auto& s = *static_cast<const AdamScalars*>(scalars);
  const T rate = static_cast<T>(s.rate), norm_coefficient = static_cast<T>(s.norm_coefficient);
  const T alpha = static_cast<T>(s.alpha), one_minus_alpha = static_cast<T>(s.one_minus_alpha);
  const T beta = static_cast<T>(s.beta), one_minus_beta = static_cast<T>(s.one_minus_beta);
  const T epsilon = static_cast<T>(s.epsilon), one_minus_post = static_cast<T>(s.one_minus_post);
  const T *X = static_cast<const T*>(inputs[0]), *G = static_cast<const T*>(inputs[1]);
  const T *V = static_cast<const T*>(inputs[2]), *H = static_cast<const T*>(inputs[3]);
  T *X_new = static_cast<T*>(outputs[0]), *V_new = static_cast<T*>(outputs[1]), *H_new = static_cast<T*>(outputs[2]);
  for_each_element<T>(count, {X, G, V, H}, [=](std::size_t i) {
    const T x = X[i];
    const T g = norm_coefficient * x + G[i];
    const T v = alpha * V[i] + one_minus_alpha * g;
    const T h = beta * H[i] + one_minus_beta * g * g;
    V_new[i] = v;
    H_new[i] = h;
    X_new[i] = one_minus_post * (x - rate * v / (square_root(h) + epsilon));
  });
}

template <typename T, bool nesterov>
void momentum(const void* scalars, std::size_t count, const void* const* inputs, void* const* outputs) {
  const auto& s = *static_cast<const MomentumScalars*>(scalars);
  const T rate = static_cast<T>(s.rate), norm_coefficient = static_cast<T>(s.norm_coefficient);
  const T alpha = static_cast<T>(s.alpha), beta = static_cast<T>(s.beta);
  const T *X = static_cast<const T*>(inputs[0]), *G = static_cast<const T*>(inputs[1]);
  const T* V = static_cast<const T*>(inputs[2]);
  T *X_new = static_cast<T*>(outputs[0]), *V_new = static_cast<T*>(outputs[1]);
  for_each_element<T>(count, {X, G, V}, [=](std::size_t i) {
    const T x = X[i];
    const T g = norm_coefficient * x + G[i];
    const T v = alpha * V[i] + beta * g;
    V_new[i] = v;
    X_new[i] = x - rate * (nesterov ? g + alpha * v : v);
  });
}

template <typename T>
void prepare_gradient(double factor, std::size_t count, const void* gradient, const unsigned char* mask,
                      void* prepared) {
  const T* G = static_cast<const T*>(gradient);
  T* result = static_cast<T*>(prepared);
  const T scale = static_cast<T>(factor);
  if (mask == nullptr) {
    for_each_element<T>(count, {G}, [=](std::size_t i) { result[i] = G[i] * scale; });
    return;
  }
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) {
    const T g = G[i];  // read either way, so that the choice is no jump
    result[i] = (mask[i] != 0 ? g : T(0)) * scale;
  }
}

}  // namespace
}  // namespace onnxtrain
