// Preparation of a gradient before its update: a factor, and a mask.
//
// Included by kernels.cpp only.
#pragma once

#include "kernels/elementwise.h"
#include "kernels/kernel_table.h"

namespace onnxtrain {
namespace {

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
    const T g = G[i];  // read unconditionally, so that the selection is branch-free
    result[i] = (mask[i] != 0 ? g : T(0)) * scale;
  }
}

}  // namespace
}  // namespace onnxtrain
