// What becomes of the sums of a product once they are complete, while they lie in the nearest cache.
#pragma once

#include <cstddef>

#include "kernels/vector.h"
#include "products/table.h"

namespace onnxtrain {
namespace {

// relu(sum). Zeros keep their sign and NaN stays, as with ONNX Runtime's Relu.
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

// The gradient by what Relu got, from sums that are that by its result y: the slope is a factor, as in ReluGradient.
template <typename T>
inline void end_by_slope(std::size_t count, const T* y, T* sums) {
  constexpr std::size_t lanes = kLanes<T>;
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const Vector<T> slope = load(y + i) > Vector<T>{} ? broadcast(T(1)) : Vector<T>{};
    store(sums + i, load(sums + i) * slope);
  }
  for (; i < count; ++i) sums[i] *= y[i] > T(0) ? T(1) : T(0);
}

// Ends the sums of a tile; `activation` has the results of Relu in their places, or is null. Rows of both lie `stride` apart.
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
