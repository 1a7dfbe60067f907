#include "convolution/products.h"

#include <algorithm>

#include "cache.h"
#include "scratch.h"
#include "tuning.h"

namespace onnxtrain {
template <typename T>
ConvolutionProducts<T>::ConvolutionProducts(const Convolution& convolution, const ParallelFor& parallel_for)
    : c_(convolution), parallel_for_(parallel_for), kernels_(kernels_of<T>(*kernels()->convolution)) {}

template <typename T>
std::size_t ConvolutionProducts<T>::weight_count() const {
  return checked_product(c_.group * c_.outputs, c_.inputs, static_cast<std::size_t>(c_.kernel[0]),
                         static_cast<std::size_t>(c_.kernel[1]), static_cast<std::size_t>(c_.kernel[2]));
}

template <typename T>
void ConvolutionProducts<T>::clear(T* data, std::size_t count) const {
  parallel_for_(divided_up(count, tuning::kClearedElements), [&](std::size_t part) {
    std::fill(data + part * tuning::kClearedElements, data + std::min(count, (part + 1) * tuning::kClearedElements),
              T(0));
  });
}

// Fills every plane, `channels` per group, with the bias of its channel, or with zeros if it is null.
template <typename T>
void ConvolutionProducts<T>::fill(T* data, std::size_t channels, const std::ptrdiff_t (&size)[kAxes],
                                  const T* bias) const {
  const std::size_t planes = checked_product(c_.batch, c_.group, channels);
  if (planes == 0) return;
  const std::size_t plane = checked_product(static_cast<std::size_t>(size[0]), static_cast<std::size_t>(size[1]),
                                            static_cast<std::size_t>(size[2]));
  parallel_for_(planes, [&](std::size_t number) {
    std::fill_n(data + number * plane, plane, bias == nullptr ? T(0) : bias[number % (c_.group * channels)]);
  });
}

template <typename T>
bool ConvolutionProducts<T>::many_groups() const {
  return c_.group >= tuning::kProductTasks / 2;
}

template <typename T>
PlaneCorrelation<T> forward_correlation(const Convolution& c, const T* x, const T* w, const T* bias, T* y) {
  const auto positions = static_cast<std::ptrdiff_t>(product(index_of(c.kernel)));
  const auto inputs = static_cast<std::ptrdiff_t>(c.inputs), outputs = static_cast<std::ptrdiff_t>(c.outputs);
  const Phase phase = {index_of(c.output), index_of(c.stride), {0, 0, 0}, {1, 1, 1}, taps_of(c)};
  const Weights<T> weights = {w, bias, outputs * inputs * positions, inputs * positions, positions};
  return {{x, c.group, c.inputs, index_of(c.input)}, {phase}, weights, c.outputs, y, index_of(c.output)};
}

template <typename T>
PlaneCorrelation<T> input_gradient_correlation(const Convolution& c, const T* dy, const T* w, T* dx) {
  const auto positions = static_cast<std::ptrdiff_t>(product(index_of(c.kernel)));
  const auto inputs = static_cast<std::ptrdiff_t>(c.inputs), outputs = static_cast<std::ptrdiff_t>(c.outputs);
  const Weights<T> weights = {w, nullptr, outputs * inputs * positions, positions, inputs * positions};
  const Index size = index_of(c.input);
  bool all_phases = true;
  std::vector<Phase> phases = phases_of(size, index_of(c.stride), taps_of(c), all_phases);
  return {{dy, c.group, c.outputs, index_of(c.output)}, std::move(phases), weights, c.inputs, dx, size, all_phases};
}

template <typename T>
void ConvolutionProducts<T>::forward(const T* x, const T* w, const T* bias, T* y) const {
  if (c_.is_empty()) return fill(y, c_.outputs, c_.output, bias);
  const PlaneCorrelation<T> correlation = forward_correlation(c_, x, w, bias, y);
  if (is_pointwise(c_)) {
    return pointwise(correlation.source, w, static_cast<std::ptrdiff_t>(c_.inputs), 1, c_.outputs, bias, y);
  }
  // Whatever the batch: an image gives the same bits whatever else is in it.
  if (prefers_winograd(correlation, tuning::kWinogradImages)) return winograd(correlation);
  correlate(correlation);
}

template <typename T>
void ConvolutionProducts<T>::input_gradient(const T* dy, const T* w, T* dx) const {
  if (c_.is_empty()) return fill(dx, c_.inputs, c_.input, nullptr);
  const PlaneCorrelation<T> correlation = input_gradient_correlation(c_, dy, w, dx);
  if (is_pointwise(c_)) {
    return pointwise(correlation.source, w, 1, static_cast<std::ptrdiff_t>(c_.inputs), c_.inputs, nullptr, dx);
  }
  if (prefers_winograd(correlation, c_.batch)) return winograd(correlation);
  if (prefers_spread(correlation)) return spread(correlation.source, w, dx);
  correlate(correlation);
}

template <typename T>
std::size_t ConvolutionProducts<T>::pixels_at_once(std::size_t depth) const {
  const std::size_t width = kernels_.pointwise_width;
  return std::clamp<std::size_t>(share_of_second_cache(tuning::kPixelShare) / sizeof(T) / depth / width, 1, 32) * width;
}

template <typename T>
void ConvolutionProducts<T>::pointwise(const Planes<T>& source, const T* weights, std::ptrdiff_t row_stride,
                                       std::ptrdiff_t depth_stride, std::size_t rows, const T* bias, T* target) const {
  const std::size_t groups = source.group, depth = source.channels;
  const std::size_t plane = static_cast<std::size_t>(source.plane()), pixels = c_.batch * plane;
  std::size_t group_size = rows * depth;
  // Rows that lie side by side, depth elements far apart: a tile would read a part of a line from as many lines as the depth has.
  const bool turns = row_stride == 1 && depth_stride > 1 && group_size * sizeof(T) > tuning::kWeightsInPlace;
  const std::size_t line = (divided_up(depth, kernels_.lanes) | 1) * kernels_.lanes;
  const Buffer turned(turns ? checked_product(groups, rows, line, sizeof(T)) : 0);
  if (turns) {
    const std::size_t parts = divided_up(rows, tuning::kTurnedRows);
    parallel_for_(groups * parts, [&](std::size_t task) {
      const std::size_t group = task / parts, first = task % parts * tuning::kTurnedRows;
      kernels_.turn({weights + group * rows * depth, depth, rows, first, std::min(rows, first + tuning::kTurnedRows),
                     turned.as<T>() + group * rows * line, line});
    });
    weights = turned.as<T>();
    row_stride = static_cast<std::ptrdiff_t>(line);
    depth_stride = 1;
    group_size = rows * line;
  }
  std::vector<std::ptrdiff_t> offsets(depth);
  for (std::size_t k = 0; k < depth; ++k) offsets[k] = static_cast<std::ptrdiff_t>(k) * depth_stride;
  const std::size_t width = kernels_.pointwise_width;
  const std::size_t block = pixels_at_once(depth);
  const std::size_t in_task =
      std::max(rounded_up(divided_up(pixels * groups, tuning::kProductTasks), width), 2 * width);
  const std::size_t tasks = divided_up(pixels, in_task);
  const std::ptrdiff_t target_plane = source.plane(), target_group = target_plane * static_cast<std::ptrdiff_t>(rows);
  BufferPool pool(checked_product(depth, std::min(block, in_task), sizeof(T)));
  parallel_for_(groups * tasks, [&](std::size_t task) {
    const std::size_t group = task / tasks, begin = task % tasks * in_task;
    pool.lend([&](const Buffer& buffer) {
      kernels_.pointwise({weights + group * group_size, row_stride, offsets.data(), rows, depth,
                          source.of_group(group), source.image(),
                          target + static_cast<std::ptrdiff_t>(group) * target_group,
                          target_group * static_cast<std::ptrdiff_t>(groups), plane, begin,
                          std::min(pixels, begin + in_task), bias == nullptr ? nullptr : bias + group * rows,
                          std::min(block, in_task), buffer.as<T>()});
    });
  });
}

// Multiplications of both methods for an image and a group, including those for padding and unused lanes, plus the cost
// of starting a tile and of additions in the same unit.
template <typename T>
bool ConvolutionProducts<T>::prefers_spread(const PlaneCorrelation<T>& p) const {
  if (is_depthwise() || c_.outputs == 0 || product(index_of(c_.output)) == 0) return false;
  const std::ptrdiff_t positions = product(index_of(c_.output));
  const auto lanes = static_cast<double>(kernels_.lanes), depth = static_cast<double>(c_.outputs);
  const double columns = static_cast<double>(rounded_up(p.columns, kernels_.lanes));
  double correlation = 0.0;
  for (const Phase& phase : p.phases) {
    correlation += static_cast<double>(product(phase.size)) * static_cast<double>(phase.taps.size()) * depth * columns;
  }
  const double rows = static_cast<double>(c_.inputs) * static_cast<double>(product(index_of(c_.kernel)));
  const double in_line = static_cast<double>(c_.output[2]);
  const double of_line = c_.stride[2] == 1 ? tuning::kLineAdditions * lanes + in_line * 4 : in_line * lanes * 3;
  const double spread = rows * static_cast<double>(positions) * (depth + tuning::kTileStart + of_line / in_line);
  return spread < tuning::kSpreadingWorthIt * correlation;
}

template <typename T>
void ConvolutionProducts<T>::spread(const Planes<T>& source, const T* weights, T* target) const {
  const std::vector<Tap> all = taps_of(c_);
  const Index input = index_of(c_.input), output = source.size, stride = index_of(c_.stride);
  Spreading<T> task = {};
  std::vector<SpreadTap> spread_taps;
  for (const Tap& tap : all) {
    SpreadTap found = {{}, {}, 0, true};
    for (int axis = 0; axis < kAxes; ++axis) {
      const std::ptrdiff_t offset = tap.offset[axis], step = stride[axis];
      found.first[axis] = offset < 0 ? (step - 1 - offset) / step : 0;
      found.last[axis] = offset < input[axis] ? std::min(output[axis], (input[axis] - offset + step - 1) / step) : 0;
      found.offset = found.offset * input[axis] + offset;
      found.inside = found.inside && found.first[axis] == 0 && found.last[axis] == output[axis];
    }
    spread_taps.push_back(found);
  }
  for (int axis = 0; axis < kAxes; ++axis) {
    task.grid[axis] = output[axis];
    task.step[axis] = stride[axis];
    task.target_size[axis] = input[axis];
  }
  task.taps = spread_taps.data();
  task.tap_count = all.size();

  const std::size_t groups = c_.group, depth = c_.outputs, rows = c_.inputs * all.size();
  const auto plane = static_cast<std::size_t>(product(input)), pixels = static_cast<std::size_t>(product(output));
  std::vector<std::ptrdiff_t> offsets(depth);
  for (std::size_t k = 0; k < depth; ++k) offsets[k] = static_cast<std::ptrdiff_t>(k * rows);
  const std::size_t parts = std::min(c_.batch, divided_up(tuning::kProductTasks, groups));
  const std::size_t splits = std::clamp<std::size_t>(tuning::kProductTasks / (groups * parts), 1, c_.inputs);
  const std::size_t block = pixels_at_once(depth);
  BufferPool pool(checked_product(depth, block, sizeof(T)));
  parallel_for_(groups * parts * splits, [&](std::size_t number) {
    const std::size_t split = number % splits, part = number / splits % parts, group = number / splits / parts;
    const std::size_t channel = split * c_.inputs / splits, end = (split + 1) * c_.inputs / splits;
    pool.lend([&](const Buffer& buffer) {
      Spreading<T> own = task;
      own.products = {weights + group * depth * rows + channel * all.size(), 1, offsets.data(),
                      (end - channel) * all.size(), depth, source.of_group(group), source.image(),
                      target + (group * c_.inputs + channel) * plane,
                      static_cast<std::ptrdiff_t>(groups * c_.inputs * plane), pixels,
                      part * c_.batch / parts * pixels, (part + 1) * c_.batch / parts * pixels, nullptr, block,
                      buffer.as<T>()};
      kernels_.spread(own);
    });
  });
}

template <typename T>
void ConvolutionProducts<T>::weight_gradient(const T* x, const T* dy, T* dw) const {
  if (c_.is_empty()) return clear(dw, weight_count());
  const Index input = index_of(c_.input), output = index_of(c_.output);
  const auto positions = static_cast<std::ptrdiff_t>(product(index_of(c_.kernel)));
  const auto inputs = static_cast<std::ptrdiff_t>(c_.inputs);
  const Planes<T> from_x = {x, c_.group, c_.inputs, input}, from_dy = {dy, c_.group, c_.outputs, output};
  const std::vector<Tap> all = taps_of(c_);
  const Grid grid(output, index_of(c_.stride), all);
  const bool products = !is_depthwise() && !many_groups();
  if (is_pointwise(c_) && products && c_.inputs < c_.outputs) {  // the columns are repacked: choose the smaller number
    accumulate({from_dy, from_x, grid, all, dw, inputs, 1});
  } else {
    accumulate({from_x, from_dy, grid, all, dw, 1, inputs * positions});
  }
}

// The depth of these multiplications, all positions of all images, is long, while rows and columns may be few. So the
// depth is split into chunks whose sums are added in order at the end; their number does not depend on the threads.
template <typename T>
void ConvolutionProducts<T>::accumulate(const PlaneProducts<T>& p) const {
  // Sums of planes are split among threads by groups, matrix multiplications by images too.
  if (depthwise_gradient(p)) return;
  if (many_groups() && prefers_filter(p.source, p.grid, p.columns.channels)) return filter_gradient(p);
  if (prefers_winograd(p)) return winograd_gradient(p);
  const std::size_t groups = p.source.group, taps = p.taps.size(), channels = p.source.channels;
  const std::size_t padded_columns = rounded_up(p.columns.channels, kernels_.lanes);
  const std::size_t most =
      std::clamp<std::size_t>(tuning::kGradientSumBytes / sizeof(T) / (taps * padded_columns), 1, channels);
  const std::size_t ranges = divided_up(channels, most), in_range = divided_up(channels, ranges);
  const bool direct = is_pointwise(c_);
  const Blocks blocks = [&] {
    Blocks result(p.grid, c_.batch, direct ? 1 : in_range, tuning::kBlockBytes / sizeof(T), tuning::kGradientPositions);
    if (direct) {
      result.extent = p.source.size;
      result.image_stride = p.source.image();
      result.channel_stride = p.source.plane();
    }
    return result;
  }();
  const std::size_t chunks =
      std::clamp<std::size_t>(divided_up(tuning::kProductTasks, groups * ranges), 1, blocks.all.size());

  const std::size_t positions = c_.batch * static_cast<std::size_t>(product(p.grid.size));
  const bool shared = ranges > 1;
  const Buffer arranged(shared ? checked_product(groups, positions, padded_columns, sizeof(T)) : 0);
  const auto arrange = [&](std::size_t group, const Block& block, T* target) {
    const auto offsets = plane_offsets(block, p.columns.size, {0, 0, 0}, {1, 1, 1}, p.columns.image());
    kernels_.pack({p.columns.of_group(group) + static_cast<std::ptrdiff_t>(block.image) * p.columns.image(),
                   p.columns.data + static_cast<std::ptrdiff_t>(c_.batch) * p.columns.image(), p.columns.plane(),
                   offsets.data(), p.columns.channels, offsets.size(), 0, offsets.size(), 0,
                   kernels_.panels(p.columns.channels), target});
  };
  if (shared) {
    parallel_for_(groups * blocks.all.size(), [&](std::size_t task) {
      const Block& block = blocks.all[task % blocks.all.size()];
      arrange(task / blocks.all.size(), block,
              arranged.as<T>() + (task / blocks.all.size() * positions + block.first) * padded_columns);
    });
  }

  const std::vector<std::ptrdiff_t> row_offsets = blocks.tap_offsets(p.grid, p.taps, in_range);
  const std::size_t rows = channels * taps, sums_size = checked_product(groups, rows, padded_columns);
  const Buffer sums(checked_product(chunks, sums_size, sizeof(T)));
  const auto sums_of = [&](std::size_t chunk, std::size_t group, std::size_t range) {
    return sums.as<T>() + chunk * sums_size + (group * rows + range * in_range * taps) * padded_columns;
  };
  const auto unpack = [&](std::size_t group, std::size_t range) {
    const std::size_t first = range * in_range, count = std::min(channels, first + in_range) - first;
    const std::ptrdiff_t group_size = static_cast<std::ptrdiff_t>(rows * p.columns.channels);
    kernels_.unpack({sums_of(0, group, range), count * taps, p.columns.channels,
                     p.target + static_cast<std::ptrdiff_t>(group) * group_size +
                         static_cast<std::ptrdiff_t>(first * taps) * p.row_stride,
                     p.row_stride, p.column_stride});
  };

  const std::size_t copy_size = direct ? 0 : blocks.copy_size(in_range);
  const std::size_t panels_size = shared ? 0 : checked_product(blocks.most_positions, padded_columns);
  BufferPool pool(checked_product(checked_sum(copy_size, panels_size), sizeof(T)));
  parallel_for_(groups * ranges * chunks, [&](std::size_t task) {
    const std::size_t chunk = task % chunks, range = task / chunks % ranges, group = task / chunks / ranges;
    const std::size_t first = range * in_range, count = std::min(channels, first + in_range) - first;
    const T* source = p.source.of_group(group) + static_cast<std::ptrdiff_t>(first) * p.source.plane();
    const std::size_t begin = chunk * blocks.all.size() / chunks, end = (chunk + 1) * blocks.all.size() / chunks;
    pool.lend([&](const Buffer& buffer) {
      for (std::size_t b = begin; b < end; ++b) {
        const Block& block = blocks.all[b];
        const T* from = buffer.as<T>();
        if (direct) {
          const Index& s = block.start;
          from = source + static_cast<std::ptrdiff_t>(block.image) * p.source.image() +
                 (s[0] * p.source.size[1] + s[1]) * p.source.size[2] + s[2];
        } else {
          copy_block(kernels_, p.grid, blocks, block, source, p.source.size, p.source.image(), count, buffer.as<T>());
        }
        const auto offsets = blocks.position_offsets(p.grid, block);
        T* panels = shared ? arranged.as<T>() + (group * positions + block.first) * padded_columns
                           : buffer.as<T>() + copy_size;
        if (!shared) arrange(group, block, panels);
        kernels_.accumulate({from, row_offsets.data(), offsets.data(), count * taps, offsets.size(),
                             p.columns.channels, panels, offsets.size(), b > begin, sums_of(chunk, group, range)});
      }
    });
    if (chunks == 1) unpack(group, range);
  });
  if (chunks == 1) return;
  add_up(sums.as<T>(), sums_size, chunks);
  parallel_for_(groups * ranges, [&](std::size_t task) { unpack(task / ranges, task % ranges); });
}

template <typename T>
void ConvolutionProducts<T>::add_up(T* sums, std::size_t size, std::size_t chunks) const {
  if (chunks == 1) return;
  parallel_for_(divided_up(size, tuning::kAddedElements), [&](std::size_t part) {
    const std::size_t begin = part * tuning::kAddedElements, count = std::min(size - begin, tuning::kAddedElements);
    for (std::size_t chunk = 1; chunk < chunks; ++chunk) kernels_.add(sums + chunk * size + begin, count, sums + begin);
  });
}

template PlaneCorrelation<float> forward_correlation(const Convolution&, const float*, const float*, const float*, float*);
template PlaneCorrelation<float> input_gradient_correlation(const Convolution&, const float*, const float*, float*);
template class ConvolutionProducts<float>;
template class ConvolutionProducts<double>;

}  // namespace onnxtrain
