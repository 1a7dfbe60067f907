// 3 x 3 correlations, and gradients of their weights, in tiles of 2 x 2 positions, with 16 multiplications each instead
// of 36.
#include <algorithm>
#include <array>

#include "cache.h"
#include "convolution/products.h"
#include "scratch.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

constexpr std::size_t kElements = 3;  // kernel size along an axis

// Of a panel.
constexpr std::size_t kMostColumns = 64;

// The tiles of a batch; a row of an image's tiles is never split.
struct TileGrid {
  std::size_t rows, in_row, all_rows;     // rows per image, tiles per row, and rows of all images
  std::size_t rows_of_block, block_count;

  TileGrid(const Index& size, std::size_t batch)
      : rows(divided_up(static_cast<std::size_t>(size[1]), 2)),
        in_row(divided_up(static_cast<std::size_t>(size[2]), 2)),
        all_rows(batch * rows),
        rows_of_block(std::max<std::size_t>(1, tuning::kWinogradBlock / in_row)),
        block_count(divided_up(all_rows, rows_of_block)) {}

  std::size_t tiles() const { return all_rows * in_row; }
  // Chunks of a weight gradient whose columns are so many panels.
  std::size_t gradient_chunks(std::size_t panels) const {
    const std::size_t short_ones = std::min(tuning::kWinogradTasks / panels, 2 * tiles() / tuning::kWinogradChunk);
    const std::size_t wanted = std::max(tiles() / tuning::kWinogradChunk, short_ones);
    return std::clamp<std::size_t>(wanted, 1, std::min(all_rows, tuning::kProductTasks));
  }
  std::size_t begin(std::size_t block) const { return block * all_rows / block_count; }
  std::size_t most_tiles() const { return divided_up(all_rows, block_count) * in_row; }
};

// The positions of rows of tiles [first, last), strip by strip.
struct TilePositions {
  std::vector<WinogradStrip> strips;
  std::vector<std::ptrdiff_t> offsets;  // in the target
  std::vector<std::size_t> rows;        // index of tile and position within the strip

  TilePositions(const TileGrid& grid, std::size_t first, std::size_t last, const Index& size,
                std::ptrdiff_t target_image) {
    const std::size_t at_once = rows_of_strip(grid);
    for (std::size_t begin = first; begin < last; begin += at_once) {
      const std::size_t end = std::min(last, begin + at_once), before = offsets.size();
      for (std::size_t tile_row = begin; tile_row < end; ++tile_row) {
        const auto image = static_cast<std::ptrdiff_t>(tile_row / grid.rows);
        const auto top = static_cast<std::ptrdiff_t>(tile_row % grid.rows) * 2;
        for (std::ptrdiff_t h = top; h < std::min(top + 2, size[1]); ++h) {
          for (std::ptrdiff_t w = 0; w < size[2]; ++w) {
            offsets.push_back(image * target_image + h * size[2] + w);
            const std::size_t tile = (tile_row - begin) * grid.in_row + static_cast<std::size_t>(w / 2);
            rows.push_back(tile * 4 + static_cast<std::size_t>(h % 2 * 2 + w % 2));
          }
        }
      }
      strips.push_back({(begin - first) * grid.in_row, (end - begin) * grid.in_row, before, offsets.size() - before});
    }
  }

  static std::size_t rows_of_strip(const TileGrid& grid) {
    return std::max<std::size_t>(1, tuning::kWinogradStrip / grid.in_row);
  }
};

// Whether a convolution is one of adjacent 3 x 3 elements with adjacent positions.
bool has_tiles(const Convolution& c) {
  if (c.group != 1 || c.kernel[0] != 1 || c.input[0] != 1 || c.output[0] != 1) return false;
  for (int axis = 1; axis < kAxes; ++axis) {
    if (c.kernel[axis] != static_cast<std::ptrdiff_t>(kElements) || c.stride[axis] != 1 || c.dilation[axis] != 1) {
      return false;
    }
  }
  return true;
}

// Index of the tap for each element, row by row.
std::array<std::size_t, kWinogradTaps> order_of(const std::vector<Tap>& taps, const Index& lowest) {
  std::array<std::size_t, kWinogradTaps> order = {};
  for (std::size_t tap = 0; tap < kWinogradTaps; ++tap) {
    const Index& offset = taps[tap].offset;
    order[static_cast<std::size_t>((offset[1] - lowest[1]) * static_cast<std::ptrdiff_t>(kElements) + offset[2] -
                                   lowest[2])] = tap;
  }
  return order;
}

// Number of taps that read the plane rather than its padding, along an axis.
std::ptrdiff_t reads_inside(const Phase& phase, int axis, std::ptrdiff_t lowest, std::ptrdiff_t source_size) {
  std::ptrdiff_t count = 0;
  for (std::ptrdiff_t at = lowest; at < lowest + static_cast<std::ptrdiff_t>(kElements); ++at) {
    for (std::ptrdiff_t q = 0; q < phase.size[axis]; ++q) count += q + at >= 0 && q + at < source_size;
  }
  return count;
}

}  // namespace

// Cost of both methods in multiplications: transforming a weight (beyond the other method's packing), and reading or
// writing an element of a tile.
template <typename T>
bool ConvolutionProducts<T>::prefers_winograd(const PlaneCorrelation<T>& p, std::size_t images) const {
  if (!has_tiles(c_)) return false;
  if (c_.outputs == 0 || product(p.source.size) == 0) return false;
  const Phase& phase = p.phases[0];
  const Grid grid = grid_of(p.phases);
  const TileGrid tiles(phase.size, images);
  const auto count = static_cast<double>(tiles.all_rows * tiles.in_row);
  const auto channels = static_cast<double>(p.source.channels), columns = static_cast<double>(p.columns);
  const auto padded_columns = static_cast<double>(rounded_up(p.columns, kernels_.lanes));
  const double inside = static_cast<double>(images) *
                        static_cast<double>(reads_inside(phase, 1, grid.lowest[1], p.source.size[1])) *
                        static_cast<double>(reads_inside(phase, 2, grid.lowest[2], p.source.size[2]));
  const double by_tiles =
      (count * static_cast<double>(kWinogradPoints) + tuning::kWinogradWeight) * channels * padded_columns +
      tuning::kWinogradTile * count * (channels + columns);
  return by_tiles < tuning::kWinogradWorthIt * inside * channels * columns;
}

template <typename T>
void ConvolutionProducts<T>::winograd(const PlaneCorrelation<T>& p) const {
  const Phase& phase = p.phases[0];
  const Grid grid = grid_of(p.phases);
  const TileGrid tiles(phase.size, c_.batch);
  const std::size_t channels = p.source.channels, panels = kernels_.panels(p.columns);
  const std::size_t padded_columns = rounded_up(p.columns, kernels_.lanes);
  const std::size_t splits = std::clamp<std::size_t>(tuning::kProductTasks / tiles.block_count, 1, panels);
  const bool shared = splits > 1;

  // The weights, and the source where several tasks read the same part.
  const std::vector<std::ptrdiff_t> offsets = weight_offsets_of(phase.taps, channels, p.weights.channel_stride);
  const auto order = order_of(phase.taps, grid.lowest);
  const std::ptrdiff_t plane = p.source.plane(), image = p.source.image();
  const std::size_t row_stride = kernels_.winograd_stride(channels);
  const std::size_t point_stride = kernels_.winograd_stride(checked_product(tiles.most_tiles(), row_stride));
  const std::size_t most_pixels =
      static_cast<std::size_t>(std::min(p.source.size[1], 2 * static_cast<std::ptrdiff_t>(tiles.rows_of_block) + 2) *
                               p.source.size[2]);
  const auto ones = multiples(1, std::max(most_pixels, channels));
  const Buffer weights(checked_product(kWinogradPoints, channels, padded_columns, sizeof(T)));
  const Buffer sources(shared ? checked_product(tiles.block_count, kWinogradPoints, point_stride, sizeof(T)) : 0);
  const auto transform = [&](std::size_t block, T* points, T* scratch) {
    kernels_.winograd_source({p.source.data, p.source.data + static_cast<std::ptrdiff_t>(c_.batch) * image, plane,
                              image, {p.source.size[1], p.source.size[2]}, {grid.lowest[1], grid.lowest[2]},
                              tiles.rows, tiles.in_row, tiles.begin(block), tiles.begin(block + 1), channels,
                              ones.data(), points, row_stride, point_stride, scratch});
  };
  const std::size_t pieces = divided_up(channels, tuning::kWinogradPack), packs = panels * pieces;
  BufferPool arranging(
      checked_product(std::max(tuning::kWinogradPack * kWinogradTaps, most_pixels), kMostColumns, sizeof(T)));
  parallel_for_(packs + (shared ? tiles.block_count : 0), [&](std::size_t task) {
    arranging.lend([&](const Buffer& buffer) {
      if (task < packs) {
        const std::size_t piece = task % pieces;
        kernels_.winograd_weights({p.weights.data, p.weights.data + weight_count(), p.weights.column_stride,
                                   offsets.data(), order.data(), p.columns, channels, task / pieces,
                                   piece * channels / pieces, (piece + 1) * channels / pieces, weights.as<T>(),
                                   buffer.as<T>()});
      } else {
        transform(task - packs, sources.as<T>() + (task - packs) * kWinogradPoints * point_stride, buffer.as<T>());
      }
    });
  });

  const std::ptrdiff_t target_plane = product(p.target_size);
  const std::size_t most_panels = divided_up(panels, splits);
  const std::size_t strip = TilePositions::rows_of_strip(tiles) * tiles.in_row;
  const std::size_t widest = divided_up(padded_columns / kernels_.lanes, panels) * kernels_.lanes;
  const std::size_t sums_size = checked_product(
      most_panels, kWinogradPoints, kernels_.winograd_stride(checked_product(tiles.most_tiles(), widest)));
  const std::size_t results_size = checked_product(std::max(strip * 4, shared ? 0 : most_pixels), kMostColumns);
  const std::size_t source_size = shared ? 0 : checked_product(kWinogradPoints, point_stride);
  BufferPool pool(checked_product(checked_sum(sums_size, results_size, source_size), sizeof(T)));
  parallel_for_(tiles.block_count * splits, [&](std::size_t task) {
    const std::size_t split = task / tiles.block_count, block = task % tiles.block_count;
    const std::size_t first = tiles.begin(block), last = tiles.begin(block + 1);
    const TilePositions positions(tiles, first, last, p.target_size,
                                  target_plane * static_cast<std::ptrdiff_t>(p.columns));
    pool.lend([&](const Buffer& buffer) {
      T *sums = buffer.as<T>(), *results = sums + sums_size, *source = results + results_size;
      if (shared) {
        source = sources.as<T>() + block * kWinogradPoints * point_stride;
      } else {
        transform(block, source, results);
      }
      kernels_.winograd_products({source, (last - first) * tiles.in_row, row_stride, point_stride, ones.data(),
                                  channels, p.columns, split * panels / splits, (split + 1) * panels / splits,
                                  weights.as<T>(), sums, positions.strips.data(), positions.strips.size(), results,
                                  p.target, positions.offsets.data(), positions.rows.data(), target_plane,
                                  p.weights.bias});
    });
  });
}

// Multiplications of rows with columns, idle lanes included, and with the time that a single vector of columns waits.
template <typename T>
double ConvolutionProducts<T>::cost_of(std::size_t rows, std::size_t columns) const {
  const std::size_t padded = rounded_up(columns, kernels_.lanes);
  const double wait = padded == kernels_.lanes ? tuning::kLonelyVector : 1.0;
  return wait * static_cast<double>(rows) * static_cast<double>(padded);
}

template <typename T>
bool ConvolutionProducts<T>::prefers_winograd(const PlaneProducts<T>& p) const {
  if (!has_tiles(c_)) return false;
  const TileGrid grid(p.grid.size, c_.batch);
  const std::size_t channels = p.source.channels, columns = p.columns.channels;
  const double of_tile = std::min(cost_of(channels, columns), cost_of(columns, channels));
  const auto tiles = static_cast<double>(grid.tiles());
  const auto chunks = static_cast<double>(grid.gradient_chunks(kernels_.panels(columns)));
  const double by_tiles = (tiles * static_cast<double>(kWinogradPoints) + tuning::kWinogradSum * chunks) * of_tile +
                          tuning::kWinogradGradientTile * tiles * static_cast<double>(channels + columns);
  const double positions = static_cast<double>(c_.batch) * static_cast<double>(product(p.grid.size));
  const double directly = positions * static_cast<double>(kWinogradTaps) * cost_of(channels, columns);
  return by_tiles < tuning::kWinogradWorthIt * directly;
}

// Chunks of rows of tiles have sums of their own, whose taps are added in order at the end. With few chunks the columns
// are split among tasks as well, which then share the transformed rows.
template <typename T>
void ConvolutionProducts<T>::winograd_gradient(const PlaneProducts<T>& p) const {
  // Columns are those of the result, or of x where that leaves fewer lanes idle.
  struct Operand {
    const Planes<T>& planes;
    void (*transform)(const WinogradSource<T>&);
    Index start;
  };
  const Operand x = {p.source, kernels_.winograd_source, p.grid.lowest};
  const Operand dy = {p.columns, kernels_.winograd_factors, {0, 0, 0}};
  const bool turned = cost_of(dy.planes.channels, x.planes.channels) < cost_of(x.planes.channels, dy.planes.channels);
  const Operand &left = turned ? dy : x, &right = turned ? x : dy;
  const std::size_t rows = left.planes.channels, columns = right.planes.channels, lanes = kernels_.lanes;
  const std::ptrdiff_t of_channel = static_cast<std::ptrdiff_t>(kWinogradTaps) * p.row_stride;
  const std::ptrdiff_t row_stride = turned ? p.column_stride : of_channel;
  const std::ptrdiff_t column_stride = turned ? of_channel : p.column_stride;

  const TileGrid grid(p.grid.size, c_.batch);
  const std::size_t vectors = divided_up(columns, lanes), panels = kernels_.panels(columns);
  const std::size_t in_panel = divided_up(vectors, panels), chunks = grid.gradient_chunks(panels);
  const std::size_t splits = std::clamp<std::size_t>(tuning::kProductTasks / 2 / chunks, 1, panels);
  // Its first lane: parts of whole panels leave no vector alone.
  const auto lane_of = [&](std::size_t split) { return std::min(vectors, split * panels / splits * in_panel) * lanes; };
  const auto columns_of = [&](std::size_t split) { return std::min(columns, lane_of(split + 1)) - lane_of(split); };
  const std::size_t most_columns = divided_up(panels, splits) * in_panel * lanes;
  const std::size_t left_stride = kernels_.winograd_stride(rows), right_stride = kernels_.winograd_stride(most_columns);
  const std::size_t bytes_of_tile = kWinogradPoints * (left_stride + right_stride) * sizeof(T);
  const std::size_t at_once =
      std::max(share_of_second_cache(tuning::kWinogradShare) / bytes_of_tile, tuning::kLeastWinogradTiles);
  const std::size_t rows_at_once = std::clamp<std::size_t>(at_once / grid.in_row, 1, divided_up(grid.all_rows, chunks));
  const std::size_t most_tiles = rows_at_once * grid.in_row;
  const std::size_t most_pixels =
      (2 * rows_at_once + 2) * static_cast<std::size_t>(std::max(p.source.size[2], p.columns.size[2]));
  const auto ones = multiples(1, most_pixels);
  const auto transform = [&](const Operand& operand, std::size_t channel, std::size_t count, std::size_t first,
                             std::size_t last, T* target, std::size_t stride, std::size_t point_stride, T* scratch) {
    const Planes<T>& planes = operand.planes;
    operand.transform({planes.data + static_cast<std::ptrdiff_t>(channel) * planes.plane(),
                       planes.data + static_cast<std::ptrdiff_t>(c_.batch) * planes.image(), planes.plane(),
                       planes.image(), {planes.size[1], planes.size[2]}, {operand.start[1], operand.start[2]},
                       grid.rows, grid.in_row, first, last, count, ones.data(), target, stride, point_stride,
                       scratch});
  };

  const bool shared = splits > 1;
  const std::size_t scratch_size = checked_product(most_pixels, kMostColumns);
  const std::size_t left_tiles = shared ? grid.tiles() : most_tiles;
  const std::size_t left_points = kernels_.winograd_stride(checked_product(left_tiles, left_stride));
  const std::size_t right_points = kernels_.winograd_stride(checked_product(most_tiles, right_stride));
  const Buffer lefts(shared ? checked_product(kWinogradPoints, left_points, sizeof(T)) : 0);
  if (shared) {
    BufferPool arranging(scratch_size * sizeof(T));
    parallel_for_(divided_up(grid.all_rows, rows_at_once), [&](std::size_t task) {
      const std::size_t first = task * rows_at_once, last = std::min(grid.all_rows, first + rows_at_once);
      arranging.lend([&](const Buffer& buffer) {
        transform(left, 0, rows, first, last, lefts.as<T>() + first * grid.in_row * left_stride, left_stride,
                  left_points, buffer.as<T>());
      });
    });
  }

  const auto order = order_of(p.taps, p.grid.lowest);
  // Ranges whose rows, channels and taps, are evenly apart in the target.
  const std::size_t ranges = turned ? rows : divided_up(rows, tuning::kWinogradPack);
  const std::size_t taps_size = checked_product(kWinogradTaps, rows, vectors * lanes);
  const Buffer taps(checked_product(chunks, taps_size, sizeof(T)));
  const auto taps_of = [&](std::size_t chunk, std::size_t split, std::size_t range) {
    return taps.as<T>() + chunk * taps_size +
           kWinogradTaps * (lane_of(split) * rows + range * rows / ranges * (lane_of(split + 1) - lane_of(split)));
  };
  const std::size_t right_size = checked_product(kWinogradPoints, right_points);
  const std::size_t left_size = shared ? 0 : checked_product(kWinogradPoints, left_points);
  const std::size_t sums_size = checked_product(divided_up(panels, splits), kWinogradPoints,
                                                kernels_.winograd_stride(checked_product(rows, in_panel * lanes)));
  BufferPool pool(checked_product(
      checked_sum(checked_sum(right_size, left_size), checked_sum(sums_size, scratch_size)), sizeof(T)));
  parallel_for_(chunks * splits, [&](std::size_t task) {
    const std::size_t chunk = task / splits, split = task % splits, count = columns_of(split);
    const std::size_t begin = chunk * grid.all_rows / chunks, end = (chunk + 1) * grid.all_rows / chunks;
    pool.lend([&](const Buffer& buffer) {
      T *factors = buffer.as<T>(), *own = factors + right_size, *sums = own + left_size, *scratch = sums + sums_size;
      for (std::size_t first = begin; first < end; first += rows_at_once) {
        const std::size_t last = std::min(end, first + rows_at_once);
        transform(right, lane_of(split), count, first, last, factors, right_stride, right_points, scratch);
        if (!shared) transform(left, 0, rows, first, last, own, left_stride, left_points, scratch);
        kernels_.winograd_gradient({shared ? lefts.as<T>() + first * grid.in_row * left_stride : own, left_stride,
                                    left_points, factors, right_stride, right_points, (last - first) * grid.in_row,
                                    rows, count, first > begin, sums});
      }
      for (std::size_t range = 0; range < ranges; ++range) {
        kernels_.winograd_taps({sums, rows, count, range * rows / ranges, (range + 1) * rows / ranges, order.data(),
                                taps_of(chunk, split, range)});
      }
    });
  });
  add_up(taps.as<T>(), taps_size, chunks);
  parallel_for_(splits * ranges, [&](std::size_t task) {
    const std::size_t split = task / ranges, range = task % ranges;
    const std::size_t first = range * rows / ranges, count = (range + 1) * rows / ranges - first;
    kernels_.unpack({taps_of(0, split, range), count * kWinogradTaps, columns_of(split),
                     p.target + static_cast<std::ptrdiff_t>(first) * row_stride +
                         static_cast<std::ptrdiff_t>(lane_of(split)) * column_stride,
                     p.row_stride, column_stride});
  });
}

#define ONNXTRAIN_WINOGRAD(T)                                                             \
  template bool ConvolutionProducts<T>::prefers_winograd(const PlaneCorrelation<T>&, std::size_t) const; \
  template void ConvolutionProducts<T>::winograd(const PlaneCorrelation<T>&) const;                      \
  template double ConvolutionProducts<T>::cost_of(std::size_t, std::size_t) const;                       \
  template bool ConvolutionProducts<T>::prefers_winograd(const PlaneProducts<T>&) const;                 \
  template void ConvolutionProducts<T>::winograd_gradient(const PlaneProducts<T>&) const;
ONNXTRAIN_WINOGRAD(float)
ONNXTRAIN_WINOGRAD(double)

}  // namespace onnxtrain
