// LogSoftmax, and gradients of Softmax and LogSoftmax, along one axis of [outer, size, inner], and of softmax cross-entropy.
//
// Included by kernels.cpp only. y = x - log sum exp(x), dx = y (dy - sum of dy y), and dx = dy - exp(y) sum of dy. Sums of
// gradients are taken in float64, those of LogSoftmax in the type of x.
#pragma once

#include "kernels/elementwise.h"
#include "kernels/kernel_table.h"
#include "kernels/lanes.h"
#include "kernels/transcendental.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// `count` neighbours along the inner axes, processed together.
template <typename T>
void log_softmax_columns(const T* x, T* y, std::size_t size, std::size_t inner, std::size_t count) {
  T largest[tuning::kSoftmaxColumns], sums[tuning::kSoftmaxColumns] = {};
  for (std::size_t i = 0; i < count; ++i) largest[i] = x[i];
  for (std::size_t k = 1; k < size; ++k) {
    const T* row = x + k * inner;
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = 0; i < count; ++i) largest[i] = row[i] > largest[i] ? row[i] : largest[i];
  }
  for (std::size_t k = 0; k < size; ++k) {
    const T* row = x + k * inner;
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = 0; i < count; ++i) sums[i] += probability(row[i] - largest[i]);
  }
  // The largest comes off first: digits of x that it has are not lost to the logarithm.
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) sums[i] = static_cast<T>(logarithm(static_cast<double>(sums[i])));
  for (std::size_t k = 0; k < size; ++k) {
    const T* row = x + k * inner;
    T* to = y + k * inner;
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = 0; i < count; ++i) to[i] = (row[i] - largest[i]) - sums[i];
  }
}

template <typename T>
void log_softmax(const LogSoftmaxCall& call, std::size_t first, std::size_t last) {
  for (std::size_t outer = first; outer < last; ++outer) {
    const T* x = static_cast<const T*>(call.x) + outer * call.size * call.inner;
    T* y = static_cast<T*>(call.y) + outer * call.size * call.inner;
    for (std::size_t begin = 0; begin < call.inner; begin += tuning::kSoftmaxColumns) {
      const std::size_t left = call.inner - begin;
      log_softmax_columns(x + begin, y + begin, call.size, call.inner,
                          left < tuning::kSoftmaxColumns ? left : tuning::kSoftmaxColumns);
    }
  }
}

template <typename T, bool logarithm>
inline T softmax_slope(T dy, T y, T sum) {
  return logarithm ? dy - probability(y) * sum : y * (dy - sum);
}

// `count` is a multiple of the number of lanes.
template <bool logarithm, typename T>
void add_products(LaneSum& total, const T* dy, const T* y, std::size_t count) {
  LaneSum sum = total;
  for (std::size_t i = 0; i < count; i += kSumLanes) {
    for (std::size_t v = 0; v < kLaneVectors; ++v) {
      WideVector slope, value;
      load(dy + i + v * kWideLanes, slope);
      if (logarithm) {
        sum.lanes[v] += slope;
      } else {
        load(y + i + v * kWideLanes, value);
        sum.lanes[v] += slope * value;
      }
    }
  }
  total = sum;
}

template <typename T, bool logarithm>
void softmax_gradient_row(const T* dy, const T* y, T* dx, std::size_t size) {
  LaneSum sum;
  const std::size_t whole = size / kSumLanes * kSumLanes;
  add_products<logarithm>(sum, dy, y, whole);
  if (whole < size) {
    T last_dy[kSumLanes], last_y[kSumLanes];
    pad_lanes(dy + whole, size - whole, T(0), last_dy);
    pad_lanes(y + whole, size - whole, T(0), last_y);
    add_products<logarithm>(sum, last_dy, last_y, kSumLanes);
  }
  const T total = static_cast<T>(sum.total());
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < size; ++i) dx[i] = softmax_slope<T, logarithm>(dy[i], y[i], total);
}

// Neighbours along the inner axes are processed together.
template <typename T, bool logarithm>
void softmax_gradient_columns(const T* dy, const T* y, T* dx, std::size_t size, std::size_t inner) {
  for (std::size_t begin = 0; begin < inner; begin += tuning::kSoftmaxColumns) {
    const std::size_t count = inner - begin < tuning::kSoftmaxColumns ? inner - begin : tuning::kSoftmaxColumns;
    double sums[tuning::kSoftmaxColumns] = {};
    for (std::size_t k = 0; k < size; ++k) {
      const T *row_dy = dy + k * inner + begin, *row_y = y + k * inner + begin;
      ONNXTRAIN_VECTORIZE
      for (std::size_t i = 0; i < count; ++i) {
        const auto slope = static_cast<double>(row_dy[i]);
        sums[i] += logarithm ? slope : slope * static_cast<double>(row_y[i]);
      }
    }
    for (std::size_t k = 0; k < size; ++k) {
      const T *row_dy = dy + k * inner + begin, *row_y = y + k * inner + begin;
      T* row_dx = dx + k * inner + begin;
      ONNXTRAIN_VECTORIZE
      for (std::size_t i = 0; i < count; ++i) {
        row_dx[i] = softmax_slope<T, logarithm>(row_dy[i], row_y[i], static_cast<T>(sums[i]));
      }
    }
  }
}

template <typename T, bool logarithm>
void softmax_gradient(const SoftmaxCall& call, std::size_t first, std::size_t last) {
  for (std::size_t outer = first; outer < last; ++outer) {
    const std::size_t start = outer * call.size * call.inner;
    const T *dy = static_cast<const T*>(call.dy) + start, *y = static_cast<const T*>(call.y) + start;
    T* dx = static_cast<T*>(call.dx) + start;
    if (call.inner == 1) {
      softmax_gradient_row<T, logarithm>(dy, y, dx, call.size);
    } else {
      softmax_gradient_columns<T, logarithm>(dy, y, dx, call.size, call.inner);
    }
  }
}

// dx = (p - 1 at the label) coefficient, p = exp(log p).
template <typename T>
void cross_entropy_gradient(const CrossEntropyCall& call, std::size_t first, std::size_t last) {
  for (std::size_t outer = first; outer < last; ++outer) {
    const std::size_t start = outer * call.classes * call.inner, label_start = outer * call.inner;
    const T* coefficient = static_cast<const T*>(call.coefficient) + label_start * call.coefficient_step;
    const T* log_probability = static_cast<const T*>(call.log_probability) + start;
    const std::int64_t* labels = call.labels + label_start;
    T* dx = static_cast<T*>(call.dx) + start;
    if (call.inner == 1 || call.coefficient_step == 0) {
      const T factor = *coefficient;
      ONNXTRAIN_VECTORIZE
      for (std::size_t i = 0; i < call.classes * call.inner; ++i) dx[i] = probability(log_probability[i]) * factor;
    } else {
      for (std::size_t row = 0; row < call.classes * call.inner; row += call.inner) {
        ONNXTRAIN_VECTORIZE
        for (std::size_t i = 0; i < call.inner; ++i) {
          dx[row + i] = probability(log_probability[row + i]) * coefficient[i];
        }
      }
    }
    for (std::size_t i = 0; i < call.inner; ++i) {
      dx[static_cast<std::size_t>(labels[i]) * call.inner + i] -= coefficient[i * call.coefficient_step];
    }
  }
}

}  // namespace
}  // namespace onnxtrain
