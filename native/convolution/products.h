// Convolutions as matrix multiplications: which ones, over which blocks, in which order.
#pragma once

#include "convolution/phases.h"

namespace onnxtrain {

// Source of a multiplication: planes of all images, the channels of a group contiguous.
template <typename T>
struct Planes {
  const T* data;
  std::size_t group, channels;  // per group
  Index size;

  std::ptrdiff_t plane() const { return product(size); }
  std::ptrdiff_t image() const { return plane() * static_cast<std::ptrdiff_t>(group * channels); }
  const T* of_group(std::size_t g) const { return data + plane() * static_cast<std::ptrdiff_t>(g * channels); }
};

template <typename T>
struct Weights {
  const T *data, *bias;  // bias may be null
  std::ptrdiff_t group_stride, column_stride, channel_stride;
};

// target[image, column, position] = bias[column] + sum over channels and taps of
// source[image, channel, step * q + tap] * weights[column, channel, tap].
template <typename T>
struct PlaneCorrelation {
  Planes<T> source;
  std::vector<Phase> phases;
  Weights<T> weights;
  std::size_t columns;  // per group
  T* target;
  Index target_size;
  bool all_phases = true;  // otherwise the target has further positions, which are zero
};

// y = x * w + bias.
template <typename T>
PlaneCorrelation<T> forward_correlation(const Convolution& c, const T* x, const T* w, const T* bias, T* y);

// dx from dy.
template <typename T>
PlaneCorrelation<T> input_gradient_correlation(const Convolution& c, const T* dy, const T* w, T* dx);

// target[column, channel, tap] = sum over images and grid of source[image, channel, step * q + tap] *
// columns[image, column, q].
template <typename T>
struct PlaneProducts {
  Planes<T> source, columns;
  Grid grid;
  std::vector<Tap> taps;
  T* target;
  std::ptrdiff_t row_stride, column_stride;  // rows are channels and taps
};

template <typename T>
class ConvolutionProducts {
 public:
  ConvolutionProducts(const Convolution& convolution, const ParallelFor& parallel_for);

  void forward(const T* x, const T* w, const T* bias, T* y) const;
  void input_gradient(const T* dy, const T* w, T* dx) const;
  void weight_gradient(const T* x, const T* dy, T* dw) const;

 private:
  void correlate(const PlaneCorrelation<T>& correlation) const;
  void multiply(const PlaneCorrelation<T>& correlation) const;
  // Whether lanes should be positions of a box, whose rows are `row` elements apart in the copy, or columns: those of few
  // columns would be idle.
  bool prefers_positions(const Grid& grid, const Index& box, std::ptrdiff_t row, std::size_t depth,
                         std::size_t columns) const;
  // The same with fewer multiplications (Winograd), where that pays for so many images.
  bool prefers_winograd(const PlaneCorrelation<T>& correlation, std::size_t images) const;
  void winograd(const PlaneCorrelation<T>& correlation) const;
  double cost_of(std::size_t rows, std::size_t columns) const;
  bool prefers_winograd(const PlaneProducts<T>& products) const;
  void winograd_gradient(const PlaneProducts<T>& products) const;
  void pointwise(const Planes<T>& source, const T* weights, std::ptrdiff_t row_stride, std::ptrdiff_t depth_stride,
                 std::size_t rows, const T* bias, T* target) const;
  // The input gradient as such multiplications, one per kernel element, added up at their positions.
  bool prefers_spread(const PlaneCorrelation<T>& correlation) const;
  void spread(const Planes<T>& source, const T* weights, T* target) const;
  void accumulate(const PlaneProducts<T>& products) const;
  // Adds `chunks` sums of `size` elements, one behind the other, to the first.
  void add_up(T* sums, std::size_t size, std::size_t chunks) const;

  // The same for many groups of few channels; returns false, with nothing done, where it does not apply.
  bool is_depthwise() const;
  bool depthwise(const PlaneCorrelation<T>& correlation) const;
  bool depthwise_gradient(const PlaneProducts<T>& products) const;

  // The same as sums of shifted planes.
  bool prefers_filter(const Planes<T>& source, const Grid& grid, std::size_t columns) const;
  void filter(const PlaneCorrelation<T>& correlation, const Phase& phase) const;
  void filter_gradient(const PlaneProducts<T>& products) const;

  std::size_t pixels_at_once(std::size_t depth) const;
  bool many_groups() const;
  std::size_t weight_count() const;
  void clear(T* data, std::size_t count) const;
  void fill(T* data, std::size_t channels, const std::ptrdiff_t (&size)[kAxes], const T* bias) const;

  const Convolution& c_;
  const ParallelFor& parallel_for_;
  const ConvolutionKernels<T>& kernels_;
};

extern template class ConvolutionProducts<float>;
extern template class ConvolutionProducts<double>;

}  // namespace onnxtrain
