// Prefetching of the next operands during a multiplication, while memory would be idle.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/padding.h"
#include "matmul/matrix_tile.h"
#include "matmul/table.h"
#include "sizes.h"

namespace onnxtrain {
namespace {

// Lines of a matrix in memory, with a stride in bytes.
struct Lines {
  const char* first;
  std::size_t count, length;
  std::ptrdiff_t stride;
};

// Lines that are read after the current ones, prefetched into the L2 cache in parts, one before each tile.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const Lines& lines, std::size_t parts) : lines_(lines), part_(divided_up(lines.count * lines.length, parts)) {}

  void fetch() {
    for (std::size_t left = part_; left != 0 && lines_.count != 0;) {
      const std::size_t end = at_ + std::min(left, lines_.length - at_);
      left -= end - at_;
      for (; at_ < end; at_ += std::min(kLineBytes, end - at_)) __builtin_prefetch(lines_.first + at_, 0, 2);
      if (at_ < lines_.length) return;
      at_ = 0;
      lines_.first += lines_.stride;
      --lines_.count;
    }
  }

 private:
  Lines lines_ = {};
  std::size_t part_ = 0, at_ = 0;  // `at_` within the first line
};

// Lines that are read after the current ones, prefetched while tiles multiply: the same number of bytes at each depth
// element, of which there are `steps` in all.
class Spread {
 public:
  Spread() = default;
  Spread(const Lines& lines, std::size_t steps) : lines_(lines), step_(divided_up(lines.count * lines.length, steps)) {
    if (lines.stride != static_cast<std::ptrdiff_t>(lines.length)) return;
    lines_.length *= lines_.count;  // they are one line
    lines_.count = 1;
  }

  // Sets the share of a tile of that depth. Returns whether there is one.
  bool takes(std::size_t depth, Stream& stream) {
    if (at_ >= lines_.count * lines_.length) return false;
    const std::size_t line = at_ / lines_.length, within = at_ % lines_.length;
    stream = {lines_.first + static_cast<std::ptrdiff_t>(line) * lines_.stride + within, step_, lines_.length - within,
              lines_.length, lines_.stride - static_cast<std::ptrdiff_t>(lines_.length)};
    at_ += depth * step_;
    return true;
  }

 private:
  Lines lines_ = {};
  std::size_t step_ = 0, at_ = 0;
};

template <typename T>
Lines lines_of(const T* first, std::size_t count, std::size_t length, std::ptrdiff_t stride) {
  return {reinterpret_cast<const char*>(first), count, length * sizeof(T),
          stride * static_cast<std::ptrdiff_t>(sizeof(T))};
}

// Rows of a matrix from `row` on, restricted to these columns from `column` on.
struct MatrixPart {
  std::size_t row, rows, column, columns;

  // Of a matrix stored in lines, which are its rows or, if transposed, its columns.
  Lines lines(const void* data, std::size_t bits, std::size_t line_bytes, bool transposed) const {
    const std::size_t line = transposed ? column : row, element = transposed ? row : column;
    const char* first = static_cast<const char*>(data) + line * line_bytes + element * bits / 8;
    return {first, transposed ? columns : rows, (transposed ? rows : columns) * bits / 8,
            static_cast<std::ptrdiff_t>(line_bytes)};
  }

  template <typename T>
  Lines lines(const LowBit<T>& w) const {
    return lines(w.integers, w.bits, w.blocks * w.block * w.bits / 8, w.transposed);
  }
};

}  // namespace
}  // namespace onnxtrain
