// Products of two matrices whose elements are rounded to bfloat16 and whose sums are float: functions over pointers,
// compiled once per instruction set, and once more for processors that multiply bfloat16 themselves.
//
// sum += left[2k + 1] * right[2k + 1]; sum += left[2k] * right[2k], both fused, for k = 0, 1, ...: what the instruction
// vdpbf16ps of AVX512-BF16 computes. Other instruction sets do the same with several instructions and give the same bits,
// but for sums below 2^-126, which the instruction takes for zero.
#pragma once

#include <cstddef>
#include <cstdint>

#include "products/table.h"

namespace onnxtrain {

// The right matrix [depth, columns], as it lies in memory: in lines, which are its rows or, transposed, its columns.
struct StoredMatrix {
  Stored stored;
  const void* data;        // null for few bits
  std::size_t line;        // elements from one line to the next
  bool transposed;
  const FewBits<float>* few_bits;  // null for the others
};

// A part of a product: target[row, column] = bias[column] + sum over the depth of left[row, depth] *
// right[depth, column].
struct Bfloat16Product {
  const std::uint16_t* left;  // rounded, rows `left_stride` apart, filled up with zeros to an even depth
  std::size_t left_stride;
  StoredMatrix right;
  std::size_t first_column;  // of the right matrix
  std::size_t rows, columns, depth;
  const float* bias;  // null: zero
  float* target;
  std::size_t target_row;
  Ending ending;
  const float* activation;  // as in `Product`
  std::size_t block;       // depth at a time, even
  std::uint16_t* scratch;  // `scratch(columns, block)` elements
};

// A matrix of floats that is rounded: target [rows][stride] = source [rows, depth], with zeros from the depth to the next
// even number.
struct Rounding {
  const float* source;
  std::size_t line;  // elements from one line of the source to the next
  bool transposed;   // whether lines are columns
  std::size_t rows, depth;
  std::uint16_t* target;
  std::size_t stride;
};

struct Bfloat16Kernels {
  bool by_processor;  // whether it has an instruction for them
  std::size_t (*scratch)(std::size_t columns, std::size_t block);
  void (*round)(const Rounding&, std::size_t first_row, std::size_t end_row);
  void (*multiply)(const Bfloat16Product&);
};

// Those for the instruction set in use, by the processor's own instruction where it has one.
const Bfloat16Kernels& bfloat16_kernels();

}  // namespace onnxtrain
