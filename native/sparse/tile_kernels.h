// Tiles of four windows, of which the products are fewer than those of the windows (table.h), and their largest sums.
//
// Vectors go over the tiles of a row, so that a window of each tile is a vector: no lane moves until results are written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/vector.h"
#include "sparse/kernels.h"
#include "sparse/table.h"

namespace onnxtrain {
namespace {

// Two vectors of x from column `first` on, and zeros beside it.
inline void load_columns(const TileRow& row, std::ptrdiff_t first, Vector<float> (&to)[2]) {
  constexpr std::ptrdiff_t count = 2 * kLanes<float>;
  const auto size = static_cast<std::ptrdiff_t>(row.size);
  if (first >= 0 && first + count <= size) {
    to[0] = load(row.x + first);
    to[1] = load(row.x + first + count / 2);
    return;
  }
  float columns[count] = {};
  const std::ptrdiff_t before = first < 0 ? -first : 0, end = size - first < count ? size - first : count;
  if (before < end) copy(row.x + first + before, static_cast<std::size_t>(end - before), columns + before);
  to[0] = load(columns);
  to[1] = load(columns + count / 2);
}

// Column q of tile t, which is x[step * t + q - begin], to columns[q * column_stride + t]: all even columns, then all odd
// ones, and the same of these for each power of 2 in the step. Returns the columns.
inline const float* split_columns(const TileRow& row, std::size_t step) {
  constexpr std::size_t lanes = kLanes<float>;
  const std::size_t half = step / 2 * row.column_stride;
  float *from = row.columns, *to = row.columns + 2 * half;
  for (std::size_t i = 0; i < half; i += lanes) {
    Vector<float> x[2];
    load_columns(row, static_cast<std::ptrdiff_t>(2 * i) - static_cast<std::ptrdiff_t>(row.begin), x);
    store(to + i, every_second(x[0], x[1], false));
    store(to + half + i, every_second(x[0], x[1], true));
  }
  for (std::size_t left = step / 2; left > 1; left /= 2) {
    float* const other = from;
    from = to;
    to = other;
    for (std::size_t i = 0; i < half; i += lanes) {
      const Vector<float> low = load(from + 2 * i), high = load(from + 2 * i + lanes);
      store(to + i, every_second(low, high, false));
      store(to + half + i, every_second(low, high, true));
    }
  }
  return to;
}

// Row p gives the value at point p from the columns of a tile: the coefficients of the product of (z - number) over the
// other numbers and, for infinity, over all.
template <std::size_t taps>
struct TileTransform {
  static constexpr std::size_t kPoints = taps + kTileWindows - 1;
  float of[kPoints][kPoints] = {};

  constexpr TileTransform() {
    for (std::size_t p = 0; p < kPoints; ++p) {
      double product[kPoints] = {1.0};
      for (std::size_t q = 0; q + 1 < kPoints; ++q) {
        if (q == p) continue;
        for (std::size_t i = kPoints - 1; i > 0; --i) product[i] = product[i - 1] - kTileNumbers[q] * product[i];
        product[0] *= -kTileNumbers[q];
      }
      for (std::size_t i = 0; i < kPoints; ++i) of[p][i] = static_cast<float>(product[i]);
    }
  }
};

template <std::size_t taps>
void split_taps(const TileRow& row, const float* given, std::size_t phase, float* to) {
  static constexpr TileTransform<taps> transform;
  constexpr std::size_t points = transform.kPoints;
  const std::size_t step = kTileWindows * row.stride;
  const float* columns[points];
  for (std::size_t i = 0; i < points; ++i) {
    const std::size_t column = row.stride * i + phase;
    columns[i] = column < step ? given + column * row.column_stride : given + (column - step) * row.column_stride + 1;
  }
  for (std::size_t t = 0; t < row.tiles; t += kLanes<float>) {
    Vector<float> x[points];
#pragma GCC unroll 7
    for (std::size_t i = 0; i < points; ++i) x[i] = load(columns[i] + t);
#pragma GCC unroll 7
    for (std::size_t p = 0; p < points; ++p) {
      Vector<float> sum = {};
#pragma GCC unroll 7
      for (std::size_t i = 0; i < points; ++i) {
        if (transform.of[p][i] != 0.0f) sum += transform.of[p][i] * x[i];
      }
      store(to + p * row.to_stride + t, sum);
    }
  }
}

void split_tiles(const TileRow& row) {
  const float* const columns = row.x != nullptr ? split_columns(row, kTileWindows * row.stride) : nullptr;
  float* to = row.to;
  for (std::size_t phase = 0; phase < row.stride && phase < row.kernel; ++phase) {
    const std::size_t taps = (row.kernel - phase + row.stride - 1) / row.stride;
    if (row.x == nullptr) {
      for (std::size_t p = 0; p < taps + kTileWindows - 1; ++p) fill_zero(to + p * row.to_stride, row.tiles);
    } else {
      (taps == 4 ? split_taps<4> : taps == 3 ? split_taps<3> : taps == 2 ? split_taps<2> : split_taps<1>)(row, columns, phase, to);
    }
    to += (taps + kTileWindows - 1) * row.to_stride;
  }
}

void join_tiles(const TileSums& products) {
  constexpr std::size_t lanes = kLanes<float>;
  const std::size_t step = products.outputs * products.vectors * lanes;
  const float* sums = products.sums;
  float* to = products.to;
  for (std::size_t o = 0; o < products.outputs; ++o, to += kTileWindows * products.window_stride) {
    for (std::size_t v = 0; v < products.vectors; ++v, sums += lanes) {
      const Vector<float> at_1 = load(sums + step), at_minus_1 = load(sums + 2 * step);
      const Vector<float> at_half = load(sums + 3 * step), at_minus_half = load(sums + 5 * step);
      const Vector<float> at_minus_2 = load(sums + 4 * step);
      const Vector<float> even = at_1 + at_minus_1, odd = at_1 - at_minus_1;
      const Vector<float> even_halves = at_half + at_minus_half, odd_halves = at_half - at_minus_half;
      float* const place = to + v * lanes;
      store(place, load(sums) + even + even_halves + at_minus_2);
      store(place + products.window_stride, odd + 0.5f * odd_halves - 2.0f * at_minus_2);
      store(place + 2 * products.window_stride, even + 0.25f * even_halves + 4.0f * at_minus_2);
      store(place + 3 * products.window_stride,
            odd + 0.125f * odd_halves - 8.0f * at_minus_2 + load(sums + 6 * step));
    }
  }
}

inline Vector<float> larger(Vector<float> a, Vector<float> b) { return a > b ? a : b; }

// Of an even and an odd vector, the lanes in turn.
struct Interleaved {
  Vector<float> low, high;
};

#if defined(ONNXTRAIN_SHUFFLES)
template <int... lane>
inline Interleaved interleaved_lanes(Vector<float> even, Vector<float> odd, std::integer_sequence<int, lane...>) {
  constexpr int lanes = sizeof...(lane);
  return {__builtin_shufflevector(even, odd, (lane / 2 + lane % 2 * lanes)...),
          __builtin_shufflevector(even, odd, (lanes / 2 + lane / 2 + lane % 2 * lanes)...)};
}

inline Interleaved interleaved(Vector<float> even, Vector<float> odd) {
  return interleaved_lanes(even, odd, std::make_integer_sequence<int, kLanes<float>>());
}
#else
inline Interleaved interleaved(Vector<float> even, Vector<float> odd) {
  constexpr std::size_t lanes = kLanes<float>;
  Interleaved turns = {};
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    const float value = lane % 2 == 0 ? even[lane / 2] : odd[lane / 2];
    const float later = lane % 2 == 0 ? even[(lanes + lane) / 2] : odd[(lanes + lane) / 2];
    turns.low[lane] = value;
    turns.high[lane] = later;
  }
  return turns;
}
#endif

template <std::size_t kernel, std::size_t begin>
void pool_windows(const TilePool& pool) {
  constexpr std::size_t lanes = kLanes<float>;
  const Vector<float> nothing = broadcast(-__builtin_inff()), bias = broadcast(pool.bias);
  Vector<std::int32_t> lane = {};
#pragma GCC unroll 16
  for (std::size_t l = 0; l < lanes; ++l) lane[l] = static_cast<std::int32_t>(l);
  // Of up to three rows.
  const std::size_t middle_row = pool.rows > 1 ? pool.tiles : 0, last_row = (pool.rows - 1) * pool.tiles;
  for (std::size_t t = 0; t < pool.tiles; t += lanes) {
    const auto largest = [&](const float* at) {
      return larger(load(at + last_row), larger(load(at + middle_row), load(at)));
    };
    const float* const first = pool.sums + t;
    Vector<float> windows[kTileWindows + 2];  // from the one before the tile to the one behind it
#pragma GCC unroll 4
    for (std::size_t w = 0; w < kTileWindows; ++w) windows[w + 1] = largest(first + w * pool.window_stride);
    if constexpr (begin > 0) {
      windows[0] = largest(first + (kTileWindows - 1) * pool.window_stride - 1);
      if (t == 0) windows[0] = lane == Vector<std::int32_t>{} ? nothing : windows[0];
    }
    if constexpr (kernel - begin > 2) {
      const auto final_tile = broadcast(static_cast<std::int32_t>(pool.tiles - 1 - t));
      windows[kTileWindows + 1] = lane == final_tile ? nothing : largest(first + 1);
    }
    const auto group = [&](std::size_t from) {
      Vector<float> sum = windows[from];
#pragma GCC unroll 2
      for (std::size_t w = 1; w < kernel; ++w) sum = larger(windows[from + w], sum);
      return larger(sum + bias, Vector<float>{});
    };
    const Interleaved y = interleaved(group(1 - begin), group(3 - begin));
    const std::size_t place = 2 * t, left = pool.groups > place ? pool.groups - place : 0;
    if (left >= lanes) {
      store(pool.y + place, y.low);
    } else if (left > 0) {
      store_first(pool.y + place, left, y.low);
    }
    if (left >= 2 * lanes) {
      store(pool.y + place + lanes, y.high);
    } else if (left > lanes) {
      store_first(pool.y + place + lanes, left - lanes, y.high);
    }
  }
}

void pool_tiles(const TilePool& pool) {
  const auto windows = pool.kernel == 3 ? (pool.begin > 0 ? pool_windows<3, 1> : pool_windows<3, 0>)
                                        : (pool.begin > 0 ? pool_windows<2, 1> : pool_windows<2, 0>);
  windows(pool);
}

}  // namespace
}  // namespace onnxtrain
