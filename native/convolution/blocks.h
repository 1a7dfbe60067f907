// Splits the positions of a convolution into blocks, and builds the offset tables that kernels read through.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "convolution/table.h"
#include "sizes.h"

namespace onnxtrain {

using Index = std::array<std::ptrdiff_t, kAxes>;

inline std::ptrdiff_t product(const Index& sizes) { return sizes[0] * sizes[1] * sizes[2]; }

// One kernel element: its offset relative to a position in the source, and its index in the weights.
struct Tap {
  Index offset;
  std::ptrdiff_t weight;
};

// Offsets of channels and taps in the weights, channel by channel.
std::vector<std::ptrdiff_t> weight_offsets_of(const std::vector<Tap>& taps, std::size_t channels,
                                              std::ptrdiff_t channel_stride);

// Grid of positions of a window over a source plane.
struct Grid {
  Index size;    // number of positions
  Index step;    // between neighbours in the source
  Index lowest;  // smallest offset of a tap
  Index reach;   // from the smallest to the largest offset

  Grid(const Index& size, const Index& step, const std::vector<Tap>& taps);
};

// A box of positions in some images.
struct Block {
  std::size_t image, images;
  Index start, size;
  std::size_t first;  // index of the first position, in block order

  // The same box on a smaller grid.
  Block within(const Index& grid) const;
  std::size_t positions() const { return images * static_cast<std::size_t>(product(size)); }
};

// The blocks of a batch, and one memory layout for the boxes that their windows cover: [channel][image][box].
struct Blocks {
  std::vector<Block> all;
  Index extent;                 // of a box in the source
  std::ptrdiff_t image_stride;  // in a block's copy of the source
  std::ptrdiff_t channel_stride;
  std::size_t most_positions;

  // At most `elements` elements in a block's copy of `channels` channels, and about `positions` positions per block. Rows of
  // a copy have multiples of `row_unit` elements.
  Blocks(const Grid& grid, std::size_t batch, std::size_t channels, std::size_t elements, std::size_t positions,
         std::ptrdiff_t row_unit = 1);

  std::size_t copy_size(std::size_t channels) const {
    return checked_product(static_cast<std::size_t>(channel_stride), channels);
  }
  // Offsets of channels and taps in a block's copy, channel by channel.
  std::vector<std::ptrdiff_t> tap_offsets(const Grid& grid, const std::vector<Tap>& taps, std::size_t channels) const;
  // Offsets of a block's positions in its copy.
  std::vector<std::ptrdiff_t> position_offsets(const Grid& grid, const Block& block) const;
};

// Offsets of a block's positions in a tensor with planes of size `plane`: position q lies at start + step * q.
std::vector<std::ptrdiff_t> plane_offsets(const Block& block, const Index& plane, const Index& start, const Index& step,
                                          std::ptrdiff_t image_stride);

// Copies the boxes of a block's windows: `channels` planes per image from `source`, the first plane of the first image.
template <typename T>
void copy_block(const ConvolutionKernels<T>& kernels, const Grid& grid, const Blocks& blocks, const Block& block,
                const T* source, const Index& plane, std::ptrdiff_t source_image, std::size_t channels, T* target) {
  BoxCopy<T> box = {};
  for (int axis = 0; axis < kAxes; ++axis) {
    box.size[axis] = plane[axis];
    box.start[axis] = block.start[axis] * grid.step[axis] + grid.lowest[axis];
    box.extent[axis] = blocks.extent[axis];
  }
  box.planes = channels;
  box.source_stride = product(plane);
  box.target_stride = blocks.channel_stride;
  for (std::size_t i = 0; i < block.images; ++i) {
    box.source = source + static_cast<std::ptrdiff_t>(block.image + i) * source_image;
    box.target = target + static_cast<std::ptrdiff_t>(i) * blocks.image_stride;
    kernels.copy_boxes(box);
  }
}

}  // namespace onnxtrain
