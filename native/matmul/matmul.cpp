#include "matmul/matmul.h"

#include <algorithm>
#include <vector>

#include "matmul/partition.h"
#include "matmul/table.h"
#include "scratch.h"
#include "sizes.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// True if the depth goes over lines of both matrices, and the products are added up without a beginning or an end.
template <typename T>
bool is_of_lines(const Matmul<T>& p) {
  return p.left.row == 1 && p.is_as_given() && p.right.column == 1 && p.bias == nullptr && p.ending == Ending::kNone;
}

template <typename T>
void multiply(const Matmul<T>& whole, const ParallelFor& parallel_for) {
  const bool sums = whole.left_sums != nullptr || whole.right_sums != nullptr;
  if ((whole.rows == 0 || whole.columns == 0) && !sums) return;
  constexpr std::size_t kUnit = 64 / sizeof(T), kRowUnit = 6;  // column unit; row unit: a tile's rows
  const MatmulKernels<T>& kernels_for = kernels_of<T>(*kernels()->product);
  const std::size_t depth = std::max<std::size_t>(whole.depth, 1);
  const auto evenly = [&](std::size_t most) { return divided_up(depth, divided_up(depth, most)); };
  const std::size_t sum_block = evenly(tuning::kSumDepth);
  const std::size_t block = evenly(tuning::kProductDepth);
  const std::size_t column_bytes = std::max(block, tuning::kProductDepth / 2) * sizeof(float);
  Cut cut(whole.rows, whole.columns, whole.depth, column_bytes, whole.left.row == 1);
  Matmul<T> common = whole;
  const std::size_t most_sums = share_of_second_cache(tuning::kOuterShare) / sizeof(T);
  common.sums_in_cache =
      is_of_lines(whole) && saturating_product(whole.rows, whole.columns) <= tuning::kOuterParts * most_sums;
  if (common.sums_in_cache) cut.shrink(whole.rows, whole.columns, most_sums);
  const std::size_t most_rows = divided_up(divided_up(whole.rows, kRowUnit), cut.rows) * kRowUnit;
  const std::size_t most_columns = divided_up(divided_up(whole.columns, kUnit), cut.columns) * kUnit;
  common.block = common.sums_in_cache ? evenly(tuning::kOuterDepth) : block;
  common.sum_block = sum_block;
  common.strip = strip_rows(block * sizeof(T));
  const auto ones = multiples(1, common.block);
  common.ones = ones.data();
  const std::size_t scratch = kernels_for.scratch(most_rows, most_columns, common.block, common.strip);
  BufferPool pool(checked_product(scratch, sizeof(T)));
  parallel_for(cut.rows * cut.columns, [&](std::size_t task) {
    const std::size_t row_part = task / cut.columns, column_part = task % cut.columns;
    const std::size_t row = begin_of(row_part, cut.rows, whole.rows, kRowUnit);
    const std::size_t column = begin_of(column_part, cut.columns, whole.columns, kUnit);
    Matmul<T> part = common;
    part.rows = begin_of(row_part + 1, cut.rows, whole.rows, kRowUnit) - row;
    part.columns = begin_of(column_part + 1, cut.columns, whole.columns, kUnit) - column;
    if ((part.rows == 0 || part.columns == 0) && !sums) return;
    part.left.data += static_cast<std::ptrdiff_t>(row) * part.left.row;
    part.first_column = column;
    if (part.is_as_given()) part.right.data += static_cast<std::ptrdiff_t>(column) * part.right.column;
    part.target += static_cast<std::ptrdiff_t>(row) * part.target_row + static_cast<std::ptrdiff_t>(column);
    if (part.bias != nullptr) part.bias += static_cast<std::ptrdiff_t>(row) * part.bias_row + static_cast<std::ptrdiff_t>(column);
    if (part.activation != nullptr) part.activation += part.target - whole.target;
    part.left_sums = column_part == 0 && whole.left_sums != nullptr ? whole.left_sums + row : nullptr;
    part.right_sums = row_part == 0 && whole.right_sums != nullptr ? whole.right_sums + column : nullptr;
    pool.lend([&](const Buffer& buffer) {
      part.scratch = buffer.as<T>();
      kernels_for.multiply(part);
    });
  });
}

template <typename T>
void linear_as(const Linear& sizes, const void* x, Stored stored, const void* w, const LinearBias& bias, void* y,
               const ParallelFor& parallel_for, const LinearEnding& ending) {
  const auto inputs = static_cast<std::ptrdiff_t>(sizes.inputs), outputs = static_cast<std::ptrdiff_t>(sizes.outputs);
  const HalfWeights half_weights = {stored, static_cast<const std::uint16_t*>(w), sizes.transposed ? sizes.inputs : sizes.outputs,
                         sizes.transposed};
  Matmul<T> product = {};
  product.left = {static_cast<const T*>(x), inputs, 1};
  if (stored == Stored::kFloat) {
    const auto* weights = static_cast<const T*>(w);
    product.right = {weights, sizes.transposed ? 1 : outputs, sizes.transposed ? inputs : 1};
    product.right_end = weights + inputs * outputs;
  } else {
    product.half_weights = &half_weights;
  }
  product.rows = sizes.rows;
  product.columns = sizes.outputs;
  product.depth = sizes.inputs;
  product.bias = static_cast<const T*>(bias.data);
  product.bias_row = bias.by_row ? outputs : 0;
  product.target = static_cast<T*>(y);
  product.target_row = outputs;
  product.ending = ending.ending;
  product.activation = static_cast<const T*>(ending.activation);
  multiply(product, parallel_for);
}

template <typename T>
void multiply_low_bit_as(std::size_t rows, const void* x, const PackedWeights& w, bool transposed, void* y,
                          const ParallelFor& parallel_for) {
  const LowBit<T> weights = low_bit<T>(w, transposed);
  Matmul<T> product = {};
  product.depth = transposed ? w.columns : w.rows;
  product.columns = transposed ? w.rows : w.columns;
  product.left = {static_cast<const T*>(x), static_cast<std::ptrdiff_t>(product.depth), 1};
  product.low_bit = &weights;
  product.rows = rows;
  product.target = static_cast<T*>(y);
  product.target_row = static_cast<std::ptrdiff_t>(product.columns);
  multiply(product, parallel_for);
}

template <typename T>
void linear_weight_gradient_as(const Linear& sizes, const void* dy, const void* x, void* dw, void* dbias,
                               const ParallelFor& parallel_for) {
  struct Matrix {
    const T* data;
    std::size_t columns;
    T* sums;
  };
  const Matrix of_x = {static_cast<const T*>(x), sizes.inputs, nullptr};
  const Matrix of_dy = {static_cast<const T*>(dy), sizes.outputs, static_cast<T*>(dbias)};
  const Matrix &rows = sizes.transposed ? of_dy : of_x, &columns = sizes.transposed ? of_x : of_dy;
  // A narrow right matrix, as of an adapter, becomes the left one: the other is then read in place, in whole vectors.
  const bool swapped = columns.columns <= tuning::kFewTiles * 8 && columns.columns < rows.columns;
  const Matrix &left = swapped ? columns : rows, &right = swapped ? rows : columns;
  const Buffer turned(swapped ? checked_product(left.columns, right.columns, sizeof(T)) : 0);
  Matmul<T> product = {};
  product.left = {left.data, 1, static_cast<std::ptrdiff_t>(left.columns)};
  product.right = {right.data, static_cast<std::ptrdiff_t>(right.columns), 1};
  product.right_end = right.data + sizes.rows * right.columns;
  product.rows = left.columns;
  product.columns = right.columns;
  product.depth = sizes.rows;
  product.target = swapped ? turned.as<T>() : static_cast<T*>(dw);
  product.target_row = static_cast<std::ptrdiff_t>(right.columns);
  product.left_sums = left.sums;
  product.right_sums = right.sums;
  multiply(product, parallel_for);
  if (!swapped) return;
  for (std::size_t row = 0; row < right.columns; ++row) {
    T* to = static_cast<T*>(dw) + row * left.columns;
    for (std::size_t column = 0; column < left.columns; ++column) to[column] = product.target[column * right.columns + row];
  }
}

template <typename T>
void weight_gradient_as(std::size_t rows, const Columns& left, const Columns& right, void* target, void* left_sums,
                        const ParallelFor& parallel_for) {
  Matmul<T> product = {};
  product.left = {static_cast<const T*>(left.data), 1, static_cast<std::ptrdiff_t>(left.stride)};
  product.right = {static_cast<const T*>(right.data), static_cast<std::ptrdiff_t>(right.stride), 1};
  product.rows = left.count;
  product.columns = right.count;
  product.depth = rows;
  product.target = static_cast<T*>(target);
  product.target_row = static_cast<std::ptrdiff_t>(right.count);
  product.left_sums = static_cast<T*>(left_sums);
  multiply(product, parallel_for);
}

}  // namespace

void weight_gradient(ElementType type, std::size_t rows, const Columns& left, const Columns& right, void* target,
                     void* left_sums, const ParallelFor& parallel_for) {
  (type == kFloat ? weight_gradient_as<float> : weight_gradient_as<double>)(rows, left, right, target, left_sums,
                                                                             parallel_for);
}

void multiply_low_bit(ElementType type, std::size_t rows, const void* x, const PackedWeights& w, bool transposed,
                       void* y, const ParallelFor& parallel_for) {
  (type == kFloat ? multiply_low_bit_as<float> : multiply_low_bit_as<double>)(rows, x, w, transposed, y,
                                                                                 parallel_for);
}

void linear(ElementType type, const Linear& sizes, const void* x, Stored stored, const void* w, const LinearBias& bias,
            void* y, const ParallelFor& parallel_for, const LinearEnding& ending) {
  (type == kFloat ? linear_as<float> : linear_as<double>)(sizes, x, stored, w, bias, y, parallel_for, ending);
}

void linear_weight_gradient(ElementType type, const Linear& sizes, const void* dy, const void* x, void* dw,
                            void* dbias, const ParallelFor& parallel_for) {
  (type == kFloat ? linear_weight_gradient_as<float> : linear_weight_gradient_as<double>)(sizes, dy, x, dw, dbias,
                                                                                           parallel_for);
}

}  // namespace onnxtrain
