// Products of two matrices: functions over pointers, compiled once per instruction set and reached through a table.
// Multiplications may be fused with additions, so instruction sets differ in the last places; one instruction set
// always gives the same bits. Strides and offsets count elements.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/by_type.h"

namespace onnxtrain {

// A matrix as it lies in memory.
template <typename T>
struct Strided {
  const T* data;
  std::ptrdiff_t row, column;  // from one to the next; one of them is 1
};

// Arranges a matrix [columns][depth] for products: [panel][depth][columns of the panel], zero where a panel is wider.
template <typename T>
struct Packing {
  const T *source, *source_end;
  std::ptrdiff_t column_stride;
  const std::ptrdiff_t* offsets;  // of the elements of a column: [depth]
  std::size_t columns;
  std::size_t depth;  // of a panel in memory
  std::size_t begin, end;  // the part of the depth that is arranged
  std::size_t first_panel, end_panel;
  T* panels;
  const std::size_t* places = nullptr;  // of a column's elements in a panel: [depth], or null for their order
};

// A matrix of integers of a few bits, [rows][blocks][block], of which `block` side by side share a scale and a zero point:
// an element is (integer - zero) * scale. The integers of a block begin with a byte, those of a byte with its lowest bits;
// the last block of a row may reach beyond the matrix.
template <typename T>
struct FewBits {
  const std::uint8_t* integers;
  const T* scales;  // [rows][blocks]
  // Zero points: packed like the integers, rows beginning with a byte; or numbers; or, where both are null, the middle.
  const std::uint8_t* packed_zeros;
  const T* zeros;  // [rows][blocks]
  std::size_t bits, block, blocks;
  bool transposed;  // whether the product's right matrix is the transposed one
};

// What the elements of a matrix are in memory.
enum class Stored { kFloat, kFloat16, kBfloat16, kFewBits };

// A matrix of half precision or bfloat16, in lines, which are its rows or, transposed, its columns.
struct Halves {
  Stored stored;
  const std::uint16_t* words;
  std::size_t line;  // elements from one line to the next
  bool transposed;
};

// What becomes of a sum s of a product when it is complete: itself; relu(s) = s where it is not below zero, else 0; or s where
// the element in its place of another matrix, a result of Relu, is above zero, else 0 s.
enum class Ending { kNone, kRelu, kReluGradient };

// A part of a product: target[row, column] = bias[column] + sum over the depth of left[row, depth] *
// right[depth, column].
template <typename T>
struct Product {
  Strided<T> left, right;
  // These take the place of the right matrix, from column `first_column` on; null: none.
  const FewBits<T>* few_bits;
  const Halves* halves;
  std::size_t first_column;
  const T* right_end;  // behind the last element of the whole matrix
  std::size_t rows, columns, depth;
  const T* bias;  // null: zero
  T* target;
  std::ptrdiff_t target_row;
  Ending ending;
  const T* activation;  // the other matrix of kReluGradient, which lies as the target does; null for the others
  T *left_sums, *right_sums;  // over the depth: [rows] and [columns]; null: not wanted

  bool is_as_given() const { return few_bits == nullptr && halves == nullptr; }  // the right matrix

  std::size_t block;  // depth at a time
  std::size_t sum_block;  // of `left_sums` and `right_sums`; a block has whole ones
  std::size_t copy_stride;  // between rows of the copy of a strip of the left matrix
  // Multiples, `block` of them: of 1, and of `copy_stride`.
  const std::ptrdiff_t *ones, *copied;
  T* scratch;  // `scratch(rows, columns)` elements for each element of a block
};

template <typename T>
struct ProductKernels {
  std::size_t (*copy_stride)(std::size_t rows);
  std::size_t (*scratch)(std::size_t rows, std::size_t columns);
  void (*multiply)(const Product<T>&);
};

struct ProductTable : ByType<ProductKernels> {};

}  // namespace onnxtrain
