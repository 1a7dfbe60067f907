// Convolutions with few outputs per group, as sums of shifted planes.
#include <algorithm>

#include "convolution/products.h"
#include "scratch.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

FilterGeometry geometry_of(const Grid& grid, const Index& size) {
  FilterGeometry g = {};
  std::size_t length = 0;
  for (int axis = 0; axis < kAxes; ++axis) {
    g.size[axis] = g.target_size[axis] = size[axis];
    g.start[axis] = grid.lowest[axis];
    g.step[axis] = grid.step[axis];
    g.target_step[axis] = 1;
    g.grid[axis] = grid.size[axis];
    const std::ptrdiff_t extent = (grid.size[axis] - 1) * grid.step[axis] + grid.reach[axis] + 1;
    g.phase_extent[axis] = (extent + grid.step[axis] - 1) / grid.step[axis];
    length = saturating_sum(saturating_product(length, static_cast<std::size_t>(g.phase_extent[axis])),
                            static_cast<std::size_t>(grid.size[axis] - 1));
  }
  g.length = saturating_sum(length, std::size_t{1});
  return g;
}

// Elements of a copy of a plane, with room for a whole block of vectors behind it.
std::size_t copy_stride_of(const FilterGeometry& g, std::size_t lanes) {
  std::size_t count = 1;  // up to one stride larger than the plane along each axis
  for (int axis = 0; axis < kAxes; ++axis) {
    count = saturating_product(count, static_cast<std::size_t>(g.step[axis] * g.phase_extent[axis]));
  }
  constexpr std::size_t kMost = std::size_t{1} << 62;  // marks an impossible copy: see prefers_filter
  return rounded_up(std::min(count, kMost) + 8 * lanes, lanes);
}

// Offsets of channels and taps in the copies.
std::vector<std::ptrdiff_t> copy_offsets(const FilterGeometry& g, const Grid& grid, const std::vector<Tap>& taps,
                                         std::size_t channels, std::size_t copy_stride) {
  std::vector<std::ptrdiff_t> offsets;
  for (std::size_t channel = 0; channel < channels; ++channel) {
    for (const Tap& tap : taps) {
      std::ptrdiff_t phase = 0, within = 0, size = 1;
      for (int axis = 0; axis < kAxes; ++axis) {
        const std::ptrdiff_t distance = tap.offset[axis] - grid.lowest[axis];
        phase = phase * g.step[axis] + distance % g.step[axis];
        within = within * g.phase_extent[axis] + distance / g.step[axis];
        size *= g.phase_extent[axis];
      }
      offsets.push_back(static_cast<std::ptrdiff_t>(channel * copy_stride) + phase * size + within);
    }
  }
  return offsets;
}

}  // namespace

// A matmul tile has at least one vector of columns; sums of planes go column by column.
template <typename T>
bool ConvolutionProducts<T>::prefers_filter(const Planes<T>& source, const Grid& grid, std::size_t columns) const {
  const std::size_t stride = copy_stride_of(geometry_of(grid, source.size), kernels_.lanes);
  return 4 * columns <= kernels_.lanes &&
         saturating_product(source.channels + 1, stride, sizeof(T)) <= tuning::kShiftedBytes;
}

template <typename T>
void ConvolutionProducts<T>::filter(const PlaneCorrelation<T>& p, const Phase& phase) const {
  const Grid grid(phase.size, phase.step, phase.taps);
  FilterGeometry geometry = geometry_of(grid, p.source.size);
  std::copy(p.target_size.begin(), p.target_size.end(), geometry.target_size);
  std::copy(phase.target_start.begin(), phase.target_start.end(), geometry.target_start);
  std::copy(phase.target_step.begin(), phase.target_step.end(), geometry.target_step);
  const std::size_t copy_stride = copy_stride_of(geometry, kernels_.lanes);
  const auto offsets = copy_offsets(geometry, grid, phase.taps, p.source.channels, copy_stride);
  const auto weight_offsets = weight_offsets_of(phase.taps, p.source.channels, p.weights.channel_stride);
  const std::size_t items = c_.batch * p.source.group, tasks = std::min(items, tuning::kPlaneTasks);
  BufferPool pool(checked_product(checked_sum(checked_product(p.source.channels + 1, copy_stride), offsets.size()),
                                  sizeof(T)));
  parallel_for_(tasks, [&](std::size_t task) {
    pool.lend([&](const Buffer& buffer) {
      kernels_.filter({&geometry, offsets.data(), weight_offsets.data(), offsets.size(), p.source.channels, p.columns,
                       p.source.group, p.source.data, p.weights.data, p.weights.bias, p.weights.group_stride,
                       p.weights.column_stride, p.target,
                       task * items / tasks, (task + 1) * items / tasks, buffer.as<T>(), copy_stride});
    });
  });
}

template <typename T>
void ConvolutionProducts<T>::filter_gradient(const PlaneProducts<T>& p) const {
  const FilterGeometry geometry = geometry_of(p.grid, p.source.size);
  const std::size_t copy_stride = copy_stride_of(geometry, kernels_.lanes);
  const auto offsets = copy_offsets(geometry, p.grid, p.taps, p.source.channels, copy_stride);
  const std::size_t groups = p.source.group, tasks = std::min(groups, tuning::kPlaneTasks);
  const std::size_t sums =
      checked_product(divided_up(groups, tasks), p.columns.channels, offsets.size(), kernels_.lanes);
  BufferPool pool(checked_product(checked_sum(checked_product(p.source.channels + 1, copy_stride), sums), sizeof(T)));
  parallel_for_(tasks, [&](std::size_t task) {
    pool.lend([&](const Buffer& buffer) {
      kernels_.filter_gradient({&geometry, offsets.data(), offsets.size(), p.source.channels, p.columns.channels,
                                groups, c_.batch, p.source.data, p.columns.data, p.target, task * groups / tasks,
                                (task + 1) * groups / tasks, buffer.as<T>(), copy_stride});
    });
  });
}

template bool ConvolutionProducts<float>::prefers_filter(const Planes<float>&, const Grid&, std::size_t) const;
template bool ConvolutionProducts<double>::prefers_filter(const Planes<double>&, const Grid&, std::size_t) const;
template void ConvolutionProducts<float>::filter(const PlaneCorrelation<float>&, const Phase&) const;
template void ConvolutionProducts<double>::filter(const PlaneCorrelation<double>&, const Phase&) const;
template void ConvolutionProducts<float>::filter_gradient(const PlaneProducts<float>&) const;
template void ConvolutionProducts<double>::filter_gradient(const PlaneProducts<double>&) const;

}  // namespace onnxtrain
