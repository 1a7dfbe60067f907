// Row-wise softmax of scores, and its gradient.
//
// Included by kernels.cpp only.
#pragma once

#include "attention/rows.h"
#include "kernels/elementwise.h"
#include "kernels/transcendental.h"

namespace onnxtrain {
namespace {

template <typename T>
constexpr T kNotANumber = static_cast<T>(__builtin_nan(""));

template <typename T>
inline T sum_of_lanes(const Vector<T>& lanes) {
  return of_lanes<kVectorBytes>(reinterpret_cast<const T*>(&lanes), [](auto a, auto b) { return a + b; });
}

template <typename T>
inline T largest_lane(const Vector<T>& lanes) {
  return of_lanes<kVectorBytes>(reinterpret_cast<const T*>(&lanes), [](auto a, auto b) { return a > b ? a : b; });
}

// Statistics of a row of scores before it became exp(score - largest); `sum` is the sum of those.
template <typename T>
struct RowSum {
  T largest, sum;
};

// Turns a row of scores, in whole vectors, into exp(score - largest of the row).
template <typename T>
RowSum<T> exponentials(T* row, const T* bias, std::size_t count, T scale, bool zero_empty) {
  Vector<T> most = broadcast(kMinusInfinity<T>);
  for (std::size_t i = 0; i < count; i += kLanes<T>) {
    const Vector<T> score = load(row + i) * scale + load(bias + i);
    store(row + i, score);
    most = score > most ? score : most;
  }
  const T largest = largest_lane<T>(most);
  bool empty = largest == kMinusInfinity<T>;
  for (std::size_t i = 0; empty && i < count; ++i) empty = row[i] == kMinusInfinity<T>;  // true only if no score is NaN
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) row[i] = probability(row[i] - largest);
  Vector<T> sums = {};
  for (std::size_t i = 0; i < count; i += kLanes<T>) sums += load(row + i);
  const T sum = sum_of_lanes<T>(sums);
  if (sum == sum) return {largest, sum};
  if (zero_empty) fill_zero(row, count);
  return {empty ? kMinusInfinity<T> : kNotANumber<T>, T(1)};
}

// The logarithms of the sums of exp(score) of rows.
template <typename T>
void write_log_sums(const T* largest, const T* sums, std::size_t rows, T* log_sums) {
  ONNXTRAIN_VECTORIZE
  for (std::size_t row = 0; row < rows; ++row) {
    log_sums[row] = static_cast<T>(static_cast<double>(largest[row]) + logarithm(static_cast<double>(sums[row])));
  }
}

template <typename T>
void scale_row(const T* from, std::size_t count, T factor, T* to) {
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) to[i] = from[i] * factor;
}

template <typename T>
inline T dot(const T* a, const T* b, std::size_t count) {
  Vector<T> sums = {};
  std::size_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) sums += load(a + i) * load(b + i);
  T sum = sum_of_lanes<T>(sums);
  for (; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// Turns a row of scores into the probabilities p, and a row of dp into the gradient of the scores: p (dp - delta)
// slope_scale.
template <typename T>
void score_gradient(T* row, T* slopes, const T* bias, std::size_t count, T scale, T slope_scale, T log_sum, T delta,
                    bool zero_empty) {
  if (zero_empty && !(log_sum - log_sum == T(0))) {  // neither NaN nor -inf
    fill_zero(row, count);
    fill_zero(slopes, count);
    return;
  }
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) {
    const T p = probability(row[i] * scale + bias[i] - log_sum);
    row[i] = p;
    slopes[i] = p * (slopes[i] - delta) * slope_scale;
  }
}

}  // namespace
}  // namespace onnxtrain
