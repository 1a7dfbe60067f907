// The attribute `compute` of nodes that multiply: "float32" or, for float inputs, "bfloat16".
#pragma once

#include <stdexcept>
#include <string>

#include "kernels/kernel_table.h"
#include "operators/runtime.h"

namespace onnxtrain {

enum class Compute { kAsGiven, kBfloat16 };

inline Compute compute_of(const Attributes& attributes) {
  const std::string compute = attributes.text("compute", "float32");
  if (compute == "bfloat16") return Compute::kBfloat16;
  if (compute == "float32") return Compute::kAsGiven;
  throw std::invalid_argument("attribute 'compute' is '" + compute + "': it must be float32 or bfloat16.");
}

// Rejects bfloat16 rounding of double.
inline bool in_bfloat16(Compute compute, ElementType type) {
  if (compute == Compute::kAsGiven) return false;
  if (type == kFloat) return true;
  throw std::invalid_argument("attribute 'compute' is 'bfloat16', and its inputs have type double: they must be float.");
}

}  // namespace onnxtrain
