// What the runtime knows of a shape while it loads a model.
#pragma once

#include <vector>

#include "operators/runtime.h"

namespace onnxtrain {

// Whether a shape may be handed on to an output: the runtime shows an unknown shape as that of a scalar, and takes an
// axis that has neither a size nor a name for one of size -1. Better say nothing than something false.
inline bool is_known_shape(const OrtApi* api, const OrtTensorTypeAndShapeInfo* info) {
  std::size_t rank = 0;
  require(api, ort::GetDimensionsCount::call(api, info, &rank));
  if (rank == 0) return false;
  std::vector<std::int64_t> sizes(rank);
  std::vector<const char*> names(rank);
  require(api, ort::GetDimensions::call(api, info, sizes.data(), rank));
  require(api, ort::GetSymbolicDimensions::call(api, info, names.data(), rank));
  for (std::size_t axis = 0; axis < rank; ++axis) {
    const bool named = names[axis] != nullptr && *names[axis] != '\0';
    if (sizes[axis] < 0 && !named) return false;
  }
  return true;
}

}  // namespace onnxtrain
