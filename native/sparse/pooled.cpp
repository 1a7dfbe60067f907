#include "sparse/pooled.h"

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

constexpr std::uint32_t kOnlyRow = 0;  // a block of outputs is one block row

// The most vectors of blocks of kTileBlock, in elements.
constexpr std::size_t kMostTileSpan = 2 * 16;

const SparseTable& table() { return *kernels()->sparse; }

// The columns of a kernel at one remainder of the stride.
struct Phase {
  std::size_t taps, points;

  Phase(std::size_t kernel, std::size_t stride, std::size_t remainder)
      : taps(divided_up(kernel - remainder, stride)), points(taps + kTileWindows - 1) {}

  // Infinity is the last point of every phase, and of kTilePoints.
  bool has(std::size_t point) const { return point + 1 < points || point + 1 == kTilePoints; }
  std::size_t place(std::size_t point) const { return std::min(point, points - 1); }
};

std::size_t phases(std::size_t kernel, std::size_t stride) { return std::min(kernel, stride); }

// The weight of a tap at a point.
double factor(const Phase& phase, std::size_t point, std::size_t tap) {
  if (point + 1 == kTilePoints) return tap + 1 == phase.taps ? 1.0 : 0.0;
  double power = 1.0, differences = 1.0;
  for (std::size_t i = 0; i < tap; ++i) power *= kTileNumbers[point];
  for (std::size_t q = 0; q + 1 < phase.points; ++q) {
    if (q != point) differences *= kTileNumbers[point] - kTileNumbers[q];
  }
  return power / differences;
}

// Rows of windows as the values of their tiles: planes [channels, remainders of the rows, points of all phases], of some
// rows of x each.
struct TilePlanes {
  std::size_t tiles, rows, row_phases, points, size;

  TilePlanes(const PooledWindows& w, std::size_t window_rows, std::size_t slack)
      : tiles(std::max(divided_up(w.windows[1], kTileWindows), divided_up(w.groups[1], 2))),
        rows(checked_sum(window_rows, (w.kernel[0] - 1) / w.strides[0])),
        row_phases(phases(w.kernel[0], w.strides[0])),
        points(0),
        size(checked_sum(checked_product(rows, tiles), slack)) {
    for (std::size_t p = 0; p < phases(w.kernel[1], w.strides[1]); ++p) points += Phase(w.kernel[1], w.strides[1], p).points;
  }

  std::size_t total(const PooledWindows& w) const { return checked_product(w.channels, row_phases, points, size); }

  // Of the entries at a point, in their order.
  std::vector<std::int32_t> offsets(const PooledWindows& w, std::size_t point) const {
    std::vector<std::int32_t> result;
    for (std::size_t channel = 0; channel < w.channels; ++channel) {
      std::size_t before = 0;
      for (std::size_t p = 0; p < phases(w.kernel[1], w.strides[1]); ++p) {
        const Phase phase(w.kernel[1], w.strides[1], p);
        for (std::size_t row = 0; phase.has(point) && row < w.kernel[0]; ++row) {
          const std::size_t plane = (channel * row_phases + row % w.strides[0]) * points + before + phase.place(point);
          result.push_back(static_cast<std::int32_t>(plane * size + row / w.strides[0] * tiles));
        }
        before += phase.points;
      }
    }
    return result;
  }

  // Fills the planes for `window_rows` rows of windows from `first` on.
  void fill(const PooledWindows& w, const float* x, std::size_t first, std::size_t window_rows, float* columns,
            std::size_t column_stride, float* to) const {
    for (std::size_t channel = 0; channel < w.channels; ++channel) {
      for (std::size_t phase = 0; phase < row_phases; ++phase) {
        const std::size_t some = window_rows + (w.kernel[0] - 1 - phase) / w.strides[0];
        for (std::size_t row = 0; row < some; ++row) {
          const std::size_t place = w.strides[0] * (first + row) + phase;  // in x with its padding
          const bool inside = place >= w.begin[0] && place - w.begin[0] < w.size[0];
          const float* const from = inside ? x + (channel * w.size[0] + place - w.begin[0]) * w.size[1] : nullptr;
          table().split_tiles({from, w.size[1], w.begin[1], w.strides[1], w.kernel[1], tiles, columns, column_stride,
                               to + (channel * row_phases + phase) * points * size + row * tiles, size});
        }
      }
    }
  }
};

// Convolves and pools rows of groups of one image, a few at a time.
class PooledRows {
 public:
  PooledRows(const TileWeights& weights, const PooledWindows& w, const float* bias, const Memory* memory)
      : weights_(weights),
        w_(w),
        bias_(bias),
        lanes_(table().lanes),
        vectors_(table().most_vectors(kTileBlock)),
        rows_(rows_at_once(w)),
        planes_(w, most_windows(rows_), lanes_),
        window_stride_(checked_sum(checked_product(most_windows(rows_), planes_.tiles), vectors_ * lanes_)),
        column_stride_(rounded_up(planes_.tiles + 1, lanes_)),
        columns_(checked_product(2 * kTileWindows * w.strides[1], column_stride_, sizeof(float)), memory),
        values_(checked_product(checked_sum(planes_.total(w), vectors_ * lanes_), sizeof(float)), memory),
        sums_(checked_product(checked_sum(checked_product(w.outputs, kTileWindows, window_stride_), lanes_),
                              sizeof(float)), memory) {
    if (planes_.total(w) > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
      throw std::invalid_argument("some rows of an image have " + std::to_string(planes_.total(w)) +
                                  " elements: they must have fewer than 2147483648.");
    }
    for (std::size_t point = 0; point < kTilePoints; ++point) offsets_[point] = planes_.offsets(w, point);
  }

  void run(const float* x, std::size_t first, std::size_t last, float* y) {
    std::size_t end = 0;  // of the rows of windows that are known
    for (std::size_t row = first; row < last; row += rows_) {
      const std::size_t some = std::min(rows_, last - row), begin = first_window(row);
      const std::size_t next = std::min(w_.windows[0], 2 * (row + some - 1) + w_.pool[0] - w_.pool_begin[0]);
      const std::size_t kept = row > first ? end - begin : 0, known = begin + kept;
      if (kept > 0) keep(end - kept - first_window(row - rows_), kept);
      if (next > known) convolve(x, known, next - known, kept);
      hide_columns(next - begin);
      pool(row, some, begin, next, y);
      end = next;
    }
  }

 private:
  static std::size_t most_windows(std::size_t rows) { return 2 * rows + 1; }

  // So many rows of groups that their values and sums stay in the L2 cache.
  static std::size_t rows_at_once(const PooledWindows& w) {
    const TilePlanes one(w, 1, 0);
    const std::size_t values = saturating_product(saturating_product(w.channels * w.strides[0], one.points), one.tiles);
    const std::size_t sums = saturating_product(w.outputs * kTileWindows, one.tiles);
    const std::size_t row = saturating_product(values + sums, 2 * sizeof(float));
    return std::clamp<std::size_t>(share_of_second_cache(tuning::kPooledShare) / std::max<std::size_t>(row, 1), 1,
                                   w.groups[0]);
  }

  std::size_t first_window(std::size_t row) const { return 2 * row - std::min(2 * row, w_.pool_begin[0]); }

  float* sums(std::size_t output, std::size_t window) const {
    return sums_.as<float>() + (output * kTileWindows + window) * window_stride_;
  }

  // Moves rows of windows, from that place on, to the first ones.
  void keep(std::size_t from, std::size_t rows) {
    for (std::size_t plane = 0; plane < w_.outputs * kTileWindows; ++plane) {
      float* const to = sums_.as<float>() + plane * window_stride_;
      std::copy_n(to + from * planes_.tiles, rows * planes_.tiles, to);
    }
  }

  // The sums of `rows` rows of windows from `first` on, behind `before` others.
  void convolve(const float* x, std::size_t first, std::size_t rows, std::size_t before) {
    planes_.fill(w_, x, first, rows, columns_.as<float>(), column_stride_, values_.as<float>());
    const std::size_t all = divided_up(rows * planes_.tiles, lanes_), parts = divided_up(all, vectors_);
    alignas(64) float products[kTilePoints * kTileBlock * kMostTileSpan];
    for (std::size_t part = 0; part < parts; ++part) {
      const std::size_t begin = part_begin(all, parts, part), some = part_begin(all, parts, part + 1) - begin;
      const MultiplyRows multiply = table().rows(kTileBlock, some);
      for (std::size_t block = 0; block < w_.outputs / kTileBlock; ++block) {
        const float* values = weights_.values(block);
        for (std::size_t point = 0; point < kTilePoints; ++point) {
          const std::uint32_t starts[] = {0, static_cast<std::uint32_t>(weights_.entries(point))};
          multiply({starts, &kOnlyRow, offsets_[point].data(), values, 0, 1, false, (some - 1) * lanes_,
                    values_.as<float>() + begin * lanes_, products + point * kTileBlock * some * lanes_});
          values += weights_.entries(point) * kTileBlock;
        }
        table().join_tiles({products, kTileBlock, some,
                            sums(block * kTileBlock, 0) + before * planes_.tiles + begin * lanes_, window_stride_});
      }
    }
  }

  // No group takes a window behind the last of a row.
  void hide_columns(std::size_t rows) {
    for (std::size_t column = w_.windows[1]; column < planes_.tiles * kTileWindows; ++column) {
      for (std::size_t output = 0; output < w_.outputs; ++output) {
        float* const at = sums(output, column % kTileWindows) + column / kTileWindows;
        for (std::size_t row = 0; row < rows; ++row) at[row * planes_.tiles] = -std::numeric_limits<float>::infinity();
      }
    }
  }

  // Rows of groups from rows of windows [begin, end).
  void pool(std::size_t first, std::size_t rows, std::size_t begin, std::size_t end, float* y) const {
    const std::size_t columns = w_.y.before[1] + w_.groups[1] + w_.y.after[1];
    const std::size_t size = (w_.y.before[0] + w_.groups[0] + w_.y.after[0]) * columns;
    for (std::size_t output = 0; output < w_.outputs; ++output) {
      for (std::size_t row = first; row < first + rows; ++row) {
        float* const to = y + output * size + (w_.y.before[0] + row) * columns;
        const std::size_t from = first_window(row);
        const std::size_t last = std::min(end, 2 * row + w_.pool[0] - w_.pool_begin[0]);
        std::fill_n(to, w_.y.before[1], 0.0f);
        table().pool_tiles({sums(output, 0) + (from - begin) * planes_.tiles, window_stride_, last - from,
                            planes_.tiles, w_.pool[1], w_.pool_begin[1], w_.groups[1], bias_[output],
                            to + w_.y.before[1]});
        std::fill_n(to + w_.y.before[1] + w_.groups[1], w_.y.after[1], 0.0f);
      }
    }
  }

  const TileWeights& weights_;
  const PooledWindows& w_;
  const float* const bias_;
  const std::size_t lanes_, vectors_, rows_;
  const TilePlanes planes_;
  const std::size_t window_stride_, column_stride_;
  const Buffer columns_, values_, sums_;
  std::array<std::vector<std::int32_t>, kTilePoints> offsets_;
};

}  // namespace

TileWeights::TileWeights(const float* w, std::size_t outputs, std::size_t channels, const std::size_t (&kernel)[2],
                         std::size_t column_stride) {
  const auto add = [&](std::size_t first, std::size_t point) {
    const std::size_t before = values_.size();
    for (std::size_t channel = 0; channel < channels; ++channel) {
      for (std::size_t p = 0; p < phases(kernel[1], column_stride); ++p) {
        const Phase phase(kernel[1], column_stride, p);
        for (std::size_t row = 0; phase.has(point) && row < kernel[0]; ++row) {
          for (std::size_t output = first; output < first + kTileBlock; ++output) {
            const float* const from = w + ((output * channels + channel) * kernel[0] + row) * kernel[1] + p;
            double sum = 0.0;
            for (std::size_t tap = 0; tap < phase.taps; ++tap) {
              sum += factor(phase, point, tap) * static_cast<double>(from[tap * column_stride]);
            }
            values_.push_back(static_cast<float>(sum));
          }
        }
      }
    }
    entries_[point] = (values_.size() - before) / kTileBlock;
  };
  for (std::size_t first = 0; first < outputs; first += kTileBlock) {
    for (std::size_t point = 0; point < kTilePoints; ++point) add(first, point);
  }
  block_size_ = values_.size() / (outputs / kTileBlock);
}

void pooled_convolution(const TileWeights& weights, const PooledWindows& w, const float* x, const float* bias,
                        float* y, const ParallelFor& parallel_for, const Memory* memory) {
  const std::size_t columns = checked_sum(w.y.before[1], w.groups[1], w.y.after[1]);
  const std::size_t plane = checked_product(columns, checked_sum(w.y.before[0], w.groups[0], w.y.after[0]));
  const std::size_t x_size = checked_product(w.channels, w.size[0], w.size[1]), y_size = checked_product(w.outputs, plane);
  if (w.groups[0] * w.groups[1] == 0) std::fill_n(y, checked_product(w.images, y_size), 0.0f);
  if (w.images == 0 || w.groups[0] * w.groups[1] == 0) return;
  // Each part of an image computes the windows again that it shares with the one before.
  const std::size_t depth = checked_product(w.channels, w.kernel[0], w.kernel[1]);
  const std::size_t work = saturating_product(w.images, w.outputs, depth, w.windows[0], w.windows[1]);
  const std::size_t tasks = std::clamp<std::size_t>(work / tuning::kPooledProducts, 1, tuning::kPooledTasks);
  const std::size_t parts = std::min(divided_up(tasks, w.images), w.groups[0]), items = checked_product(w.images, parts);
  for_each_range(parallel_for, items, divided_up(items, tasks), [&](std::size_t first, std::size_t last) {
    PooledRows rows(weights, w, bias, memory);
    for (std::size_t item = first; item < last; ++item) {
      const std::size_t image = item / parts, part = item % parts;
      float* const to = y + image * y_size;
      rows.run(x + image * x_size, part_begin(w.groups[0], parts, part), part_begin(w.groups[0], parts, part + 1), to);
      for (std::size_t output = 0; output < w.outputs; ++output) {
        if (part == 0) std::fill_n(to + output * plane, w.y.before[0] * columns, 0.0f);
        if (part + 1 == parts) {
          const std::size_t end = (w.y.before[0] + w.groups[0]) * columns;
          std::fill_n(to + output * plane + end, plane - end, 0.0f);
        }
      }
    }
  });
}

}  // namespace onnxtrain
