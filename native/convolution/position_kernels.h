// Convolutions with vectors of neighbouring positions: no lane is idle where outputs are few, and no result is
// transposed. Vectors over the outputs (correlation_kernels.h) read each element of the source less often.
#pragma once

#include "convolution/table.h"
#include "matmul/matrix_tile.h"

namespace onnxtrain {
namespace {

// A few outputs of a few vectors of positions.
template <typename T>
struct PositionTile {
  const T* weights;  // at the first output, first of the depth; `line` between elements of the depth
  std::size_t line;
  const T* source;
  const PositionVector* vectors;
  const std::ptrdiff_t* offsets;  // of the depth in the source
  std::size_t depth;
  bool accumulate;  // adds to the contents of `sums`
  T* sums;          // [outputs][vectors * lanes]
};

template <typename T, std::size_t rows, std::size_t vectors>
void multiply_positions(const PositionTile<T>& tile) {
  Vector<T> sum[rows][vectors];
  const T* from[vectors];
#pragma GCC unroll 4
  for (std::size_t v = 0; v < vectors; ++v) from[v] = tile.source + tile.vectors[v].source;
#pragma GCC unroll 8
  for (std::size_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (std::size_t v = 0; v < vectors; ++v) {
      sum[r][v] = tile.accumulate ? load(tile.sums + (r * vectors + v) * kLanes<T>) : Vector<T>{};
    }
  }
  const T* weights = tile.weights;
  for (const std::ptrdiff_t *offset = tile.offsets, *end = offset + tile.depth; offset != end; ++offset) {
    Vector<T> right[vectors];
#pragma GCC unroll 4
    for (std::size_t v = 0; v < vectors; ++v) right[v] = load(from[v] + *offset);
#pragma GCC unroll 8
    for (std::size_t r = 0; r < rows; ++r) {
      const Vector<T> weight = broadcast(weights[r]);
#pragma GCC unroll 4
      for (std::size_t v = 0; v < vectors; ++v) sum[r][v] += weight * right[v];
    }
    weights += tile.line;
  }
#pragma GCC unroll 8
  for (std::size_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (std::size_t v = 0; v < vectors; ++v) store(tile.sums + (r * vectors + v) * kLanes<T>, sum[r][v]);
  }
}

template <typename T>
using MultiplyPositions = void (*)(const PositionTile<T>&);

template <typename T, std::size_t vectors>
inline MultiplyPositions<T> multiply_positions_of_rows(std::size_t rows) {
  constexpr std::size_t most = tile_rows(vectors);
  static constexpr MultiplyPositions<T> kernels[kMaxTileRows] = {
      multiply_positions<T, 1, vectors>,
      multiply_positions<T, 2, vectors>,
      multiply_positions<T, 3, vectors>,
      multiply_positions<T, 4, vectors>,
      multiply_positions<T, 5, vectors>,
      multiply_positions<T, 6, vectors>,
      multiply_positions<T, most < 7 ? 6 : 7, vectors>,
      multiply_positions<T, most < 8 ? 6 : 8, vectors>};
  return kernels[rows - 1];
}

template <typename T>
inline MultiplyPositions<T> multiply_positions_of(std::size_t rows, std::size_t vectors) {
  if constexpr (kMaxTileVectors >= 4) {
    if (vectors == 4) return multiply_positions_of_rows<T, 4>(rows);
    if (vectors == 3) return multiply_positions_of_rows<T, 3>(rows);
  }
  return vectors == 2 ? multiply_positions_of_rows<T, 2>(rows) : multiply_positions_of_rows<T, 1>(rows);
}

// Writes the sums of one output plus its bias to the target.
template <typename T>
inline void write_positions(const PositionCorrelation<T>& task, const PositionVector* vectors, std::size_t count,
                            const T* sums, T bias, T* target) {
  for (std::size_t v = 0; v < count; ++v, sums += kLanes<T>) {
    const PositionRun* run = task.runs + vectors[v].first_run;
    const Vector<T> value = load(sums) + broadcast(bias);
    if (run->count == kLanes<T> && task.run_step == 1) {
      store(target + run->target, value);
      continue;
    }
    T lanes[kLanes<T>];
    store(lanes, value);
    for (const PositionRun* end = task.runs + vectors[v].end_run; run != end; ++run) {
      T* to = target + run->target;
      if (task.run_step == 1) {
        copy(lanes + run->lane, run->count, to);
      } else {
        for (std::size_t i = 0; i < run->count; ++i) {
          to[static_cast<std::ptrdiff_t>(i) * task.run_step] = lanes[run->lane + i];
        }
      }
    }
  }
}

// A chunk of the depth at a time, for all columns of a panel: its source and weights stay in the L1 cache meanwhile.
template <typename T>
void correlate_positions(const PositionCorrelation<T>& task) {
  alignas(kVectorBytes) T sums[kMaxTileColumnBytes / sizeof(T) * kMaxTileColumnBytes / sizeof(T)];
  const Panels<T> panels(task.columns);
  const Parts groups(task.vector_count, kMaxTileVectors), chunks(task.depth, tuning::kPositionDepth);
  for (std::size_t group = 0; group < groups.count; ++group) {
    const PositionVector* vectors = task.vectors + groups.begin(group);
    const std::size_t count = groups.size(group), line = count * kLanes<T>;
    for (std::size_t panel = task.first_panel; panel < task.end_panel; ++panel) {
      const std::size_t first = panels.begin(panel), width = panels.width(panel);
      const std::size_t valid = task.columns - first < width ? task.columns - first : width;
      const Parts tiles(valid, tile_rows(count));
      for (std::size_t chunk = 0; chunk < chunks.count; ++chunk) {
        const std::size_t from = chunks.begin(chunk);
        const T* weights = task.panels + first * task.depth + from * width;
        for (std::size_t t = 0; t < tiles.count; ++t) {
          const std::size_t row = tiles.begin(t);
          multiply_positions_of<T>(tiles.size(t), count)({weights + row, width, task.source, vectors,
                                                          task.depth_offsets + from, chunks.size(chunk), chunk > 0,
                                                          sums + row * line});
        }
      }
      for (std::size_t row = 0; row < valid; ++row) {
        const std::size_t column = first + row;
        write_positions(task, vectors, count, sums + row * line, task.bias == nullptr ? T(0) : task.bias[column],
                        task.target + static_cast<std::ptrdiff_t>(column) * task.column_stride);
      }
    }
  }
}

}  // namespace
}  // namespace onnxtrain
