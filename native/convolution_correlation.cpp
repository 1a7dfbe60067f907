// Correlations as products of matrices: positions of the source with the weights.
#include <algorithm>

#include "convolution_products.h"
#include "scratch.h"

namespace onnxtrain {
namespace {

// Bytes of arranged weights beyond which a block has more positions, because each block reads all weights.
constexpr std::size_t kLargeWeights = 1024 * 1024;

// Elements of weights that a task arranges.
constexpr std::size_t kPackSize = 65536;

// One phase's part of the products.
struct PhasePart {
  const Phase* phase;
  std::size_t depth;
  std::vector<std::ptrdiff_t> weight_offsets, tap_offsets;
  std::size_t weights;  // where its arranged weights begin, in elements of a column
};

// Part `part` of the weights of one panel, group and phase.
struct PackTask {
  const PhasePart* phase;
  std::size_t group, panel, begin, end;
};

}  // namespace

template <typename T>
Grid PlaneCorrelation<T>::grid() const {
  Index size = {0, 0, 0};
  std::vector<Tap> taps;
  for (const Phase& phase : phases) {
    for (int axis = 0; axis < kAxes; ++axis) size[axis] = std::max(size[axis], phase.size[axis]);
    taps.insert(taps.end(), phase.taps.begin(), phase.taps.end());
  }
  return Grid(size, phases[0].step, taps);
}

template <typename T>
void ConvolutionProducts<T>::correlate(const PlaneCorrelation<T>& p) const {
  const auto is_empty = [](const Phase& phase) { return phase.taps.empty(); };
  const bool all_empty = std::all_of(p.phases.begin(), p.phases.end(), is_empty) || product(p.source.size) == 0;
  const std::size_t count = c_.batch * p.source.group * p.columns * static_cast<std::size_t>(product(p.target_size));
  if (all_empty && p.weights.bias == nullptr) return clear(p.target, count);
  if (depthwise(p)) return;
  PlaneCorrelation<T> reached = p;  // by some tap; all else is zero, as only gradients have such places
  reached.phases.erase(std::remove_if(reached.phases.begin(), reached.phases.end(), is_empty), reached.phases.end());
  if (reached.phases.size() < p.phases.size()) clear(p.target, count);
  if (!prefers_filter(p.source, reached.grid(), p.columns)) return multiply(reached);
  for (const Phase& phase : reached.phases) filter(reached, phase);
}

template <typename T>
void ConvolutionProducts<T>::multiply(const PlaneCorrelation<T>& p) const {
  const Grid grid = p.grid();
  const std::size_t groups = p.source.group, channels = p.source.channels;
  const std::size_t padded_columns = divided_up(p.columns, kernels_.lanes) * kernels_.lanes;
  std::size_t depth = 0;  // of all phases
  for (const Phase& phase : p.phases) depth += channels * phase.taps.size();
  const std::size_t positions = c_.batch * static_cast<std::size_t>(product(grid.size));
  const bool large = depth * padded_columns * sizeof(T) > kLargeWeights;
  const std::size_t wanted = std::max<std::size_t>(large ? 256 : 96, divided_up(positions * groups, kProductTasks));
  const Blocks blocks(grid, c_.batch, channels, kBlockBytes / sizeof(T), wanted);
  const std::size_t panels = kernels_.panels(p.columns);
  const std::size_t splits = std::clamp<std::size_t>(kProductTasks / (blocks.all.size() * groups), 1, panels);
  const std::size_t copy_size = blocks.copy_size(channels);
  const bool shared = splits > 1;

  std::vector<PhasePart> parts;
  for (const Phase& phase : p.phases) {
    const std::size_t before = parts.empty() ? 0 : parts.back().weights + groups * parts.back().depth;
    parts.push_back({&phase, channels * phase.taps.size(),
                     weight_offsets_of(phase.taps, channels, p.weights.channel_stride),
                     blocks.tap_offsets(grid, phase.taps, channels), before});
  }
  std::vector<PackTask> packs;
  for (const PhasePart& part : parts) {
    const std::size_t cuts =
        std::clamp<std::size_t>(part.depth * padded_columns / kPackSize / panels, 1, divided_up(part.depth, 16) + 1);
    for (std::size_t i = 0; i < groups * panels * cuts; ++i) {
      packs.push_back({&part, i / cuts / panels, i / cuts % panels, i % cuts * part.depth / cuts,
                       (i % cuts + 1) * part.depth / cuts});
    }
  }

  // Arranges the weights, and the source where several tasks read the same of it.
  const Buffer weights(groups * depth * padded_columns * sizeof(T));
  const Buffer copies(shared ? groups * blocks.all.size() * copy_size * sizeof(T) : 0);
  const auto weights_of = [&](const PhasePart& part, std::size_t group) {
    return weights.as<T>() + (part.weights + group * part.depth) * padded_columns;
  };
  const auto copy = [&](std::size_t group, const Block& block, T* target) {
    copy_block(kernels_, grid, blocks, block, p.source.of_group(group), p.source.size, p.source.image(), channels,
               target);
  };
  parallel_for_(packs.size() + (shared ? groups * blocks.all.size() : 0), [&](std::size_t task) {
    if (task < packs.size()) {
      const PackTask& pack = packs[task];
      const PhasePart& part = *pack.phase;
      kernels_.pack({p.weights.data + static_cast<std::ptrdiff_t>(pack.group) * p.weights.group_stride,
                     p.weights.data + weight_count(), p.weights.column_stride, part.weight_offsets.data(), p.columns,
                     part.depth, pack.begin, pack.end, pack.panel, pack.panel + 1, weights_of(part, pack.group)});
    } else {
      task -= packs.size();
      copy(task / blocks.all.size(), blocks.all[task % blocks.all.size()], copies.as<T>() + task * copy_size);
    }
  });

  const std::ptrdiff_t target_plane = product(p.target_size);
  const std::ptrdiff_t target_image = target_plane * static_cast<std::ptrdiff_t>(groups * p.columns);
  BufferPool pool(shared ? 0 : copy_size * sizeof(T));
  parallel_for_(groups * blocks.all.size() * splits, [&](std::size_t task) {
    const std::size_t split = task % splits, number = task / splits, group = number / blocks.all.size();
    const Block& box = blocks.all[number % blocks.all.size()];
    T* target = p.target + static_cast<std::ptrdiff_t>(box.image) * target_image +
                static_cast<std::ptrdiff_t>(group * p.columns) * target_plane;
    pool.lend([&](const Buffer& buffer) {
      T* source = shared ? copies.as<T>() + number * copy_size : buffer.as<T>();
      if (!shared) copy(group, box, source);
      for (const PhasePart& part : parts) {
        const Phase& phase = *part.phase;
        const Block block = box.within(phase.size);
        const auto rows = blocks.position_offsets(grid, block);
        const auto places = plane_offsets(block, p.target_size, phase.target_start, phase.target_step, target_image);
        kernels_.correlate({source, rows.data(), part.tap_offsets.data(), rows.size(), part.depth, p.columns,
                            split * panels / splits, (split + 1) * panels / splits, weights_of(part, group), target,
                            places.data(), target_plane,
                            p.weights.bias == nullptr ? nullptr : p.weights.bias + group * p.columns});
      }
    });
  });
}

template struct PlaneCorrelation<float>;
template struct PlaneCorrelation<double>;
#define ONNXTRAIN_CORRELATION(T)                                                      \
  template void ConvolutionProducts<T>::correlate(const PlaneCorrelation<T>&) const; \
  template void ConvolutionProducts<T>::multiply(const PlaneCorrelation<T>&) const;
ONNXTRAIN_CORRELATION(float)
ONNXTRAIN_CORRELATION(double)

}  // namespace onnxtrain
