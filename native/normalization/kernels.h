// Gradients of normalizations over a channel or a row.
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

// `count` is a multiple of the number of lanes. d and dd are untouched if `statistics` is false.
template <bool statistics, typename T>
void add_moments(MomentSums& total, double near, const T* x, const T* g, std::size_t count) {
  MomentSums sums = total;  // in registers
  for (std::size_t i = 0; i < count; i += kSumLanes) {
    for (std::size_t v = 0; v < kLaneVectors; ++v) {
      WideVector d, slope;
      load(x + i + v * kWideLanes, d);
      load(g + i + v * kWideLanes, slope);
      d -= near;
      if (statistics) {
        sums.d.lanes[v] += d;
        sums.dd.lanes[v] += d * d;
      }
      sums.g.lanes[v] += slope;
      sums.gd.lanes[v] += slope * d;
    }
  }
  total = sums;
}

template <bool statistics, typename T>
void add_run(MomentSums& sums, T near, const T* x, const T* g, std::size_t count) {
  const std::size_t whole = count / kSumLanes * kSumLanes;
  add_moments<statistics>(sums, static_cast<double>(near), x, g, whole);
  if (whole < count) {
    T last_x[kSumLanes], last_g[kSumLanes];
    pad_lanes(x + whole, count - whole, near, last_x);
    pad_lanes(g + whole, count - whole, T(0), last_g);
    add_moments<statistics>(sums, static_cast<double>(near), last_x, last_g, kSumLanes);
  }
}

// Moments derived from the sums.
struct Moments {
  double mean, variance, g, gd;  // sums of g and of g (x - mean)
};

inline Moments moments_of(const MomentSums& sums, double near, double count) {
  const double shift = sums.d.total() / count, g = sums.g.total();
  const double variance = sums.dd.total() / count - shift * shift;
  return {near + shift, variance < 0.0 ? 0.0 : variance, g, sums.gd.total() - shift * g};
}

template <typename T>
class ChannelRuns {
 public:
  ChannelRuns(const BatchNormalizationCall& call, std::size_t channel)
      : call_(call), first_(channel * call.size), step_(call.channels * call.size) {}

  // Adds all elements of the channel; short runs are gathered first.
  template <bool statistics>
  void add_to(MomentSums& sums, T near) const {
    const T *x = static_cast<const T*>(call_.x) + first_, *dy = static_cast<const T*>(call_.dy) + first_;
    if (call_.size >= 2 * kSumLanes) {
      for (std::size_t n = 0; n < call_.batch; ++n) {
        add_run<statistics>(sums, near, x + n * step_, dy + n * step_, call_.size);
      }
      return;
    }
    T gathered_x[tuning::kGatheredElements], gathered_dy[tuning::kGatheredElements];
    std::size_t filled = 0;
    for (std::size_t n = 0; n < call_.batch; ++n) {
      for (std::size_t i = 0; i < call_.size; ++i, ++filled) {
        gathered_x[filled] = x[n * step_ + i];
        gathered_dy[filled] = dy[n * step_ + i];
      }
      if (filled + call_.size > tuning::kGatheredElements || n + 1 == call_.batch) {
        add_run<statistics>(sums, near, gathered_x, gathered_dy, filled);
        filled = 0;
      }
    }
  }

  T first_x() const { return static_cast<const T*>(call_.x)[first_]; }

  // dx = ((dy - mean_dy) - (x - mean) slope) factor.
  void write(double mean, double mean_dy, double slope, double factor) const {
    const Split<T> centre(mean);
    const T less = static_cast<T>(mean_dy), times = static_cast<T>(slope), scale = static_cast<T>(factor);
    for (std::size_t n = 0; n < call_.batch; ++n) {
      const T *x = static_cast<const T*>(call_.x) + first_ + n * step_;
      const T *dy = static_cast<const T*>(call_.dy) + first_ + n * step_;
      T* dx = static_cast<T*>(call_.dx) + first_ + n * step_;
      ONNXTRAIN_VECTORIZE
      for (std::size_t i = 0; i < call_.size; ++i) {
        dx[i] = ((dy[i] - less) - ((x[i] - centre.high) - centre.low) * times) * scale;
      }
    }
  }

  void scale_only(double factor) const {
    const T scale = static_cast<T>(factor);
    for (std::size_t n = 0; n < call_.batch; ++n) {
      const T* dy = static_cast<const T*>(call_.dy) + first_ + n * step_;
      T* dx = static_cast<T*>(call_.dx) + first_ + n * step_;
      ONNXTRAIN_VECTORIZE
      for (std::size_t i = 0; i < call_.size; ++i) dx[i] = dy[i] * scale;
    }
  }

 private:
  const BatchNormalizationCall& call_;
  std::size_t first_, step_;
};

inline double reciprocal_root(double value) { return 1.0 / square_root(value); }

template <typename T>
void batch_normalization_channel(const BatchNormalizationCall& call, std::size_t channel) {
  const ChannelRuns<T> runs(call, channel);
  const auto count = static_cast<double>(call.batch * call.size);
  const double scale = static_cast<double>(static_cast<const T*>(call.scale)[channel]);
  MomentSums sums;
  Moments moments = {};
  double inverse = 0.0;
  if (count == 0.0) {
    // Empty sums: no elements to normalize.
  } else if (call.mean == nullptr) {
    const T near = runs.first_x();
    runs.template add_to<true>(sums, near);
    moments = moments_of(sums, static_cast<double>(near), count);
    inverse = reciprocal_root(moments.variance + call.epsilon);
    const double slope = moments.gd * inverse * inverse / count;
    if (call.dx != nullptr) runs.write(moments.mean, moments.g / count, slope, scale * inverse);
  } else {
    const T mean = static_cast<const T*>(call.mean)[channel];
    inverse = reciprocal_root(static_cast<double>(static_cast<const T*>(call.variance)[channel]) + call.epsilon);
    if (call.dscale != nullptr || call.dbias != nullptr) {
      runs.template add_to<false>(sums, mean);
      moments.g = sums.g.total();
      moments.gd = sums.gd.total();
    }
    if (call.dx != nullptr) runs.scale_only(scale * inverse);
  }
  if (call.dscale != nullptr) static_cast<T*>(call.dscale)[channel] = static_cast<T>(moments.gd * inverse);
  if (call.dbias != nullptr) static_cast<T*>(call.dbias)[channel] = static_cast<T>(moments.g);
}

template <typename T>
void batch_normalization_gradient(const BatchNormalizationCall& call, std::size_t first, std::size_t last) {
  for (std::size_t channel = first; channel < last; ++channel) batch_normalization_channel<T>(call, channel);
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
  add_run<true>(sums, near, x, g, size);
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
