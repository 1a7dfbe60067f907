#include "sparse/products.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "cache.h"
#include "kernels/kernel_table.h"
#include "ranges.h"
#include "sizes.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Outputs whose sums are in the L1 cache together, and the most vectors of the most lanes of a sum.
constexpr std::size_t kOutputs = 16, kMostSums = kOutputs * 8 * 16;

const SparseTable& table() { return *kernels()->sparse; }

std::size_t most_tasks(const SparseMatrix& weights, std::size_t rows) {
  const std::size_t work = saturating_product(weights.products(), rows) / tuning::kLeastSparseProducts;
  return std::clamp<std::size_t>(work, 1, tuning::kSparseTasks);
}

// Equal ranges of `count` items for at most `tasks` tasks.
void for_each_part(const ParallelFor& parallel_for, std::size_t count, std::size_t tasks,
                   const std::function<void(std::size_t first, std::size_t last)>& work) {
  for_each_range(parallel_for, count, divided_up(count, std::max<std::size_t>(1, std::min(tasks, count))), work);
}

// Calls work(first vector, vectors) for parts of [0, count) with a power of two of vectors each, at most `most`.
template <typename Work>
void for_each_power(std::size_t count, std::size_t most, Work work) {
  for (std::size_t first = 0; first < count;) {
    while (most > count - first) most /= 2;
    work(first, most);
    first += most;
  }
}

void linear_by_lanes(const SparseMatrix& weights, std::size_t rows, const float* x, const SparseEnding& ending,
                     float* y, const ParallelFor& parallel_for) {
  const LanesOfOutputs& packed = weights.by_lanes();
  const std::size_t groups = packed.starts.size() - 1;
  for_each_part(parallel_for, groups, most_tasks(weights, rows), [&](std::size_t first, std::size_t last) {
    for (std::size_t row = 0; row < rows; ++row) {
      table().by_lanes({packed.starts.data(), packed.positions.data(), packed.values.data(), packed.outputs.data(), first,
                        last, x + row * weights.depth(), y + row * weights.outputs()});
    }
  });
  for (std::size_t row = 0; row < rows; ++row) {
    SparseEnding at = ending;
    if (at.residual != nullptr) at.residual += row * weights.outputs();
    float* const sums = y + row * weights.outputs();
    table().end(at, weights.outputs(), sums, sums);
  }
}

// Block rows of a chunk of outputs, into sums.
void multiply(const SparseMatrix& weights, const std::int32_t* offsets, std::size_t chunk, std::size_t outputs,
              std::size_t vectors, const float* x, float* sums) {
  const std::size_t first = chunk * kOutputs / weights.block();
  table().rows(weights.block(), vectors)(
      {weights.starts(), offsets, weights.values(), first, first + outputs / weights.block(), x, sums});
}

}  // namespace

void sparse_linear(const SparseMatrix& weights, std::size_t rows, const float* x, const SparseEnding& ending, float* y,
                   const ParallelFor& parallel_for, const Memory* memory) {
  const std::size_t lanes = table().lanes, depth = weights.depth(), outputs = weights.outputs();
  if (rows == 0) return;
  if (rows < tuning::kSparseRows && rows < lanes) {
    return linear_by_lanes(weights, rows, x, ending, y, parallel_for);
  }

  // Panels of rows, transposed: [panel][depth][vectors * lanes].
  const std::size_t all_vectors = divided_up(rows, lanes);
  std::size_t most = table().most_vectors(weights.block());
  while (most / 2 >= all_vectors) most /= 2;
  const std::size_t stride = most * lanes, panels = divided_up(all_vectors, most);
  if (checked_product(depth, stride) > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    throw std::invalid_argument("the depth, " + std::to_string(depth) + ", is too large for 32-bit offsets.");
  }
  const auto offsets = weights.offsets(
      {stride}, [&](std::size_t position) { return static_cast<std::int32_t>(position * stride); });
  // A few panels at a time, which stay in the cache.
  const std::size_t panel_size = checked_product(depth, stride);
  const std::size_t share = share_of_second_cache(tuning::kSparsePanelShare) / sizeof(float);
  const std::size_t together = std::clamp<std::size_t>(share / panel_size, 1, panels);
  const Buffer transposed(checked_product(together, panel_size, sizeof(float)), memory);
  const std::size_t chunks = divided_up(outputs, kOutputs);
  const std::size_t tasks = most_tasks(weights, std::min(rows, together * stride));
  for (std::size_t before = 0; before < panels; before += together) {
    const std::size_t some_panels = std::min(together, panels - before);
    const std::size_t first_vector = before * most;
    const std::size_t some_vectors = std::min(all_vectors - first_vector, some_panels * most);
    for_each_part(parallel_for, some_vectors, tasks, [&](std::size_t first, std::size_t last) {
      for (std::size_t v = first; v < last; ++v) {
        const std::size_t row = (first_vector + v) * lanes;
        table().transpose(x + row * depth, std::min(lanes, rows - row), depth, 0, depth,
                          transposed.as<float>() + v / most * panel_size + v % most * lanes, stride);
      }
    });

    const std::size_t ranges = std::min(chunks, divided_up(tasks, some_panels));
    const auto work = [&](std::size_t task) {
      const std::size_t panel = task / ranges, range = task % ranges, last_chunk = (range + 1) * chunks / ranges;
      const float* const from = transposed.as<float>() + panel * panel_size;
      alignas(64) float sums[kMostSums];
      for_each_power(std::min(most, some_vectors - panel * most), most, [&](std::size_t first, std::size_t vectors) {
        const std::size_t row = (first_vector + panel * most + first) * lanes;
        const std::size_t count = std::min(vectors * lanes, rows - row);
        for (std::size_t chunk = range * chunks / ranges; chunk < last_chunk; ++chunk) {
          const std::size_t output = chunk * kOutputs, some = std::min(kOutputs, outputs - output);
          multiply(weights, offsets->data(), chunk, some, vectors, from + first * lanes, sums);
          SparseEnding at = ending;
          if (at.bias != nullptr) at.bias += output;
          if (at.residual != nullptr) at.residual += row * outputs + output;
          table().end_transposed(at, some, count, vectors * lanes, sums, y + row * outputs + output, outputs);
        }
      });
    };
    if (tasks == 1) {
      for (std::size_t task = 0; task < some_panels * ranges; ++task) work(task);
    } else {
      parallel_for(some_panels * ranges, work);
    }
  }
}

namespace {

// The image as planes that a window's taps read at constant distances: padded, and one plane for each remainder of the
// strides.
struct Planes {
  std::size_t rows, columns, size, per_channel;

  explicit Planes(const SparseWindows& w)
      : rows(divided_up(w.padded[0], w.strides[0])),
        columns(divided_up(w.padded[1], w.strides[1])),
        size(checked_product(rows, columns)),
        per_channel(std::min(w.strides[0], (w.kernel[0] - 1) * w.dilations[0] + 1) *
                    std::min(w.strides[1], (w.kernel[1] - 1) * w.dilations[1] + 1)) {}

  static std::size_t phases(const SparseWindows& w, std::size_t axis) {
    return std::min(w.strides[axis], (w.kernel[axis] - 1) * w.dilations[axis] + 1);
  }

  // Of the tap at `position` in [channels, kernel].
  std::size_t offset(const SparseWindows& w, std::size_t position) const {
    const std::size_t column = position % w.kernel[1] * w.dilations[1];
    const std::size_t row = position / w.kernel[1] % w.kernel[0] * w.dilations[0];
    const std::size_t channel = position / (w.kernel[0] * w.kernel[1]);
    const std::size_t phase = row % w.strides[0] * phases(w, 1) + column % w.strides[1];
    return (channel * per_channel + phase) * size + row / w.strides[0] * columns + column / w.strides[1];
  }

  // Fills the planes of one channel.
  void fill(const SparseWindows& w, const float* x, float* to) const {
    for (std::size_t row_phase = 0; row_phase < phases(w, 0); ++row_phase) {
      for (std::size_t column_phase = 0; column_phase < phases(w, 1); ++column_phase) {
        const PaddedRow padded = row_of(w, column_phase);
        for (std::size_t row = 0; row < rows; ++row, to += columns) {
          const std::size_t above = row * w.strides[0] + row_phase;  // in padded rows
          const bool inside = above >= w.begin[0] && above - w.begin[0] < w.size[0];
          table().pad(padded, inside ? x + (above - w.begin[0]) * w.size[1] : nullptr, to);
        }
      }
    }
  }

 private:
  // Copies every stride-th element of the rows of an image, between zeros.
  PaddedRow row_of(const SparseWindows& w, std::size_t phase) const {
    const std::size_t stride = w.strides[1];
    const std::size_t left = w.begin[1] > phase ? divided_up(w.begin[1] - phase, stride) : 0;
    const std::size_t first = left * stride + phase - w.begin[1];  // in x
    const std::size_t inside = first < w.size[1] ? divided_up(w.size[1] - first, stride) : 0;
    const std::size_t before = std::min(left, columns);
    return {first, stride, before, std::min(inside, columns - before), columns};
  }
};

}  // namespace

void sparse_convolution(const SparseMatrix& weights, const SparseWindows& w, const float* x, const SparseEnding& ending,
                        float* y, const ParallelFor& parallel_for, const Memory* memory) {
  const std::size_t lanes = table().lanes, outputs = weights.outputs();
  const std::size_t x_size = w.size[0] * w.size[1], y_size = w.windows[0] * w.windows[1];
  if (w.images == 0 || y_size == 0) return;
  const Planes planes(w);
  const std::size_t positions = (w.windows[0] - 1) * planes.columns + w.windows[1];
  const std::size_t all_vectors = divided_up(positions, lanes);
  const std::size_t image_size = checked_product(w.channels, planes.per_channel, planes.size);
  if (checked_sum(image_size, 2 * lanes) > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    throw std::invalid_argument("a padded image has " + std::to_string(image_size) +
                                " elements: it must have fewer than 2147483648.");
  }
  const auto offsets =
      weights.offsets({planes.rows, planes.columns},
                      [&](std::size_t position) { return static_cast<std::int32_t>(planes.offset(w, position)); });

  // Vectors may read beyond the last plane.
  const bool as_given = image_size == w.channels * x_size && positions % lanes == 0 && w.strides[0] * w.strides[1] == 1;
  const std::size_t image_stride = as_given ? image_size : image_size + lanes;
  const Buffer padded(as_given ? 0 : checked_product(w.images, image_stride, sizeof(float)), memory);
  const float* const source = as_given ? x : padded.as<float>();
  const std::size_t tasks = most_tasks(weights, checked_product(w.images, positions));
  if (!as_given) {
    for_each_part(parallel_for, w.images * w.channels, tasks, [&](std::size_t first, std::size_t last) {
      for (std::size_t plane = first; plane < last; ++plane) {
        const std::size_t image = plane / w.channels, channel = plane % w.channels;
        planes.fill(w, x + plane * x_size,
                    padded.as<float>() + image * image_stride + channel * planes.per_channel * planes.size);
      }
    });
    for (std::size_t image = 0; image < w.images; ++image) {
      std::fill_n(padded.as<float>() + image * image_stride + image_size, lanes, 0.0f);
    }
  }

  const std::size_t most = table().most_vectors(weights.block()), tiles = divided_up(all_vectors, most);
  const std::size_t chunks = divided_up(outputs, kOutputs);
  const std::size_t ranges = std::min(chunks, divided_up(tasks, checked_product(w.images, tiles)));
  const auto work = [&](std::size_t item) {
    const std::size_t image = item / (tiles * ranges), tile = item / ranges % tiles, range = item % ranges;
    const float* const from = source + image * image_stride;
    alignas(64) float sums[kMostSums];
    for_each_power(std::min(most, all_vectors - tile * most), most, [&](std::size_t first, std::size_t vectors) {
      const std::size_t begin = (tile * most + first) * lanes, end = std::min(begin + vectors * lanes, positions);
      for (std::size_t chunk = range * chunks / ranges; chunk < (range + 1) * chunks / ranges; ++chunk) {
        const std::size_t some = std::min(kOutputs, outputs - chunk * kOutputs);
        multiply(weights, offsets->data(), chunk, some, vectors, from + begin, sums);
        const std::size_t output = chunk * kOutputs, before = (image * outputs + output) * y_size;
        SparseEnding at = ending;
        if (at.bias != nullptr) at.bias += output;
        if (at.residual != nullptr) at.residual += before;
        const SparseSpan span = {begin, end, planes.columns, w.windows[1], vectors * lanes, y_size};
        table().end_windows(at, span, some, sums, y + before);
      }
    });
  };
  const std::size_t items = w.images * tiles * ranges;
  for_each_part(parallel_for, items, tasks, [&](std::size_t first, std::size_t last) {
    for (std::size_t item = first; item < last; ++item) work(item);
  });
}

}  // namespace onnxtrain
