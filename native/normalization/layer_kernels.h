// Gradients of normalizations over a row.
//
// Included by kernels.cpp only. With d = x - mean, r = 1 / sqrt(variance + epsilon), and g the gradient of d r: dx = r
// (g - mean(g) - d r^2 mean(g d)). One pass over the data collects all sums in float64, relative to a value near the
// mean to avoid cancellation; a second pass, with the data still in cache, writes dx and adds to dscale and dbias.
#pragma once

#include "kernels/elementwise.h"
#include "kernels/kernel_table.h"
#include "kernels/lanes.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Sums of x - near, of g = dy scale, and of their products.
struct MomentSums {
  LaneSum d, dd, g, gd;
};

// `count` is a multiple of the number of lanes.
template <typename T>
void add_moments(MomentSums& total, double near, const T* x, const T* dy, const T* scale, std::size_t count) {
  MomentSums sums = total;  // in registers
  for (std::size_t i = 0; i < count; i += kSumLanes) {
    for (std::size_t v = 0; v < kLaneVectors; ++v) {
      const std::size_t at = i + v * kWideLanes;
      WideVector d;
      load(x + at, d);
      const WideVector g = widen(few(dy + at) * few(scale + at));
      d -= near;
      sums.d.lanes[v] += d;
      sums.dd.lanes[v] += d * d;
      sums.g.lanes[v] += g;
      sums.gd.lanes[v] += g * d;
    }
  }
  total = sums;
}

template <typename T>
void add_run(MomentSums& sums, T near, const T* x, const T* dy, const T* scale, std::size_t count) {
  const std::size_t whole = count / kSumLanes * kSumLanes;
  add_moments(sums, static_cast<double>(near), x, dy, scale, whole);
  if (whole < count) {
    T last_x[kSumLanes], last_dy[kSumLanes], last_scale[kSumLanes];
    pad_lanes(x + whole, count - whole, near, last_x);
    pad_lanes(dy + whole, count - whole, T(0), last_dy);
    pad_lanes(scale + whole, count - whole, T(0), last_scale);
    add_moments(sums, static_cast<double>(near), last_x, last_dy, last_scale, kSumLanes);
  }
}

// Moments derived from the sums.
struct Moments {
  double mean, variance, g, gd;  // sums of g and of g (x - mean)
};

inline Moments moments_of(const MomentSums& sums, double near, double count) {
  const double g = sums.g.total(), shift = sums.d.total() / count;
  const double variance = sums.dd.total() / count - shift * shift;
  return {near + shift, variance < 0.0 ? 0.0 : variance, g, sums.gd.total() - shift * g};
}

// The forward result, if it is wanted.
enum class Result { kNone, kScaled, kWithBias };

// One row of a layer normalization: dx, the result, and its contribution to dscale and dbias, in one pass. `dx` may be x,
// and any other tensor may be a buffer for what is not wanted.
template <typename T, bool centred, Result result>
void layer_normalization_row(const LayerNormalizationCall& call, std::size_t row, T* dx, double* dscale,
                             double* dbias) {
  const std::size_t size = call.size;
  const T *x = static_cast<const T*>(call.x) + row * size, *dy = static_cast<const T*>(call.dy) + row * size;
  const T *scale = static_cast<const T*>(call.scale), *bias = static_cast<const T*>(call.bias);
  T* y = static_cast<T*>(call.y) + (result == Result::kNone ? 0 : row * size);
  const auto count = static_cast<double>(size);
  const T near = centred ? x[0] : T(0);
  MomentSums sums;
  add_run(sums, near, x, dy, scale, size);
  Moments moments = moments_of(sums, static_cast<double>(near), count);
  if (!centred) moments = {0.0, sums.dd.total() / count, 0.0, sums.gd.total()};
  const double inverse = reciprocal_root(moments.variance + call.epsilon);
  const Split<T> centre(moments.mean);
  const T high = centre.high, low = centre.low, factor = static_cast<T>(inverse);
  const T less = static_cast<T>(moments.g / count), times = static_cast<T>(moments.gd * inverse * inverse / count);
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < size; ++i) {
    const T slope = dy[i], weight = scale[i], d = (x[i] - high) - low, normalized = d * factor;
    dscale[i] += static_cast<double>(slope * normalized);
    if (centred) dbias[i] += static_cast<double>(slope);
    if (result == Result::kScaled) y[i] = normalized * weight;
    if (result == Result::kWithBias) y[i] = normalized * weight + bias[i];
    dx[i] = ((slope * weight - less) - d * times) * factor;
  }
}

template <typename T, bool centred, Result result>
void layer_normalization_rows(const LayerNormalizationCall& call, std::size_t first, std::size_t last, T* unwanted,
                              double* dscale, double* dbias) {
  for (std::size_t row = first; row < last; ++row) {
    T* dx = call.dx == nullptr ? unwanted : static_cast<T*>(call.dx) + row * call.size;
    layer_normalization_row<T, centred, result>(call, row, dx, dscale, dbias);
  }
}

// `unwanted` has room for a row; dscale and dbias, the latter null unless centred, are added to.
template <typename T>
void layer_normalization_gradient(const LayerNormalizationCall& call, std::size_t first, std::size_t last,
                                  void* unwanted, double* dscale, double* dbias) {
  T* row = static_cast<T*>(unwanted);
  if (!call.centred) {
    if (call.y == nullptr) return layer_normalization_rows<T, false, Result::kNone>(call, first, last, row, dscale, dbias);
    return layer_normalization_rows<T, false, Result::kScaled>(call, first, last, row, dscale, dbias);
  }
  if (call.y == nullptr) return layer_normalization_rows<T, true, Result::kNone>(call, first, last, row, dscale, dbias);
  if (call.bias == nullptr) return layer_normalization_rows<T, true, Result::kScaled>(call, first, last, row, dscale, dbias);
  layer_normalization_rows<T, true, Result::kWithBias>(call, first, last, row, dscale, dbias);
}

}  // namespace
}  // namespace onnxtrain
