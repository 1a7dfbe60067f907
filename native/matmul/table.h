// Multiplication of two matrices: functions over pointers, compiled once per instruction set and called through a
// table. Multiply-add may be fused, so instruction sets differ in the last bits; one instruction set always gives the
// same bits. Strides and offsets count elements.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/by_type.h"

namespace onnxtrain {

// A matrix in memory.
template <typename T>
struct Strided {
  const T* data;
  std::ptrdiff_t row, column;  // strides; one of them is 1
};

// Packs a matrix [columns][depth] as [panel][depth][columns of the panel], zero-padded.
template <typename T>
struct Packing {
  const T *source, *source_end;
  std::ptrdiff_t column_stride;
  const std::ptrdiff_t* offsets;  // of the elements of a column: [depth]
  std::size_t columns;
  std::size_t depth;  // depth of a panel in memory
  std::size_t begin, end;  // the part of the depth to pack
  std::size_t first_panel, end_panel;
  T* panels;
  const std::size_t* positions = nullptr;  // positions of a column's elements in a panel: [depth], or null if in order
};

// A low-bit integer matrix, [rows][blocks][block], in which the `block` integers of a block share a scale and a zero
// point: an element is (integer - zero) * scale. Blocks are byte-aligned, the lowest bits of a byte come first; the
// last block of a row may extend beyond the matrix.
template <typename T>
struct LowBit {
  const std::uint8_t* integers;
  const T* scales;  // [rows][blocks]
  // Zero points: packed like the integers, with byte-aligned rows; or floating-point; or, if both are null, the
  // midpoint.
  const std::uint8_t* packed_zeros;
  const T* zeros;  // [rows][blocks]
  std::size_t bits, block, blocks;
  bool transposed;  // true if the right matrix is the transposed one
};

// Element types in memory.
enum class Stored { kFloat, kFloat16, kBfloat16, kLowBit };

// A float16 or bfloat16 matrix; lines are its rows or, if transposed, its columns.
struct HalfWeights {
  Stored stored;
  const std::uint16_t* words;
  std::size_t line;  // elements between lines
  bool transposed;
};

// The epilogue of a complete sum s: s itself; relu(s) = s unless it is below zero, else 0; or, given Relu's result r at
// the same position, s where r > 0, else 0 s.
enum class Ending { kNone, kRelu, kReluGradient };

// A part of a multiplication: target[row, column] = bias[row, column] + sum over the depth of left[row, depth] *
// right[depth, column].
template <typename T>
struct Matmul {
  Strided<T> left, right;
  // Replace the right matrix, from column `first_column` on; null: not used.
  const LowBit<T>* low_bit;
  const HalfWeights* half_weights;
  std::size_t first_column;
  const T* right_end;  // one past the last element of the whole matrix
  std::size_t rows, columns, depth;
  const T* bias;            // null: zero; may be the target
  std::ptrdiff_t bias_row;  // 0: the same for all rows
  T* target;
  std::ptrdiff_t target_row;
  Ending ending;
  const T* activation;  // Relu's result for kReluGradient, laid out like the target; null otherwise
  T *left_sums, *right_sums;  // over the depth: [rows] and [columns]; null: not requested

  bool is_as_given() const { return low_bit == nullptr && half_weights == nullptr; }  // true if the right matrix is not converted

  std::size_t block;  // depth at a time
  std::size_t sum_block;  // of `left_sums` and `right_sums`
  bool sums_in_cache;     // the depth goes over lines of both matrices, and the target fits a share of the L2 cache
  std::size_t strip;  // most rows that are packed at a time
  const std::ptrdiff_t* ones;  // 0, 1, ...: `block` of them
  T* scratch;  // `scratch(rows, columns, block, strip)` elements
};

template <typename T>
struct MatmulKernels {
  std::size_t (*scratch)(std::size_t rows, std::size_t columns, std::size_t block, std::size_t strip);
  void (*multiply)(const Matmul<T>&);
};

struct MatmulTable : ByType<MatmulKernels> {};

}  // namespace onnxtrain
