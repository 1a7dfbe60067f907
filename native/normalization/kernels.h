// Batch normalization in training mode, and gradients of normalizations over a channel or a row.
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

inline Moments moments_of(double d, double dd, double g, double gd, double near, double count) {
  const double shift = d / count, variance = dd / count - shift * shift;
  return {near + shift, variance < 0.0 ? 0.0 : variance, g, gd - shift * g};
}

inline Moments moments_of(const MomentSums& sums, double near, double count) {
  return moments_of(sums.d.total(), sums.dd.total(), sums.g.total(), sums.gd.total(), near, count);
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

// The statistics of a channel from the sums of x - near and of its square, and the running ones that follow.
template <typename T>
struct ChannelScale {
  Split<T> centre{0.0};
  T factor = T(0), bias = T(0);

  ChannelScale(const BatchStatisticsCall& call, std::size_t channel, double d, double dd, double near, double count) {
    const auto at = [channel](const void* values) { return static_cast<double>(static_cast<const T*>(values)[channel]); };
    const Moments moments = moments_of(d, dd, 0.0, 0.0, near, count);
    centre = Split<T>(moments.mean);
    factor = static_cast<T>(at(call.scale) * reciprocal_root(moments.variance + call.epsilon));
    bias = static_cast<const T*>(call.bias)[channel];
    const double kept = call.momentum, added = 1.0 - call.momentum;
    if (call.new_mean != nullptr) {
      static_cast<T*>(call.new_mean)[channel] = static_cast<T>(kept * at(call.mean) + added * moments.mean);
    }
    if (call.new_variance != nullptr) {
      static_cast<T*>(call.new_variance)[channel] = static_cast<T>(kept * at(call.variance) + added * moments.variance);
    }
  }
};

// `count` is a multiple of the number of lanes.
template <typename T>
void add_spread_lanes(LaneSum& d_total, LaneSum& dd_total, double near, const T* x, std::size_t count) {
  LaneSum d_sums = d_total, dd_sums = dd_total;  // in registers
  for (std::size_t i = 0; i < count; i += kSumLanes) {
    for (std::size_t v = 0; v < kLaneVectors; ++v) {
      WideVector d;
      load(x + i + v * kWideLanes, d);
      d -= near;
      d_sums.lanes[v] += d;
      dd_sums.lanes[v] += d * d;
    }
  }
  d_total = d_sums;
  dd_total = dd_sums;
}

template <typename T>
void add_spread(LaneSum& d, LaneSum& dd, T near, const T* x, std::size_t count) {
  const std::size_t whole = count / kSumLanes * kSumLanes;
  add_spread_lanes(d, dd, static_cast<double>(near), x, whole);
  if (whole < count) {
    T last[kSumLanes];
    pad_lanes(x + whole, count - whole, near, last);
    add_spread_lanes(d, dd, static_cast<double>(near), last, kSumLanes);
  }
}

template <typename T>
void normalize_channel(const BatchStatisticsCall& call, std::size_t channel) {
  const std::size_t step = call.channels * call.size;
  const T* x = static_cast<const T*>(call.x) + channel * call.size;
  T* y = static_cast<T*>(call.y) + channel * call.size;
  LaneSum d, dd;
  const T near = x[0];
  if (call.size >= 2 * kSumLanes) {
    for (std::size_t n = 0; n < call.batch; ++n) add_spread(d, dd, near, x + n * step, call.size);
  } else {  // short runs are gathered first
    T gathered[tuning::kGatheredElements];
    std::size_t filled = 0;
    for (std::size_t n = 0; n < call.batch; ++n) {
      for (std::size_t i = 0; i < call.size; ++i) gathered[filled++] = x[n * step + i];
      if (filled + call.size > tuning::kGatheredElements || n + 1 == call.batch) {
        add_spread(d, dd, near, gathered, filled);
        filled = 0;
      }
    }
  }
  const auto count = static_cast<double>(call.batch * call.size);
  const ChannelScale<T> scale(call, channel, d.total(), dd.total(), static_cast<double>(near), count);
  const T high = scale.centre.high, low = scale.centre.low, factor = scale.factor, bias = scale.bias;
  for (std::size_t n = 0; n < call.batch; ++n) {
    const T* run = x + n * step;
    T* out = y + n * step;
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = 0; i < call.size; ++i) out[i] = ((run[i] - high) - low) * factor + bias;
  }
}

// Channels [first, first + count) of rows without further axes.
template <typename T>
void normalize_columns(const BatchStatisticsCall& call, std::size_t first, std::size_t count) {
  constexpr std::size_t kMost = tuning::kNormalizedColumns;
  const T* x = static_cast<const T*>(call.x) + first;
  T* y = static_cast<T*>(call.y) + first;
  const std::size_t rows = call.batch, step = call.channels;
  double d[kMost] = {}, dd[kMost] = {}, near[kMost];
  for (std::size_t i = 0; i < count; ++i) near[i] = static_cast<double>(x[i]);
  for (std::size_t n = 0; n < rows; ++n) {
    const T* row = x + n * step;
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = 0; i < count; ++i) {
      const double difference = static_cast<double>(row[i]) - near[i];
      d[i] += difference;
      dd[i] += difference * difference;
    }
  }
  T high[kMost], low[kMost], factor[kMost], bias[kMost];
  for (std::size_t i = 0; i < count; ++i) {
    const ChannelScale<T> scale(call, first + i, d[i], dd[i], near[i], static_cast<double>(rows));
    high[i] = scale.centre.high;
    low[i] = scale.centre.low;
    factor[i] = scale.factor;
    bias[i] = scale.bias;
  }
  for (std::size_t n = 0; n < rows; ++n) {
    const T* row = x + n * step;
    T* out = y + n * step;
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = 0; i < count; ++i) out[i] = ((row[i] - high[i]) - low[i]) * factor[i] + bias[i];
  }
}

template <typename T>
void batch_normalization(const BatchStatisticsCall& call, std::size_t first, std::size_t last) {
  if (call.size == 1) {
    for (; first < last; first += tuning::kNormalizedColumns) {
      const std::size_t left = last - first;
      normalize_columns<T>(call, first, left < tuning::kNormalizedColumns ? left : tuning::kNormalizedColumns);
    }
    return;
  }
  for (std::size_t channel = first; channel < last; ++channel) normalize_channel<T>(call, channel);
}

// Sums of columns, each in the order of the rows: the same bits for any number of columns.
struct ColumnSums {
  double d[tuning::kNormalizedColumns] = {}, dd[tuning::kNormalizedColumns] = {};
  double g[tuning::kNormalizedColumns] = {}, gd[tuning::kNormalizedColumns] = {};
};

// Of columns [at, at + kWideLanes * vectors) of a block, whose rows are `step` apart.
template <std::size_t vectors, typename T>
void add_column_vectors(ColumnSums& sums, const T* near, const T* x, const T* g, std::size_t rows, std::size_t step,
                        std::size_t at) {
  WideVector d_sum[vectors] = {}, dd_sum[vectors] = {}, g_sum[vectors] = {}, gd_sum[vectors] = {}, origin[vectors];
  for (std::size_t v = 0; v < vectors; ++v) load(near + at + v * kWideLanes, origin[v]);
  for (std::size_t n = 0; n < rows; ++n) {
    for (std::size_t v = 0; v < vectors; ++v) {
      WideVector d, slope;
      load(x + n * step + at + v * kWideLanes, d);
      load(g + n * step + at + v * kWideLanes, slope);
      d -= origin[v];
      d_sum[v] += d;
      dd_sum[v] += d * d;
      g_sum[v] += slope;
      gd_sum[v] += slope * d;
    }
  }
  for (std::size_t i = 0; i < vectors * kWideLanes; ++i) {
    const std::size_t v = i / kWideLanes, lane = i % kWideLanes;
    sums.d[at + i] = d_sum[v][lane];
    sums.dd[at + i] = dd_sum[v][lane];
    sums.g[at + i] = g_sum[v][lane];
    sums.gd[at + i] = gd_sum[v][lane];
  }
}

template <typename T>
void add_column(ColumnSums& sums, const T* near, const T* x, const T* g, std::size_t rows, std::size_t step,
                std::size_t at) {
  double d_sum = 0.0, dd_sum = 0.0, g_sum = 0.0, gd_sum = 0.0;
  for (std::size_t n = 0; n < rows; ++n) {
    const double d = static_cast<double>(x[n * step + at]) - static_cast<double>(near[at]);
    const double slope = static_cast<double>(g[n * step + at]);
    d_sum += d;
    dd_sum += d * d;
    g_sum += slope;
    gd_sum += slope * d;
  }
  sums.d[at] = d_sum;
  sums.dd[at] = dd_sum;
  sums.g[at] = g_sum;
  sums.gd[at] = gd_sum;
}

// Channels [first, first + count) of rows without further axes: whole rows are read, not one element of each.
template <typename T>
void batch_normalization_columns(const BatchNormalizationCall& call, std::size_t first, std::size_t count) {
  constexpr std::size_t kMost = tuning::kNormalizedColumns, kVectors = 2;
  const T *x = static_cast<const T*>(call.x) + first, *dy = static_cast<const T*>(call.dy) + first;
  const T* near = call.mean == nullptr ? x : static_cast<const T*>(call.mean) + first;
  const std::size_t rows = call.batch, step = call.channels;
  ColumnSums sums;
  std::size_t at = 0;
  for (; at + kVectors * kWideLanes <= count; at += kVectors * kWideLanes) {
    add_column_vectors<kVectors>(sums, near, x, dy, rows, step, at);
  }
  for (; at < count; ++at) add_column(sums, near, x, dy, rows, step, at);

  T high[kMost], low[kMost], less[kMost], times[kMost], scale[kMost];
  const auto total = static_cast<double>(rows);
  for (std::size_t i = 0; i < count; ++i) {
    Moments moments = {0.0, 0.0, sums.g[i], sums.gd[i]};
    if (call.mean == nullptr) {
      moments = moments_of(sums.d[i], sums.dd[i], sums.g[i], sums.gd[i], static_cast<double>(near[i]), total);
    } else {
      moments.variance = static_cast<double>(static_cast<const T*>(call.variance)[first + i]);
    }
    const double inverse = reciprocal_root(moments.variance + call.epsilon);
    const Split<T> centre(moments.mean);
    high[i] = centre.high;
    low[i] = centre.low;
    less[i] = static_cast<T>(moments.g / total);
    times[i] = static_cast<T>(moments.gd * inverse * inverse / total);
    scale[i] = static_cast<T>(static_cast<double>(static_cast<const T*>(call.scale)[first + i]) * inverse);
    if (call.dscale != nullptr) static_cast<T*>(call.dscale)[first + i] = static_cast<T>(moments.gd * inverse);
    if (call.dbias != nullptr) static_cast<T*>(call.dbias)[first + i] = static_cast<T>(moments.g);
  }
  if (call.dx == nullptr) return;
  T* dx = static_cast<T*>(call.dx) + first;
  for (std::size_t n = 0; n < rows; ++n) {
    const T *row = x + n * step, *slopes = dy + n * step;
    T* out = dx + n * step;
    if (call.mean == nullptr) {
      ONNXTRAIN_VECTORIZE
      for (std::size_t i = 0; i < count; ++i) {
        out[i] = ((slopes[i] - less[i]) - ((row[i] - high[i]) - low[i]) * times[i]) * scale[i];
      }
    } else {
      ONNXTRAIN_VECTORIZE
      for (std::size_t i = 0; i < count; ++i) out[i] = slopes[i] * scale[i];
    }
  }
}

template <typename T>
void batch_normalization_gradient(const BatchNormalizationCall& call, std::size_t first, std::size_t last) {
  if (call.size == 1 && call.batch > 0) {
    for (; first < last; first += tuning::kNormalizedColumns) {
      const std::size_t left = last - first;
      batch_normalization_columns<T>(call, first, left < tuning::kNormalizedColumns ? left : tuning::kNormalizedColumns);
    }
    return;
  }
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
