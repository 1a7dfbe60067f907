#include "convolution/blocks.h"

#include <stdexcept>
#include <string>

#include "tuning.h"

namespace onnxtrain {
namespace {

// Limit on the elements of a block's copy of the source: 1 GiB of float. Kernels as large as an image stay far below
// it.
constexpr std::size_t kMostCopied = std::size_t{1} << 28;

}  // namespace

std::vector<std::ptrdiff_t> weight_offsets_of(const std::vector<Tap>& taps, std::size_t channels,
                                              std::ptrdiff_t channel_stride) {
  std::vector<std::ptrdiff_t> offsets;
  offsets.reserve(channels * taps.size());
  for (std::size_t channel = 0; channel < channels; ++channel) {
    for (const Tap& tap : taps) offsets.push_back(static_cast<std::ptrdiff_t>(channel) * channel_stride + tap.weight);
  }
  return offsets;
}

Block Block::within(const Index& grid) const {
  Block block = *this;
  for (int axis = 0; axis < kAxes; ++axis) {
    block.size[axis] = std::clamp<std::ptrdiff_t>(grid[axis] - start[axis], 0, size[axis]);
  }
  return block;
}

Grid::Grid(const Index& size_, const Index& step_, const std::vector<Tap>& taps) : size(size_), step(step_) {
  for (int axis = 0; axis < kAxes; ++axis) {
    std::ptrdiff_t low = taps[0].offset[axis], high = low;
    for (const Tap& tap : taps) {
      low = std::min(low, tap.offset[axis]);
      high = std::max(high, tap.offset[axis]);
    }
    lowest[axis] = low;
    reach[axis] = high - low;
  }
}

Blocks::Blocks(const Grid& grid, std::size_t batch, std::size_t channels, std::size_t elements, std::size_t positions,
               std::ptrdiff_t row_unit) {
  Index box = grid.size;
  const auto covered = [&] {
    for (int axis = 0; axis < kAxes; ++axis) extent[axis] = (box[axis] - 1) * grid.step[axis] + grid.reach[axis] + 1;
    extent[2] = (extent[2] + row_unit - 1) / row_unit * row_unit;
    return static_cast<std::size_t>(product(extent));  // about one plane at most
  };
  const auto too_large = [&] {
    return saturating_product(covered(), channels) > elements || static_cast<std::size_t>(product(box)) > positions;
  };
  while (too_large() && product(box) > tuning::kFewestPositions) {
    int axis = 0;
    while (box[axis] == 1) ++axis;
    box[axis] = (box[axis] + 1) / 2;
  }
  const std::size_t plane = covered();
  if (saturating_product(plane, channels) > std::max(kMostCopied, elements)) {
    throw std::invalid_argument("the windows of neighbouring positions span " + std::to_string(plane) +
                                " elements of each of " + std::to_string(channels) +
                                " channels, more than this kernel copies at a time: use ONNX's own Conv for such "
                                "pads and dilations.");
  }
  std::size_t images = 1;
  if (box == grid.size) {
    images = std::min(elements / std::max<std::size_t>(plane * channels, 1),
                      positions / static_cast<std::size_t>(product(box)));
    images = std::clamp<std::size_t>(images, 1, std::max<std::size_t>(batch, 1));
    images = divided_up(batch, divided_up(batch, images));  // balances the blocks
  }
  image_stride = static_cast<std::ptrdiff_t>(plane);
  // Uses an odd number of cache lines per channel: a power of two would map all channels to a few cache sets.
  constexpr std::size_t kLine = 16;
  channel_stride = static_cast<std::ptrdiff_t>((divided_up(plane * images, kLine) | 1) * kLine);
  most_positions = images * static_cast<std::size_t>(product(box));

  std::size_t first = 0;
  for (std::size_t image = 0; image < batch; image += images) {
    for (std::ptrdiff_t d = 0; d < grid.size[0]; d += box[0]) {
      for (std::ptrdiff_t h = 0; h < grid.size[1]; h += box[1]) {
        for (std::ptrdiff_t w = 0; w < grid.size[2]; w += box[2]) {
          const Index size = {std::min(box[0], grid.size[0] - d), std::min(box[1], grid.size[1] - h),
                              std::min(box[2], grid.size[2] - w)};
          all.push_back({image, std::min(images, batch - image), {d, h, w}, size, first});
          first += all.back().positions();
        }
      }
    }
  }
}

std::vector<std::ptrdiff_t> Blocks::tap_offsets(const Grid& grid, const std::vector<Tap>& taps,
                                                std::size_t channels) const {
  std::vector<std::ptrdiff_t> offsets;
  offsets.reserve(channels * taps.size());
  for (std::size_t channel = 0; channel < channels; ++channel) {
    for (const Tap& tap : taps) {
      std::ptrdiff_t offset = 0;
      for (int axis = 0; axis < kAxes; ++axis) {
        offset = offset * extent[axis] + tap.offset[axis] - grid.lowest[axis];
      }
      offsets.push_back(static_cast<std::ptrdiff_t>(channel) * channel_stride + offset);
    }
  }
  return offsets;
}

namespace {

std::vector<std::ptrdiff_t> offsets_in(const Block& block, const Index& plane, const Index& start, const Index& step,
                                       std::ptrdiff_t image_stride) {
  std::vector<std::ptrdiff_t> offsets;
  offsets.reserve(block.positions());
  for (std::size_t i = 0; i < block.images; ++i) {
    for (std::ptrdiff_t d = 0; d < block.size[0]; ++d) {
      for (std::ptrdiff_t h = 0; h < block.size[1]; ++h) {
        const std::ptrdiff_t row = ((start[0] + d * step[0]) * plane[1] + start[1] + h * step[1]) * plane[2] + start[2];
        for (std::ptrdiff_t w = 0; w < block.size[2]; ++w) {
          offsets.push_back(static_cast<std::ptrdiff_t>(i) * image_stride + row + w * step[2]);
        }
      }
    }
  }
  return offsets;
}

}  // namespace

std::vector<std::ptrdiff_t> Blocks::position_offsets(const Grid& grid, const Block& block) const {
  return offsets_in(block, extent, {0, 0, 0}, grid.step, image_stride);
}

std::vector<std::ptrdiff_t> plane_offsets(const Block& block, const Index& plane, const Index& start, const Index& step,
                                          std::ptrdiff_t image_stride) {
  Index first;
  for (int axis = 0; axis < kAxes; ++axis) first[axis] = start[axis] + block.start[axis] * step[axis];
  return offsets_in(block, plane, first, step, image_stride);
}

}  // namespace onnxtrain
