// Weights of a few bits as numbers, arranged for products as soon as they are made: no more of them than a block of the
// depth exists at a time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "products/matrix_tile.h"
#include "products/table.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

template <std::size_t bits>
inline std::uint8_t integer_at(const std::uint8_t* packed, std::size_t place) {
  constexpr std::size_t kPerByte = 8 / bits, kMask = (1u << bits) - 1;
  return static_cast<std::uint8_t>(packed[place / kPerByte] >> (place % kPerByte * bits) & kMask);
}

template <typename T, std::size_t bits>
inline T zero_point(const FewBits<T>& w, std::size_t row, std::size_t block) {
  if (w.zeros != nullptr) return w.zeros[row * w.blocks + block];
  if (w.packed_zeros == nullptr) return T(1u << (bits - 1));
  const std::size_t row_bytes = (w.blocks * bits + 7) / 8;
  return T(integer_at<bits>(w.packed_zeros + row * row_bytes, block));
}

// Elements [column, column + count) of a row.
template <typename T, std::size_t bits>
void dequantize(const FewBits<T>& w, std::size_t row, std::size_t column, std::size_t count, T* target) {
  constexpr std::size_t kPerByte = 8 / bits;
  const std::size_t block_bytes = w.block / kPerByte;
  while (count != 0) {
    const std::size_t block = column / w.block, first = column % w.block;
    const std::size_t taken = std::min(count, w.block - first);
    const std::uint8_t* packed = w.integers + (row * w.blocks + block) * block_bytes;
    const T scale = w.scales[row * w.blocks + block], zero = zero_point<T, bits>(w, row, block);
    std::size_t i = 0;
    if (first % kPerByte == 0) {
      const std::uint8_t* bytes = packed + first / kPerByte;
      for (std::size_t byte = 0; i + kPerByte <= taken; ++byte, i += kPerByte) {
#pragma GCC unroll 4
        for (std::size_t j = 0; j < kPerByte; ++j) {
          const auto integer = static_cast<int>(bytes[byte] >> (j * bits) & ((1u << bits) - 1));
          target[i + j] = (static_cast<T>(integer) - zero) * scale;
        }
      }
    }
    for (; i < taken; ++i) target[i] = (T(integer_at<bits>(packed, first + i)) - zero) * scale;
    target += taken;
    column += taken;
    count -= taken;
  }
}

template <typename T, std::size_t bits>
void pack_few_bits_of(const FewBits<T>& w, std::size_t first_row, std::size_t depth, std::size_t first_column,
                      std::size_t columns, T* packed) {
  const Panels<T> panels(columns);
  for (std::size_t panel = 0; panel < panels.count(); ++panel) {
    const std::size_t column = panels.begin(panel), width = panels.width(panel);
    const std::size_t valid = std::min(columns - column, width);
    T* to = packed + column * depth;
    for (std::size_t k = 0; k < depth; ++k, to += width) {
      dequantize<T, bits>(w, first_row + k, first_column + column, valid, to);
      fill_zero(to + valid, width - valid);
    }
  }
}

// The same of the transposed matrix: rows [first_row, ...) are its columns, which lie side by side in memory.
template <typename T, std::size_t bits>
void pack_transposed_few_bits_of(const FewBits<T>& w, std::size_t first_row, std::size_t depth,
                                 std::size_t first_column, std::size_t columns, T* packed) {
  constexpr std::size_t lanes = kLanes<T>, kLength = (tuning::kProductDepth + lanes - 1) / lanes * lanes;
  alignas(kVectorBytes) T numbers[lanes * kLength];
  const Panels<T> panels(columns);
  for (std::size_t panel = 0; panel < panels.count(); ++panel) {
    const std::size_t column = panels.begin(panel), width = panels.width(panel);
    T* to = packed + column * depth;
    for (std::size_t j = 0; j < width; j += lanes, to += lanes) {
      const std::size_t valid = column + j < columns ? std::min(columns - column - j, lanes) : 0;
      for (std::size_t i = 0; i < valid; ++i) {
        dequantize<T, bits>(w, first_column + column + j + i, first_row, depth, numbers + i * kLength);
      }
      for (std::size_t k = 0; k < depth; k += lanes) {
        Vector<T> square[lanes];
#pragma GCC unroll 16
        for (std::size_t i = 0; i < lanes; ++i) {
          square[i] = i < valid ? load(numbers + i * kLength + k) : Vector<T>{};
        }
        transpose_in_registers<T>(square);
        const std::size_t rows = std::min(depth - k, lanes);
        for (std::size_t i = 0; i < rows; ++i) store(to + (k + i) * width, square[i]);
      }
    }
  }
}

// Rows [first_row, first_row + depth) from column `first_column` on, as panels; the last is filled up with zeros.
template <typename T>
void pack_few_bits(const FewBits<T>& w, std::size_t first_row, std::size_t depth, std::size_t first_column,
                   std::size_t columns, T* packed) {
  const auto choose = [&](auto two, auto four, auto eight) { return w.bits == 2 ? two : w.bits == 4 ? four : eight; };
  const auto pack = w.transposed ? choose(pack_transposed_few_bits_of<T, 2>, pack_transposed_few_bits_of<T, 4>,
                                          pack_transposed_few_bits_of<T, 8>)
                                 : choose(pack_few_bits_of<T, 2>, pack_few_bits_of<T, 4>, pack_few_bits_of<T, 8>);
  pack(w, first_row, depth, first_column, columns, packed);
}

}  // namespace
}  // namespace onnxtrain
