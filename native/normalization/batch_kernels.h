// Batch normalization in training mode with the activation behind it, and its gradient, also by given statistics.
//
// Included by kernels.cpp only. With c = x - mean, r = 1 / sqrt(variance + epsilon), n = scale r c + bias, y = f(n), and
// g = dy f'(n): dbias = sum(g), dscale = r sum(g c), dx = scale r (g - mean(g) - c r^2 mean(g c)). All sums are in
// float64; those of the statistics are relative to the first element, to avoid cancellation. The gradient computes n
// again, with the bits of the forward pass, in its two passes over a channel, which stays in cache between them.
#pragma once

#include "kernels/elementwise.h"
#include "kernels/kernel_table.h"
#include "kernels/lanes.h"
#include "kernels/vector.h"
#include "normalization/activation.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Mean and variance of a channel, as the forward pass keeps them for the gradient: two numbers of the tensor's type each.
template <typename T>
struct ChannelStatistics {
  Split<T> mean{0.0}, variance{0.0};

  double wide_mean() const { return static_cast<double>(mean.high) + static_cast<double>(mean.low); }
  double wide_variance() const { return static_cast<double>(variance.high) + static_cast<double>(variance.low); }
  double inverse(double epsilon) const { return reciprocal_root(wide_variance() + epsilon); }

  void keep(void* means, void* variances, std::size_t channels, std::size_t channel) const {
    keep(mean, static_cast<T*>(means), channels, channel);
    keep(variance, static_cast<T*>(variances), channels, channel);
  }

  static ChannelStatistics kept(const void* means, const void* variances, std::size_t channels, std::size_t channel) {
    ChannelStatistics found;
    found.mean = kept(static_cast<const T*>(means), channels, channel);
    found.variance = kept(static_cast<const T*>(variances), channels, channel);
    return found;
  }

 private:
  static void keep(const Split<T>& value, T* rows, std::size_t channels, std::size_t channel) {
    if (rows == nullptr) return;
    rows[channel] = value.high;
    rows[channels + channel] = value.low;
  }

  static Split<T> kept(const T* rows, std::size_t channels, std::size_t channel) {
    Split<T> value(0.0);
    value.high = rows[channel];
    value.low = rows[channels + channel];
    return value;
  }
};

// From the sums of x - near and of its square.
template <typename T>
ChannelStatistics<T> statistics_of(double d, double dd, double near, double count) {
  const double shift = d / count, variance = dd / count - shift * shift;
  ChannelStatistics<T> found;
  found.mean = Split<T>(near + shift);
  found.variance = Split<T>(variance < 0.0 ? 0.0 : variance);
  return found;
}

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

// The statistics of a channel of `batch` runs, `step` apart.
template <typename T>
ChannelStatistics<T> channel_statistics(const T* x, std::size_t batch, std::size_t step, std::size_t size) {
  LaneSum d, dd;
  const T near = x[0];
  for (std::size_t n = 0; n < batch; ++n) add_spread(d, dd, near, x + n * step, size);
  return statistics_of<T>(d.total(), dd.total(), static_cast<double>(near), static_cast<double>(batch * size));
}

// Channels [first, first + channels) of short runs lie side by side in each row (an element of the batch): their elements
// are columns, and many of them make a vector. Long parts of a row are read at once, as the cache holds fewer of short ones.
struct ColumnBlock {
  std::size_t first, channels, size, rows, step;  // step: from row to row

  template <typename Call>
  ColumnBlock(const Call& call, std::size_t from, std::size_t count)
      : first(from), channels(count), size(call.size), rows(call.batch), step(call.channels * call.size) {}

  std::size_t begin() const { return first * size; }
  std::size_t columns() const { return channels * size; }
  static std::size_t most_channels(std::size_t size) { return tuning::kNormalizedColumns / size; }
  static bool fits(std::size_t size) { return most_channels(size) >= 8; }
};

// Two sums for each column, in the order of the rows: the same bits for any number of columns.
struct ColumnSums {
  static constexpr std::size_t kColumns = tuning::kNormalizedColumns, kVectors = 2, kTogether = kVectors * kWideLanes;
  static_assert(kColumns % kTogether == 0);
  double plain[kColumns] = {}, products[kColumns] = {};

  // Rows of so many columns have whole vectors.
  static std::size_t padded(std::size_t columns) { return (columns + kTogether - 1) / kTogether * kTogether; }

  // Calls add(row, column, sums, sums of products) for vectors of columns of some rows.
  template <typename Add>
  void add_rows(std::size_t rows, std::size_t padded_columns, Add add) {
    for (std::size_t at = 0; at < padded_columns; at += kTogether) {
      WideVector sum[kVectors], product[kVectors];
      for (std::size_t v = 0; v < kVectors; ++v) {
        load(plain + at + v * kWideLanes, sum[v]);
        load(products + at + v * kWideLanes, product[v]);
      }
      for (std::size_t n = 0; n < rows; ++n) {
        for (std::size_t v = 0; v < kVectors; ++v) add(n, at + v * kWideLanes, sum[v], product[v]);
      }
      for (std::size_t v = 0; v < kVectors; ++v) {
        store(plain + at + v * kWideLanes, sum[v]);
        store(products + at + v * kWideLanes, product[v]);
      }
    }
  }

  // The sum over the columns of a channel.
  static double total(const double* sums, std::size_t channel, std::size_t size) {
    double all = 0.0;
    for (std::size_t i = 0; i < size; ++i) all += sums[channel * size + i];
    return all;
  }
};

// The statistics of the channels of a block.
template <typename T>
void column_statistics(const ColumnBlock& block, const T* x, ChannelStatistics<T>* statistics) {
  constexpr std::size_t kColumns = ColumnSums::kColumns, kRows = tuning::kGatheredElements / kColumns;
  const std::size_t columns = block.columns(), padded = ColumnSums::padded(columns);
  double near[kColumns] = {};
  for (std::size_t i = 0; i < columns; ++i) near[i] = static_cast<double>(x[i / block.size * block.size]);
  ColumnSums sums;
  T some[kRows * kColumns] = {};
  for (std::size_t begin = 0; begin < block.rows; begin += kRows) {
    const std::size_t rows = block.rows - begin < kRows ? block.rows - begin : kRows;
    const T* from = x + begin * block.step;
    std::size_t step = block.step;
    if (columns < padded) {  // columns behind the last channel stay zero
      for (std::size_t n = 0; n < rows; ++n) copy(from + n * step, columns, some + n * padded);
      from = some;
      step = padded;
    }
    sums.add_rows(rows, padded, [=, &near](std::size_t n, std::size_t at, WideVector& sum, WideVector& product) {
      WideVector d, origin;
      load(from + n * step + at, d);
      load(near + at, origin);
      d -= origin;
      sum += d;
      product += d * d;
    });
  }
  for (std::size_t i = 0; i < block.channels; ++i) {
    const double d = ColumnSums::total(sums.plain, i, block.size), dd = ColumnSums::total(sums.products, i, block.size);
    statistics[i] = statistics_of<T>(d, dd, near[i * block.size], static_cast<double>(block.rows * block.size));
  }
}

// One number for all elements of a run; elements of several channels side by side have a pointer instead.
template <typename T>
struct Same {
  T value;
  T operator[](std::size_t) const { return value; }
};

// n = ((x - high) - low) factor + bias, as both passes compute it.
template <typename Numbers>
struct Normalization {
  Numbers high, low, factor, bias;

  template <typename T>
  T centred(std::size_t i, T x) const {
    return (x - high[i]) - low[i];
  }

  template <typename T>
  T normalized(std::size_t i, T centred) const {
    return centred * factor[i] + bias[i];
  }
};

template <typename T>
Normalization<Same<T>> normalization_of(const ChannelStatistics<T>& statistics, double epsilon, const void* scales,
                                        const void* biases, std::size_t channel) {
  const double scale = static_cast<double>(static_cast<const T*>(scales)[channel]);
  const T bias = biases == nullptr ? T(0) : static_cast<const T*>(biases)[channel];
  const T factor = static_cast<T>(scale * statistics.inverse(epsilon));
  return {{statistics.mean.high}, {statistics.mean.low}, {factor}, {bias}};
}

// What the columns of a block are normalized by.
template <typename T>
struct ColumnNormalizations {
  T high[ColumnSums::kColumns], low[ColumnSums::kColumns], factor[ColumnSums::kColumns], bias[ColumnSums::kColumns];

  void set(std::size_t channel, std::size_t size, const Normalization<Same<T>>& by) {
    for (std::size_t i = channel * size; i < (channel + 1) * size; ++i) {
      high[i] = by.high.value;
      low[i] = by.low.value;
      factor[i] = by.factor.value;
      bias[i] = by.bias.value;
    }
  }

  Normalization<const T*> all() const { return {high, low, factor, bias}; }
};

// y = f(n), or f(n + addend).
template <typename T, typename Numbers, typename Activation>
void normalize_run(const Normalization<Numbers> by, const Activation activation, std::size_t size, const T* x,
                   const T* addend, T* y) {
  if (addend == nullptr) {
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = 0; i < size; ++i) y[i] = activation.value(by.normalized(i, by.centred(i, x[i])));
  } else {
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = 0; i < size; ++i) y[i] = activation.value(by.normalized(i, by.centred(i, x[i])) + addend[i]);
  }
}

// A part of an optional tensor.
template <typename T>
const T* part(const void* tensor, std::size_t at) {
  return tensor == nullptr ? nullptr : static_cast<const T*>(tensor) + at;
}

template <typename T>
T* part(void* tensor, std::size_t at) {
  return tensor == nullptr ? nullptr : static_cast<T*>(tensor) + at;
}

// Keeps the statistics of a channel for the gradient, and writes the running ones that follow.
template <typename T>
void write_statistics(const BatchStatisticsCall& call, std::size_t channel, const ChannelStatistics<T>& found) {
  const auto running = [&](const void* old, void* target, double own) {
    if (target == nullptr) return;
    const double before = static_cast<double>(static_cast<const T*>(old)[channel]);
    static_cast<T*>(target)[channel] = static_cast<T>(call.momentum * before + (1.0 - call.momentum) * own);
  };
  running(call.mean, call.new_mean, found.wide_mean());
  running(call.variance, call.new_variance, found.wide_variance());
  found.keep(call.batch_mean, call.batch_variance, call.channels, channel);
}

template <typename T, typename Activation>
void normalize_channel(const BatchStatisticsCall& call, std::size_t channel, const Activation& activation) {
  const std::size_t step = call.channels * call.size, first = channel * call.size;
  const T* x = static_cast<const T*>(call.x) + first;
  const auto found = channel_statistics(x, call.batch, step, call.size);
  write_statistics(call, channel, found);
  const auto by = normalization_of(found, call.epsilon, call.scale, call.bias, channel);
  for (std::size_t n = 0; n < call.batch; ++n) {
    const std::size_t at = first + n * step;
    normalize_run(by, activation, call.size, x + n * step, part<T>(call.addend, at), part<T>(call.y, at));
  }
}

template <typename T, typename Activation>
void normalize_columns(const BatchStatisticsCall& call, const ColumnBlock& block, const Activation& activation) {
  const T* x = static_cast<const T*>(call.x) + block.begin();
  ChannelStatistics<T> statistics[ColumnSums::kColumns];
  column_statistics(block, x, statistics);
  ColumnNormalizations<T> by;
  for (std::size_t i = 0; i < block.channels; ++i) {
    const std::size_t channel = block.first + i;
    write_statistics(call, channel, statistics[i]);
    by.set(i, block.size, normalization_of(statistics[i], call.epsilon, call.scale, call.bias, channel));
  }
  for (std::size_t n = 0; n < block.rows; ++n) {
    const std::size_t at = block.begin() + n * block.step;
    normalize_run(by.all(), activation, block.columns(), x + n * block.step, part<T>(call.addend, at),
                  part<T>(call.y, at));
  }
}

// Calls columns(block) or channel(index) for channels [first, last).
template <typename Call, typename Columns, typename Channel>
void for_each_channel(const Call& call, std::size_t first, std::size_t last, Columns columns, Channel channel) {
  while (ColumnBlock::fits(call.size) && first < last) {
    const std::size_t left = last - first, most = ColumnBlock::most_channels(call.size);
    const ColumnBlock block(call, first, left < most ? left : most);
    columns(block);
    first += block.channels;
  }
  for (; first < last; ++first) channel(first);
}

template <typename T>
void batch_normalization(const BatchStatisticsCall& call, std::size_t first, std::size_t last) {
  with_activation<T>(call.activation, [&](const auto& activation) {
    for_each_channel(
        call, first, last, [&](const ColumnBlock& block) { normalize_columns<T>(call, block, activation); },
        [&](std::size_t channel) { normalize_channel<T>(call, channel, activation); });
  });
}

// What the gradient of a channel reads: the statistics of the batch, kept or computed now, or given ones.
template <typename T, typename Compute>
ChannelStatistics<T> statistics_for(const BatchNormalizationCall& call, std::size_t channel, Compute compute) {
  if (call.batch_mean != nullptr) {
    return ChannelStatistics<T>::kept(call.batch_mean, call.batch_variance, call.channels, channel);
  }
  if (call.mean == nullptr) return compute();
  ChannelStatistics<T> given;
  given.mean.high = static_cast<const T*>(call.mean)[channel];
  given.variance.high = static_cast<const T*>(call.variance)[channel];
  return given;
}

// dx = ((g - less) - c times) scale. With given statistics dx = g scale.
template <typename Numbers>
struct SlopeCorrection {
  Numbers less, times, scale;
};

// From the sums of g and of g c; also writes dscale and dbias.
template <typename T>
SlopeCorrection<Same<T>> finish_channel(const BatchNormalizationCall& call, std::size_t channel,
                                        const ChannelStatistics<T>& statistics, double g, double gc) {
  const double inverse = statistics.inverse(call.epsilon), count = static_cast<double>(call.batch * call.size);
  const double scale = static_cast<double>(static_cast<const T*>(call.scale)[channel]);
  if (call.dscale != nullptr) static_cast<T*>(call.dscale)[channel] = static_cast<T>(gc * inverse);
  if (call.dbias != nullptr) static_cast<T*>(call.dbias)[channel] = static_cast<T>(g);
  const T less = static_cast<T>(g / count), times = static_cast<T>(gc * inverse * inverse / count);
  return {{less}, {times}, {static_cast<T>(scale * inverse)}};
}

// x and g of a run, side by side for their sums.
template <typename T, typename Numbers, typename Activation>
void find_slopes(const Normalization<Numbers> by, const Activation activation, std::size_t size, const T* x,
                 const T* dy, T* copied, T* g) {
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < size; ++i) {
    copied[i] = x[i];
    g[i] = activation.gradient(dy[i], by.normalized(i, by.centred(i, x[i])));
  }
}

// dx, and the result y again; either may be null, dx may be where x or dy is, y where x is.
template <typename T, typename Numbers, typename Activation>
void write_slopes(const Normalization<Numbers> by, const SlopeCorrection<Numbers> slopes, bool given_statistics,
                  const Activation activation, std::size_t size, const T* x, const T* dy, T* dx, T* y) {
  if (dx == nullptr) {
    if (y != nullptr) normalize_run<T>(by, activation, size, x, nullptr, y);
  } else if (given_statistics) {
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = 0; i < size; ++i) dx[i] = dy[i] * slopes.scale[i];
  } else if (y == nullptr) {
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = 0; i < size; ++i) {
      const T c = by.centred(i, x[i]), g = activation.gradient(dy[i], by.normalized(i, c));
      dx[i] = ((g - slopes.less[i]) - c * slopes.times[i]) * slopes.scale[i];
    }
  } else {
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = 0; i < size; ++i) {
      const T c = by.centred(i, x[i]), n = by.normalized(i, c), g = activation.gradient(dy[i], n);
      dx[i] = ((g - slopes.less[i]) - c * slopes.times[i]) * slopes.scale[i];
      y[i] = activation.value(n);
    }
  }
}

// Adds the other term to a run of dx, which is in the L1 cache.
template <typename T>
void add_other(const BatchNormalizationCall& call, std::size_t image, std::size_t begin, std::size_t size, T* dx) {
  if (call.other == nullptr || dx == nullptr) return;
  const T* other = static_cast<const T*>(call.other) + image * call.other_step + begin;
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < size; ++i) dx[i] += other[i];
}

// Sums of g and of g c, with c in float64, over the runs of a channel, which are put into blocks of the L1 cache.
template <typename T>
class ChannelSums {
 public:
  explicit ChannelSums(double mean) : mean_(mean) {}

  template <typename Activation>
  void add(const Normalization<Same<T>>& by, const Activation& activation, std::size_t size, const T* x, const T* dy) {
    if (Activation::kIsNone && size % kSumLanes == 0) return add_lanes(x, dy, size);  // g is dy: the same sums, no copy
    for (std::size_t at = 0; at < size;) {
      const std::size_t room = kBlock - filled_, left = size - at, count = left < room ? left : room;
      find_slopes(by, activation, count, x + at, dy + at, x_ + filled_, g_ + filled_);
      filled_ += count;
      at += count;
      if (filled_ == kBlock) empty();
    }
  }

  void finish() {
    for (; filled_ % kSumLanes != 0; ++filled_) x_[filled_] = g_[filled_] = T(0);
    empty();
  }

  double g() const { return sum_.total(); }
  double gc() const { return products_.total(); }

 private:
  static constexpr std::size_t kBlock = tuning::kGatheredElements;

  void empty() {
    add_lanes(x_, g_, filled_);
    filled_ = 0;
  }

  // `count` is a multiple of the number of lanes.
  void add_lanes(const T* x, const T* slopes, std::size_t count) {
    LaneSum sum = sum_, products = products_;  // in registers
    for (std::size_t i = 0; i < count; i += kSumLanes) {
      for (std::size_t v = 0; v < kLaneVectors; ++v) {
        WideVector c, g;
        load(x + i + v * kWideLanes, c);
        load(slopes + i + v * kWideLanes, g);
        c -= mean_;
        sum.lanes[v] += g;
        products.lanes[v] += g * c;
      }
    }
    sum_ = sum;
    products_ = products;
  }

  double mean_;
  LaneSum sum_, products_;
  T x_[kBlock], g_[kBlock];
  std::size_t filled_ = 0;
};

template <typename T, typename Activation>
void batch_normalization_channel(const BatchNormalizationCall& call, std::size_t channel, const Activation& activation) {
  const std::size_t step = call.channels * call.size, first = channel * call.size;
  const T *x = static_cast<const T*>(call.x) + first, *dy = static_cast<const T*>(call.dy) + first;
  T *dx = part<T>(call.dx, first), *y = part<T>(call.y, first);
  const auto compute = [&] { return channel_statistics(x, call.batch, step, call.size); };
  const auto statistics = statistics_for<T>(call, channel, compute);
  const auto by = normalization_of(statistics, call.epsilon, call.scale, call.bias, channel);
  const bool is_given = call.mean != nullptr;
  ChannelSums<T> sums(statistics.wide_mean());
  if (!is_given || call.dscale != nullptr || call.dbias != nullptr) {
    for (std::size_t n = 0; n < call.batch; ++n) {
      const std::size_t at = n * step;
      sums.add(by, activation, call.size, x + at, dy + at);
    }
    sums.finish();
  }
  const auto slopes = finish_channel(call, channel, statistics, sums.g(), sums.gc());
  for (std::size_t n = 0; n < call.batch; ++n) {
    const std::size_t at = n * step;
    write_slopes(by, slopes, is_given, activation, call.size, x + at, dy + at, part<T>(dx, at), part<T>(y, at));
    add_other(call, n, first, call.size, part<T>(dx, at));
  }
}

template <typename T, typename Activation>
void batch_normalization_columns(const BatchNormalizationCall& call, const ColumnBlock& block,
                                 const Activation& activation) {
  constexpr std::size_t kColumns = ColumnSums::kColumns, kRows = tuning::kGatheredElements / kColumns;
  const T *x = static_cast<const T*>(call.x) + block.begin(), *dy = static_cast<const T*>(call.dy) + block.begin();
  T *dx = part<T>(call.dx, block.begin()), *y = part<T>(call.y, block.begin());
  const bool is_given = call.mean != nullptr;
  ChannelStatistics<T> statistics[kColumns];
  if (call.batch_mean == nullptr && !is_given) column_statistics(block, x, statistics);
  ColumnNormalizations<T> by;
  double means[kColumns] = {};
  for (std::size_t i = 0; i < block.channels; ++i) {
    const std::size_t channel = block.first + i;
    statistics[i] = statistics_for<T>(call, channel, [&] { return statistics[i]; });
    for (std::size_t at = i * block.size; at < (i + 1) * block.size; ++at) means[at] = statistics[i].wide_mean();
    by.set(i, block.size, normalization_of(statistics[i], call.epsilon, call.scale, call.bias, channel));
  }
  const std::size_t padded = ColumnSums::padded(block.columns());
  ColumnSums sums;
  T copied[kRows * kColumns] = {}, g[kRows * kColumns] = {};  // columns behind the last channel stay zero
  for (std::size_t begin = 0; begin < block.rows; begin += kRows) {
    const std::size_t rows = block.rows - begin < kRows ? block.rows - begin : kRows;
    for (std::size_t n = 0; n < rows; ++n) {
      const std::size_t at = (begin + n) * block.step;
      find_slopes(by.all(), activation, block.columns(), x + at, dy + at, copied + n * padded, g + n * padded);
    }
    sums.add_rows(rows, padded, [&](std::size_t n, std::size_t at, WideVector& sum, WideVector& product) {
      WideVector factor, slope, mean;
      load(copied + n * padded + at, factor);
      load(g + n * padded + at, slope);
      load(means + at, mean);
      factor -= mean;
      sum += slope;
      product += slope * factor;
    });
  }
  T less[kColumns], times[kColumns], scale[kColumns];
  for (std::size_t i = 0; i < block.channels; ++i) {
    const double sum = ColumnSums::total(sums.plain, i, block.size);
    const double product = ColumnSums::total(sums.products, i, block.size);
    const auto found = finish_channel(call, block.first + i, statistics[i], sum, product);
    for (std::size_t at = i * block.size; at < (i + 1) * block.size; ++at) {
      less[at] = found.less.value;
      times[at] = found.times.value;
      scale[at] = found.scale.value;
    }
  }
  const SlopeCorrection<const T*> slopes = {less, times, scale};
  for (std::size_t n = 0; n < block.rows; ++n) {
    const std::size_t at = n * block.step;
    write_slopes(by.all(), slopes, is_given, activation, block.columns(), x + at, dy + at, part<T>(dx, at),
                 part<T>(y, at));
    add_other(call, n, block.begin(), block.columns(), part<T>(dx, at));
  }
}

template <typename T>
void batch_normalization_gradient(const BatchNormalizationCall& call, std::size_t first, std::size_t last) {
  with_activation<T>(call.activation, [&](const auto& activation) {
    for_each_channel(
        call, first, last, [&](const ColumnBlock& block) { batch_normalization_columns<T>(call, block, activation); },
        [&](std::size_t channel) { batch_normalization_channel<T>(call, channel, activation); });
  });
}

}  // namespace
}  // namespace onnxtrain
