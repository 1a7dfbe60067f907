// Multiplication of two matrices with elements rounded to bfloat16 and float accumulation: functions over pointers,
// compiled once per instruction set, and once more for CPUs with bfloat16 instructions.
//
// sum += left[2k + 1] * right[2k + 1]; sum += left[2k] * right[2k], both fused, for k = 0, 1, ...: the result of the
// instruction vdpbf16ps of AVX512-BF16. Other instruction sets emulate it with the same bits, except that the
// instruction flushes sums below 2^-126 to zero. AMX adds up the 16 pairs of a tile apart, and these sums: other bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "matmul/table.h"

namespace onnxtrain {

// The right matrix [depth, columns] in memory: lines are its rows or, if transposed, its columns.
struct StoredMatrix {
  Stored stored;
  const void* data;        // null for low-bit weights
  std::size_t line;        // elements between lines
  bool transposed;
  const LowBit<float>* low_bit;  // null otherwise
};

// The right matrix as elements of a rounded source, such as the patches that a convolution reads: its element [k, j] lies
// at depth[k] + columns[j]. With `pairs`, the source consists of pairs, and so does the depth. Bytes of one vector
// behind the last element must be readable.
struct Patches {
  const std::uint16_t* source;
  bool pairs;
  const std::ptrdiff_t* depth;
  const std::ptrdiff_t* columns;
  const std::size_t* run_ends;  // of the columns of pairs, or else of the depth: the end of the neighbouring offsets
};

// A part of a multiplication: target[row, column] = bias[row, column] + sum over the depth of left[row, depth] *
// right[depth, column].
struct Bfloat16Matmul {
  const std::uint16_t* left;  // from `round`, with `left_stride` words per row and room for `row_unit` rows behind the
                              // last
  std::size_t left_stride;
  StoredMatrix right;
  const Patches* patches;  // in place of the right matrix; null: none
  std::size_t first_column;  // of the right matrix
  std::size_t rows, columns, depth;
  const float* bias;     // null: zero; may be the target
  std::size_t bias_row;  // 0: the same for all rows
  float* target;
  std::size_t target_row;
  Ending ending;
  const float* activation;  // as in `Matmul`
  std::size_t block;       // depth at a time, whole cache lines of words
  std::size_t strip;       // most rows at a time
  std::uint16_t* scratch;  // `scratch(rows, columns, block, strip)` elements
};

// Rounds a float matrix [rows, depth] to words, `stride` for each row, in the layout that `multiply` reads.
struct Rounding {
  const float* source;
  std::size_t line;  // elements between lines of the source
  bool transposed;   // true if lines are columns
  std::size_t rows, depth;
  std::uint16_t* target;
  std::size_t stride;  // whole cache lines
};

struct Bfloat16Kernels {
  bool by_processor;  // true if the CPU has an instruction for them
  std::size_t row_unit;  // rows that are multiplied together
  std::size_t (*scratch)(std::size_t rows, std::size_t columns, std::size_t block, std::size_t strip);
  void (*round)(const Rounding&, std::size_t first_row, std::size_t end_row);
  void (*multiply)(const Bfloat16Matmul&);
};

// The kernels for the instruction set in use, with the CPU's own bfloat16 instruction where it has one.
const Bfloat16Kernels& bfloat16_kernels();

}  // namespace onnxtrain
