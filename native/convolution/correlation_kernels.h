// Packing of operands, and matrix multiplication with an indirectly addressed source: convolution without im2col.
#pragma once

#include "convolution/table.h"
#include "matmul/packing.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

template <typename T>
void copy_boxes(const BoxCopy<T>& box) {
  std::ptrdiff_t first[kAxes], last[kAxes];  // part of the box that lies within the plane
  for (int axis = 0; axis < kAxes; ++axis) {
    const std::ptrdiff_t end = box.size[axis] - box.start[axis];
    first[axis] = box.start[axis] < 0 ? (-box.start[axis] < box.extent[axis] ? -box.start[axis] : box.extent[axis]) : 0;
    last[axis] = end < first[axis] ? first[axis] : end < box.extent[axis] ? end : box.extent[axis];
  }
  const std::ptrdiff_t width = box.extent[2], inside = last[2] - first[2];
  for (std::size_t plane = 0; plane < box.planes; ++plane) {
    const T* source = box.source + static_cast<std::ptrdiff_t>(plane) * box.source_stride + box.start[2] + first[2];
    T* target = box.target + static_cast<std::ptrdiff_t>(plane) * box.target_stride;
    for (std::ptrdiff_t d = 0; d < box.extent[0]; ++d) {
      const bool outside = d < first[0] || d >= last[0];
      for (std::ptrdiff_t h = 0; h < box.extent[1]; ++h, target += width) {
        if (outside || h < first[1] || h >= last[1]) {
          fill_zero(target, static_cast<std::size_t>(width));
          continue;
        }
        const std::ptrdiff_t row = ((d + box.start[0]) * box.size[1] + h + box.start[1]) * box.size[2];
        for (std::ptrdiff_t w = 0; w < first[2]; ++w) target[w] = T(0);
        copy(source + row, static_cast<std::size_t>(inside), target + first[2]);
        for (std::ptrdiff_t w = last[2]; w < width; ++w) target[w] = T(0);
      }
    }
  }
}

// Number of consecutive offsets among the first `count`.
inline std::size_t run_length(const std::ptrdiff_t* offsets, std::size_t count) {
  std::size_t run = 1;
  while (run < count && offsets[run] == offsets[0] + static_cast<std::ptrdiff_t>(run)) ++run;
  return run;
}

// Writes sums[sum_rows[row]][width] plus a bias to target[target_offsets[row] + column * column_stride].
template <typename T>
void scatter_transposed(const T* sums, std::size_t rows, std::size_t width, std::size_t columns, T* target,
                        const std::ptrdiff_t* offsets, const std::size_t* sum_rows, std::ptrdiff_t column_stride,
                        const T* bias) {
  constexpr std::size_t lanes = kLanes<T>, kFewInSquare = lanes / 8;
  for (std::size_t row = 0; row < rows;) {
    const std::size_t run = run_length(offsets + row, rows - row < lanes ? rows - row : lanes);
    const bool block = run == lanes;
    // Scattered positions: writes several per column, since columns are far apart.
    const std::size_t step = run > 1 ? run : rows - row < lanes ? rows - row : lanes;
    std::size_t column = 0;
    if (block) {
      for (; column + kFewInSquare < columns; column += lanes) {
        const std::size_t count = columns - column < lanes ? columns - column : lanes;
        Vector<T> square[lanes];
#pragma GCC unroll 16
        for (std::size_t i = 0; i < lanes; ++i) square[i] = load(sums + sum_rows[row + i] * width + column);
        transpose_in_registers<T>(square);
        T* corner = target + offsets[row] + static_cast<std::ptrdiff_t>(column) * column_stride;
#pragma GCC unroll 16
        for (std::size_t i = 0; i < lanes; ++i) {
          if (i == count) break;
          if (bias != nullptr) square[i] += broadcast(bias[column + i]);
          store(corner + static_cast<std::ptrdiff_t>(i) * column_stride, square[i]);
        }
      }
    }
    for (; column < columns; ++column) {
      const T more = bias == nullptr ? T(0) : bias[column];
      T* to = target + static_cast<std::ptrdiff_t>(column) * column_stride;
      for (std::size_t i = row; i < row + step; ++i) to[offsets[i]] = sums[sum_rows[i] * width + column] + more;
    }
    row += step;
  }
}

// Sums of rows [begin, end), all of one class, over one chunk of the depth.
template <typename T>
void correlate_rows(const Correlation<T>& task, const RowClass& row_class, std::size_t begin, std::size_t end,
                    std::size_t chunk, const T* columns, std::size_t vectors, T* sums) {
  const std::size_t width = vectors * kLanes<T>, channels = task.chunks[chunk + 1] - task.chunks[chunk];
  const Parts tiles(end - begin, tile_rows(vectors));
  for (std::size_t t = 0; t < tiles.count; ++t) {
    const std::size_t row = tiles.begin(t), rows = tiles.size(t);
    const T* starts[kMaxTileRows];
    for (std::size_t r = 0; r < rows; ++r) starts[r] = task.source + task.row_offsets[begin + row + r];
    for (std::size_t run = 0; run < row_class.run_count; ++run) {
      const std::size_t first = row_class.runs[2 * run], last = row_class.runs[2 * run + 1];
      const std::size_t depth = task.chunks[chunk] * task.taps + first * channels;
      const Tile<T> tile = {starts, task.depth_offsets + depth, (last - first) * channels, columns + depth * width,
                            chunk + run > 0, sums + row * width, width};
      multiply_of<T>(rows, vectors)(tile);
    }
  }
}

template <typename T>
void correlate(const Correlation<T>& task) {
  alignas(kVectorBytes) T sums[tuning::kStripRows * kMaxTileColumnBytes / sizeof(T)];
  const Panels<T> panels(task.columns);
  for (std::size_t panel = task.first_panel; panel < task.end_panel; ++panel) {
    const std::size_t first = panels.begin(panel), width = panels.width(panel), vectors = panels.vectors(panel);
    const std::size_t valid = task.columns - first < width ? task.columns - first : width;
    const T* columns = task.panels + first * task.depth;
    const RowClass* classes = task.classes;
    for (std::size_t strip = 0; strip < task.rows; strip += tuning::kStripRows) {
      const std::size_t end = task.rows - strip < tuning::kStripRows ? task.rows : strip + tuning::kStripRows;
      const RowClass* row_class = classes;
      for (std::size_t chunk = 0; chunk < task.chunk_count; ++chunk) {
        row_class = classes;
        for (std::size_t row = strip; row < end; row = row_class++->end) {
          T* from = sums + (row - strip) * width;
          if (row_class->run_count == 0) fill_zero(from, (row_class->end - row) * width);
          correlate_rows(task, *row_class, row, row_class->end, chunk, columns, vectors, from);
        }
      }
      classes = row_class;
      T* target = task.target + static_cast<std::ptrdiff_t>(first) * task.column_stride;
      scatter_transposed(sums, end - strip, width, valid, target, task.target_offsets + strip, task.sum_rows + strip,
                         task.column_stride, task.bias == nullptr ? nullptr : task.bias + first);
    }
  }
}

template <typename T>
void accumulate(const Accumulation<T>& task) {
  const Panels<T> panels(task.columns);
  const Parts depths(task.depth, tuning::kAccumulationDepth);
  for (std::size_t part = 0; part < depths.count; ++part) {
    for (std::size_t panel = 0; panel < panels.count(); ++panel) {
      const std::size_t first = panels.begin(panel), width = panels.width(panel), vectors = panels.vectors(panel);
      const T* columns = task.panels + first * task.panel_depth + depths.begin(part) * width;
      T* sums = task.sums + first * task.rows;
      const Parts tiles(task.rows, tile_rows(vectors));
      for (std::size_t t = 0; t < tiles.count; ++t) {
        const std::size_t row = tiles.begin(t), rows = tiles.size(t);
        const T* starts[kMaxTileRows];
        for (std::size_t r = 0; r < rows; ++r) starts[r] = task.source + task.row_offsets[row + r];
        const Tile<T> tile = {starts,  task.depth_offsets + depths.begin(part), depths.size(part), columns,
                              part > 0 || task.accumulate, sums + row * width,  width};
        multiply_of<T>(rows, vectors)(tile);
      }
    }
  }
}

template <typename T>
void unpack(const Unpacking<T>& task) {
  constexpr std::size_t lanes = kLanes<T>;
  const Panels<T> panels(task.columns);
  for (std::size_t panel = 0; panel < panels.count(); ++panel) {
    const std::size_t first = panels.begin(panel), width = panels.width(panel);
    const std::size_t valid = task.columns - first < width ? task.columns - first : width;
    const T* sums = task.sums + first * task.rows;
    T* target = task.target + static_cast<std::ptrdiff_t>(first) * task.column_stride;
    if (task.column_stride == 1) {
      for (std::size_t row = 0; row < task.rows; ++row) {
        copy(sums + row * width, valid, target + static_cast<std::ptrdiff_t>(row) * task.row_stride);
      }
      continue;
    }
    for (std::size_t row = 0; row < task.rows;) {
      const bool block = task.row_stride == 1 && row + lanes <= task.rows;
      const std::size_t step = block ? lanes : 1;
      std::size_t column = 0;
      for (; block && column + lanes <= valid; column += lanes) {
        transpose_block(sums + row * width + column, width,
                        target + row + column * static_cast<std::size_t>(task.column_stride),
                        static_cast<std::size_t>(task.column_stride));
      }
      for (; column < valid; ++column) {
        T* to = target + static_cast<std::ptrdiff_t>(column) * task.column_stride;
        for (std::size_t i = row; i < row + step; ++i) {
          to[static_cast<std::ptrdiff_t>(i) * task.row_stride] = sums[i * width + column];
        }
      }
      row += step;
    }
  }
}

template <typename T>
void add(const T* from, std::size_t count, T* to) {
  for (std::size_t i = 0; i < count; ++i) to[i] += from[i];
}

}  // namespace
}  // namespace onnxtrain
