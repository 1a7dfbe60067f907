// Element-wise loops over several arrays.
//
// Included by files that are compiled once per instruction set. The loop bodies are plain, so that the compiler
// vectorizes them; ONNXTRAIN_VECTORIZE promises that buffers are either identical or disjoint, which makes the
// iterations independent.
#pragma once

#include <cstddef>

#include "anywhere.h"
#include "tuning.h"

#if defined(__clang__)
#define ONNXTRAIN_VECTORIZE _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define ONNXTRAIN_VECTORIZE _Pragma("GCC ivdep")
#else
#define ONNXTRAIN_VECTORIZE
#endif

namespace onnxtrain {
namespace {

template <std::size_t bytes>
inline void ask_for(const void* from) {
#pragma GCC unroll 8
  for (std::size_t line = 0; line < bytes; line += 64) {
    __builtin_prefetch(static_cast<const char*>(from) + line + tuning::kAheadBytes);
  }
}

// Calls block(i) for whole blocks, then element(i) for the rest, prefetching `streams`.
template <typename T, std::size_t count_of_streams, typename Block, typename Element>
inline void for_each_block(std::size_t count, const T* const (&streams)[count_of_streams], Block block,
                           Element element) {
  std::size_t i = 0;
  for (; i + tuning::kLoopElements <= count; i += tuning::kLoopElements) {
    for (const T* stream : streams) ask_for<tuning::kLoopElements * sizeof(T)>(stream + i);
    block(i);
  }
  for (; i < count; ++i) element(i);
}

// Calls element(0) ... element(count - 1), prefetching `streams`.
template <typename T, std::size_t count_of_streams, typename Element>
inline void for_each_element(std::size_t count, const T* const (&streams)[count_of_streams], Element element) {
  const auto block = [element](std::size_t i) {
    ONNXTRAIN_VECTORIZE
    for (std::size_t j = i; j < i + tuning::kLoopElements; ++j) element(j);
  };
  for_each_block<T>(count, streams, block, element);
}

ONNXTRAIN_ANYWHERE inline float square_root(float value) { return __builtin_sqrtf(value); }
ONNXTRAIN_ANYWHERE inline double square_root(double value) { return __builtin_sqrt(value); }

inline double reciprocal_root(double value) { return 1.0 / square_root(value); }

}  // namespace
}  // namespace onnxtrain
