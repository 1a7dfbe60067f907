// Convolutions with many groups of few channels, mainly depthwise ones, on images that fit the cache: a vector holds
// one position of as many groups as it has lanes.
#pragma once

#include "convolution/correlation_kernels.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Planes of neighbouring groups; the last vector may have fewer groups than lanes.
template <typename T, typename Pointer>
struct PlanesOfLanes {
  Pointer first;
  std::ptrdiff_t stride;  // between lanes
  std::size_t count;      // lanes in use

  Pointer lane(std::size_t i) const { return first + static_cast<std::ptrdiff_t>(i < count ? i : count - 1) * stride; }
};

// Transposes planes to vectors: element `position` of all planes goes to target[starts[position]].
template <typename T>
inline void gather_lanes(const PlanesOfLanes<T, const T*>& planes, std::size_t positions, const std::ptrdiff_t* starts,
                         T* target) {
  constexpr std::size_t lanes = kLanes<T>;
  std::size_t p = 0;
  for (; p + lanes <= positions; p += lanes) {
    Vector<T> square[lanes];
#pragma GCC unroll 16
    for (std::size_t i = 0; i < lanes; ++i) square[i] = load(planes.lane(i) + p);
    transpose_in_registers<T>(square);
#pragma GCC unroll 16
    for (std::size_t i = 0; i < lanes; ++i) store(target + starts[p + i], square[i]);
  }
  if (p == positions) return;
  for (std::size_t i = 0; i < lanes; ++i) {
    const T* plane = planes.lane(i);
    for (std::size_t q = p; q < positions; ++q) target[starts[q] + static_cast<std::ptrdiff_t>(i)] = plane[q];
  }
}

// Transposes vectors, one per position, back to planes.
template <typename T>
inline void scatter_lanes(const T* source, std::size_t positions, const PlanesOfLanes<T, T*>& planes) {
  constexpr std::size_t lanes = kLanes<T>;
  std::size_t p = 0;
  for (; p + lanes <= positions; p += lanes) {
    Vector<T> square[lanes];
#pragma GCC unroll 16
    for (std::size_t i = 0; i < lanes; ++i) square[i] = load(source + (p + i) * lanes);
    transpose_in_registers<T>(square);
    if (planes.count == lanes) {
#pragma GCC unroll 16
      for (std::size_t i = 0; i < lanes; ++i) {
        store(planes.first + static_cast<std::ptrdiff_t>(i) * planes.stride + p, square[i]);
      }
    } else {
      for (std::size_t i = 0; i < planes.count; ++i) store(planes.lane(i) + p, square[i]);
    }
  }
  for (std::size_t i = 0; i < planes.count; ++i) {
    T* plane = planes.lane(i);
    for (std::size_t q = p; q < positions; ++q) plane[q] = source[q * lanes + i];
  }
}

// Interleaves the weights of neighbouring groups: element k of all of them goes to target[k].
template <typename T>
inline void gather_weights(const PlanesOfLanes<T, const T*>& weights, const std::ptrdiff_t* offsets, std::size_t depth,
                           T* target) {
  for (std::size_t i = 0; i < kLanes<T>; ++i) {
    const T* from = weights.lane(i);
    for (std::size_t k = 0; k < depth; ++k) target[k * kLanes<T> + i] = from[offsets[k]];
  }
}

template <typename T, std::size_t count>
inline void filter_positions(const T* source, const std::ptrdiff_t* starts, const std::ptrdiff_t* offsets,
                             const T* weights, std::size_t depth, Vector<T> bias, T* target,
                             const std::ptrdiff_t* target_starts) {
  Vector<T> sum[count];
  const T* from[count];
#pragma GCC unroll 8
  for (std::size_t p = 0; p < count; ++p) {
    sum[p] = bias;
    from[p] = source + starts[p];
  }
  for (std::size_t k = 0; k < depth; ++k) {
    const Vector<T> weight = load(weights + k * kLanes<T>);
    const std::ptrdiff_t offset = offsets[k];
#pragma GCC unroll 8
    for (std::size_t p = 0; p < count; ++p) sum[p] += weight * load(from[p] + offset);
  }
#pragma GCC unroll 8
  for (std::size_t p = 0; p < count; ++p) store(target + target_starts[p], sum[p]);
}

template <typename T>
void depthwise(const Depthwise<T>& task) {
  constexpr std::size_t lanes = kLanes<T>;
  const LaneLayout& layout = *task.layout;
  T* copies = task.scratch;
  T* results = copies + layout.channels * layout.copy_size;
  T* weights = results + layout.target_positions * lanes;
  fill_zero(copies, layout.channels * layout.copy_size);
  const auto source_plane = static_cast<std::ptrdiff_t>(layout.positions);
  const auto target_plane = static_cast<std::ptrdiff_t>(layout.target_positions);
  const auto channels = static_cast<std::ptrdiff_t>(layout.channels);
  const auto columns = static_cast<std::ptrdiff_t>(layout.columns);
  for (std::size_t item = task.first; item < task.last; ++item) {
    const std::size_t image = item % layout.images, group = item / layout.images * lanes;
    const std::size_t used = layout.groups - group < lanes ? layout.groups - group : lanes;
    const auto channel = static_cast<std::ptrdiff_t>(image * layout.groups + group);
    if (image == 0 || item == task.first) {
      for (std::size_t j = 0; j < layout.columns; ++j) {
        const T* from = task.weights + static_cast<std::ptrdiff_t>(group) * task.group_weight +
                        static_cast<std::ptrdiff_t>(j) * task.column_weight;
        for (std::size_t phase = 0; phase < layout.phase_count; ++phase) {
          const LanePhase& part = layout.phases[phase];
          gather_weights<T>({from, task.group_weight, used}, part.weight_offsets, part.depth,
                            weights + (j * layout.total_depth + part.first_depth) * lanes);
        }
      }
    }
    for (std::ptrdiff_t c = 0; c < channels; ++c) {
      gather_lanes<T>({task.source + (channel * channels + c) * source_plane, channels * source_plane, used},
                      layout.positions, layout.starts, copies + static_cast<std::size_t>(c) * layout.copy_size);
    }
    for (std::ptrdiff_t j = 0; j < columns; ++j) {
      Vector<T> bias = {};
      if (task.bias != nullptr) {
        for (std::size_t i = 0; i < used; ++i) {
          bias[i] = task.bias[(static_cast<std::ptrdiff_t>(group + i)) * columns + j];
        }
      }
      for (std::size_t phase = 0; phase < layout.phase_count; ++phase) {
        const LanePhase& part = layout.phases[phase];
        const T* factors = weights + (static_cast<std::size_t>(j) * layout.total_depth + part.first_depth) * lanes;
        std::size_t p = 0;
        for (; p + tuning::kPositionsAtOnce <= part.positions; p += tuning::kPositionsAtOnce) {
          filter_positions<T, tuning::kPositionsAtOnce>(copies, part.starts + p, part.offsets, factors, part.depth,
                                                        bias, results, part.target_starts + p);
        }
        for (; p + 4 <= part.positions; p += 4) {
          filter_positions<T, 4>(copies, part.starts + p, part.offsets, factors, part.depth, bias, results,
                                 part.target_starts + p);
        }
        for (; p < part.positions; ++p) {
          filter_positions<T, 1>(copies, part.starts + p, part.offsets, factors, part.depth, bias, results,
                                 part.target_starts + p);
        }
      }
      scatter_lanes<T>(results, layout.target_positions,
                       {task.target + (channel * columns + j) * target_plane, columns * target_plane, used});
    }
  }
}

// sums[k] += factor * source shifted by offsets[k], over all positions.
template <typename T, std::size_t count>
inline void correlate_lanes(const T* source, const std::ptrdiff_t* starts, const std::ptrdiff_t* offsets,
                            const T* factor, std::size_t positions, T* sums) {
  constexpr std::size_t lanes = kLanes<T>;
  Vector<T> sum[count];
  std::ptrdiff_t offset[count];
#pragma GCC unroll 9
  for (std::size_t k = 0; k < count; ++k) {
    sum[k] = load(sums + k * lanes);
    offset[k] = offsets[k];
  }
  for (std::size_t p = 0; p < positions; ++p) {
    const Vector<T> times = load(factor + p * lanes);
    const T* from = source + starts[p];
#pragma GCC unroll 9
    for (std::size_t k = 0; k < count; ++k) sum[k] += times * load(from + offset[k]);
  }
#pragma GCC unroll 9
  for (std::size_t k = 0; k < count; ++k) store(sums + k * lanes, sum[k]);
}

template <typename T>
void depthwise_gradient(const DepthwiseGradient<T>& task) {
  constexpr std::size_t lanes = kLanes<T>;
  const LaneLayout& layout = *task.layout;
  const LanePhase& part = layout.phases[0];
  T* copies = task.scratch;
  T* factors = copies + layout.channels * layout.copy_size;
  T* sums = factors + layout.target_positions * lanes;
  fill_zero(copies, layout.channels * layout.copy_size);
  fill_zero(sums, layout.columns * part.depth * lanes);
  const auto source_plane = static_cast<std::ptrdiff_t>(layout.positions);
  const auto target_plane = static_cast<std::ptrdiff_t>(layout.target_positions);
  const auto channels = static_cast<std::ptrdiff_t>(layout.channels);
  const auto columns = static_cast<std::ptrdiff_t>(layout.columns);
  const std::size_t used = layout.groups - task.group < lanes ? layout.groups - task.group : lanes;
  for (std::size_t image = task.first; image < task.last; ++image) {
    const auto channel = static_cast<std::ptrdiff_t>(image * layout.groups + task.group);
    for (std::ptrdiff_t c = 0; c < channels; ++c) {
      gather_lanes<T>({task.source + (channel * channels + c) * source_plane, channels * source_plane, used},
                      layout.positions, layout.starts, copies + static_cast<std::size_t>(c) * layout.copy_size);
    }
    for (std::ptrdiff_t j = 0; j < columns; ++j) {
      gather_lanes<T>({task.factors + (channel * columns + j) * target_plane, columns * target_plane, used},
                      layout.target_positions, part.target_starts, factors);
      T* into = sums + static_cast<std::size_t>(j) * part.depth * lanes;
      std::size_t k = 0;
      for (; k + 9 <= part.depth; k += 9) {
        correlate_lanes<T, 9>(copies, part.starts, part.offsets + k, factors, part.positions, into + k * lanes);
      }
      for (; k + 3 <= part.depth; k += 3) {
        correlate_lanes<T, 3>(copies, part.starts, part.offsets + k, factors, part.positions, into + k * lanes);
      }
      for (; k < part.depth; ++k) {
        correlate_lanes<T, 1>(copies, part.starts, part.offsets + k, factors, part.positions, into + k * lanes);
      }
    }
  }
  const std::size_t rows = layout.columns * part.depth;
  for (std::size_t i = 0; i < used; ++i) {
    for (std::size_t k = 0; k < rows; ++k) task.target[(task.group + i) * rows + k] = sums[k * lanes + i];
  }
}

}  // namespace
}  // namespace onnxtrain
