// Linear maps along both axes of planes: bilinear or bicubic resizing, and its gradient.
//
// Included by kernels.cpp only. An element of a result is a sum over a few neighbours (taps). Along the rows a vector has
// as many rows as lanes, so that neither axis gathers. The axis that leaves fewer elements goes first.
#pragma once

#include "kernels/kernel_table.h"
#include "kernels/vector.h"

namespace onnxtrain {
namespace {

// Transposes rows [rows][columns], `from_stride` apart, at most `lanes` rows: to [columns][lanes].
template <typename T>
void turn_rows(const T* from, std::size_t from_stride, std::size_t rows, std::size_t columns, T* to) {
  constexpr std::size_t lanes = kLanes<T>;
  if (rows == lanes && columns >= lanes) {
    for (std::size_t column = 0; column < columns; column += lanes) {
      const std::size_t at = column + lanes <= columns ? column : columns - lanes;  // the last block ends with the rows
      transpose_block(from + at, from_stride, to + at * lanes, lanes);
    }
    return;
  }
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t column = 0; column < columns; ++column) to[column * lanes + row] = from[row * from_stride + column];
  }
}

// The reverse: from [columns][lanes] to rows `to_stride` apart.
template <typename T>
void turn_columns(const T* from, std::size_t rows, std::size_t columns, T* to, std::size_t to_stride) {
  constexpr std::size_t lanes = kLanes<T>;
  if (rows == lanes && columns >= lanes) {
    for (std::size_t column = 0; column < columns; column += lanes) {
      const std::size_t at = column + lanes <= columns ? column : columns - lanes;
      transpose_block(from + at * lanes, lanes, to + at, to_stride);
    }
    return;
  }
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t column = 0; column < columns; ++column) to[row * to_stride + column] = from[column * lanes + row];
  }
}

// Along the rows of [rows, axis.in] to [rows, axis.out]. `scratch` has room for (in + out) vectors.
template <typename T>
void resize_rows(const ResizeAxis& axis, const T* from, std::size_t rows, T* to, T* scratch) {
  constexpr std::size_t lanes = kLanes<T>;
  const T* weights = static_cast<const T*>(axis.weights);
  T *turned = scratch, *results = scratch + axis.in * lanes;
  for (std::size_t row = 0; row < rows; row += lanes) {
    // The last vector ends with the rows, and computes some again.
    const std::size_t first = row + lanes <= rows || rows < lanes ? row : rows - lanes;
    const std::size_t count = rows - first < lanes ? rows - first : lanes;
    turn_rows(from + first * axis.in, axis.in, count, axis.in, turned);
    for (std::size_t i = 0; i < axis.out; ++i) {
      const T* source = turned + axis.first[i] * lanes;
      Vector<T> sum = broadcast(weights[i]) * load(source);
      for (std::size_t tap = 1; tap < axis.taps; ++tap) {
        sum += broadcast(weights[tap * axis.out + i]) * load(source + tap * lanes);
      }
      store(results + i * lanes, sum);
    }
    turn_columns(results, count, axis.out, to + first * axis.out, axis.out);
  }
}

// to = a * weight_a + b * weight_b, or that is added.
template <typename T, bool add>
void mix_rows(const T* a, T weight_a, const T* b, T weight_b, std::size_t count, T* to) {
  constexpr std::size_t lanes = kLanes<T>;
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const Vector<T> mixed = load(a + i) * broadcast(weight_a) + load(b + i) * broadcast(weight_b);
    store(to + i, add ? load(to + i) + mixed : mixed);
  }
  for (; i < count; ++i) {
    const T mixed = a[i] * weight_a + b[i] * weight_b;
    to[i] = add ? to[i] + mixed : mixed;
  }
}

template <typename T, bool add>
void weigh_row(const T* a, T weight, std::size_t count, T* to) {
  constexpr std::size_t lanes = kLanes<T>;
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    const Vector<T> weighed = load(a + i) * broadcast(weight);
    store(to + i, add ? load(to + i) + weighed : weighed);
  }
  for (; i < count; ++i) to[i] = add ? to[i] + a[i] * weight : a[i] * weight;
}

// Along the columns of [axis.in, columns] to [axis.out, columns].
template <typename T>
void resize_columns(const ResizeAxis& axis, const T* from, std::size_t columns, T* to) {
  const T* weights = static_cast<const T*>(axis.weights);
  for (std::size_t i = 0; i < axis.out; ++i, to += columns) {
    const T* row = from + axis.first[i] * columns;
    const auto weight = [&](std::size_t tap) { return weights[tap * axis.out + i]; };
    if (axis.taps == 1) {
      weigh_row<T, false>(row, weight(0), columns, to);
      continue;
    }
    mix_rows<T, false>(row, weight(0), row + columns, weight(1), columns, to);
    std::size_t tap = 2;
    for (; tap + 1 < axis.taps; tap += 2) {
      const T* more = row + tap * columns;
      mix_rows<T, true>(more, weight(tap), more + columns, weight(tap + 1), columns, to);
    }
    if (tap < axis.taps) weigh_row<T, true>(row + tap * columns, weight(tap), columns, to);
  }
}

// `scratch`: `planes_at_once` planes between both axes, then (in + out) vectors of the rows' axis.
template <typename T>
void resize(const ResizeCall& call, std::size_t first, std::size_t last, void* scratch) {
  const ResizeAxis &columns = call.axes[0], &rows = call.axes[1];
  const std::size_t size = columns.in * rows.in, result = columns.out * rows.out;
  T* between = static_cast<T*>(scratch);
  const bool rows_first = columns.in <= columns.out;
  const std::size_t in_between = rows_first ? columns.in * rows.out : columns.out * rows.in;
  T* vectors = between + call.planes_at_once * in_between;
  for (std::size_t plane = first; plane < last; plane += call.planes_at_once) {
    const std::size_t count = last - plane < call.planes_at_once ? last - plane : call.planes_at_once;
    const T* x = static_cast<const T*>(call.x) + plane * size;
    T* y = static_cast<T*>(call.y) + plane * result;
    if (rows_first) resize_rows(rows, x, count * columns.in, between, vectors);
    for (std::size_t i = 0; i < count; ++i) {
      if (rows_first) {
        resize_columns(columns, between + i * in_between, rows.out, y + i * result);
      } else {
        resize_columns(columns, x + i * size, rows.in, between + i * in_between);
      }
    }
    if (!rows_first) resize_rows(rows, between, count * columns.out, y, vectors);
  }
}

}  // namespace
}  // namespace onnxtrain
