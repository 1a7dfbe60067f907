// Around the sums of a tile: what they begin with, and epilogues, applied once they are complete, while in the L1 cache.
#pragma once

#include <cstddef>

#include "kernels/vector.h"
#include "matmul/table.h"

namespace onnxtrain {
namespace {

// Starts the sums of a row with its bias, which may be there already.
template <typename T>
inline void begin_row(const T* bias, std::size_t count, T* sums) {
  if (bias != sums) copy(bias, count, sums);
}

// relu(sum). Zeros keep their sign and NaN propagates, as in ONNX Runtime's Relu.
template <typename T>
inline void end_by_relu(std::size_t count, T* sums) {
  constexpr std::size_t lanes = kLanes<T>;
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const Vector<T> sum = load(sums + i);
    store(sums + i, sum < Vector<T>{} ? Vector<T>{} : sum);
  }
  for (; i < count; ++i) sums[i] = sums[i] < T(0) ? T(0) : sums[i];
}

// Gradient of Relu's input from the gradient of its result y: chosen, as in ReluGradient.
template <typename T>
inline void end_by_slope(std::size_t count, const T* y, T* sums) {
  constexpr std::size_t lanes = kLanes<T>;
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    store(sums + i, load(y + i) <= Vector<T>{} ? Vector<T>{} : load(sums + i));
  }
  for (; i < count; ++i) sums[i] = y[i] <= T(0) ? T(0) : sums[i];
}

// Applies the epilogue to a tile; `activation` is Relu's result at the same positions, or null. Both have row stride
// `stride`.
template <typename T>
inline void end_rows(Ending ending, std::size_t rows, std::size_t count, std::ptrdiff_t stride, const T* activation,
                     T* sums) {
  for (std::size_t row = 0; row < rows; ++row, sums += stride) {
    if (ending == Ending::kRelu) {
      end_by_relu(count, sums);
    } else {
      end_by_slope(count, activation, sums);
      activation += stride;
    }
  }
}

}  // namespace
}  // namespace onnxtrain
