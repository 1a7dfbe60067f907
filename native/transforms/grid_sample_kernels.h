// Bilinear sampling of images at the points of a grid, and its gradient.
//
// Included by kernels.cpp only. Images are transposed so that the channels of a pixel lie together: a point then reads
// four rows of channels. Sums over channels have sixteen parts: the same bits for every vector width.
#pragma once

#include "kernels/vector.h"
#include "transforms/table.h"

namespace onnxtrain {
namespace {

constexpr std::size_t kParts = 16;

template <typename T>
struct Parts {
  typedef T type __attribute__((vector_size(kParts * sizeof(T))));
  typedef T unaligned __attribute__((vector_size(kParts * sizeof(T)), aligned(sizeof(T)), may_alias));
};

template <typename T>
inline T sum_of_parts(const typename Parts<T>::type& parts) {
  return of_lanes<sizeof(parts)>(reinterpret_cast<const T*>(&parts), [](auto a, auto b) { return a + b; });
}

// Along one axis: the indices of two pixels, their weights, and the derivatives of these by the coordinate. Pixels outside
// are zeros.
template <typename T>
struct AxisTaps {
  bool outside[2];
  std::size_t index[2];
  T weight[2], slope[2];
};

inline float rounded_down(float value) { return __builtin_floorf(value); }
inline double rounded_down(double value) { return __builtin_floor(value); }

// Reflects a position at both ends until it is inside; `sign` turns with it.
template <typename T>
T reflected(T position, T low, T high, T& sign) {
  const T span = high - low > T(1) ? high - low : T(1);  // 0 where the only pixel's centre is both ends
  const T distance = position < low ? low - position : position - low, flips = rounded_down(distance / span);
  const T rest = distance - flips * span;
  const bool odd = flips - 2 * rounded_down(flips / 2) == T(1);
  if (odd != (position < low)) sign = -sign;
  return (odd ? span - rest : rest) + low;
}

template <typename T>
AxisTaps<T> taps_of(T coordinate, std::size_t size, Padding padding, bool align_corners) {
  const T length = static_cast<T>(size), last = length - 1;
  const T low = align_corners ? T(0) : T(-0.5), high = align_corners ? last : length - T(0.5);
  T slope = (align_corners ? last : length) / 2;
  T position = align_corners ? (coordinate + 1) * slope : (coordinate + 1) * slope - T(0.5);
  if (padding == Padding::kReflection) {
    position = reflected(position, low, high, slope);
  } else if (padding == Padding::kBorder && (position < low || position > high)) {
    position = position < 0 ? T(0) : position > last ? last : position;
    slope = 0;
  }
  // Beyond two pixels outside, all is the same; not a number stays so.
  const T near = position < -2 ? T(-2) : position > length + 1 ? length + 1 : position == position ? position : T(0);
  const T first = rounded_down(near), behind = position == position ? near - first : position;
  AxisTaps<T> taps = {{}, {}, {1 - behind, behind}, {-slope, slope}};
  for (int k = 0; k < 2; ++k) {
    T index = first + static_cast<T>(k), sign = 1;
    taps.outside[k] = padding == Padding::kZeros && (index < 0 || index > last);
    if (padding == Padding::kReflection) index = reflected(index, low, high, sign);
    taps.index[k] = static_cast<std::size_t>(index < 0 ? T(0) : index > last ? last : index);
  }
  return taps;
}

// The four pixels of a point, where their channels begin, and their weights. Behind the last pixel is one of zeros.
template <typename T>
struct PointTaps {
  AxisTaps<T> x, y;
  std::size_t at[4];
  T weight[4];

  PointTaps(const GridSampleCall& call, const T* point)
      : x(taps_of(point[0], call.width, call.padding, call.align_corners)),
        y(taps_of(point[1], call.height, call.padding, call.align_corners)) {
    for (int k = 0; k < 4; ++k) {
      const bool outside = y.outside[k / 2] || x.outside[k % 2];
      at[k] = (outside ? call.height * call.width : y.index[k / 2] * call.width + x.index[k % 2]) * call.channels;
      weight[k] = y.weight[k / 2] * x.weight[k % 2];
    }
  }
};

template <typename T>
void grid_sample(const GridSampleCall& call, std::size_t first, std::size_t last, void* scratch) {
  using Wide = typename Parts<T>::unaligned;
  const std::size_t channels = call.channels, pixels = call.height * call.width;
  T *image = static_cast<T*>(scratch), *rows = image + (pixels + 1) * channels;
  for (std::size_t i = 0; i < channels; ++i) image[pixels * channels + i] = T(0);
  for (std::size_t n = first; n < last; ++n) {
    transpose(static_cast<const T*>(call.x) + n * channels * pixels, pixels, channels, pixels, image, channels);
    const T* grid = static_cast<const T*>(call.grid) + n * call.points * 2;
    T* y = static_cast<T*>(call.y) + n * channels * call.points;
    for (std::size_t begin = 0; begin < call.points; begin += kSampledPoints) {
      const std::size_t count = call.points - begin < kSampledPoints ? call.points - begin : kSampledPoints;
      for (std::size_t i = 0; i < count; ++i) {
        const PointTaps<T> taps(call, grid + 2 * (begin + i));
        T* row = rows + i * channels;
        const T *a = image + taps.at[0], *b = image + taps.at[1], *c = image + taps.at[2], *d = image + taps.at[3];
        const T *w = taps.weight;
        std::size_t at = 0;
        for (; at + kParts <= channels; at += kParts) {
          const auto wide = [at](const T* from) -> const Wide& { return *reinterpret_cast<const Wide*>(from + at); };
          *reinterpret_cast<Wide*>(row + at) = (wide(a) * w[0] + wide(b) * w[1]) + (wide(c) * w[2] + wide(d) * w[3]);
        }
        for (; at < channels; ++at) row[at] = (a[at] * w[0] + b[at] * w[1]) + (c[at] * w[2] + d[at] * w[3]);
      }
      transpose(rows, channels, count, channels, y + begin, call.points);
    }
  }
}

template <typename T>
void grid_sample_gradient(const GridSampleCall& call, std::size_t first, std::size_t last, void* scratch) {
  using Wide = typename Parts<T>::unaligned;
  const std::size_t channels = call.channels, pixels = call.height * call.width, volume = pixels * channels;
  T *image = static_cast<T*>(scratch), *changes = image + volume + channels, *rows = changes + volume + channels;
  for (std::size_t i = 0; i < channels; ++i) image[volume + i] = changes[i + volume] = T(0);
  for (std::size_t n = first; n < last; ++n) {
    transpose(static_cast<const T*>(call.x) + n * volume, pixels, channels, pixels, image, channels);
    for (std::size_t i = 0; i < volume; ++i) changes[i] = T(0);
    const T *grid = static_cast<const T*>(call.grid) + n * call.points * 2;
    const T *dy = static_cast<const T*>(call.dy) + n * channels * call.points;
    for (std::size_t begin = 0; begin < call.points; begin += kSampledPoints) {
      const std::size_t count = call.points - begin < kSampledPoints ? call.points - begin : kSampledPoints;
      transpose(dy + begin, call.points, channels, count, rows, channels);
      for (std::size_t i = 0; i < count; ++i) {
        const PointTaps<T> taps(call, grid + 2 * (begin + i));
        const T* row = rows + i * channels;
        // The derivatives of the sample by both coordinates, as weights of the four pixels.
        const AxisTaps<T> &x = taps.x, &y = taps.y;
        const T across[4] = {y.weight[0] * x.slope[0], y.weight[0] * x.slope[1], y.weight[1] * x.slope[0], y.weight[1] * x.slope[1]};
        const T down[4] = {y.slope[0] * x.weight[0], y.slope[0] * x.weight[1], y.slope[1] * x.weight[0], y.slope[1] * x.weight[1]};
        typename Parts<T>::type sums[2] = {};
        std::size_t at = 0;
        for (; at + kParts <= channels; at += kParts) {
          const typename Parts<T>::type slopes = *reinterpret_cast<const Wide*>(row + at);
          typename Parts<T>::type changed[2] = {};
          for (int k = 0; k < 4; ++k) {
            const typename Parts<T>::type pixel = *reinterpret_cast<const Wide*>(image + taps.at[k] + at);
            *reinterpret_cast<Wide*>(changes + taps.at[k] + at) += slopes * taps.weight[k];
            changed[0] += pixel * across[k];
            changed[1] += pixel * down[k];
          }
          sums[0] += slopes * changed[0];
          sums[1] += slopes * changed[1];
        }
        T total[2] = {sum_of_parts<T>(sums[0]), sum_of_parts<T>(sums[1])};
        for (; at < channels; ++at) {
          T changed[2] = {};
          for (int k = 0; k < 4; ++k) {
            changes[taps.at[k] + at] += row[at] * taps.weight[k];
            changed[0] += image[taps.at[k] + at] * across[k];
            changed[1] += image[taps.at[k] + at] * down[k];
          }
          total[0] += row[at] * changed[0];
          total[1] += row[at] * changed[1];
        }
        if (call.dgrid == nullptr) continue;
        T* change = static_cast<T*>(call.dgrid) + (n * call.points + begin + i) * 2;
        change[0] = total[0];
        change[1] = total[1];
      }
    }
    if (call.dx != nullptr) transpose(changes, channels, pixels, channels, static_cast<T*>(call.dx) + n * volume, pixels);
  }
}

}  // namespace
}  // namespace onnxtrain
