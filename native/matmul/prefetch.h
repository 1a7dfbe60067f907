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

// Lines that are read after the current ones, prefetched in parts: as many bytes for each depth element of the tiles
// that are multiplied before, of which there are `steps` in all.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const Lines& lines, std::size_t steps) : lines_(lines) {
    if (lines.stride == static_cast<std::ptrdiff_t>(lines.length)) {  // they are one line
      lines_.length *= lines_.count;
      lines_.count = 1;
    }
    step_ = steps == 0 ? 0 : divided_up(size(), steps);
  }

  // Sets the part of a tile of that depth, to be prefetched while it is multiplied. Returns false if there is none; a
  // part of more than a cache line for each depth element is prefetched now.
  bool takes(std::size_t depth, Stream& stream) {
    if (at_ >= size()) return false;
    if (step_ > kLineBytes) {
      fetch(depth);
      return false;
    }
    stream = {address(at_), step_, lines_.length - at_ % lines_.length, lines_.length,
              lines_.stride - static_cast<std::ptrdiff_t>(lines_.length)};
    at_ += depth * step_;
    return true;
  }

  // Prefetches the part of a tile of that depth now, into the L2 cache.
  void fetch(std::size_t depth) {
    const std::size_t end = std::min(size(), at_ + depth * step_);
    while (at_ < end) {
      const std::size_t line_end = std::min(end, (at_ / lines_.length + 1) * lines_.length);
      const char* from = address(at_);
      for (std::size_t i = 0; i < line_end - at_; i += kLineBytes) __builtin_prefetch(from + i, 0, 2);
      at_ = line_end;
    }
  }

 private:
  std::size_t size() const { return lines_.count * lines_.length; }
  const char* address(std::size_t at) const {
    return lines_.first + static_cast<std::ptrdiff_t>(at / lines_.length) * lines_.stride + at % lines_.length;
  }

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
