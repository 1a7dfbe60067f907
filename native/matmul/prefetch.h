// Prefetching of the next operands during a multiplication, while memory would be idle.
#pragma once

#include <cstddef>

#include "matmul/matrix_tile.h"
#include "matmul/table.h"

namespace onnxtrain {
namespace {

// Lines of a matrix in memory, with a stride in bytes.
struct Lines {
  const char* first;
  std::size_t count, length;
  std::ptrdiff_t stride;
};

// Lines that are read after the current ones, prefetched in parts.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const Lines& lines, std::size_t parts)
      : lines_(lines), part_((lines.count * lines.length + parts - 1) / parts) {}

  // Returns the next part, for a tile with this many depth elements; `otherwise` once everything is fetched.
  Stream next(const void* otherwise, std::size_t depth) {
    if (lines_.count == 0 || part_ == 0) return {static_cast<const char*>(otherwise)};
    const Stream result = {lines_.first + at_, (part_ + depth - 1) / depth, lines_.length - at_, lines_.length,
                           lines_.stride - static_cast<std::ptrdiff_t>(lines_.length)};
    for (at_ += part_; lines_.count != 0 && at_ >= lines_.length; at_ -= lines_.length, --lines_.count) {
      lines_.first += lines_.stride;
    }
    return result;
  }

 private:
  Lines lines_ = {};
  std::size_t part_ = 0, at_ = 0;  // `at_` within the first line
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
