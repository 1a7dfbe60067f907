// Sparse products with the sums in registers.
//
// A row of x is a few vectors, of examples or of pixels. An entry of the matrix multiplies it by one broadcast value for
// each output of its block: a block of four outputs loads x once for four multiplications.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/vector.h"
#include "sparse/table.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace onnxtrain {
namespace {

// Independent sums, at least: multiply-add takes four cycles, two start in each.
inline constexpr std::size_t kIndependentSums = 8;

inline std::size_t most_sparse_vectors(std::size_t block) {
  if (block == 1) return 8;
  const std::size_t of_four = kVectorRegisters == 32 ? 4 : 2;
  return block == 4 ? of_four : of_four / 2;
}

template <std::size_t block, std::size_t vectors>
inline void add_entry(const float* x, const float* values, Vector<float> (&sum)[block][vectors]) {
  Vector<float> row[vectors];
#pragma GCC unroll 8
  for (std::size_t v = 0; v < vectors; ++v) row[v] = load(x + v * kLanes<float>);
#pragma GCC unroll 8
  for (std::size_t b = 0; b < block; ++b) {
    const Vector<float> value = broadcast(values[b]);
#pragma GCC unroll 8
    for (std::size_t v = 0; v < vectors; ++v) sum[b][v] += value * row[v];
  }
}

template <std::size_t block, std::size_t vectors>
void multiply_rows(const SparseRows& part) {
  constexpr std::size_t together = block * vectors >= kIndependentSums ? 1 : kIndependentSums / (block * vectors);
  const float* values = part.values + part.starts[part.first] * block;
  const std::int32_t* offset = part.offsets + part.starts[part.first];
  float* sums = part.sums;
  for (std::size_t r = part.first; r < part.last; ++r) {
    Vector<float> sum[together][block][vectors] = {};
    const std::int32_t* const end = part.offsets + part.starts[r + 1];
    for (; offset + together <= end; offset += together, values += together * block) {
#pragma GCC unroll 8
      for (std::size_t t = 0; t < together; ++t) add_entry(part.x + offset[t], values + t * block, sum[t]);
    }
    if constexpr (together > 1) {
      for (; offset < end; ++offset, values += block) add_entry(part.x + *offset, values, sum[0]);
    }
#pragma GCC unroll 8
    for (std::size_t b = 0; b < block; ++b) {
#pragma GCC unroll 8
      for (std::size_t v = 0; v < vectors; ++v) {
        Vector<float> total = sum[0][b][v];
#pragma GCC unroll 8
        for (std::size_t t = 1; t < together; ++t) total += sum[t][b][v];
        store(sums, total);
        sums += kLanes<float>;
      }
    }
  }
}

template <std::size_t block>
inline MultiplyRows rows_of(std::size_t vectors) {
  constexpr std::size_t half = kVectorRegisters == 32 ? 1 : 2;  // half as many registers, half as many vectors
  constexpr std::size_t most = block == 1 ? 8 : (block == 4 ? 4 : 2) / half;
  if constexpr (most >= 8) {
    if (vectors == 8) return multiply_rows<block, 8>;
  }
  if constexpr (most >= 4) {
    if (vectors == 4) return multiply_rows<block, 4>;
  }
  if constexpr (most >= 2) {
    if (vectors == 2) return multiply_rows<block, 2>;
  }
  return multiply_rows<block, 1>;
}

inline MultiplyRows sparse_rows(std::size_t block, std::size_t vectors) {
  return block == 1 ? rows_of<1>(vectors) : block == 4 ? rows_of<4>(vectors) : rows_of<8>(vectors);
}

inline Vector<float> gathered(const float* x, const std::int32_t* positions) {
#if defined(__AVX512F__)
  return (Vector<float>)_mm512_i32gather_ps(_mm512_loadu_si512(positions), x, 4);
#elif defined(__AVX2__)
  return (Vector<float>)_mm256_i32gather_ps(x, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(positions)), 4);
#else
  Vector<float> row = {};
  for (std::size_t lane = 0; lane < kLanes<float>; ++lane) row[lane] = x[positions[lane]];
  return row;
#endif
}

void multiply_lanes(const SparseLanes& part) {
  constexpr std::size_t lanes = kLanes<float>;
  for (std::size_t group = part.first; group < part.last; ++group) {
    const std::size_t end = part.starts[group + 1];
    std::size_t e = part.starts[group];
    Vector<float> sum = {}, other = {};
    for (; e + 2 <= end; e += 2) {
      sum += load(part.values + e * lanes) * gathered(part.x, part.positions + e * lanes);
      other += load(part.values + (e + 1) * lanes) * gathered(part.x, part.positions + (e + 1) * lanes);
    }
    if (e < end) sum += load(part.values + e * lanes) * gathered(part.x, part.positions + e * lanes);
    sum += other;
    const std::int32_t* outputs = part.outputs + group * lanes;
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      if (outputs[lane] >= 0) part.sums[outputs[lane]] = sum[lane];
    }
  }
}

void transpose_rows(const float* x, std::size_t rows, std::size_t row_stride, std::size_t first, std::size_t last,
                    float* x_t, std::size_t stride) {
  constexpr std::size_t lanes = kLanes<float>;
  std::size_t column = first;
  for (; column + lanes <= last; column += lanes) {
    Vector<float> block[lanes];
#pragma GCC unroll 16
    for (std::size_t r = 0; r < lanes; ++r) block[r] = r < rows ? load(x + r * row_stride + column) : Vector<float>{};
    transpose_in_registers<float>(block);
#pragma GCC unroll 16
    for (std::size_t c = 0; c < lanes; ++c) store(x_t + (column + c) * stride, block[c]);
  }
  for (; column < last; ++column) {
    for (std::size_t r = 0; r < lanes; ++r) x_t[column * stride + r] = r < rows ? x[r * row_stride + column] : 0.0f;
  }
}

void pad_row(const PaddedRow& row, const float* from, float* to) {
  if (from == nullptr) return fill_zero(to, row.columns);
  fill_zero(to, row.before);
  to += row.before;
  from += row.first;
  if (row.stride == 1) {
    copy(from, row.count, to);
  } else {
    for (std::size_t i = 0; i < row.count; ++i) to[i] = from[i * row.stride];
  }
  fill_zero(to + row.count, row.columns - row.before - row.count);
}

inline Vector<float> limited(const SparseEnding& ending, Vector<float> y) {
  if (!ending.has_limits) return y;
  const Vector<float> lower = broadcast(ending.lower), upper = broadcast(ending.upper);
  y = y < lower ? lower : y;
  return y > upper ? upper : y;
}

// The first `count` elements, less than a vector; the others are zero, and are not read or written.
inline Vector<float> load_first(const float* from, std::size_t count) {
#if defined(__AVX512F__)
  return (Vector<float>)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
#else
  float elements[kLanes<float>] = {};
  copy(from, count, elements);
  return load(elements);
#endif
}

inline void store_first(float* to, std::size_t count, Vector<float> value) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), (__m512)value);
#else
  float elements[kLanes<float>];
  store(elements, value);
  copy(elements, count, to);
#endif
}

inline void end_sums(const SparseEnding& ending, std::size_t count, const float* sums, float* y) {
  constexpr std::size_t lanes = kLanes<float>;
  const Vector<float> shift = broadcast(ending.shift);
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    Vector<float> sum = load(sums + i) + shift;
    if (ending.bias != nullptr) sum += load(ending.bias + i);
    if (ending.residual != nullptr) sum += load(ending.residual + i);
    store(y + i, limited(ending, sum));
  }
  if (const std::size_t left = count - i; left > 0) {
    Vector<float> sum = load_first(sums + i, left) + shift;
    if (ending.bias != nullptr) sum += load_first(ending.bias + i, left);
    if (ending.residual != nullptr) sum += load_first(ending.residual + i, left);
    store_first(y + i, left, limited(ending, sum));
  }
}

void end_windows(const SparseEnding& ending, const SparseSpan& span, std::size_t outputs, const float* sums, float* y) {
  for (std::size_t position = span.begin; position < span.end;) {
    const std::size_t row = position / span.columns, column = position % span.columns;
    const std::size_t next = span.end < (row + 1) * span.columns ? span.end : (row + 1) * span.columns;
    if (column < span.windows) {
      const std::size_t last = next < row * span.columns + span.windows ? next : row * span.columns + span.windows;
      for (std::size_t o = 0; o < outputs; ++o) {
        const std::size_t place = o * span.y_stride + row * span.windows + column;
        SparseEnding at = ending;
        at.bias = nullptr;
        if (ending.bias != nullptr) at.shift += ending.bias[o];
        if (ending.residual != nullptr) at.residual += place;
        end_sums(at, last - position, sums + o * span.sums_stride + position - span.begin, y + place);
      }
    }
    position = next;
  }
}

void end_transposed(const SparseEnding& ending, std::size_t outputs, std::size_t rows, std::size_t sums_stride,
                    const float* sums, float* y, std::size_t y_stride) {
  constexpr std::size_t lanes = kLanes<float>;
  for (std::size_t first = 0; first < outputs; first += lanes) {
    const std::size_t count = outputs - first < lanes ? outputs - first : lanes;
    for (std::size_t row = 0; row < rows; row += lanes) {
      Vector<float> block[lanes];
#pragma GCC unroll 16
      for (std::size_t o = 0; o < lanes; ++o) {
        block[o] = o < count ? load(sums + (first + o) * sums_stride + row) : Vector<float>{};
      }
      transpose_in_registers<float>(block);
      const std::size_t in_block = rows - row < lanes ? rows - row : lanes;
      for (std::size_t r = 0; r < in_block; ++r) {
        SparseEnding at = ending;
        const std::size_t place = (row + r) * y_stride + first;
        if (at.bias != nullptr) at.bias += first;
        if (at.residual != nullptr) at.residual += place;
        end_sums(at, count, reinterpret_cast<const float*>(&block[r]), y + place);
      }
    }
  }
}

}  // namespace
}  // namespace onnxtrain
