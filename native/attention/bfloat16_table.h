// Attention with operands rounded to bfloat16: compiled only for processors that have instructions for their products.
#pragma once

#include <cstddef>

#include "attention/table.h"

namespace onnxtrain {

// As the members of `AttentionKernels` of the same names.
struct Bfloat16Attention {
  std::size_t (*scratch)(const AttentionCall& call, bool gradient);
  void (*attend)(const AttentionCall& call, std::size_t head, std::size_t first, std::size_t last, void* scratch);
  void (*gradient)(const AttentionCall& call, std::size_t head, void* scratch);
};

// Null if the instruction set in use has none.
const Bfloat16Attention* bfloat16_attention();

}  // namespace onnxtrain
