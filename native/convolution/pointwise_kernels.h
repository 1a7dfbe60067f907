// Multiplies the weights with whole images: 1x1 convolutions, and input gradients whose terms per kernel element are
// added up afterwards.
#pragma once

#include "matmul/matrix_tile.h"

namespace onnxtrain {
namespace {

// Vectors of pixels per tile: the weights are few, so more rows are better than more vectors.
inline constexpr std::size_t kPixelVectors = kVectorRegisters == 32 ? 3 : 2;

template <typename T>
void turn(const Turning<T>& task) {
  transpose(task.source + task.begin, task.rows, task.depth, task.end - task.begin, task.target + task.begin * task.line,
            task.line);
}

// Calls part(image, pixel, index, count) for each run of consecutive pixels within [begin, end).
template <typename Part>
inline void for_each_stretch(std::size_t pixels, std::size_t begin, std::size_t end, Part part) {
  std::size_t image = begin / pixels, pixel = begin % pixels;
  for (std::size_t at = begin; at < end; ++image, pixel = 0) {
    const std::size_t count = end - at < pixels - pixel ? end - at : pixels - pixel;
    part(static_cast<std::ptrdiff_t>(image), static_cast<std::ptrdiff_t>(pixel), at - begin, count);
    at += count;
  }
}

// Gathers pixels [begin, end) of all channels as [depth][width].
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

// Some rows and pixels [begin, end) of a matrix multiplication: `width` pixels, padded, in `columns`.
template <typename T>
struct PixelTile {
  const T* rows[kMaxTileRows];
  const T* columns;
  std::size_t row, row_count, begin, end, vectors, width;

  void multiply(const Pointwise<T>& task, bool accumulate, T* sums, std::size_t stride) const {
    const Tile<T> tile = {rows, task.depth_offsets, task.depth, columns, accumulate, sums, stride};
    multiply_of<T>(row_count, vectors)(tile);
  }
};

// Calls work(tile) for all tiles of the task, in blocks of pixels whose channels fit the L2 cache; row by row, so that
// the target is written in long runs.
template <typename T, typename Work>
void for_each_pixel_tile(const Pointwise<T>& task, Work work) {
  for (std::size_t block = task.begin; block < task.end; block += task.block) {
    const std::size_t block_end = task.end - block < task.block ? task.end : block + task.block;
    const Panels<T> panels(block_end - block, kPixelVectors);
    const auto end_of = [&](std::size_t panel) {
      const std::size_t end = block + panels.begin(panel) + panels.width(panel);
      return end < block_end ? end : block_end;
    };
    for (std::size_t panel = 0; panel < panels.count(); ++panel) {
      gather_pixels(task, block + panels.begin(panel), end_of(panel), panels.width(panel),
                    task.scratch + panels.begin(panel) * task.depth);
    }
    const Parts tiles(task.rows, tile_rows(kPixelVectors));
    for (std::size_t t = 0; t < tiles.count; ++t) {
      PixelTile<T> tile;
      tile.row = tiles.begin(t);
      tile.row_count = tiles.size(t);
      for (std::size_t r = 0; r < tile.row_count; ++r) {
        tile.rows[r] = task.weights + static_cast<std::ptrdiff_t>(tile.row + r) * task.row_stride;
      }
      for (std::size_t panel = 0; panel < panels.count(); ++panel) {
        tile.columns = task.scratch + panels.begin(panel) * task.depth;
        tile.begin = block + panels.begin(panel);
        tile.end = end_of(panel);
        tile.vectors = panels.vectors(panel);
        tile.width = panels.width(panel);
        work(tile);
      }
    }
  }
}

template <typename T>
void pointwise(const Pointwise<T>& task) {
  alignas(kVectorBytes) T buffer[kMaxTileRows * kPixelVectors * kLanes<T>];
  for_each_pixel_tile(task, [&](const PixelTile<T>& tile) {
    const std::size_t pixel = tile.begin % task.pixels;
    const bool direct = tile.end - tile.begin == tile.width && pixel + tile.width <= task.pixels;
    T* sums = buffer;
    std::size_t stride = tile.width;
    if (direct) {
      stride = task.pixels;
      T* image = task.target + static_cast<std::ptrdiff_t>(tile.begin / task.pixels) * task.target_image;
      sums = image + tile.row * stride + pixel;
    }
    if (task.bias != nullptr) {
      for (std::size_t r = 0; r < tile.row_count; ++r) {
        for (std::size_t v = 0; v < tile.vectors; ++v) {
          store(sums + r * stride + v * kLanes<T>, broadcast(task.bias[tile.row + r]));
        }
      }
    }
    tile.multiply(task, task.bias != nullptr, sums, stride);
    if (!direct) scatter_pixels(task, buffer, tile.width, tile.row, tile.row_count, tile.begin, tile.end);
  });
}

// A run of neighbouring positions: the first, its sums at `at`, and its offset in the target.
struct PixelLine {
  std::ptrdiff_t start[kAxes], count, at, offset;
};

template <typename T>
std::size_t lines_of(const Spreading<T>& task, std::size_t begin, std::size_t end, PixelLine* lines) {
  std::size_t found = 0;
  const std::ptrdiff_t *grid = task.grid, *step = task.step, *size = task.target_size;
  const auto add = [&](std::ptrdiff_t image, std::ptrdiff_t pixel, std::size_t at, std::size_t count) {
    std::ptrdiff_t d = pixel / (grid[1] * grid[2]), h = pixel / grid[2] % grid[1], w = pixel % grid[2];
    for (auto from = static_cast<std::ptrdiff_t>(at), left = static_cast<std::ptrdiff_t>(count); left > 0; w = 0) {
      const std::ptrdiff_t in_line = grid[2] - w < left ? grid[2] - w : left;
      const std::ptrdiff_t offset = (d * step[0] * size[1] + h * step[1]) * size[2] + w * step[2];
      lines[found++] = {{d, h, w}, in_line, from, image * task.products.target_image + offset};
      from += in_line;
      left -= in_line;
      if (++h == grid[1]) {
        h = 0;
        ++d;
      }
    }
  };
  for_each_stretch(task.products.pixels, begin, end, add);
  return found;
}

// Adds `count` elements, less than a vector.
template <std::size_t count, typename T>
inline void add_few(const T* from, T* to) {
  typedef T Few __attribute__((vector_size(count * sizeof(T)), aligned(sizeof(T)), may_alias));
  *reinterpret_cast<Few*>(to) += *reinterpret_cast<const Few*>(from);
}

// Lines are often shorter than a vector.
template <typename T>
inline void add_line(const T* from, std::ptrdiff_t count, T* to, std::ptrdiff_t step) {
  constexpr std::ptrdiff_t lanes = kLanes<T>;
  if (step == 1) {
    for (; count >= lanes; count -= lanes, from += lanes, to += lanes) add_few<kLanes<T>>(from, to);
    if constexpr (lanes >= 16) {
      if (count >= 8) {
        add_few<8>(from, to);
        from += 8, to += 8, count -= 8;
      }
    }
    if constexpr (lanes >= 8) {
      if (count >= 4) {
        add_few<4>(from, to);
        from += 4, to += 4, count -= 4;
      }
    }
  }
  for (std::ptrdiff_t i = 0; i < count; ++i) to[i * step] += from[i];
}

// The matrix products are summed into what the kernel reads with padding; the padding itself is never multiplied.
template <typename T>
void spread(const Spreading<T>& task) {
  alignas(kVectorBytes) T sums[kMaxTileRows * kPixelVectors * kLanes<T>];
  PixelLine lines[kPixelVectors * kLanes<T>];
  const Pointwise<T>& products = task.products;
  const std::ptrdiff_t plane = task.target_size[0] * task.target_size[1] * task.target_size[2];
  const std::ptrdiff_t step = task.step[2];
  const std::size_t channels = products.rows / task.tap_count;
  for (std::size_t image = products.begin / products.pixels; image < products.end / products.pixels; ++image) {
    fill_zero(products.target + static_cast<std::ptrdiff_t>(image) * products.target_image,
              channels * static_cast<std::size_t>(plane));
  }
  for_each_pixel_tile(products, [&](const PixelTile<T>& tile) {
    tile.multiply(products, false, sums, tile.width);
    const std::size_t line_count = lines_of(task, tile.begin, tile.end, lines);
    for (std::size_t r = 0; r < tile.row_count; ++r) {
      const SpreadTap& tap = task.taps[(tile.row + r) % task.tap_count];
      T* target = products.target + static_cast<std::ptrdiff_t>((tile.row + r) / task.tap_count) * plane + tap.offset;
      const T* from = sums + r * tile.width;
      if (tap.inside) {
        for (const PixelLine* line = lines; line != lines + line_count; ++line) {
          add_line(from + line->at, line->count, target + line->offset, step);
        }
        continue;
      }
      for (const PixelLine* line = lines; line != lines + line_count; ++line) {
        if (line->start[0] < tap.first[0] || line->start[0] >= tap.last[0]) continue;
        if (line->start[1] < tap.first[1] || line->start[1] >= tap.last[1]) continue;
        const std::ptrdiff_t before = tap.first[2] - line->start[2], first = before > 0 ? before : 0;
        const std::ptrdiff_t inside = tap.last[2] - line->start[2], last = inside < line->count ? inside : line->count;
        if (first < last) add_line(from + line->at + first, last - first, target + line->offset + first * step, step);
      }
    }
  });
}

}  // namespace
}  // namespace onnxtrain
