#include "matmul/bfloat16.h"

#include <algorithm>

#include "matmul/partition.h"
#include "scratch.h"
#include "sizes.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// A float matrix as left operand: lines are rows or, if transposed, columns.
struct Left {
  const float* data;
  std::size_t line;
  bool transposed;
};

constexpr std::size_t kLine = 32;  // words per cache line
constexpr std::size_t kRoundedRows = 16;  // at a time: the lanes of the widest vector

// Rounds the whole left matrix, which every part of the multiplication reads.
void round_left(const Bfloat16Kernels& kernels, const Left& left, const Bfloat16Matmul& product, std::uint16_t* words,
                const ParallelFor& parallel_for) {
  const Rounding rounding = {left.data,     left.line,     left.transposed,    product.rows,
                             product.depth, words,         product.left_stride};
  const std::size_t rows = std::max(kRoundedRows, rounded_up(tuning::kTaskElements / std::max<std::size_t>(product.depth, 1),
                                                             kRoundedRows));
  parallel_for(divided_up(product.rows, rows), [&](std::size_t task) {
    kernels.round(rounding, task * rows, std::min(product.rows, (task + 1) * rows));
  });
}

void multiply(const Left& left, Bfloat16Matmul whole, const ParallelFor& parallel_for) {
  if (whole.rows == 0 || whole.columns == 0) return;
  const RoundedLeft rounded(whole.rows, whole.depth);
  whole.left = rounded.words();
  whole.left_stride = rounded.stride();
  round_left(bfloat16_kernels(), left, whole, rounded.words(), parallel_for);
  multiply_rounded(whole, parallel_for);
}

}  // namespace

RoundedLeft::RoundedLeft(std::size_t rows, std::size_t depth)
    : stride_(checked_product(divided_up(depth, kLine) | 1, kLine)),  // an odd number of cache lines
      words_(checked_product(checked_sum(rows, bfloat16_kernels().row_unit), stride_, sizeof(std::uint16_t))) {}

std::size_t choose_blocks(Bfloat16Matmul& product, std::size_t rows, std::size_t columns) {
  const std::size_t depth = std::max<std::size_t>(product.depth, 1);
  product.block = rounded_up(divided_up(depth, divided_up(depth, tuning::kBfloat16Depth)), kLine);
  product.strip = strip_rows(product.block * sizeof(std::uint16_t));
  return checked_product(bfloat16_kernels().scratch(rows, columns, product.block, product.strip), sizeof(std::uint16_t));
}

void multiply_rounded(Bfloat16Matmul whole, const ParallelFor& parallel_for) {
  if (whole.rows == 0 || whole.columns == 0) return;
  constexpr std::size_t kUnit = 16;  // of columns
  const Bfloat16Kernels& kernels = bfloat16_kernels();
  const std::size_t unit = kernels.row_unit;
  const Cut cut(whole.rows, whole.columns, whole.depth, tuning::kBfloat16Depth * sizeof(std::uint16_t), false);
  const std::size_t most_columns = divided_up(divided_up(whole.columns, kUnit), cut.columns) * kUnit;
  const std::size_t most_rows = divided_up(divided_up(whole.rows, unit), cut.rows) * unit;
  BufferPool pool(choose_blocks(whole, most_rows, most_columns));
  parallel_for(cut.rows * cut.columns, [&](std::size_t task) {
    const std::size_t row_part = task / cut.columns, column_part = task % cut.columns;
    const std::size_t row = begin_of(row_part, cut.rows, whole.rows, unit);
    const std::size_t column = begin_of(column_part, cut.columns, whole.columns, kUnit);
    Bfloat16Matmul part = whole;
    part.rows = begin_of(row_part + 1, cut.rows, whole.rows, unit) - row;
    part.columns = begin_of(column_part + 1, cut.columns, whole.columns, kUnit) - column;
    if (part.rows == 0 || part.columns == 0) return;
    part.left += row * part.left_stride;
    part.first_column = column;
    part.target += row * part.target_row + column;
    if (part.bias != nullptr) part.bias += row * part.bias_row + column;
    if (part.activation != nullptr) part.activation += part.target - whole.target;
    pool.lend([&](const Buffer& buffer) {
      part.scratch = buffer.as<std::uint16_t>();
      kernels.multiply(part);
    });
  });
}

void linear_in_bfloat16(const Linear& sizes, const float* x, Stored stored, const void* w, const LinearBias& bias,
                        float* y, const ParallelFor& parallel_for, const LinearEnding& ending) {
  Bfloat16Matmul product = {};
  product.right = {stored, w, sizes.transposed ? sizes.inputs : sizes.outputs, sizes.transposed, nullptr};
  product.rows = sizes.rows;
  product.columns = sizes.outputs;
  product.depth = sizes.inputs;
  product.bias = static_cast<const float*>(bias.data);
  product.bias_row = bias.by_row ? sizes.outputs : 0;
  product.target = y;
  product.target_row = sizes.outputs;
  product.ending = ending.ending;
  product.activation = static_cast<const float*>(ending.activation);
  multiply({x, sizes.inputs, false}, product, parallel_for);
}

void multiply_low_bit_in_bfloat16(std::size_t rows, const float* x, const PackedWeights& w, bool transposed, float* y,
                                   const ParallelFor& parallel_for) {
  const LowBit<float> weights = low_bit<float>(w, transposed);
  Bfloat16Matmul product = {};
  product.right = {Stored::kLowBit, nullptr, 0, transposed, &weights};
  product.rows = rows;
  product.columns = transposed ? w.rows : w.columns;
  product.depth = transposed ? w.columns : w.rows;
  product.target = y;
  product.target_row = product.columns;
  multiply({x, product.depth, false}, product, parallel_for);
}

void linear_weight_gradient_in_bfloat16(const Linear& sizes, const float* dy, const float* x, float* dw, float* dbias,
                                        const ParallelFor& parallel_for) {
  struct Matrix {
    const float* data;
    std::size_t columns;
  };
  const Matrix of_x = {x, sizes.inputs}, of_dy = {dy, sizes.outputs};
  const Matrix &left = sizes.transposed ? of_dy : of_x, &right = sizes.transposed ? of_x : of_dy;
  Bfloat16Matmul product = {};
  product.right = {Stored::kFloat, right.data, right.columns, false, nullptr};
  product.rows = left.columns;
  product.columns = right.columns;
  product.depth = sizes.rows;
  product.target = dw;
  product.target_row = right.columns;
  multiply({left.data, left.columns, true}, product, parallel_for);
  if (dbias == nullptr) return;
  const Columns none = {nullptr, 0, 0};
  weight_gradient(kFloat, sizes.rows, {dy, sizes.outputs, sizes.outputs}, none, nullptr, dbias, parallel_for);
}

}  // namespace onnxtrain
