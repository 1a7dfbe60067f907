// Layout of the rows of scores in a block: padded to whole vectors, with -inf behind the last key.
//
// Included by kernels.cpp only.
#pragma once

#include "kernels/padding.h"

namespace onnxtrain {
namespace {

template <typename T>
constexpr T kMinusInfinity = -static_cast<T>(__builtin_inf());

template <typename T>
std::size_t score_stride(std::size_t keys) {
  return odd_lines<T>(keys);
}

}  // namespace
}  // namespace onnxtrain
