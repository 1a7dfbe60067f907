#include "sparse/products.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "cache.h"
#include "kernels/kernel_table.h"
#include "ranges.h"
#include "sizes.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

constexpr std::size_t kMostSums = kOutputsTogether * kMostSpan + 16;  // a vector is read beyond the last

// Outputs of a gradient that a task has at least.
constexpr std::size_t kGradientOutputs = 16;

// Of which the offsets of transposed rows have 32 bits, however many vectors a row has.
constexpr std::size_t kMostDepth = std::numeric_limits<std::int32_t>::max() / kMostSpan;

const SparseTable& table() { return *kernels()->sparse; }

// The kernels for vectors over that many rows: with half as many lanes if these are enough.
const SparseTable& table_of_rows(std::size_t rows) {
  const SparseTable* const half = table().half;
  return half != nullptr && rows <= half->lanes ? *half : table();
}

std::size_t most_tasks(const SparseMatrix& weights, std::size_t rows) {
  const std::size_t work = saturating_product(weights.products(), rows) / tuning::kLeastSparseProducts;
  return std::clamp<std::size_t>(work, 1, tuning::kSparseTasks);
}

// Equal ranges of `count` items for at most `tasks` tasks.
void for_each_part(const ParallelFor& parallel_for, std::size_t count, std::size_t tasks,
                   const std::function<void(std::size_t first, std::size_t last)>& work) {
  for_each_range(parallel_for, count, divided_up(count, std::max<std::size_t>(1, std::min(tasks, count))), work);
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

// Rows of the panels that layers exchange transposed, of at most `most`; 0 where they exchange rows as they are, since
// these do not fill equal panels of whole vectors.
std::size_t panel_rows(std::size_t rows, std::size_t most) {
  const std::size_t lanes = table_of_rows(rows).lanes, vectors = rows / lanes;
  if (most == 0 || rows == 0 || rows % lanes != 0) return 0;
  const std::size_t panels = divided_up(vectors, std::max<std::size_t>(1, most / lanes));
  return vectors % panels == 0 ? rows / panels : 0;
}

// Where `columns` columns of a row begin: in panels of that many rows, or as given if 0.
std::size_t place_of(std::size_t row, std::size_t column, std::size_t columns, std::size_t panel) {
  if (panel == 0) return row * columns + column;
  return row / panel * panel * columns + column * panel + row % panel;
}

// Vectors of x that are multiplied at a time; the last may overlap the one before.
struct Tile {
  std::size_t vectors, last_vector;
};

// The sums of some outputs, from the first of a block, with the values of the entries in their order.
void multiply(const SparseTable& table, const SparseMatrix& weights, const SlicedEntries& entries, const float* values,
              std::size_t output, std::size_t outputs, const Tile& tile, const float* x, float* sums) {
  const std::size_t first = output / weights.block(), last = first + outputs / weights.block();
  const MultiplyRows rows = table.rows(weights.block(), tile.vectors);
  for (std::size_t slice = 0; slice < entries.slices; ++slice) {
    const std::uint32_t* const starts = entries.starts.data() + slice * (weights.block_rows() + 1);
    const std::uint32_t* const order = entries.rows.data() + slice * weights.block_rows();
    rows({starts, order, entries.offsets.data(), values, first, last, slice > 0, tile.last_vector, x, sums});
  }
}

// Ranges of outputs for at least that many tasks, if there are as many outputs; each has as many, but for the last.
std::size_t ranges_of(const SparseMatrix& weights, std::size_t tasks) {
  const std::size_t chunks = divided_up(weights.outputs(), kOutputsTogether);
  return divided_up(chunks, std::max<std::size_t>(1, chunks / tasks));
}

// Calls work(output, outputs) for the outputs of a range, that many at a time: a multiple of kOutputsTogether.
template <typename Work>
void for_outputs(const SparseMatrix& weights, std::size_t ranges, std::size_t range, std::size_t together, Work work) {
  const std::size_t chunks = divided_up(divided_up(weights.outputs(), kOutputsTogether), ranges);
  const std::size_t last = std::min(weights.outputs(), (range + 1) * chunks * kOutputsTogether);
  for (std::size_t output = range * chunks * kOutputsTogether; output < last; output += together) {
    work(output, std::min(together, last - output));
  }
}

// Channels, or positions of a linear layer, of one of at most that many slices, whose values of x stay in a cache while the
// entries of some outputs read them; each entry is multiplied by that many vectors.
std::size_t channels_of_slice(const SparseMatrix& weights, std::size_t channels, std::size_t most_slices,
                              std::size_t vectors) {
  const std::size_t least = weights.block() == 1 ? tuning::kSparseSliceProducts : tuning::kSparseSliceBlockProducts;
  const std::size_t slices = std::min(most_slices, weights.products() * vectors / weights.block_rows() / least);
  return divided_up(channels, std::max<std::size_t>(slices, 1));
}

// Panels of rows of x, transposed, from a vector of rows on: [panel][columns][most * lanes].
void transpose_panels(const SparseTable& table, const float* x, std::size_t rows, std::size_t columns,
                      std::size_t first_vector, std::size_t vectors, std::size_t most, std::size_t tasks, float* x_t,
                      const ParallelFor& parallel_for) {
  const std::size_t lanes = table.lanes, stride = most * lanes;
  for_each_part(parallel_for, vectors, tasks, [&](std::size_t first, std::size_t last) {
    for (std::size_t v = first; v < last; ++v) {
      const std::size_t row = (first_vector + v) * lanes;
      table.transpose(x + row * columns, std::min(lanes, rows - row), columns, 0, columns,
                      x_t + v / most * columns * stride + v % most * lanes, stride);
    }
  });
}

// sparse_linear on panels of rows, with the values of the entries in their order; null for those of constant weights.
void linear_by_panels(const SparseMatrix& weights, const float* values, std::size_t rows, const float* x,
                      const SparseEnding& ending, float* y, const TransposedRows& transposed,
                      const ParallelFor& parallel_for, const Memory* memory) {
  const SparseTable& table = table_of_rows(rows);
  const std::size_t lanes = table.lanes, depth = weights.depth(), outputs = weights.outputs();
  const std::size_t all_vectors = divided_up(rows, lanes), most_vectors = table.most_vectors(weights.block());
  const std::size_t x_panel = panel_rows(rows, transposed.x), y_panel = panel_rows(rows, transposed.y);
  // Panels of rows, transposed: [panel][depth][vectors * lanes]. They are multiplied whole or, if they must fit those that
  // layers exchange, in tiles of some vectors.
  std::size_t most = std::gcd(x_panel, y_panel) / lanes;
  if (most == 0) most = divided_up(all_vectors, divided_up(all_vectors, most_vectors));
  std::size_t tiles = divided_up(most, most_vectors);
  if (x_panel == 0 && most % tiles == 0) most /= std::exchange(tiles, 1);
  const std::size_t panels = divided_up(all_vectors, most), stride = x_panel > 0 ? x_panel : most * lanes;
  if (checked_product(depth, stride) > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    throw std::invalid_argument("the depth, " + std::to_string(depth) + ", is too large for 32-bit offsets.");
  }
  // Blocks are bound by multiplication: slices took 1.07 times as long.
  const std::size_t multiplied = std::min(most, most_vectors);
  const bool whole = values != nullptr || weights.block() > 1;
  const std::size_t bytes = checked_product(depth, multiplied * lanes * sizeof(float));
  const std::size_t slices = (bytes + tuning::kSparseLinearSliceBytes / 2) / tuning::kSparseLinearSliceBytes;
  const std::size_t slice = whole ? depth : channels_of_slice(weights, depth, slices, multiplied);
  const auto entries = weights.entries({stride, slice}, slice, [&](std::size_t position) {
    return static_cast<std::int32_t>(position * stride);
  });
  if (values == nullptr) values = entries->values.data();
  // A few panels at a time, which stay in the cache. Of two, each of two threads multiplies the one that it has transposed,
  // and reads nothing that another core has written.
  const std::size_t panel_size = checked_product(depth, stride);
  const std::size_t share = share_of_second_cache(tuning::kSparsePanelShare) / sizeof(float);
  const std::size_t least = std::min<std::size_t>(panels, panel_size <= share ? 2 : 1);
  const std::size_t together = x_panel > 0 ? panels : std::clamp<std::size_t>(share / panel_size, least, panels);
  const Buffer own(x_panel > 0 ? 0 : checked_product(together, panel_size, sizeof(float)), memory);
  const std::size_t tasks = most_tasks(weights, std::min(rows, together * most * lanes));
  for (std::size_t before = 0; before < panels; before += together) {
    const std::size_t some_panels = std::min(together, panels - before);
    const std::size_t first_vector = before * most;
    const std::size_t some_vectors = std::min(all_vectors - first_vector, some_panels * most);
    if (x_panel == 0) {
      transpose_panels(table, x, rows, depth, first_vector, some_vectors, most, tasks, own.as<float>(), parallel_for);
    }

    const std::size_t ranges = ranges_of(weights, divided_up(tasks, some_panels * tiles));
    const auto work = [&](std::size_t task) {
      const std::size_t panel = task / (tiles * ranges), tile = task / ranges % tiles, range = task % ranges;
      const std::size_t in_panel = std::min(most, some_vectors - panel * most);
      const std::size_t first = part_begin(in_panel, tiles, tile);
      const std::size_t vectors = part_begin(in_panel, tiles, tile + 1) - first;
      if (vectors == 0) return;
      const std::size_t row = (first_vector + panel * most + first) * lanes;
      const std::size_t count = std::min(vectors * lanes, rows - row), last_vector = (vectors - 1) * lanes;
      const float* const from =
          x_panel > 0 ? x + place_of(row, 0, depth, x_panel) : own.as<float>() + panel * panel_size + first * lanes;
      alignas(64) float sums[kMostSums];
      // The more outputs have sums at a time, the less often a slice of x is read again.
      const std::size_t times = entries->slices > 1 ? kMostSpan / (vectors * lanes) : 1;
      for_outputs(weights, ranges, range, times * kOutputsTogether, [&](std::size_t output, std::size_t some) {
        multiply(table, weights, *entries, values, output, some, {vectors, last_vector}, from, sums);
        const std::size_t place = place_of(row, output, outputs, y_panel);
        SparseEnding at = ending;
        if (at.bias != nullptr) at.bias += output;
        if (at.residual != nullptr) at.residual += place;
        if (at.gate != nullptr) at.gate += place;
        if (y_panel > 0) {
          table.end_run(at, {vectors, last_vector, lanes, nullptr, y_panel, y_panel}, some, sums, y + place);
        } else {
          table.end_transposed(at, some, count, vectors * lanes, sums, y + place, outputs);
        }
      });
    };
    const std::size_t items = some_panels * tiles * ranges;
    if (tasks == 1) {
      for (std::size_t task = 0; task < items; ++task) work(task);
    } else {
      parallel_for(items, work);
    }
  }
}

// Whether multiplications under a mask are less work than the dense product, if each takes as long as `product` dense
// ones and an element of the dense matrix as long as `element`.
bool pays(const SparseMatrix& mask, std::size_t rows, double product, double element) {
  if (mask.depth() > kMostDepth) return false;
  const auto padded = static_cast<double>(divided_up(rows, table().lanes) * table().lanes);
  const auto depth = static_cast<double>(mask.depth()), outputs = static_cast<double>(mask.outputs());
  const auto products = static_cast<double>(mask.products());
  const double sparse = padded * (products * product + (depth + outputs) * tuning::kMaskedElement) +
                        products * tuning::kMaskedWeight + depth * outputs * element;
  return sparse < tuning::kMaskedShare * static_cast<double>(rows) * depth * outputs;
}

// The values of the entries of a mask in a dense matrix; false if it is not zero elsewhere.
bool gather(const SparseMatrix& mask, const float* w, float* values, std::size_t tasks,
            const ParallelFor& parallel_for) {
  const std::vector<std::int32_t>& sources = mask.sources();
  const std::size_t all = mask.depth() * mask.outputs();
  std::atomic<std::size_t> found = 0, kept = 0;
  for_each_part(parallel_for, tasks, tasks, [&](std::size_t first, std::size_t last) {
    const std::size_t from = part_begin(all, tasks, first), to = part_begin(all, tasks, last);
    found += table().non_zeros(w + from, to - from);
    const std::size_t begin = part_begin(sources.size(), tasks, first), end = part_begin(sources.size(), tasks, last);
    for (std::size_t e = begin; e < end; ++e) values[e] = w[sources[e]];
    kept += table().non_zeros(values + begin, end - begin);
  });
  return found == kept;
}

}  // namespace

void sparse_linear(const SparseMatrix& weights, std::size_t rows, const float* x, const SparseEnding& ending, float* y,
                   const TransposedRows& transposed, const ParallelFor& parallel_for, const Memory* memory) {
  if (rows == 0) return;
  if (rows < tuning::kSparseRows && rows < table().lanes) {
    linear_by_lanes(weights, rows, x, ending, y, parallel_for);
  } else {
    linear_by_panels(weights, nullptr, rows, x, ending, y, transposed, parallel_for, memory);
  }
}

void transpose_rows(std::size_t rows, std::size_t columns, std::size_t most, const float* x, float* x_t,
                    const ParallelFor& parallel_for) {
  if (columns == 0) return;
  const SparseTable& table = table_of_rows(rows);
  const std::size_t panel = panel_rows(rows, most), lanes = table.lanes;
  if (panel == 0) {
    std::copy_n(x, rows * columns, x_t);
    return;
  }
  const std::size_t tasks = divided_up(rows * columns, tuning::kTaskElements);
  transpose_panels(table, x, rows, columns, 0, rows / lanes, panel / lanes, tasks, x_t, parallel_for);
}

bool masked_linear(const SparseMatrix& mask, std::size_t rows, const float* x, const float* w,
                   const SparseEnding& ending, float* y, const ParallelFor& parallel_for) {
  const double product = mask.block() == 1 ? tuning::kMaskedProduct : tuning::kMaskedBlockProduct;
  if (!pays(mask, rows, product, tuning::kMaskedCheck)) return false;
  const Buffer values(checked_product(mask.products(), sizeof(float)));
  if (!gather(mask, w, values.as<float>(), most_tasks(mask, rows), parallel_for)) return false;
  linear_by_panels(mask, values.as<float>(), rows, x, ending, y, {}, parallel_for, nullptr);
  return true;
}

bool masked_weight_gradient(const SparseMatrix& mask, std::size_t rows, const float* dy, const float* x, float* dw,
                            float* db, const ParallelFor& parallel_for) {
  if (!pays(mask, rows, tuning::kMaskedGradientProduct, tuning::kMaskedFill)) return false;
  const std::size_t lanes = table().lanes, depth = mask.depth(), outputs = mask.outputs();
  // Panels of rows, transposed: [panel][depth, then outputs][vectors * lanes].
  const std::size_t all_vectors = divided_up(rows, lanes);
  const std::size_t in_cache = share_of_second_cache(tuning::kMaskedPanelShare) / (sizeof(float) * lanes) / depth;
  const std::size_t most_vectors = std::clamp<std::size_t>(in_cache, 1, table().most_gradient_vectors);
  const std::size_t panels = divided_up(all_vectors, most_vectors);
  const std::size_t most = divided_up(all_vectors, panels), stride = most * lanes;
  const std::size_t x_size = checked_product(depth, stride), dy_size = checked_product(outputs, stride);
  const std::size_t share = share_of_second_cache(tuning::kSparsePanelShare) / sizeof(float);
  const std::size_t panel_size = checked_sum(x_size, dy_size);
  const std::size_t together = std::clamp<std::size_t>(share / panel_size, 1, panels);
  const Buffer transposed(checked_product(together, panel_size, sizeof(float)));
  const Buffer sums(checked_product(checked_sum(mask.products(), db == nullptr ? 0 : outputs * lanes), sizeof(float)));
  float* const of_entries = sums.as<float>();
  float* const of_bias = db == nullptr ? nullptr : of_entries + mask.products();
  const std::size_t tasks = most_tasks(mask, rows);
  std::vector<std::int32_t> offsets(mask.positions());
  for (std::int32_t& offset : offsets) offset *= static_cast<std::int32_t>(stride);
  const std::size_t parts = std::min(tasks, divided_up(outputs, kGradientOutputs));
  for (std::size_t before = 0; before < panels; before += together) {
    const std::size_t first_vector = before * most;
    const std::size_t some_vectors = std::min(all_vectors - first_vector, std::min(together, panels - before) * most);
    for_each_part(parallel_for, some_vectors, tasks, [&](std::size_t first, std::size_t last) {
      for (std::size_t v = first; v < last; ++v) {
        const std::size_t row = (first_vector + v) * lanes, count = std::min(lanes, rows - row);
        const std::size_t vectors = std::min(most, some_vectors - v / most * most);
        float* const to = transposed.as<float>() + v / most * panel_size;
        table().transpose(x + row * depth, count, depth, 0, depth, to + v % most * lanes, stride);
        table().transpose(dy + row * outputs, count, outputs, 0, outputs, to + x_size + v % most * lanes,
                          vectors * lanes);
      }
    });
    for_each_part(parallel_for, parts, parts, [&](std::size_t begin, std::size_t end) {
      const std::size_t first = part_begin(outputs, parts, begin), last = part_begin(outputs, parts, end);
      for (std::size_t panel = 0; panel * most < some_vectors; ++panel) {
        const std::size_t vectors = std::min(most, some_vectors - panel * most);
        const float* const from = transposed.as<float>() + panel * panel_size;
        table().gradients(vectors)({mask.starts().data(), offsets.data(), first, last, before + panel > 0, from + x_size,
                                    from, of_entries, of_bias});
      }
    });
  }
  std::fill_n(dw, depth * outputs, 0.0f);
  for (std::size_t e = 0; e < mask.products(); ++e) dw[mask.sources()[e]] = of_entries[e];
  for (std::size_t output = 0; db != nullptr && output < outputs; ++output) {
    db[output] = std::accumulate(of_bias + output * lanes, of_bias + (output + 1) * lanes, 0.0f);
  }
  return true;
}

namespace {

// Where the elements of a plane of these sizes are in memory, inside of a border.
struct Placed {
  std::size_t columns, size, first;

  Placed(const std::size_t (&sizes)[2], const SparseBorder& border)
      : columns(checked_sum(border.before[1], sizes[1], border.after[1])),
        size(checked_product(columns, checked_sum(border.before[0], sizes[0], border.after[0]))),
        first(border.before[0] * columns + border.before[1]) {}
};

// A strip of an image, some rows of windows, as planes that a window's taps read at constant distances: padded, and one
// plane for each remainder of the strides.
struct Planes {
  std::size_t row_span, rows, columns, size, per_channel;

  // With rows and planes of at least these sizes.
  Planes(const SparseWindows& w, std::size_t window_rows, std::size_t least_columns, std::size_t least_size = 0)
      : row_span((w.kernel[0] - 1) * w.dilations[0] / w.strides[0]),
        rows(window_rows + row_span),
        columns(std::max(least_columns, divided_up(w.padded[1], w.strides[1]))),
        size(std::max(least_size, checked_product(rows, columns))),
        per_channel(phases(w, 0) * phases(w, 1)) {}

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

  // Fills the planes of some channels for `window_rows` rows of windows from `first` on. Channels of x are as placed.
  void fill(const SparseWindows& w, const Placed& placed, const float* x, std::size_t channels, std::size_t first,
            std::size_t window_rows, float* to) const {
    const std::size_t column_phases = phases(w, 1);
    std::vector<PaddedAxis> all_columns;
    for (std::size_t phase = 0; phase < column_phases; ++phase) all_columns.push_back(axis_of(w, 1, phase, 0, columns));
    // Even and odd columns of x are read together.
    const bool both = column_phases == 2 && w.strides[1] == 2;
    const std::size_t even = both ? w.begin[1] % 2 : 0, odd = both ? 1 - even : 0;
    const bool halves = both && all_columns[even].first == 0 && all_columns[odd].first == 1 &&
                        all_columns[even].count - all_columns[odd].count <= 1;
    for (std::size_t row_phase = 0; row_phase < phases(w, 0); ++row_phase) {
      const PaddedAxis some_rows = axis_of(w, 0, row_phase, first, window_rows + row_span);
      for (std::size_t channel = 0; channel < channels; ++channel) {
        const float* const from = x + channel * placed.size;
        float* const planes = to + (channel * per_channel + row_phase * column_phases) * size;
        if (halves) {
          table().split(some_rows, all_columns[even], all_columns[odd], from, placed.columns, planes + even * size,
                        planes + odd * size);
          continue;
        }
        for (std::size_t phase = 0; phase < column_phases; ++phase) {
          table().pad(some_rows, all_columns[phase], from, placed.columns, planes + phase * size);
        }
      }
    }
  }

  // Elements of a channel that `positions` windows in turn read.
  std::size_t read(const SparseWindows& w, std::size_t positions) const {
    const std::size_t span = row_span * columns + (w.kernel[1] - 1) * w.dilations[1] / w.strides[1];
    return checked_product(per_channel, std::min(size, positions + span));
  }

 private:
  // Places [from, from + total) of an axis that holds every stride-th row or column of an image, between zeros.
  static PaddedAxis axis_of(const SparseWindows& w, std::size_t axis, std::size_t phase, std::size_t from,
                            std::size_t total) {
    const std::size_t stride = w.strides[axis], begin = w.begin[axis], end = begin + w.size[axis];
    const auto places_before = [&](std::size_t padded) {
      const std::size_t places = padded > phase ? divided_up(padded - phase, stride) : 0;
      return std::clamp(places, from, from + total) - from;
    };
    const std::size_t before = places_before(begin), count = places_before(end) - before;
    const std::size_t first = count > 0 ? (from + before) * stride + phase - begin : 0;  // in x
    return {first, stride, before, count, total};
  }
};

// Rows of windows of a strip: so many that its planes stay in the L2 cache beside what is written, but at least a few
// tiles.
std::size_t strip_rows(const SparseWindows& w, std::size_t least_columns) {
  const Planes one(w, 1, least_columns);
  const std::size_t row_bytes = checked_product(w.channels, one.per_channel, one.columns, sizeof(float));
  const std::size_t rows = tuning::kSparseStripBytes / std::max<std::size_t>(1, row_bytes);
  const std::size_t least = divided_up(2 * kMostSpan, one.columns) + 3 * one.row_span;
  const std::size_t strips = divided_up(w.windows[0], std::max(least, rows - std::min(rows, one.row_span)));
  return divided_up(w.windows[0], strips);
}

}  // namespace

void sparse_convolution(const SparseMatrix& weights, const SparseWindows& w, const float* x, const SparseEnding& ending,
                        float* y, const ParallelFor& parallel_for, const Memory* memory) {
  const std::size_t lanes = table().lanes, most_vectors = table().most_vectors(weights.block());
  const std::size_t outputs = weights.outputs();
  const Placed x_placed(w.size, w.x), y_placed(w.windows, w.y), residual_placed(w.windows, w.residual);
  if (w.windows[0] * w.windows[1] == 0) std::fill_n(y, checked_product(w.images, outputs, y_placed.size), 0.0f);
  if (w.images == 0 || w.windows[0] * w.windows[1] == 0) return;
  const bool padded = w.padded[0] != w.size[0] || w.padded[1] != w.size[1] || w.strides[0] * w.strides[1] > 1;
  const std::size_t all_positions = (w.windows[0] - 1) * x_placed.columns + w.windows[1];  // unless padded
  // Of several vectors, the last overlaps the one before, so that nothing is read beyond x.
  const bool as_given = !padded && (all_positions % lanes == 0 || (all_positions > lanes && most_vectors > 1));
  // Rows of the planes are as long as those of y, if these are not much longer.
  const std::size_t own_columns = divided_up(w.padded[1], w.strides[1]);
  const std::size_t wanted = y_placed.columns <= 2 * own_columns ? y_placed.columns : 0;
  const std::size_t columns = as_given ? x_placed.columns : wanted;
  const std::size_t window_rows = as_given ? w.windows[0] : strip_rows(w, columns);
  const std::size_t strips_per_image = divided_up(w.windows[0], window_rows);
  const std::size_t strips = checked_product(w.images, strips_per_image);
  const Planes planes(w, window_rows, columns, as_given ? x_placed.size : 0);
  const std::size_t strip_size = checked_product(w.channels, planes.per_channel, planes.size);
  if (checked_sum(strip_size, 2 * lanes) > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    throw std::invalid_argument("a padded image has " + std::to_string(strip_size) +
                                " elements: it must have fewer than 2147483648.");
  }
  const auto positions_of = [&](std::size_t rows) { return (rows - 1) * planes.columns + w.windows[1]; };
  const auto vectors_of = [&](std::size_t rows) { return divided_up(positions_of(rows), lanes); };
  const std::size_t tiles = divided_up(vectors_of(window_rows), most_vectors);
  const std::size_t most = divided_up(vectors_of(window_rows), tiles), taps = w.kernel[0] * w.kernel[1];
  const std::size_t bytes = checked_product(w.channels, planes.read(w, most * lanes) * sizeof(float));
  const std::size_t channels = channels_of_slice(weights, w.channels, bytes / tuning::kSparseSliceBytes, most);
  const auto entries =
      weights.entries({planes.size, planes.columns, channels}, channels * taps,
                      [&](std::size_t position) { return static_cast<std::int32_t>(planes.offset(w, position)); });

  // Where rows of y, and of the residual, are as long as those of the planes, vectors go over the ends of rows.
  const bool runs = y_placed.columns == planes.columns &&
                    (ending.residual == nullptr || residual_placed.columns == planes.columns);
  std::vector<std::int32_t> masks(runs && w.windows[1] < planes.columns ? planes.columns + kMostSpan : 0, -1);
  for (std::size_t column = 0; column < masks.size(); ++column) {
    if (column % planes.columns >= w.windows[1]) masks[column] = 0;
  }

  // A few strips at a time, which stay in the cache. Vectors may be read beyond the last plane.
  const std::size_t strip_stride = as_given ? strip_size : strip_size + lanes;
  const std::size_t share = tuning::kSparseStripBytes / sizeof(float) / std::max<std::size_t>(1, strip_stride);
  const std::size_t together = as_given ? strips : std::clamp<std::size_t>(share, 1, strips);
  const Buffer planes_of_strips(as_given ? 0 : checked_product(together, strip_stride, sizeof(float)), memory);
  const float* const source = as_given ? x + x_placed.first : planes_of_strips.as<float>();
  for (std::size_t before = 0; before < strips; before += together) {
    const std::size_t some_strips = std::min(together, strips - before);
    const std::size_t tasks = most_tasks(weights, checked_product(some_strips, positions_of(window_rows)));
    const auto rows_of = [&](std::size_t strip) {
      return std::min(window_rows, w.windows[0] - strip % strips_per_image * window_rows);
    };
    if (!as_given) {
      const std::size_t parts = std::min(w.channels, divided_up(tasks, some_strips));
      for_each_part(parallel_for, some_strips * parts, tasks, [&](std::size_t begin, std::size_t end) {
        for (std::size_t item = begin; item < end; ++item) {
          const std::size_t strip = before + item / parts, part = item % parts;
          const std::size_t first = part_begin(w.channels, parts, part);
          const std::size_t some = part_begin(w.channels, parts, part + 1) - first;
          float* const to = planes_of_strips.as<float>() + (strip - before) * strip_stride;
          const std::size_t channel = strip / strips_per_image * w.channels + first;
          planes.fill(w, x_placed, x + channel * x_placed.size + x_placed.first, some,
                      strip % strips_per_image * window_rows, rows_of(strip),
                      to + first * planes.per_channel * planes.size);
          if (part == 0) std::fill_n(to + strip_size, lanes, 0.0f);
        }
      });
    }

    const std::size_t ranges = ranges_of(weights, divided_up(tasks, checked_product(some_strips, tiles)));
    const auto work = [&](std::size_t item) {
      const std::size_t strip = before + item / (tiles * ranges), part = item / ranges % tiles, range = item % ranges;
      const std::size_t rows = rows_of(strip), positions = positions_of(rows), vectors = vectors_of(rows);
      const std::size_t parts = divided_up(vectors, most);
      if (part >= parts) return;
      const std::size_t first = part_begin(vectors, parts, part), some = part_begin(vectors, parts, part + 1) - first;
      const std::size_t begin = first * lanes, end = std::min(begin + some * lanes, positions);
      const Tile tile = {some, some > 1 ? end - begin - lanes : 0};
      const std::size_t image = strip / strips_per_image, row = strip % strips_per_image * window_rows;
      const std::size_t run_begin = runs ? begin : 0;  // from the first window of the strip
      const SparseSpan span = {begin,         end,          planes.columns,          w.windows[1],
                               w.y.before[1], w.y.after[1], some * lanes,            {y_placed.columns, y_placed.size},
                               {residual_placed.columns, residual_placed.size}};
      const SparseRun run = {some, tile.last_vector, some > 1 ? lanes : end - begin,
                             masks.empty() ? nullptr : masks.data() + begin % planes.columns, y_placed.size,
                             residual_placed.size};
      const float* const from = source + (strip - before) * strip_stride + begin;
      alignas(64) float sums[kMostSums];
      // What the next tile reads first; strips have been copied into the cache.
      for (std::size_t channel = 0; as_given && range == 0 && part + 1 < parts && channel < w.channels; ++channel) {
        const float* const next = from + channel * planes.size + planes.row_span * planes.columns + (some + 1) * lanes;
        for (std::size_t v = 0; v < some; ++v) __builtin_prefetch(next + v * lanes, 0, 2);
      }
      for_outputs(weights, ranges, range, kOutputsTogether, [&](std::size_t output, std::size_t some_outputs) {
        multiply(table(), weights, *entries, entries->values.data(), output, some_outputs, tile, from, sums);
        SparseEnding at = ending;
        if (at.bias != nullptr) at.bias += output;
        if (at.residual != nullptr) {
          at.residual += (image * outputs + output) * residual_placed.size + residual_placed.first +
                         row * residual_placed.columns + run_begin;
        }
        float* const planes_of_y = y + (image * outputs + output) * y_placed.size;
        float* const to = planes_of_y + y_placed.first + row * y_placed.columns + run_begin;
        if (runs) {
          table().end_run(at, run, some_outputs, sums, to);
        } else {
          table().end_windows(at, span, some_outputs, sums, to);
        }
        // What is above the windows of the image and, unless rows have been ended with their borders, between them and
        // below them.
        const bool is_last = row + rows == w.windows[0];
        const std::size_t beside = runs ? 0 : w.y.before[1], after = runs ? 0 : w.y.after[1];
        const std::size_t above = part == 0 && row == 0 ? y_placed.first - beside : 0;
        const std::size_t begin_below = y_placed.first + (row + rows - 1) * y_placed.columns + w.windows[1] + after;
        const std::size_t between = runs ? planes.columns - w.windows[1] : 0;
        const std::size_t below = part + 1 < parts ? 0 : is_last ? y_placed.size - begin_below : between;
        for (std::size_t o = 0; above + below > 0 && o < some_outputs; ++o) {
          float* const plane = planes_of_y + o * y_placed.size;
          std::fill_n(plane, above, 0.0f);
          std::fill_n(plane + begin_below, below, 0.0f);
        }
      });
    };
    for_each_part(parallel_for, some_strips * tiles * ranges, tasks, [&](std::size_t first, std::size_t last) {
      for (std::size_t item = first; item < last; ++item) work(item);
    });
  }
}

}  // namespace onnxtrain
