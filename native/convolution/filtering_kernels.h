// Convolutions with few outputs per group, mainly depthwise ones: sums of shifted planes instead of matrix
// multiplications.
//
// A plane is copied with its padding, and split into phases of the stride so that positions one stride apart are
// contiguous. Neighbouring outputs then read neighbouring sources for every kernel element, even across row ends: all
// rows are computed in one run, including a few unused outputs between rows.
#pragma once

#include "convolution/correlation_kernels.h"

namespace onnxtrain {
namespace {

// Every `step`-th element, `count` of them.
template <typename T>
inline void copy_strided(const T* __restrict from, std::ptrdiff_t step, std::ptrdiff_t count, T* __restrict to) {
  if (step == 2) {
    for (std::ptrdiff_t i = 0; i < count; ++i) to[i] = from[2 * i];
  } else {
    for (std::ptrdiff_t i = 0; i < count; ++i) to[i] = from[i * step];
  }
}

// Copies one row of a plane into its phases, `phase_size` apart, with zeros outside of the plane.
template <typename T>
inline void copy_row_phases(const FilterGeometry& g, const T* row, std::ptrdiff_t phase_size, T* target) {
  const std::ptrdiff_t step = g.step[2], start = g.start[2], width = g.phase_extent[2];
  for (std::ptrdiff_t phase = 0; phase < step; ++phase, target += phase_size) {
    // Elements start + phase + step * i, as far as they exist.
    const std::ptrdiff_t origin = start + phase;
    std::ptrdiff_t first = origin >= 0 ? 0 : (step - 1 - origin) / step;
    std::ptrdiff_t last = g.size[2] <= origin ? 0 : (g.size[2] - origin + step - 1) / step;
    if (first > width) first = width;
    if (last > width) last = width;
    if (last < first) last = first;
    for (std::ptrdiff_t i = 0; i < first; ++i) target[i] = T(0);
    if (step == 1) {
      copy(row + origin + first, static_cast<std::size_t>(last - first), target + first);
    } else {
      copy_strided(row + origin + first * step, step, last - first, target + first);
    }
    for (std::ptrdiff_t i = last; i < width; ++i) target[i] = T(0);
  }
}

template <typename T>
inline void copy_phases(const FilterGeometry& g, const T* plane, T* target) {
  const std::ptrdiff_t row_size = g.phase_extent[2], phase_size = g.phase_extent[0] * g.phase_extent[1] * row_size;
  for (std::ptrdiff_t d = 0; d < g.phase_extent[0] * g.step[0]; ++d) {
    const std::ptrdiff_t in_d = d + g.start[0], phase_d = d % g.step[0];
    for (std::ptrdiff_t h = 0; h < g.phase_extent[1] * g.step[1]; ++h) {
      const std::ptrdiff_t in_h = h + g.start[1], phase = (phase_d * g.step[1] + h % g.step[1]) * g.step[2];
      T* to = target + phase * phase_size + (d / g.step[0] * g.phase_extent[1] + h / g.step[1]) * row_size;
      if (in_d >= 0 && in_d < g.size[0] && in_h >= 0 && in_h < g.size[1]) {
        copy_row_phases(g, plane + (in_d * g.size[1] + in_h) * g.size[2], phase_size, to);
      } else {
        for (std::ptrdiff_t i = 0; i < g.step[2]; ++i) {
          fill_zero(to + i * phase_size, static_cast<std::size_t>(row_size));
        }
      }
    }
  }
}

// Sums over the depth of weight * source, for vectors of neighbouring outputs.
template <typename T, std::size_t vectors>
inline void filter_vectors(const T* source, const std::ptrdiff_t* offsets, const T* weights, std::size_t depth, T bias,
                           T* target) {
  Vector<T> sum[vectors];
#pragma GCC unroll 8
  for (std::size_t v = 0; v < vectors; ++v) sum[v] = broadcast(bias);
  for (std::size_t k = 0; k < depth; ++k) {
    const Vector<T> weight = broadcast(weights[k]);
    const T* from = source + offsets[k];
#pragma GCC unroll 8
    for (std::size_t v = 0; v < vectors; ++v) sum[v] += weight * load(from + v * kLanes<T>);
  }
#pragma GCC unroll 8
  for (std::size_t v = 0; v < vectors; ++v) store(target + v * kLanes<T>, sum[v]);
}

template <typename T>
inline void filter_plane(const T* source, const std::ptrdiff_t* offsets, const T* weights, std::size_t depth, T bias,
                         std::size_t length, T* target) {
  constexpr std::size_t lanes = kLanes<T>;
  std::size_t i = 0;
  for (; i + 7 * lanes < length; i += 8 * lanes) {
    filter_vectors<T, 8>(source + i, offsets, weights, depth, bias, target + i);
  }
  for (; i + lanes < length; i += 2 * lanes) {
    filter_vectors<T, 2>(source + i, offsets, weights, depth, bias, target + i);
  }
  if (i < length) filter_vectors<T, 1>(source + i, offsets, weights, depth, bias, target + i);
}

// Copies the outputs of one plane from rows `phase_extent[2]` wide to the target.
template <typename T>
inline void scatter_rows(const FilterGeometry& g, const T* sums, T* target) {
  for (std::ptrdiff_t d = 0; d < g.grid[0]; ++d) {
    for (std::ptrdiff_t h = 0; h < g.grid[1]; ++h) {
      const T* from = sums + (d * g.phase_extent[1] + h) * g.phase_extent[2];
      const std::ptrdiff_t row = (g.target_start[0] + d * g.target_step[0]) * g.target_size[1] + g.target_start[1] +
                                 h * g.target_step[1];
      T* to = target + row * g.target_size[2] + g.target_start[2];
      if (g.target_step[2] == 1) {
        copy(from, static_cast<std::size_t>(g.grid[2]), to);
      } else {
        for (std::ptrdiff_t w = 0; w < g.grid[2]; ++w) to[w * g.target_step[2]] = from[w];
      }
    }
  }
}

template <typename T>
void filter(const Filtering<T>& task) {
  const FilterGeometry& g = *task.geometry;
  const std::ptrdiff_t plane = g.size[0] * g.size[1] * g.size[2];
  const std::ptrdiff_t target_plane = g.target_size[0] * g.target_size[1] * g.target_size[2];
  T* copies = task.scratch;
  T* sums = copies + task.channels * task.copy_stride;
  T* weights = sums + task.copy_stride;
  for (std::size_t item = task.first; item < task.last; ++item) {
    const T* source = task.source + static_cast<std::ptrdiff_t>(item * task.channels) * plane;
    for (std::size_t c = 0; c < task.channels; ++c) {
      copy_phases(g, source + static_cast<std::ptrdiff_t>(c) * plane, copies + c * task.copy_stride);
    }
    const std::size_t group = item % task.groups;
    for (std::size_t j = 0; j < task.columns; ++j) {
      const T* from = task.weights + static_cast<std::ptrdiff_t>(group) * task.group_weight +
                      static_cast<std::ptrdiff_t>(j) * task.column_weight;
      for (std::size_t k = 0; k < task.depth; ++k) weights[k] = from[task.weight_offsets[k]];
      filter_plane(copies, task.offsets, weights, task.depth,
                   task.bias == nullptr ? T(0) : task.bias[group * task.columns + j], g.length, sums);
      scatter_rows(g, sums, task.target + static_cast<std::ptrdiff_t>(item * task.columns + j) * target_plane);
    }
  }
}

// sums[k] += source shifted by offsets[k] * factor, one vector at a time.
template <typename T, std::size_t count>
inline void correlate_vectors(const T* source, const std::ptrdiff_t* offsets, const T* factor, std::size_t length,
                              T* sums) {
  constexpr std::size_t lanes = kLanes<T>;
  Vector<T> sum[count];
  const T* from[count];
#pragma GCC unroll 9
  for (std::size_t k = 0; k < count; ++k) {
    sum[k] = load(sums + k * lanes);
    from[k] = source + offsets[k];
  }
  for (std::size_t i = 0; i < length; i += lanes) {
    const Vector<T> times = load(factor + i);
#pragma GCC unroll 9
    for (std::size_t k = 0; k < count; ++k) sum[k] += times * load(from[k] + i);
  }
#pragma GCC unroll 9
  for (std::size_t k = 0; k < count; ++k) store(sums + k * lanes, sum[k]);
}

template <typename T>
inline void correlate_plane(const T* source, const std::ptrdiff_t* offsets, std::size_t depth, const T* factor,
                            std::size_t length, T* sums) {
  constexpr std::size_t lanes = kLanes<T>;
  std::size_t k = 0;
  for (; k + 9 <= depth; k += 9) correlate_vectors<T, 9>(source, offsets + k, factor, length, sums + k * lanes);
  for (; k + 3 <= depth; k += 3) correlate_vectors<T, 3>(source, offsets + k, factor, length, sums + k * lanes);
  for (; k < depth; ++k) correlate_vectors<T, 1>(source, offsets + k, factor, length, sums + k * lanes);
}

// The rows of a plane, `phase_extent[2]` apart, zero-filled.
template <typename T>
inline void spread_rows(const FilterGeometry& g, const T* plane, T* target) {
  for (std::ptrdiff_t d = 0; d < g.grid[0]; ++d) {
    for (std::ptrdiff_t h = 0; h < g.grid[1]; ++h, plane += g.grid[2]) {
      copy(plane, static_cast<std::size_t>(g.grid[2]), target + (d * g.phase_extent[1] + h) * g.phase_extent[2]);
    }
  }
}

template <typename T>
void filter_gradient(const FilterGradient<T>& task) {
  constexpr std::size_t lanes = kLanes<T>;
  const FilterGeometry& g = *task.geometry;
  const std::ptrdiff_t plane = g.size[0] * g.size[1] * g.size[2], grid = g.grid[0] * g.grid[1] * g.grid[2];
  const std::size_t per_group = task.columns * task.depth * lanes, total = (task.last - task.first) * per_group;
  T* copies = task.scratch;
  T* factor = copies + task.channels * task.copy_stride;
  T* sums = factor + task.copy_stride;
  fill_zero(copies, (task.channels + 1) * task.copy_stride);
  fill_zero(sums, total);
  for (std::size_t image = 0; image < task.images; ++image) {
    for (std::size_t group = task.first; group < task.last; ++group) {
      const std::size_t item = image * task.groups + group;
      const T* source = task.source + static_cast<std::ptrdiff_t>(item * task.channels) * plane;
      for (std::size_t c = 0; c < task.channels; ++c) {
        copy_phases(g, source + static_cast<std::ptrdiff_t>(c) * plane, copies + c * task.copy_stride);
      }
      for (std::size_t j = 0; j < task.columns; ++j) {
        spread_rows(g, task.factors + static_cast<std::ptrdiff_t>(item * task.columns + j) * grid, factor);
        correlate_plane(copies, task.offsets, task.depth, factor, g.length,
                        sums + (group - task.first) * per_group + j * task.depth * lanes);
      }
    }
  }
  T* target = task.target + task.first * task.columns * task.depth;
  for (std::size_t i = 0; i < total; i += lanes) {
    T sum = T(0);
    for (std::size_t lane = 0; lane < lanes; ++lane) sum += sums[i + lane];
    target[i / lanes] = sum;
  }
}

}  // namespace
}  // namespace onnxtrain
