// Shapes known to the runtime while it loads a model.
#pragma once

#include <vector>

#include "operators/runtime.h"

namespace onnxtrain {

// Returns whether a shape may be propagated to an output: the runtime reports an unknown shape as a scalar's, and an
// axis with neither size nor name as size -1. Propagating nothing is better than a wrong shape.
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
