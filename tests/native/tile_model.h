// The tile instructions of AMX in plain C++, as Intel's manual defines them: included before the kernels, which then run
// on CPUs without AMX. Tiles are 16 rows of 64 bytes, as the kernels configure them.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tile_model {

inline constexpr std::size_t kRows = 16, kPairs = 16;

union Tile {
  std::uint32_t pairs[kRows][kPairs];
  float sums[kRows][kPairs];
};

inline Tile tiles[8];

inline void load(std::size_t tile, const void* from, std::size_t bytes) {
  for (std::size_t row = 0; row < kRows; ++row) {
    std::memcpy(tiles[tile].pairs[row], static_cast<const char*>(from) + row * bytes, sizeof tiles[tile].pairs[row]);
  }
}

inline void store(std::size_t tile, void* to, std::size_t bytes) {
  for (std::size_t row = 0; row < kRows; ++row) {
    std::memcpy(static_cast<char*>(to) + row * bytes, tiles[tile].sums[row], sizeof tiles[tile].sums[row]);
  }
}

inline float widened(std::uint32_t upper_half) {
  float value;
  std::memcpy(&value, &upper_half, sizeof value);
  return value;
}

// The products of the lower and of the upper halves of the pairs are added up apart, then both to the sum.
inline void multiply(std::size_t sums, std::size_t left, std::size_t right) {
  for (std::size_t row = 0; row < kRows; ++row) {
    for (std::size_t column = 0; column < kPairs; ++column) {
      float lower = 0.0f, upper = 0.0f;
      for (std::size_t k = 0; k < kPairs; ++k) {
        const std::uint32_t a = tiles[left].pairs[row][k], b = tiles[right].pairs[k][column];
        lower = __builtin_fmaf(widened(a << 16), widened(b << 16), lower);
        upper = __builtin_fmaf(widened(a & 0xffff0000u), widened(b & 0xffff0000u), upper);
      }
      tiles[sums].sums[row][column] += lower + upper;
    }
  }
}

}  // namespace tile_model

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(shapes) static_cast<void>(shapes)
#define _tile_release() static_cast<void>(0)
#define _tile_loadd(tile, from, bytes) tile_model::load(tile, from, bytes)
#define _tile_stored(tile, to, bytes) tile_model::store(tile, to, bytes)
#define _tile_zero(tile) std::memset(&tile_model::tiles[tile], 0, sizeof(tile_model::Tile))
#define _tile_dpbf16ps(sums, left, right) tile_model::multiply(sums, left, right)
