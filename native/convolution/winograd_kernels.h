// 3 x 3 correlations in tiles of 2 x 2 positions: 16 multiplications per tile and channel instead of 36, on transformed
// inputs and weights (S. Winograd; A. Lavin and S. Gray, arXiv:1509.09308).
//
// With an input tile d [4, 4] and weights g [3, 3], y = A ((G g G') * (B d B')) A', where ' transposes and * is
// element-wise; these 16 elements are called points. For each point the sum over channels is a matrix multiplication.
//
// The gradient of the weights is the adjoint: G' ((A' dy A) * (B d B')) G, summed over the tiles of 2 x 2 positions of
// dy, which is a matrix multiplication for each point, too.
//
// Data of a point is an odd number of cache lines, so that those of the 16 points of a tile are in different cache sets.
#pragma once

#include "convolution/correlation_kernels.h"
#include "kernels/padding.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// G along one axis.
template <typename T>
inline void transform_weights(const Vector<T> (&g)[3], Vector<T> (&u)[4]) {
  const Vector<T> outer = broadcast(T(0.5)) * (g[0] + g[2]), inner = broadcast(T(0.5)) * g[1];
  u[0] = g[0];
  u[1] = outer + inner;
  u[2] = outer - inner;
  u[3] = g[2];
}

// B along one axis.
template <typename T>
inline void transform_source(const Vector<T> (&d)[4], Vector<T> (&v)[4]) {
  v[0] = d[0] - d[2];
  v[1] = d[1] + d[2];
  v[2] = d[2] - d[1];
  v[3] = d[1] - d[3];
}

// Channels [begin, end) of a panel's weights: [point][channel][columns of the panel].
template <typename T>
void winograd_weights(const WinogradWeights<T>& task) {
  const Panels<T> panels(task.columns);
  const std::size_t first = panels.begin(task.panel), width = panels.width(task.panel);
  const std::size_t valid = task.columns - first < width ? task.columns - first : width;
  const std::size_t depth = (task.end - task.begin) * kWinogradTaps;
  pack<T>({task.source + static_cast<std::ptrdiff_t>(first) * task.column_stride, task.source_end, task.column_stride,
           task.offsets + task.begin * kWinogradTaps, valid, depth, 0, depth, 0, 1, task.scratch});
  const T* from = task.scratch;
  T* to = task.points + (first * kWinogradPoints * task.channels) + task.begin * width;
  for (std::size_t channel = task.begin; channel < task.end; ++channel, from += kWinogradTaps * width, to += width) {
    for (std::size_t lane = 0; lane < width; lane += kLanes<T>) {
      Vector<T> half[3][4];
#pragma GCC unroll 3
      for (std::size_t i = 0; i < 3; ++i) {
        Vector<T> g[3];
#pragma GCC unroll 3
        for (std::size_t j = 0; j < 3; ++j) g[j] = load(from + task.order[i * 3 + j] * width + lane);
        transform_weights<T>(g, half[i]);
      }
#pragma GCC unroll 4
      for (std::size_t j = 0; j < 4; ++j) {
        const Vector<T> g[3] = {half[0][j], half[1][j], half[2][j]};
        Vector<T> u[4];
        transform_weights<T>(g, u);
#pragma GCC unroll 4
        for (std::size_t i = 0; i < 4; ++i) store(to + (i * 4 + j) * task.channels * width + lane, u[i]);
      }
    }
  }
}

// A', from 2 positions to 4 points, along one axis.
template <typename T>
inline void transform_source(const Vector<T> (&d)[2], Vector<T> (&v)[4]) {
  v[0] = d[0];
  v[1] = d[0] + d[1];
  v[2] = d[0] - d[1];
  v[3] = -d[1];
}

// A row of tiles of one image, `side` pixels high and wide: the contents of `panel`, [pixel][width], of the image's
// rows from `first_row` on.
template <typename T, std::size_t side>
void transform_row(const WinogradSource<T>& task, std::ptrdiff_t row, std::ptrdiff_t first_row, const T* panel,
                   std::size_t width, T* points) {
  alignas(kVectorBytes) static constexpr T kZeros[kMaxTileColumnBytes / sizeof(T)] = {};
  for (std::size_t tile = 0; tile < task.tiles_in_row; ++tile, points += task.row_stride) {
    const T* reads[side][side];
    const std::ptrdiff_t top = 2 * row + task.start[0];
    const std::ptrdiff_t left = 2 * static_cast<std::ptrdiff_t>(tile) + task.start[1];
    for (std::ptrdiff_t i = 0; i < static_cast<std::ptrdiff_t>(side); ++i) {
      const bool inside = top + i >= 0 && top + i < task.size[0];
      for (std::ptrdiff_t j = 0; j < static_cast<std::ptrdiff_t>(side); ++j) {
        const bool is_pixel = inside && left + j >= 0 && left + j < task.size[1];
        const std::ptrdiff_t pixel = (top + i - first_row) * task.size[1] + left + j;
        reads[i][j] = is_pixel ? panel + pixel * static_cast<std::ptrdiff_t>(width) : kZeros;
      }
    }
    for (std::size_t lane = 0; lane < width; lane += kLanes<T>) {
      Vector<T> half[side][4];
#pragma GCC unroll 4
      for (std::size_t i = 0; i < side; ++i) {
        Vector<T> d[side];
#pragma GCC unroll 4
        for (std::size_t j = 0; j < side; ++j) d[j] = load(reads[i][j] + lane);
        transform_source<T>(d, half[i]);
      }
#pragma GCC unroll 4
      for (std::size_t j = 0; j < 4; ++j) {
        Vector<T> d[side], v[4];
#pragma GCC unroll 4
        for (std::size_t i = 0; i < side; ++i) d[i] = half[i][j];
        transform_source<T>(d, v);
#pragma GCC unroll 4
        for (std::size_t i = 0; i < 4; ++i) store(points + (i * 4 + j) * task.point_stride + lane, v[i]);
      }
    }
  }
}

// Rows of tiles [first, last), numbered across all images, `side` pixels high and wide: [point][tile][row_stride].
template <typename T, std::size_t side>
void transform_tiles(const WinogradSource<T>& task) {
  const Panels<T> panels(task.channels);
  T* points = task.points;
  for (std::size_t at = task.first; at < task.last;) {
    const std::size_t image = at / task.tile_rows, row = at % task.tile_rows;
    const std::size_t left = task.last - at, rows = task.tile_rows - row < left ? task.tile_rows - row : left;
    const std::ptrdiff_t top = 2 * static_cast<std::ptrdiff_t>(row) + task.start[0];
    const std::ptrdiff_t bottom = top + 2 * static_cast<std::ptrdiff_t>(rows - 1) + static_cast<std::ptrdiff_t>(side);
    const std::ptrdiff_t first_row = top < 0 ? 0 : top < task.size[0] ? top : task.size[0];
    const std::ptrdiff_t end_row = bottom < first_row ? first_row : bottom < task.size[0] ? bottom : task.size[0];
    const auto pixels = static_cast<std::size_t>((end_row - first_row) * task.size[1]);
    const T* source = task.source + static_cast<std::ptrdiff_t>(image) * task.image + first_row * task.size[1];
    for (std::size_t p = 0; p < panels.count(); ++p) {
      const std::size_t first = panels.begin(p), width = panels.width(p);
      const std::size_t valid = task.channels - first < width ? task.channels - first : width;
      pack<T>({source + static_cast<std::ptrdiff_t>(first) * task.plane, task.source_end, task.plane, task.ones, valid,
               pixels, 0, pixels, 0, 1, task.scratch});
      for (std::size_t r = 0; r < rows; ++r) {
        transform_row<T, side>(task, static_cast<std::ptrdiff_t>(row + r), first_row, task.scratch, width,
                               points + r * task.tiles_in_row * task.row_stride + first);
      }
    }
    points += rows * task.tiles_in_row * task.row_stride;
    at += rows;
  }
}

// Sums over all channels for one point and panel: [tile][columns of the panel].
template <typename T>
void multiply_point(const WinogradProducts<T>& task, const T* source, const T* columns, std::size_t vectors, T* sums,
                    const T* next_source, const T* next_columns) {
  const std::size_t width = vectors * kLanes<T>;
  const Parts tiles(task.tiles, tile_rows(vectors)), depths(task.channels, tuning::kWinogradDepth);
  // Prefetches the next operands, a number of bytes per depth element.
  const std::size_t all = tiles.count * task.channels;
  const std::size_t source_step = (task.tiles * task.row_stride * sizeof(T) + all - 1) / all;
  const std::size_t columns_step = (width * sizeof(T) + tiles.count - 1) / tiles.count;
  const auto at = [](const T* from, std::size_t bytes) { return reinterpret_cast<const char*>(from) + bytes; };
  std::size_t done = 0;
  for (std::size_t part = 0; part < depths.count; ++part) {
    const std::size_t begin = depths.begin(part), depth = depths.size(part);
    for (std::size_t t = 0; t < tiles.count; ++t, done += depth) {
      const std::size_t row = tiles.begin(t), rows = tiles.size(t);
      const T* starts[kMaxTileRows];
      for (std::size_t r = 0; r < rows; ++r) starts[r] = source + (row + r) * task.row_stride + begin;
      const Tile<T> tile = {starts, task.ones, depth, columns + begin * width, part > 0, sums + row * width, width,
                            0,
                            {{at(next_source, done * source_step), source_step},
                             {at(next_columns, done * columns_step), columns_step}}};
      multiply_of<T, Fetching::kStreams>(rows, vectors)(tile);
    }
  }
}

// The positions of some tiles from the sums of their points: [tile][4][width].
template <typename T>
void positions_of_points(const T* sums, std::size_t point_stride, std::size_t tiles, std::size_t width, T* results) {
  for (std::size_t at = 0; at < tiles * width; at += width, results += 4 * width) {
    for (std::size_t lane = 0; lane < width; lane += kLanes<T>) {
      Vector<T> half[2][4];
#pragma GCC unroll 4
      for (std::size_t j = 0; j < 4; ++j) {
        Vector<T> m[4];
#pragma GCC unroll 4
        for (std::size_t i = 0; i < 4; ++i) m[i] = load(sums + (i * 4 + j) * point_stride + at + lane);
        half[0][j] = m[0] + m[1] + m[2];
        half[1][j] = m[1] - m[2] - m[3];
      }
#pragma GCC unroll 2
      for (std::size_t i = 0; i < 2; ++i) {
        store(results + 2 * i * width + lane, half[i][0] + half[i][1] + half[i][2]);
        store(results + (2 * i + 1) * width + lane, half[i][1] - half[i][2] - half[i][3]);
      }
    }
  }
}

template <typename T>
void winograd_products(const WinogradProducts<T>& task) {
  const Panels<T> panels(task.columns);
  const std::size_t start = panels.begin(task.first_panel);
  const auto columns_of = [&](std::size_t panel, std::size_t point) {
    return task.panels + (panels.begin(panel) * kWinogradPoints + point * panels.width(panel)) * task.channels;
  };
  const std::size_t point_size = odd_lines<T>(task.tiles * panels.width(0));
  const auto sums_of = [&](std::size_t panel) {
    return task.sums + (panel - task.first_panel) * kWinogradPoints * point_size;
  };
  for (std::size_t point = 0; point < kWinogradPoints; ++point) {
    const T* source = task.source + point * task.point_stride;
    const std::size_t next = point + 1 < kWinogradPoints ? point + 1 : 0;
    for (std::size_t panel = task.first_panel; panel < task.end_panel; ++panel) {
      const bool last = panel + 1 == task.end_panel;
      const std::size_t width = panels.width(panel);
      multiply_point(task, source, columns_of(panel, point), panels.vectors(panel),
                     sums_of(panel) + point * point_size, task.source + next * task.point_stride,
                     last ? columns_of(task.first_panel, next) : columns_of(panel + 1, point));
    }
  }
  for (std::size_t panel = task.first_panel; panel < task.end_panel; ++panel) {
    const std::size_t first = panels.begin(panel), width = panels.width(panel);
    const std::size_t valid = task.columns - first < width ? task.columns - first : width;
    const T* bias = task.bias == nullptr ? nullptr : task.bias + first;
    for (std::size_t s = 0; s < task.strip_count; ++s) {
      const WinogradStrip& strip = task.strips[s];
      positions_of_points(sums_of(panel) + strip.first_tile * width, point_size, strip.tiles, width,
                          task.results);
      scatter_transposed(task.results, strip.positions, width, valid,
                         task.target + static_cast<std::ptrdiff_t>(first) * task.column_stride,
                         task.target_offsets + strip.first_position, task.result_rows + strip.first_position,
                         task.column_stride, bias);
    }
  }
}

template <typename T>
void winograd_gradient(const WinogradGradient<T>& task) {
  const Panels<T> panels(task.columns);
  const std::size_t point_size = odd_lines<T>(task.channels * panels.width(0));
  for (std::size_t point = 0; point < kWinogradPoints; ++point) {
    for (std::size_t panel = 0; panel < panels.count(); ++panel) {
      const std::size_t first = panels.begin(panel), width = panels.width(panel), vectors = panels.vectors(panel);
      T* sums = task.sums + (panel * kWinogradPoints + point) * point_size;
      const Parts tiles(task.channels, tile_rows(vectors));
      for (std::size_t t = 0; t < tiles.count; ++t) {
        const std::size_t row = tiles.begin(t);
        const Tile<T> tile = {nullptr, nullptr, task.tiles,
                              task.factors + point * task.factor_point_stride + first, task.accumulate,
                              sums + row * width, width, task.factor_stride, {},
                              task.source + point * task.point_stride + row,
                              static_cast<std::ptrdiff_t>(task.row_stride)};
        multiply_of<T, Fetching::kNothing, Left::kColumns>(tiles.size(t), vectors)(tile);
      }
    }
  }
}

// The transpose of G along one axis.
template <typename T>
inline void taps_of_points(const Vector<T> (&u)[4], Vector<T> (&g)[3]) {
  const Vector<T> outer = broadcast(T(0.5)) * (u[1] + u[2]);
  g[0] = u[0] + outer;
  g[1] = broadcast(T(0.5)) * (u[1] - u[2]);
  g[2] = outer + u[3];
}

template <typename T>
void winograd_taps(const WinogradTaps<T>& task) {
  const Panels<T> panels(task.columns);
  const std::size_t point_size = odd_lines<T>(task.channels * panels.width(0));
  for (std::size_t panel = 0; panel < panels.count(); ++panel) {
    const std::size_t width = panels.width(panel);
    const T* from = task.sums + panel * kWinogradPoints * point_size;
    T* to = task.taps + panels.begin(panel) * kWinogradTaps * (task.end - task.begin);
    for (std::size_t at = task.begin * width; at < task.end * width; at += width, to += kWinogradTaps * width) {
      for (std::size_t lane = 0; lane < width; lane += kLanes<T>) {
        Vector<T> half[3][4];
#pragma GCC unroll 4
        for (std::size_t j = 0; j < 4; ++j) {
          Vector<T> u[4], g[3];
#pragma GCC unroll 4
          for (std::size_t i = 0; i < 4; ++i) u[i] = load(from + (i * 4 + j) * point_size + at + lane);
          taps_of_points<T>(u, g);
#pragma GCC unroll 3
          for (std::size_t i = 0; i < 3; ++i) half[i][j] = g[i];
        }
#pragma GCC unroll 3
        for (std::size_t i = 0; i < 3; ++i) {
          Vector<T> g[3];
          taps_of_points<T>(half[i], g);
#pragma GCC unroll 3
          for (std::size_t j = 0; j < 3; ++j) store(to + task.order[i * 3 + j] * width + lane, g[j]);
        }
      }
    }
  }
}

}  // namespace
}  // namespace onnxtrain
