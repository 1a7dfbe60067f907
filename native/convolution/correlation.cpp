// Correlations as matrix multiplications: source positions times weights.
#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "convolution/positions.h"
#include "convolution/products.h"
#include "scratch.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Groups the positions of a phase by the taps that read the plane rather than its padding.
class TapClasses {
 public:
  // Distinguishes classes along the axes marked true; along the others every position counts as reading all taps.
  TapClasses(const Phase& phase, const Index& source_size, const std::array<bool, kAxes>& split)
      : all_(split == std::array<bool, kAxes>{}) {
    std::vector<std::vector<bool>> sets[kAxes];  // taps per axis and class
    for (int axis = 0; axis < kAxes; ++axis) {
      for (std::ptrdiff_t q = 0; q < phase.size[axis]; ++q) {
        std::vector<bool> set;
        for (const Tap& tap : phase.taps) {
          const std::ptrdiff_t at = q * phase.step[axis] + tap.offset[axis];
          set.push_back(!split[axis] || (at >= 0 && at < source_size[axis]));
        }
        const auto found = std::find(sets[axis].begin(), sets[axis].end(), set);
        of_[axis].push_back(static_cast<std::size_t>(found - sets[axis].begin()));
        if (found == sets[axis].end()) sets[axis].push_back(set);
      }
    }
    counts_ = {sets[0].size(), sets[1].size(), sets[2].size()};
    for (const auto& d : sets[0]) {
      for (const auto& h : sets[1]) {
        for (const auto& w : sets[2]) {
          std::vector<std::size_t>& runs = runs_.emplace_back();
          for (std::size_t tap = 0; tap < d.size(); ++tap) {
            if (!d[tap] || !h[tap] || !w[tap]) continue;
            if (runs.empty() || runs.back() != tap) runs.insert(runs.end(), {tap, tap});
            ++runs.back();
          }
        }
      }
    }
  }

  // True if every position counts as reading all taps.
  bool are_all() const { return all_; }

  // Indices of a block's positions, ordered by class within each strip, and their classes.
  std::vector<std::size_t> sort(const Block& block, std::vector<RowClass>& classes) const {
    std::vector<std::size_t> class_of;
    for (std::size_t i = 0; i < block.images; ++i) {
      for (std::ptrdiff_t d = 0; d < block.size[0]; ++d) {
        for (std::ptrdiff_t h = 0; h < block.size[1]; ++h) {
          const std::size_t line = (at(block, 0, d) * counts_[1] + at(block, 1, h)) * counts_[2];
          for (std::ptrdiff_t w = 0; w < block.size[2]; ++w) class_of.push_back(line + at(block, 2, w));
        }
      }
    }
    std::vector<std::size_t> order(class_of.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (std::size_t strip = 0; strip < order.size(); strip += tuning::kStripRows) {
      const std::size_t end = std::min(order.size(), strip + tuning::kStripRows);
      const auto at_strip = order.begin() + static_cast<std::ptrdiff_t>(strip);
      if (!all_) {
        std::stable_sort(at_strip, order.begin() + static_cast<std::ptrdiff_t>(end),
                         [&](std::size_t a, std::size_t b) { return class_of[a] < class_of[b]; });
      }
      for (std::size_t row = strip; row < end; ++row) {
        const std::size_t own = class_of[order[row]];
        const std::vector<std::size_t>& runs = runs_[own];
        if (row == strip || own != class_of[order[row - 1]]) classes.push_back({row, runs.data(), runs.size() / 2});
        classes.back().end = row + 1;
      }
    }
    return order;
  }

 private:
  std::size_t at(const Block& block, int axis, std::ptrdiff_t q) const {
    return of_[axis][static_cast<std::size_t>(block.start[axis] + q)];
  }

  bool all_;
  std::vector<std::size_t> of_[kAxes];  // class of a position
  std::array<std::size_t, kAxes> counts_;
  std::vector<std::vector<std::size_t>> runs_;
};

// Cost of the multiplications of a block: rows times taps, plus overhead per tile and per run of its taps.
double cost_of(const TapClasses& classes, const Block& block, std::size_t channels) {
  std::vector<RowClass> found;
  classes.sort(block, found);
  double cost = 0.0;
  std::size_t begin = 0;
  for (const RowClass& c : found) {
    std::size_t taps = 0;
    for (std::size_t run = 0; run < c.run_count; ++run) taps += c.runs[2 * run + 1] - c.runs[2 * run];
    const std::size_t rows = c.end - begin, tiles = divided_up(rows, tuning::kCostedRows);
    cost += static_cast<double>(rows * taps) +
            static_cast<double>(tiles) *
                (tuning::kTileCost * static_cast<double>(taps) +
                 tuning::kRunCost / static_cast<double>(channels) * static_cast<double>(c.run_count));
    begin = c.end;
  }
  return cost;
}

// One class of all positions of a phase.
TapClasses all_taps(const Phase& phase, const Index& source_size) {
  return TapClasses(phase, source_size, {false, false, false});
}

// Chooses the classes with the lowest cost for a phase's positions.
TapClasses best_classes(const Phase& phase, const Index& source_size, const Block& block, std::size_t all_channels) {
  const std::size_t channels =
      std::max<std::size_t>(1, std::min(tuning::kChunkDepth / phase.taps.size(), all_channels));
  TapClasses best = all_taps(phase, source_size);
  const double all = cost_of(best, block, channels);
  double least = tuning::kClassesWorthIt * all;
  for (const bool columns : {false, true}) {
    TapClasses other(phase, source_size, {true, true, columns});
    const double cost = cost_of(other, block, channels);
    if (cost >= least) continue;
    least = cost;
    best = std::move(other);
  }
  return best;
}

// One phase of the computation.
struct PhasePart {
  const Phase* phase;
  std::size_t depth;
  TapClasses classes;
  std::vector<std::size_t> chunks;             // first channel of each chunk, and the end
  std::vector<std::size_t> positions;             // positions along the depth, channel by channel; empty if in order
  std::vector<std::ptrdiff_t> weight_offsets;  // channel by channel
  std::vector<std::ptrdiff_t> tap_offsets;     // in depth order
  std::size_t weights;                         // offset of its packed weights, in elements of a column

  PhasePart(const Phase& phase_, TapClasses classes_, const Grid& grid, const Blocks& blocks, std::size_t channels,
            std::ptrdiff_t channel_stride, std::size_t weights_)
      : phase(&phase_),
        depth(channels * phase_.taps.size()),
        classes(std::move(classes_)),
        weight_offsets(weight_offsets_of(phase_.taps, channels, channel_stride)),
        tap_offsets(blocks.tap_offsets(grid, phase_.taps, channels)),
        weights(weights_) {
    const std::size_t taps = phase->taps.size(),
                      count = std::max<std::size_t>(divided_up(depth, tuning::kChunkDepth), 1);
    for (std::size_t i = 0; i <= count; ++i) chunks.push_back(i * channels / count);
    if (classes.are_all()) return;
    const std::vector<std::ptrdiff_t> in_order = tap_offsets;
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t channel = chunks[i]; channel < chunks[i + 1]; ++channel) {
        for (std::size_t tap = 0; tap < taps; ++tap) {
          positions.push_back(chunks[i] * taps + tap * (chunks[i + 1] - chunks[i]) + channel - chunks[i]);
          tap_offsets[positions.back()] = in_order[channel * taps + tap];
        }
      }
    }
  }
};

// Selects elements of a list by index.
std::vector<std::ptrdiff_t> in_order(const std::vector<std::ptrdiff_t>& list, const std::vector<std::size_t>& order) {
  std::vector<std::ptrdiff_t> result;
  result.reserve(order.size());
  for (const std::size_t number : order) result.push_back(list[number]);
  return result;
}

// Packs part `part` of the weights of one panel, group and phase.
struct PackTask {
  const PhasePart* phase;
  std::size_t group, panel, begin, end;
};

}  // namespace

template <typename T>
void ConvolutionProducts<T>::correlate(const PlaneCorrelation<T>& p) const {
  const auto is_empty = [](const Phase& phase) { return phase.taps.empty(); };
  const bool all_empty = std::all_of(p.phases.begin(), p.phases.end(), is_empty);
  const std::size_t count = c_.batch * p.source.group * p.columns * static_cast<std::size_t>(product(p.target_size));
  if (all_empty && p.weights.bias == nullptr) return clear(p.target, count);
  if (p.all_phases && depthwise(p)) return;
  PlaneCorrelation<T> reached = p;  // reached by some tap; the rest is zero (gradients only)
  reached.phases.erase(std::remove_if(reached.phases.begin(), reached.phases.end(), is_empty), reached.phases.end());
  if (!p.all_phases || reached.phases.size() < p.phases.size()) clear(p.target, count);
  if (!prefers_filter(p.source, grid_of(reached.phases), p.columns)) return multiply(reached);
  for (const Phase& phase : reached.phases) filter(reached, phase);
}

template <typename T>
void ConvolutionProducts<T>::multiply(const PlaneCorrelation<T>& p) const {
  const Grid grid = grid_of(p.phases);
  const std::size_t groups = p.source.group, channels = p.source.channels;
  const std::size_t padded_columns = rounded_up(p.columns, kernels_.lanes);
  std::size_t depth = 0;  // of all phases
  for (const Phase& phase : p.phases) depth += channels * phase.taps.size();
  const std::size_t positions = c_.batch * static_cast<std::size_t>(product(grid.size));
  const bool large = saturating_product(depth, padded_columns, sizeof(T)) > tuning::kLargeWeights;
  const std::size_t wanted = std::max<std::size_t>(large ? tuning::kLeastPositionsOfLarge : tuning::kLeastPositions,
                                                   divided_up(positions * groups, tuning::kProductTasks));
  const Blocks blocks(grid, c_.batch, channels, tuning::kBlockBytes / sizeof(T), wanted);
  const std::size_t panels = kernels_.panels(p.columns);
  const std::size_t splits = std::clamp<std::size_t>(tuning::kProductTasks / (blocks.all.size() * groups), 1, panels);
  const std::size_t copy_size = blocks.copy_size(channels);
  const bool shared = splits > 1, in_lanes = prefers_positions(
      grid, blocks.all[0].size, blocks.extent[2], depth / p.phases.size(), p.columns);

  std::vector<PhasePart> parts;
  for (const Phase& phase : p.phases) {
    const std::size_t before = parts.empty() ? 0 : parts.back().weights + groups * parts.back().depth;
    parts.emplace_back(phase,
                       in_lanes ? all_taps(phase, p.source.size)
                                : best_classes(phase, p.source.size, blocks.all[0].within(phase.size), channels),
                       grid, blocks, channels, p.weights.channel_stride, before);
  }
  std::vector<PackTask> packs;
  for (const PhasePart& part : parts) {
    const std::size_t cuts = std::clamp<std::size_t>(part.depth * padded_columns / tuning::kPackedElements / panels, 1,
                                                     divided_up(part.depth, 16) + 1);
    for (std::size_t i = 0; i < groups * panels * cuts; ++i) {
      packs.push_back({&part, i / cuts / panels, i / cuts % panels, i % cuts * part.depth / cuts,
                       (i % cuts + 1) * part.depth / cuts});
    }
  }

  // Packs the weights, and the source where several tasks read the same part.
  const Buffer weights(checked_product(groups, depth, padded_columns, sizeof(T)));
  const std::size_t behind = in_lanes ? kernels_.lanes : 0;  // a vector of a short line reads beyond it
  const Buffer copies(
      shared ? checked_product(checked_sum(checked_product(groups, blocks.all.size(), copy_size), behind), sizeof(T)) : 0);
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
                     part.depth, pack.begin, pack.end, pack.panel, pack.panel + 1, weights_of(part, pack.group),
                     part.positions.empty() ? nullptr : part.positions.data()});
    } else {
      task -= packs.size();
      copy(task / blocks.all.size(), blocks.all[task % blocks.all.size()], copies.as<T>() + task * copy_size);
    }
  });

  const std::ptrdiff_t target_plane = product(p.target_size);
  const std::ptrdiff_t target_image = target_plane * static_cast<std::ptrdiff_t>(groups * p.columns);
  BufferPool pool(shared ? 0 : checked_product(checked_sum(copy_size, behind), sizeof(T)));
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
        const std::size_t first_panel = split * panels / splits, end_panel = (split + 1) * panels / splits;
        const T* bias = p.weights.bias == nullptr ? nullptr : p.weights.bias + group * p.columns;
        if (in_lanes) {
          const PositionVectors positions(
              blocks, block, {p.target_size, phase.target_start, phase.target_step, target_image}, kernels_.lanes);
          kernels_.correlate_positions({source, part.tap_offsets.data(), part.depth, p.columns, first_panel, end_panel,
                                        weights_of(part, group), positions.vectors.data(), positions.vectors.size(),
                                        positions.runs.data(), phase.target_step[2], target, target_plane, bias});
          continue;
        }
        std::vector<RowClass> classes;
        const auto order = part.classes.sort(block, classes);
        const auto rows = in_order(blocks.position_offsets(grid, block), order);
        const auto offsets = plane_offsets(block, p.target_size, phase.target_start, phase.target_step, target_image);
        std::vector<std::size_t> sum_rows(order.size());
        for (std::size_t row = 0; row < order.size(); ++row) sum_rows[order[row]] = row % tuning::kStripRows;
        kernels_.correlate({source, rows.data(), part.tap_offsets.data(), classes.data(), part.chunks.data(),
                            part.chunks.size() - 1, phase.taps.size(), rows.size(), part.depth, p.columns, first_panel,
                            end_panel, weights_of(part, group), target, offsets.data(), sum_rows.data(), target_plane,
                            bias});
      }
    });
  });
}

// Multiplications of both methods for a plane of a box, idle lanes included: of positions, or of columns, whose results are
// transposed.
template <typename T>
bool ConvolutionProducts<T>::prefers_positions(const Grid& grid, const Index& box, std::ptrdiff_t row, std::size_t depth,
                                               std::size_t columns) const {
  if (!reads_neighbours(grid)) return false;
  const std::size_t lanes = kernels_.lanes, padded = rounded_up(columns, lanes);
  const double alone = padded == lanes ? tuning::kLonelyVector : 1.0;
  const double by_columns = static_cast<double>(product(box)) * static_cast<double>(padded) *
                            (alone * static_cast<double>(depth) + tuning::kTransposedElement);
  const auto positions = static_cast<double>(PositionVectors::count(box, row, lanes) * lanes);
  return tuning::kPositionProduct * positions * static_cast<double>(columns * depth) < by_columns;
}

#define ONNXTRAIN_CORRELATION(T)                                                      \
  template void ConvolutionProducts<T>::correlate(const PlaneCorrelation<T>&) const; \
  template void ConvolutionProducts<T>::multiply(const PlaneCorrelation<T>&) const;  \
  template bool ConvolutionProducts<T>::prefers_positions(const Grid&, const Index&, std::ptrdiff_t, std::size_t, \
                                                          std::size_t) const;
ONNXTRAIN_CORRELATION(float)
ONNXTRAIN_CORRELATION(double)

}  // namespace onnxtrain
