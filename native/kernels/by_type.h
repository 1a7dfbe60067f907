// Kernels for float and for double.
#pragma once

#include <cstddef>

namespace onnxtrain {

template <template <typename> class Kernels>
struct ByType {
  Kernels<float> single;
  Kernels<double> wide;
};

template <typename T, template <typename> class Kernels>
const Kernels<T>& kernels_of(const ByType<Kernels>& table) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return table.single;
  } else {
    return table.wide;
  }
}

}  // namespace onnxtrain
