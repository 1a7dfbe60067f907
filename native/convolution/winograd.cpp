// 3 x 3 correlations in tiles of 2 x 2 positions, with 16 multiplications each instead of 36.
#include <algorithm>

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
  if (c_.group != 1 || c_.kernel[0] != 1 || c_.input[0] != 1 || c_.output[0] != 1) return false;
  for (int axis = 1; axis < kAxes; ++axis) {
    if (c_.kernel[axis] != static_cast<std::ptrdiff_t>(kElements) || c_.stride[axis] != 1 || c_.dilation[axis] != 1) {
      return false;
    }
  }
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
  std::size_t order[kWinogradTaps];
  for (std::size_t tap = 0; tap < kWinogradTaps; ++tap) {
    const Index& offset = phase.taps[tap].offset;
    const std::ptrdiff_t index = (offset[1] - grid.lowest[1]) * static_cast<std::ptrdiff_t>(kElements) + offset[2] -
                                 grid.lowest[2];
    order[index] = tap;
  }
  const std::ptrdiff_t plane = p.source.plane(), image = p.source.image();
  const std::size_t row_stride = kernels_.winograd_stride(channels);
  const std::size_t point_stride = checked_product(tiles.most_tiles(), row_stride);
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
                                   offsets.data(), order, p.columns, channels, task / pieces, piece * channels / pieces,
                                   (piece + 1) * channels / pieces, weights.as<T>(), buffer.as<T>()});
      } else {
        transform(task - packs, sources.as<T>() + (task - packs) * kWinogradPoints * point_stride, buffer.as<T>());
      }
    });
  });

  const std::ptrdiff_t target_plane = product(p.target_size);
  const std::size_t most_panels = divided_up(panels, splits);
  const std::size_t strip = TilePositions::rows_of_strip(tiles) * tiles.in_row;
  const std::size_t sums_size =
      checked_product(kWinogradPoints, tiles.most_tiles(), std::min(most_panels * kMostColumns, padded_columns));
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

#define ONNXTRAIN_WINOGRAD(T)                                                             \
  template bool ConvolutionProducts<T>::prefers_winograd(const PlaneCorrelation<T>&, std::size_t) const; \
  template void ConvolutionProducts<T>::winograd(const PlaneCorrelation<T>&) const;
ONNXTRAIN_WINOGRAD(float)
ONNXTRAIN_WINOGRAD(double)

}  // namespace onnxtrain
