// Reductions over the first axes, products of rows, and running sums and products.
//
// Included by kernels.cpp only. Sums are taken in the order of the rows and in the type of x, as ONNX Runtime takes them.
#pragma once

#include "kernels/elementwise.h"
#include "kernels/kernel_table.h"

namespace onnxtrain {
namespace {

// Columns whose results fit the first cache.
constexpr std::size_t kReducedColumns = 2048;

template <ReductionKind kind, typename T>
inline T term(T x) {
  return kind == ReductionKind::kSumOfSquares ? x * x : x;
}

template <ReductionKind kind, typename T>
inline T joined(T left, T right) {
  return kind == ReductionKind::kProduct ? left * right : left + right;
}

// Columns [first, last) of x [size, columns].
template <ReductionKind kind, typename T>
void reduce_columns(const ReductionCall& call, std::size_t first, std::size_t last) {
  for (std::size_t begin = first; begin < last; begin += kReducedColumns) {
    const std::size_t count = last - begin < kReducedColumns ? last - begin : kReducedColumns;
    const T* x = static_cast<const T*>(call.x) + begin;
    T* y = static_cast<T*>(call.y) + begin;
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = 0; i < count; ++i) y[i] = call.size == 0 ? T(kind == ReductionKind::kProduct) : term<kind>(x[i]);
    std::size_t row = 1;
    for (; row + 3 < call.size; row += 4) {  // y is read and written once for four rows
      const T *a = x + row * call.columns, *b = a + call.columns, *c = b + call.columns, *d = c + call.columns;
      ONNXTRAIN_VECTORIZE
      for (std::size_t i = 0; i < count; ++i) {
        const T two = joined<kind>(joined<kind>(y[i], term<kind>(a[i])), term<kind>(b[i]));
        y[i] = joined<kind>(joined<kind>(two, term<kind>(c[i])), term<kind>(d[i]));
      }
    }
    for (; row < call.size; ++row) {
      const T* a = x + row * call.columns;
      ONNXTRAIN_VECTORIZE
      for (std::size_t i = 0; i < count; ++i) y[i] = joined<kind>(y[i], term<kind>(a[i]));
    }
    if (kind == ReductionKind::kMean) {
      ONNXTRAIN_VECTORIZE
      for (std::size_t i = 0; i < count; ++i) y[i] /= static_cast<T>(call.size);
    }
  }
}

// Rows [first, last) of x [rows, size]: sixteen products side by side, whatever the instruction set.
template <typename T>
void multiply_rows(const ReductionCall& call, std::size_t first, std::size_t last) {
  constexpr std::size_t lanes = 16;
  for (std::size_t row = first; row < last; ++row) {
    const T* x = static_cast<const T*>(call.x) + row * call.size;
    T products[lanes];
    for (T& each : products) each = T(1);
    std::size_t i = 0;
    for (; i + lanes <= call.size; i += lanes) {
      ONNXTRAIN_VECTORIZE
      for (std::size_t lane = 0; lane < lanes; ++lane) products[lane] *= x[i + lane];
    }
    T product = T(1);
    for (const T each : products) product *= each;
    for (; i < call.size; ++i) product *= x[i];
    static_cast<T*>(call.y)[row] = product;
  }
}

// Lines of [outer, size, inner], one for each of the outer and inner elements, side by side: an element waits for the one
// before it.
template <bool multiplies, std::size_t lines, typename T>
void scan_lines(const ScanCall& call, const T* x, T* y, std::size_t between) {
  T totals[lines];
  for (T& total : totals) total = T(multiplies);
  for (std::size_t step = 0; step < call.size; ++step) {
    const std::size_t at = (call.reverse ? call.size - 1 - step : step) * call.inner;
    ONNXTRAIN_VECTORIZE
    for (std::size_t line = 0; line < lines; ++line) {
      const T value = x[at + line * between], before = totals[line];
      // The first element is taken as it is: 0 + -0 is another zero.
      totals[line] = multiplies ? before * value : step == 0 ? value : before + value;
      y[at + line * between] = call.exclusive ? before : totals[line];
    }
  }
}

// The lines [first, last): neighbours as vectors; of lines behind each other few, whose elements may share a set of the
// first cache.
template <bool multiplies, typename T>
void scan(const ScanCall& call, std::size_t first, std::size_t last) {
  const T* x = static_cast<const T*>(call.x);
  T* y = static_cast<T*>(call.y);
  constexpr std::size_t most = 64, many = 16, few = 4;
  for (std::size_t line = first; line < last;) {
    const std::size_t column = line % call.inner, at = line / call.inner * call.size * call.inner + column;
    if (call.inner == 1 && last - line >= few) {
      scan_lines<multiplies, few>(call, x + at, y + at, call.size);
      line += few;
    } else if (call.inner - column >= most && last - line >= most) {
      scan_lines<multiplies, most>(call, x + at, y + at, 1);
      line += most;
    } else if (call.inner - column >= many && last - line >= many) {
      scan_lines<multiplies, many>(call, x + at, y + at, 1);
      line += many;
    } else {
      scan_lines<multiplies, 1>(call, x + at, y + at, 1);
      ++line;
    }
  }
}

}  // namespace
}  // namespace onnxtrain
