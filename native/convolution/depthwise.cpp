// Convolutions with many groups of few channels, one vector of groups at a time.
#include <algorithm>

#include "convolution/products.h"
#include "scratch.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Offsets of a box's positions in a plane of another size.
void append_starts(const Index& box, const Index& start, const Index& step, const Index& plane, std::size_t lanes,
                   std::vector<std::ptrdiff_t>& starts) {
  for (std::ptrdiff_t d = 0; d < box[0]; ++d) {
    for (std::ptrdiff_t h = 0; h < box[1]; ++h) {
      const std::ptrdiff_t row = ((start[0] + d * step[0]) * plane[1] + start[1] + h * step[1]) * plane[2] + start[2];
      for (std::ptrdiff_t w = 0; w < box[2]; ++w) {
        starts.push_back((row + w * step[2]) * static_cast<std::ptrdiff_t>(lanes));
      }
    }
  }
}

}  // namespace

// A layout with the tables that it points to.
struct DepthwiseLayout {
  struct Tables {
    std::vector<std::ptrdiff_t> starts, target_starts, offsets, weight_offsets;
  };
  LaneLayout layout = {};
  std::vector<std::ptrdiff_t> starts;
  std::vector<Tables> tables;
  std::vector<LanePhase> phases;
  std::size_t lanes;

  DepthwiseLayout(std::size_t images, std::size_t groups, std::size_t channels, std::size_t columns, const Index& size,
                  const Index& target_size, const std::vector<Phase>& parts, std::ptrdiff_t channel_weight,
                  std::size_t lanes_)
      : tables(parts.size()), lanes(lanes_) {
    Index low = {0, 0, 0}, high = size;
    for (const Phase& part : parts) {
      for (const Tap& tap : part.taps) {
        for (int axis = 0; axis < kAxes; ++axis) {
          low[axis] = std::min(low[axis], tap.offset[axis]);
          high[axis] = std::max(high[axis], (part.size[axis] - 1) * part.step[axis] + tap.offset[axis] + 1);
        }
      }
    }
    const Index one = {1, 1, 1}, inside = {-low[0], -low[1], -low[2]};
    const Index box = {high[0] - low[0], high[1] - low[1], high[2] - low[2]};
    layout.images = images;
    layout.groups = groups;
    layout.channels = channels;
    layout.columns = columns;
    layout.positions = static_cast<std::size_t>(product(size));
    layout.target_positions = static_cast<std::size_t>(product(target_size));
    layout.copy_size = saturating_product(static_cast<std::size_t>(box[0]), static_cast<std::size_t>(box[1]),
                                          static_cast<std::size_t>(box[2]), lanes);
    if (saturating_product(scratch_without_weights(), sizeof(float)) > tuning::kSideBySideBytes) return;  // see fits()
    append_starts(size, inside, one, box, lanes, starts);
    layout.starts = starts.data();
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const Phase& part = parts[i];
      Tables& table = tables[i];
      append_starts(part.size, inside, part.step, box, lanes, table.starts);
      append_starts(part.size, part.target_start, part.target_step, target_size, lanes, table.target_starts);
      for (std::size_t channel = 0; channel < channels; ++channel) {
        for (const Tap& tap : part.taps) {
          const std::ptrdiff_t offset = (tap.offset[0] * box[1] + tap.offset[1]) * box[2] + tap.offset[2];
          table.offsets.push_back(static_cast<std::ptrdiff_t>(channel * layout.copy_size) +
                                  offset * static_cast<std::ptrdiff_t>(lanes));
          table.weight_offsets.push_back(static_cast<std::ptrdiff_t>(channel) * channel_weight + tap.weight);
        }
      }
      phases.push_back({table.starts.size(), table.offsets.size(), table.starts.data(), table.target_starts.data(),
                        table.offsets.data(), table.weight_offsets.data(), layout.total_depth});
      layout.total_depth += table.offsets.size();
    }
    layout.phases = phases.data();
    layout.phase_count = phases.size();
  }
  DepthwiseLayout(const DepthwiseLayout&) = delete;
  DepthwiseLayout& operator=(const DepthwiseLayout&) = delete;

  std::size_t scratch_without_weights() const {
    return saturating_sum(saturating_product(layout.channels, layout.copy_size),
                          saturating_product(layout.target_positions, lanes));
  }
  std::size_t scratch() const {
    return saturating_sum(scratch_without_weights(), saturating_product(layout.columns, layout.total_depth, lanes));
  }
  bool fits(std::size_t element_size) const {
    return layout.phases != nullptr && saturating_product(scratch(), element_size) <= tuning::kSideBySideBytes;
  }
};

template <typename T>
bool ConvolutionProducts<T>::is_depthwise() const {
  return c_.group >= kernels_.lanes / 2 && c_.group > 1 &&
         saturating_product(c_.inputs, c_.outputs) <= tuning::kSideBySideProducts;
}

template <typename T>
bool ConvolutionProducts<T>::depthwise(const PlaneCorrelation<T>& p) const {
  if (!is_depthwise()) return false;
  const DepthwiseLayout layout(c_.batch, p.source.group, p.source.channels, p.columns, p.source.size, p.target_size,
                               p.phases, p.weights.channel_stride, kernels_.lanes);
  if (!layout.fits(sizeof(T))) return false;
  const std::size_t items = c_.batch * divided_up(p.source.group, kernels_.lanes),
                    tasks = std::min(items, tuning::kPlaneTasks);
  BufferPool pool(layout.scratch() * sizeof(T));
  parallel_for_(tasks, [&](std::size_t task) {
    pool.lend([&](const Buffer& buffer) {
      kernels_.depthwise({&layout.layout, p.source.data, p.weights.data, p.weights.bias, p.weights.group_stride,
                          p.weights.column_stride, p.target, task * items / tasks, (task + 1) * items / tasks,
                          buffer.as<T>()});
    });
  });
  return true;
}

template <typename T>
bool ConvolutionProducts<T>::depthwise_gradient(const PlaneProducts<T>& p) const {
  if (!is_depthwise()) return false;
  const Phase phase = {p.columns.size, p.grid.step, {0, 0, 0}, {1, 1, 1}, p.taps};
  const DepthwiseLayout layout(c_.batch, p.source.group, p.source.channels, p.columns.channels, p.source.size,
                               p.columns.size, {phase}, 0, kernels_.lanes);
  if (!layout.fits(sizeof(T))) return false;
  // With few groups the images are split among threads as well; their sums are added in order at the end.
  const std::size_t parts = divided_up(p.source.group, kernels_.lanes);
  const std::size_t chunks = std::clamp<std::size_t>(tuning::kPlaneTasks / 2 / parts, 1, c_.batch);
  const std::size_t count = checked_product(p.source.group, p.columns.channels, layout.layout.total_depth);
  const Buffer sums(checked_product(chunks - 1, count, sizeof(T)));
  BufferPool pool(layout.scratch() * sizeof(T));
  parallel_for_(parts * chunks, [&](std::size_t task) {
    const std::size_t chunk = task / parts;
    pool.lend([&](const Buffer& buffer) {
      kernels_.depthwise_gradient({&layout.layout, p.source.data, p.columns.data,
                                   chunk == 0 ? p.target : sums.as<T>() + (chunk - 1) * count,
                                   task % parts * kernels_.lanes, chunk * c_.batch / chunks,
                                   (chunk + 1) * c_.batch / chunks, buffer.as<T>()});
    });
  });
  for (std::size_t chunk = 1; chunk < chunks; ++chunk) {
    kernels_.add(sums.as<T>() + (chunk - 1) * count, count, p.target);
  }
  return true;
}

#define ONNXTRAIN_DEPTHWISE(T)                                                          \
  template bool ConvolutionProducts<T>::is_depthwise() const;                           \
  template bool ConvolutionProducts<T>::depthwise(const PlaneCorrelation<T>&) const;    \
  template bool ConvolutionProducts<T>::depthwise_gradient(const PlaneProducts<T>&) const;
ONNXTRAIN_DEPTHWISE(float)
ONNXTRAIN_DEPTHWISE(double)

}  // namespace onnxtrain
