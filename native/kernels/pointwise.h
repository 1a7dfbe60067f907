// Convolutions with kernels of one element: products of the weights with the images themselves.
#pragma once

#include "matrix_tile.h"

namespace onnxtrain {
namespace {

// Vectors of pixels in a tile: the weights are few, so more rows are better than more vectors.
inline constexpr std::size_t kPixelVectors = kVectorRegisters == 32 ? 3 : 2;

// Calls part(image, pixel, index, count) for each stretch of consecutive pixels within [begin, end).
template <typename Part>
inline void for_each_stretch(std::size_t pixels, std::size_t begin, std::size_t end, Part part) {
  std::size_t image = begin / pixels, pixel = begin % pixels;
  for (std::size_t at = begin; at < end; ++image, pixel = 0) {
    const std::size_t count = end - at < pixels - pixel ? end - at : pixels - pixel;
    part(static_cast<std::ptrdiff_t>(image), static_cast<std::ptrdiff_t>(pixel), at - begin, count);
    at += count;
  }
}

// The pixels [begin, end) of all channels: [depth][width].
template <typename T>
void gather_pixels(const Pointwise<T>& task, std::size_t begin, std::size_t end, std::size_t width, T* columns) {
  const auto plane = static_cast<std::ptrdiff_t>(task.pixels);
  const auto gather = [&](std::ptrdiff_t image, std::ptrdiff_t pixel, std::size_t at, std::size_t count) {
    const T* from = task.source + image * task.source_image + pixel;
    T* to = columns + at;
    if (count == kPixelVectors * kLanes<T>) {
      for (std::size_t k = 0; k < task.depth; ++k, from += plane, to += width) {
#pragma GCC unroll 4
        for (std::size_t v = 0; v < kPixelVectors; ++v) store(to + v * kLanes<T>, load(from + v * kLanes<T>));
      }
    } else {
      for (std::size_t k = 0; k < task.depth; ++k, from += plane, to += width) copy(from, count, to);
    }
  };
  for_each_stretch(task.pixels, begin, end, gather);
  if (end - begin < width) {
    for (std::size_t k = 0; k < task.depth; ++k) fill_zero(columns + k * width + (end - begin), width - (end - begin));
  }
}

template <typename T>
void scatter_pixels(const Pointwise<T>& task, const T* sums, std::size_t width, std::size_t row, std::size_t rows,
                    std::size_t begin, std::size_t end) {
  const auto plane = static_cast<std::ptrdiff_t>(task.pixels);
  const auto scatter = [&](std::ptrdiff_t image, std::ptrdiff_t pixel, std::size_t at, std::size_t count) {
    T* to = task.target + image * task.target_image + static_cast<std::ptrdiff_t>(row) * plane + pixel;
    for (std::size_t r = 0; r < rows; ++r, to += plane) copy(sums + r * width + at, count, to);
  };
  for_each_stretch(task.pixels, begin, end, scatter);
}

// The pixels [begin, end), few enough that those of all channels stay in the second cache. Row by row, so that the
// target is written in long stretches.
template <typename T>
void pointwise_block(const Pointwise<T>& task, std::size_t block_begin, std::size_t block_end) {
  constexpr std::size_t lanes = kLanes<T>;
  alignas(kVectorBytes) T buffer[kMaxTileRows * kPixelVectors * lanes];
  const Panels<T> panels(block_end - block_begin, kPixelVectors);
  const auto end_of = [&](std::size_t panel) {
    const std::size_t end = block_begin + panels.begin(panel) + panels.width(panel);
    return end < block_end ? end : block_end;
  };
  for (std::size_t panel = 0; panel < panels.count(); ++panel) {
    gather_pixels(task, block_begin + panels.begin(panel), end_of(panel), panels.width(panel),
                  task.scratch + panels.begin(panel) * task.depth);
  }
  const Parts tiles(task.rows, tile_rows(kPixelVectors));
  for (std::size_t t = 0; t < tiles.count; ++t) {
    const std::size_t row = tiles.begin(t), rows = tiles.size(t);
    const T* starts[kMaxTileRows];
    for (std::size_t r = 0; r < rows; ++r) {
      starts[r] = task.weights + static_cast<std::ptrdiff_t>(row + r) * task.row_stride;
    }
    for (std::size_t panel = 0; panel < panels.count(); ++panel) {
      const std::size_t width = panels.width(panel), vectors = panels.vectors(panel);
      const std::size_t begin = block_begin + panels.begin(panel), end = end_of(panel), pixel = begin % task.pixels;
      const bool direct = end - begin == width && pixel + width <= task.pixels;
      T* sums = buffer;
      std::size_t stride = width;
      if (direct) {
        stride = task.pixels;
        T* image = task.target + static_cast<std::ptrdiff_t>(begin / task.pixels) * task.target_image;
        sums = image + row * stride + pixel;
      }
      if (task.bias != nullptr) {
        for (std::size_t r = 0; r < rows; ++r) {
          for (std::size_t v = 0; v < vectors; ++v) store(sums + r * stride + v * lanes, broadcast(task.bias[row + r]));
        }
      }
      const Tile<T> tile = {starts, task.depth_offsets, task.depth, task.scratch + panels.begin(panel) * task.depth,
                            task.bias != nullptr, sums, stride};
      multiply_of<T>(rows, vectors)(tile);
      if (!direct) scatter_pixels(task, buffer, width, row, rows, begin, end);
    }
  }
}

template <typename T>
void pointwise(const Pointwise<T>& task) {
  for (std::size_t begin = task.begin; begin < task.end; begin += task.block) {
    pointwise_block(task, begin, task.end - begin < task.block ? task.end : begin + task.block);
  }
}

}  // namespace
}  // namespace onnxtrain
