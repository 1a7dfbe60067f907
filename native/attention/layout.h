// Offsets of buffers in scratch memory, each from the beginning of a cache line on.
//
// Included by kernels.cpp only.
#pragma once

#include "kernels/padding.h"

namespace onnxtrain {
namespace {

template <typename T>
struct ScratchLayout {
  std::size_t total = 0;

  std::size_t take(std::size_t count) {
    constexpr std::size_t line = sizeof(T) < kLineBytes ? kLineBytes / sizeof(T) : 1;
    const std::size_t begin = total;
    total += rounded_up(count, line);
    return begin;
  }
};

}  // namespace
}  // namespace onnxtrain
