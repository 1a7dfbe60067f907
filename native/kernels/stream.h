// Plain memory traffic: the bandwidth limit for kernels that compute little per element.
//
// Included by kernels.cpp only.
#pragma once

#include "kernels/elementwise.h"

namespace onnxtrain {
namespace {

template <std::size_t arrays>
void stream_into(std::size_t count, const float* input, float* const* outputs) {
  float* first = outputs[0];
  float* second = outputs[arrays > 1 ? 1 : 0];
  float* third = outputs[arrays > 2 ? 2 : 0];
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) {
    const float value = input[i];
    first[i] += value;
    if (arrays > 1) second[i] += value;
    if (arrays > 2) third[i] += value;
  }
}

void stream(std::size_t arrays, std::size_t count, const float* input, float* const* outputs) {
  if (arrays == 1) stream_into<1>(count, input, outputs);
  if (arrays == 2) stream_into<2>(count, input, outputs);
  if (arrays == 3) stream_into<3>(count, input, outputs);
}

}  // namespace
}  // namespace onnxtrain
