#include "convolution/bfloat16.h"

#include <algorithm>
#include <limits>
#include <thread>

#include "cache.h"
#include "convolution/bfloat16_table.h"
#include "convolution/products.h"
#include "matmul/bfloat16.h"
#include "matmul/partition.h"
#include "scratch.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

using Word = std::uint16_t;

constexpr std::size_t kBehind = 64;  // readable bytes behind a source
constexpr std::size_t kLineBytes = 64;

std::size_t cache_lines(std::size_t bytes) { return rounded_up(bytes, kLineBytes); }

// For each offset, the end of those `step` apart that it belongs to.
std::vector<std::size_t> run_ends(const std::vector<std::ptrdiff_t>& offsets, std::ptrdiff_t step = 1) {
  std::vector<std::size_t> ends(offsets.size());
  std::size_t end = offsets.size();
  for (std::size_t i = offsets.size(); i-- > 0;) {
    if (i + 1 < offsets.size() && offsets[i + 1] != offsets[i] + step) end = i + 1;
    ends[i] = end;
  }
  return ends;
}

// The blocks of a grid, in copies whose rows hold the elements one step apart side by side, so that neighbouring
// positions are neighbours in them, too.
class RoundedBlocks {
 public:
  // `channels` are words, or pairs of channels.
  RoundedBlocks(const Grid& grid, std::size_t batch, std::size_t channels, std::size_t elements, std::size_t positions,
                bool pairs)
      : grid_(grid), side_by_side_(grid), channels_(channels), pairs_(pairs),
        blocks_(grid, batch, channels, elements, positions, grid.step[2]) {
    side_by_side_.step[2] = 1;
  }

  const Blocks& blocks() const { return blocks_; }
  std::size_t bytes() const {
    return cache_lines(checked_sum(checked_product(blocks_.copy_size(channels_), std::size_t{pairs_ ? 4u : 2u}), kBehind));
  }

  std::vector<std::ptrdiff_t> tap_offsets(std::vector<Tap> taps) const {
    const std::ptrdiff_t step = grid_.step[2], width = blocks_.extent[2] / step;
    for (Tap& tap : taps) {
      const std::ptrdiff_t at = tap.offset[2] - grid_.lowest[2];
      tap.offset[2] = grid_.lowest[2] + at % step * width + at / step;
    }
    return blocks_.tap_offsets(grid_, taps, channels_);
  }

  std::vector<std::ptrdiff_t> position_offsets(const Block& block) const {
    return blocks_.position_offsets(side_by_side_, block);
  }

  // Rounds planes [first, end) of a block.
  void round(const Planes<float>& source, const Block& block, std::size_t first, std::size_t end, Word* target) const {
    BoxRounding box = {};
    for (int axis = 0; axis < kAxes; ++axis) {
      box.size[axis] = source.size[axis];
      box.start[axis] = block.start[axis] * grid_.step[axis] + grid_.lowest[axis];
      box.extent[axis] = blocks_.extent[axis];
      box.every[axis] = grid_.reach[axis] == 0 ? grid_.step[axis] : 1;
    }
    box.step = grid_.step[2];
    box.pairs = pairs_;
    box.planes = end - first;
    box.source_stride = source.plane();
    box.target_stride = blocks_.channel_stride;
    const auto at = static_cast<std::ptrdiff_t>(first);
    for (std::size_t i = 0; i < block.images; ++i) {
      const auto image = static_cast<std::ptrdiff_t>(i);
      box.source = source.data + static_cast<std::ptrdiff_t>(block.image + i) * source.image() + at * source.plane();
      box.target = target + at * blocks_.channel_stride + image * blocks_.image_stride * (pairs_ ? 2 : 1);
      bfloat16_convolution().round_boxes(box);
    }
  }

 private:
  Grid grid_, side_by_side_;
  std::size_t channels_;
  bool pairs_;
  Blocks blocks_;
};

// One phase of a correlation: its weights as left matrix, and where a row of the right one lies in a copy.
struct PhasePart {
  const Phase* phase;
  std::size_t depth;
  std::vector<std::ptrdiff_t> offsets;
  RoundedLeft weights;
};

void round_weights(const PlaneCorrelation<float>& p, const std::vector<PhasePart>& parts, const ParallelFor& parallel_for) {
  constexpr std::size_t kRows = 32;
  const std::size_t tasks = divided_up(p.columns, kRows);
  std::vector<std::vector<std::ptrdiff_t>> offsets;
  for (const PhasePart& part : parts) {
    offsets.emplace_back();
    for (const Tap& tap : part.phase->taps) offsets.back().push_back(tap.weight);
  }
  parallel_for(parts.size() * tasks, [&](std::size_t task) {
    const PhasePart& part = parts[task / tasks];
    const std::size_t first = task % tasks * kRows, end = std::min(first + kRows, p.columns);
    const Weights<float>& w = p.weights;
    if (part.phase->taps.size() == 1 && std::min(w.column_stride, w.channel_stride) == 1) {  // a matrix
      const bool transposed = w.column_stride == 1;
      const auto line = static_cast<std::size_t>(transposed ? w.channel_stride : w.column_stride);
      bfloat16_kernels().round({w.data, line, transposed, p.columns, p.source.channels, part.weights.words(),
                                part.weights.stride()},
                               first, end);
      return;
    }
    WeightRounding rounding = {};
    rounding.depth = part.depth;
    rounding.target = part.weights.words();
    rounding.stride = part.weights.stride();
    rounding.source = w.data;
    rounding.row_stride = w.column_stride;
    rounding.channel_stride = w.channel_stride;
    rounding.channels = p.source.channels;
    rounding.taps = part.phase->taps.size();
    rounding.offsets = offsets[task / tasks].data();
    bfloat16_convolution().round_weights(rounding, first, end);
  });
}

// Row parts of each of so many blocks, so that every core has work: each part packs the block for itself.
std::size_t row_parts(std::size_t blocks, std::size_t rows, std::size_t products) {
  static const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
  const std::size_t threads = std::clamp<std::size_t>(products / tuning::kLeastProducts, 1, cores);
  return std::clamp<std::size_t>(divided_up(threads, blocks), 1, std::max<std::size_t>(1, rows / tuning::kLeastRows));
}

// The same convolution with planes as lines, if it has one kernel element at each position.
Convolution in_lines(const Convolution& convolution) {
  Convolution c = convolution;
  if (!is_pointwise(c)) return c;
  c.input[2] = c.output[2] = product(index_of(c.input));
  for (const int axis : {0, 1}) c.input[axis] = c.output[axis] = 1;
  return c;
}

void correlate(const Convolution& c, const PlaneCorrelation<float>& p, const ParallelFor& parallel_for) {
  const std::size_t channels = p.source.channels, pairs = divided_up(channels, 2), rows = p.columns;
  std::vector<Phase> phases;
  std::copy_if(p.phases.begin(), p.phases.end(), std::back_inserter(phases),
               [](const Phase& phase) { return !phase.taps.empty(); });
  const auto plane = static_cast<std::size_t>(product(p.target_size));
  if (!p.all_phases || phases.size() < p.phases.size()) {
    parallel_for(c.batch * rows, [&](std::size_t task) { std::fill_n(p.target + task * plane, plane, 0.0f); });
  }
  if (phases.empty()) return;
  const Grid grid = grid_of(phases);
  const std::size_t positions = checked_product(c.batch, static_cast<std::size_t>(product(grid.size)));
  const std::size_t sums = share_of_second_cache(tuning::kBlockSumShare) / sizeof(float) / rows;
  const RoundedBlocks rounded(grid, c.batch, pairs, tuning::kBlockBytes / (2 * sizeof(Word)),
                              std::clamp(sums, tuning::kLeastBlockPositions, std::max(positions / tuning::kProductTasks, tuning::kLeastBlockPositions)), true);
  const Blocks& blocks = rounded.blocks();
  std::vector<PhasePart> parts;
  parts.reserve(phases.size());
  std::size_t depth = 0;  // of all phases
  for (const Phase& phase : phases) {
    const std::size_t own = checked_product(2 * pairs, phase.taps.size());
    parts.push_back({&phase, own, rounded.tap_offsets(phase.taps), RoundedLeft(rows, own)});
    depth += own;
  }
  round_weights(p, parts, parallel_for);

  const std::size_t unit = bfloat16_kernels().row_unit;
  const std::size_t splits = row_parts(blocks.all.size(), rows, saturating_product(positions, rows, depth));
  const std::size_t most_rows = divided_up(divided_up(rows, unit), splits) * unit;
  const std::size_t sums_stride = rounded_up(blocks.most_positions, kLineBytes / sizeof(float));
  const std::size_t sums_bytes = checked_product(most_rows, sums_stride, sizeof(float));
  std::size_t scratch_bytes = 0;
  std::vector<Bfloat16Matmul> products(parts.size());
  for (std::size_t i = 0; i < parts.size(); ++i) {
    products[i].depth = parts[i].depth;
    scratch_bytes = std::max(scratch_bytes, choose_blocks(products[i], most_rows, blocks.most_positions));
  }
  const auto target_plane = static_cast<std::ptrdiff_t>(plane);
  const std::ptrdiff_t target_image = target_plane * static_cast<std::ptrdiff_t>(rows);
  BufferPool pool(checked_sum(checked_sum(rounded.bytes(), sums_bytes), scratch_bytes));
  parallel_for(blocks.all.size() * splits, [&](std::size_t task) {
    const Block& box = blocks.all[task / splits];
    const std::size_t first = begin_of(task % splits, splits, rows, unit);
    const std::size_t count = begin_of(task % splits + 1, splits, rows, unit) - first;
    if (count == 0) return;
    pool.lend([&](const Buffer& buffer) {
      Word* source = buffer.as<Word>();
      float* sums_here = reinterpret_cast<float*>(buffer.as<char>() + rounded.bytes());
      rounded.round(p.source, box, 0, channels, source);
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const PhasePart& part = parts[i];
        const Block block = box.within(part.phase->size);
        if (block.positions() == 0) continue;
        const auto columns = rounded.position_offsets(block);
        const auto column_ends = run_ends(columns);
        const auto targets =
            plane_offsets(block, p.target_size, part.phase->target_start, part.phase->target_step, target_image);
        const std::ptrdiff_t step = part.phase->target_step[2];
        const auto target_ends = run_ends(targets, step);
        float* target = p.target + static_cast<std::ptrdiff_t>(box.image) * target_image +
                        static_cast<std::ptrdiff_t>(first) * target_plane;
        const bool direct = target_ends[0] == targets.size() && (step == 1 || targets.size() == 1);
        const Patches patches = {source, true, part.offsets.data(), columns.data(), column_ends.data()};
        Bfloat16Matmul product = products[i];
        product.left = part.weights.words() + first * part.weights.stride();
        product.left_stride = part.weights.stride();
        product.patches = &patches;
        product.rows = count;
        product.columns = columns.size();
        product.target = direct ? target + targets[0] : sums_here;
        product.target_row = direct ? plane : sums_stride;
        product.scratch = reinterpret_cast<Word*>(buffer.as<char>() + rounded.bytes() + sums_bytes);
        if (p.weights.bias != nullptr) {
          for (std::size_t row = 0; row < count; ++row) {
            std::fill_n(product.target + row * product.target_row, product.columns, p.weights.bias[first + row]);
          }
          product.bias = product.target;
          product.bias_row = product.target_row;
        }
        bfloat16_kernels().multiply(product);
        if (direct) continue;
        bfloat16_convolution().scatter({sums_here, sums_stride, count, targets.size(), targets.data(), target_ends.data(), step,
                                        target, target_plane});
      }
    });
  });
}

}  // namespace

void convolve_in_bfloat16(const Convolution& convolution, const float* x, const float* w, const float* bias, float* y,
                          const ParallelFor& parallel_for) {
  const Convolution c = in_lines(convolution);
  correlate(c, forward_correlation(c, x, w, bias, y), parallel_for);
}

void convolution_input_gradient_in_bfloat16(const Convolution& convolution, const float* dy, const float* w, float* dx,
                                            const ParallelFor& parallel_for) {
  const Convolution c = in_lines(convolution);
  correlate(c, input_gradient_correlation(c, dy, w, dx), parallel_for);
}

// Rows are channels of dy, columns are channels of x and taps, and the depth is the positions of a block.
void convolution_weight_gradient_in_bfloat16(const Convolution& convolution, const float* x, const float* dy, float* dw,
                                             const ParallelFor& parallel_for) {
  const Convolution c = in_lines(convolution);
  const std::vector<Tap> taps = taps_of(c);
  const Planes<float> of_x = {x, 1, c.inputs, index_of(c.input)}, of_dy = {dy, 1, c.outputs, index_of(c.output)};
  const RoundedBlocks rounded(Grid(index_of(c.output), index_of(c.stride), taps), c.batch, c.inputs,
                              tuning::kGradientSourceWords, tuning::kGradientDepth, false);
  const std::vector<std::ptrdiff_t> columns = rounded.tap_offsets(taps);
  const Buffer source(rounded.bytes());
  for (const Block& block : rounded.blocks().all) {
    constexpr std::size_t kChannels = 8, kRows = 32;
    parallel_for(divided_up(c.inputs, kChannels), [&](std::size_t task) {
      rounded.round(of_x, block, task * kChannels, std::min(c.inputs, (task + 1) * kChannels), source.as<Word>());
    });
    const auto offsets = plane_offsets(block, of_dy.size, {0, 0, 0}, {1, 1, 1}, of_dy.image());
    const auto offset_ends = run_ends(offsets);
    const RoundedLeft left(c.outputs, offsets.size());
    parallel_for(divided_up(c.outputs, kRows), [&](std::size_t task) {
      PlaneRounding rounding = {};
      rounding.depth = offsets.size();
      rounding.target = left.words();
      rounding.stride = left.stride();
      rounding.source = dy + static_cast<std::ptrdiff_t>(block.image) * of_dy.image();
      rounding.row_stride = of_dy.plane();
      rounding.offsets = offsets.data();
      rounding.run_ends = offset_ends.data();
      bfloat16_convolution().round_planes(rounding, task * kRows, std::min(c.outputs, (task + 1) * kRows));
    });
    const auto depth = rounded.position_offsets(block);
    const auto depth_ends = run_ends(depth);
    const Patches patches = {source.as<Word>(), false, depth.data(), columns.data(), depth_ends.data()};
    Bfloat16Matmul product = {};
    product.left = left.words();
    product.left_stride = left.stride();
    product.patches = &patches;
    product.rows = c.outputs;
    product.columns = columns.size();
    product.depth = depth.size();
    product.target = dw;
    product.target_row = columns.size();
    if (&block != &rounded.blocks().all[0]) {
      product.bias = dw;
      product.bias_row = columns.size();
    }
    multiply_rounded(product, parallel_for);
  }
}

}  // namespace onnxtrain
