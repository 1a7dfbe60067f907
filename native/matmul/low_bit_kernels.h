// Low-bit weights, dequantized tile by tile while packing: at most one block of the depth is held as floats.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

#include "matmul/line_packing.h"
#include "matmul/table.h"

namespace onnxtrain {
namespace {

template <std::size_t bits>
inline std::uint8_t integer_at(const std::uint8_t* packed, std::size_t index) {
  constexpr std::size_t kPerByte = 8 / bits, kMask = (1u << bits) - 1;
  return static_cast<std::uint8_t>(packed[index / kPerByte] >> (index % kPerByte * bits) & kMask);
}

template <typename T, std::size_t bits>
inline T zero_point(const LowBit<T>& w, std::size_t row, std::size_t block) {
  if (w.zeros != nullptr) return w.zeros[row * w.blocks + block];
  if (w.packed_zeros == nullptr) return T(1u << (bits - 1));
  const std::size_t row_bytes = (w.blocks * bits + 7) / 8;
  return T(integer_at<bits>(w.packed_zeros + row * row_bytes, block));
}

// As many integers as a vector has lanes, byte-aligned: two in each 64 bits.
template <std::size_t bits>
inline Vector<float> integers_at(const std::uint8_t* packed) {
  constexpr std::uint64_t kMask = (1u << bits) - 1;
  std::uint64_t word = 0;
  __builtin_memcpy(&word, packed, kLanes<float> * bits / 8);
  Vector<std::uint64_t> shifts;
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kLanes<std::uint64_t>; ++i) shifts[i] = 2 * bits * i;
  const Vector<std::uint64_t> pairs = broadcast(word) >> shifts;
  const Vector<std::uint64_t> apart = (pairs & kMask) | (pairs << (32 - bits) & kMask << 32);
  return __builtin_convertvector((Vector<std::int32_t>)apart, Vector<float>);
}

// Elements [column, column + count) of a row.
template <typename T, std::size_t bits>
void dequantize(const LowBit<T>& w, std::size_t row, std::size_t column, std::size_t count, T* target) {
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
      if constexpr (sizeof(T) == sizeof(float) && bits < 8 && std::endian::native == std::endian::little) {
        constexpr std::size_t lanes = kLanes<T>;
        for (; i + lanes <= taken; i += lanes, bytes += lanes / kPerByte) {
          store(target + i, (integers_at<bits>(bytes) - broadcast(zero)) * broadcast(scale));
        }
      }
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

// Packs rows [first_row, first_row + depth) from column `first_column` on into panels; the last one is zero-padded.
template <typename T>
void pack_low_bit(const LowBit<T>& w, std::size_t first_row, std::size_t depth, std::size_t first_column,
                   std::size_t columns, T* packed) {
  const LinesPacking<T> packing = {w.transposed, first_row, depth, first_column, columns, packed};
  const auto of_bits = [&](auto bits) {
    pack_lines(packing, [&](std::size_t line, std::size_t first, std::size_t count, T* to) {
      dequantize<T, decltype(bits)::value>(w, line, first, count, to);
    });
  };
  if (w.bits == 2) return of_bits(std::integral_constant<std::size_t, 2>());
  if (w.bits == 4) return of_bits(std::integral_constant<std::size_t, 4>());
  of_bits(std::integral_constant<std::size_t, 8>());
}

}  // namespace
}  // namespace onnxtrain
