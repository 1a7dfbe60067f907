// Gradients of normalizations over a row.
//
// Included by kernels.cpp only. With d = x - mean, r = 1 / sqrt(variance + epsilon), and g the gradient of d r: dx = r
// (g - mean(g) - d r^2 mean(g d)). One pass over the data collects all sums in float64, relative to a value near the
// mean to avoid cancellation; a second pass, with the data still in cache, writes dx.
#pragma once

#include "kernels/elementwise.h"
#include "kernels/kernel_table.h"
#include "kernels/lanes.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Sums of x - near, of g, and of their products.
struct MomentSums {
  LaneSum d, dd, g, gd;
};

// `count` is a multiple of the number of lanes.
template <typename T>
void add_moments(MomentSums& total, double near, const T* x, const T* g, std::size_t count) {
  MomentSums sums = total;  // in registers
  for (std::size_t i = 0; i < count; i += kSumLanes) {
    for (std::size_t v = 0; v < kLaneVectors; ++v) {
      WideVector d, slope;
      load(x + i + v * kWideLanes, d);
      load(g + i + v * kWideLanes, slope);
      d -= near;
      sums.d.lanes[v] += d;
      sums.dd.lanes[v] += d * d;
      sums.g.lanes[v] += slope;
      sums.gd.lanes[v] += slope * d;
    }
  }
  total = sums;
}

template <typename T>
void add_run(MomentSums& sums, T near, const T* x, const T* g, std::size_t count) {
  const std::size_t whole = count / kSumLanes * kSumLanes;
  add_moments(sums, static_cast<double>(near), x, g, whole);
  if (whole < count) {
    T last_x[kSumLanes], last_g[kSumLanes];
    pad_lanes(x + whole, count - whole, near, last_x);
    pad_lanes(g + whole, count - whole, T(0), last_g);
    add_moments(sums, static_cast<double>(near), last_x, last_g, kSumLanes);
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

// One row of a layer normalization: dx, and its contribution to dscale and dbias.
template <typename T, bool centred>
void layer_normalization_row(const LayerNormalizationCall& call, std::size_t row, T* g, double* dscale,
                             double* dbias) {
  const std::size_t size = call.size;
  const T *x = static_cast<const T*>(call.x) + row * size, *dy = static_cast<const T*>(call.dy) + row * size;
  const T* scale = static_cast<const T*>(call.scale);
  const auto count = static_cast<double>(size);
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < size; ++i) g[i] = dy[i] * scale[i];
  const T near = centred ? x[0] : T(0);
  MomentSums sums;
  add_run(sums, near, x, g, size);
  Moments moments = moments_of(sums, static_cast<double>(near), count);
  if (!centred) moments = {0.0, sums.dd.total() / count, 0.0, sums.gd.total()};
  const double inverse = reciprocal_root(moments.variance + call.epsilon);
  const Split<T> centre(moments.mean);
  const T factor = static_cast<T>(inverse);
  if (dscale != nullptr) {
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = 0; i < size; ++i) {
      dscale[i] += static_cast<double>(dy[i] * (((x[i] - centre.high) - centre.low) * factor));
    }
  }
  if (dbias != nullptr) {
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = 0; i < size; ++i) dbias[i] += static_cast<double>(dy[i]);
  }
  if (call.y != nullptr) {  // before dx, which may overwrite x
    T* y = static_cast<T*>(call.y) + row * size;
    const T* bias = static_cast<const T*>(call.bias);
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = 0; i < size; ++i) y[i] = ((x[i] - centre.high) - centre.low) * factor * scale[i];
    if (bias != nullptr) {
      ONNXTRAIN_VECTORIZE
      for (std::size_t i = 0; i < size; ++i) y[i] += bias[i];
    }
  }
  if (call.dx == nullptr) return;
  T* dx = static_cast<T*>(call.dx) + row * size;
  const T less = static_cast<T>(moments.g / count), times = static_cast<T>(moments.gd * inverse * inverse / count);
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < size; ++i) {
    dx[i] = ((g[i] - less) - ((x[i] - centre.high) - centre.low) * times) * factor;
  }
}

// `products` holds one row; dscale and dbias are sums over rows [first, last); null: not requested.
template <typename T>
void layer_normalization_gradient(const LayerNormalizationCall& call, std::size_t first, std::size_t last,
                                  void* products, double* dscale, double* dbias) {
  T* g = static_cast<T*>(products);
  for (std::size_t row = first; row < last; ++row) {
    if (call.centred) {
      layer_normalization_row<T, true>(call, row, g, dscale, dbias);
    } else {
      layer_normalization_row<T, false>(call, row, g, dscale, dbias);
    }
  }
}

}  // namespace
}  // namespace onnxtrain
