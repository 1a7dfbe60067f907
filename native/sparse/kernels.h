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

// Independent sums, at least: multiply-add takes four cycles, and loads let one start in each.
inline constexpr std::size_t kIndependentSums = 4;

// Vectors by which single entries are multiplied four at a time, at most (with more, loads of x bound them), and the
// independent sums of these.
inline constexpr std::size_t kVectorsOfFour = kLanes<float> == 8 ? 4 : 2, kSumsOfFour = 8;

// Of a block, with their sums in registers.
template <std::size_t block>
inline constexpr std::size_t kMostVectors =
    block == 1 ? 8 : (block == 4 ? 4 : 2) / (kVectorRegisters == 32 ? 1 : 2);

inline std::size_t most_sparse_vectors(std::size_t block) {
  return block == 1 ? kMostVectors<1> : block == 4 ? kMostVectors<4> : kMostVectors<8>;
}

// Four entries with one value each, whose values take one load, and whose offsets take two.
struct FourEntries {
#if defined(__AVX2__)
  FourEntries(const std::int32_t* offset, const float* value) {
    __builtin_memcpy(pairs, offset, sizeof pairs);
#if defined(__AVX512F__)
    values = _mm512_broadcast_f32x4(_mm_loadu_ps(value));
#else
    values = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(value));
#endif
  }

  template <std::size_t entry>
  std::size_t offset() const {
    return entry % 2 == 0 ? pairs[entry / 2] & 0xffffffffu : pairs[entry / 2] >> 32;
  }

  template <std::size_t entry>
  Vector<float> value() const {
    constexpr int lane = 0b01010101 * entry;
#if defined(__AVX512F__)
    return (Vector<float>)_mm512_permute_ps(values, lane);
#else
    return (Vector<float>)_mm256_permute_ps(values, lane);
#endif
  }

  std::uint64_t pairs[2];
#if defined(__AVX512F__)
  __m512 values;
#else
  __m256 values;
#endif
#else
  FourEntries(const std::int32_t* offset, const float* value) : offsets(offset), values(value) {}

  template <std::size_t entry>
  std::size_t offset() const {
    return static_cast<std::size_t>(offsets[entry]);
  }

  template <std::size_t entry>
  Vector<float> value() const {
    return broadcast(values[entry]);
  }

  const std::int32_t* offsets;
  const float* values;
#endif
};

// Adds the products of an entry; value(b) is that of output b of its block, in all lanes.
template <std::size_t block, std::size_t vectors, typename Value>
inline void add_entry(const float* x, std::size_t last_vector, Value value, Vector<float> (&sum)[block][vectors]) {
  Vector<float> row[vectors];
#pragma GCC unroll 8
  for (std::size_t v = 0; v + 1 < vectors; ++v) row[v] = load(x + v * kLanes<float>);
  row[vectors - 1] = load(x + last_vector);
#pragma GCC unroll 8
  for (std::size_t b = 0; b < block; ++b) {
    const Vector<float> factor = value(b);
#pragma GCC unroll 8
    for (std::size_t v = 0; v < vectors; ++v) sum[b][v] += factor * row[v];
  }
}

template <std::size_t block, std::size_t vectors>
void multiply_rows(const SparseRows& part) {
  constexpr bool four = block == 1 && vectors <= kVectorsOfFour;
  // Entries that are added together, each to one of some sets of sums.
  constexpr std::size_t independent = four ? kSumsOfFour : kIndependentSums;
  constexpr std::size_t needed = block * vectors >= independent ? 1 : independent / (block * vectors);
  constexpr std::size_t together = four ? 4 : needed, sets = needed < together ? needed : together;
  const float* values = part.values + part.starts[part.first] * block;
  const std::int32_t* offset = part.offsets + part.starts[part.first];
  const std::size_t last_vector = vectors > 1 ? part.last_vector : 0;
  const auto place = [&](std::size_t v) { return v + 1 < vectors ? v * kLanes<float> : last_vector; };
  for (std::size_t r = part.first; r < part.last; ++r) {
    float* sums = part.sums + (part.rows[r] - part.first) * (block * vectors * kLanes<float>);
    Vector<float> sum[sets][block][vectors] = {};
    if (part.add) {
#pragma GCC unroll 8
      for (std::size_t b = 0; b < block; ++b) {
#pragma GCC unroll 8
        for (std::size_t v = 0; v < vectors; ++v) sum[0][b][v] = load(sums + b * vectors * kLanes<float> + place(v));
      }
    }
    const std::int32_t* const end = part.offsets + part.starts[r + 1];
    const auto add_one = [&](std::size_t t) {
      const float* const block_values = values + t * block;
      add_entry(part.x + offset[t], last_vector, [&](std::size_t b) { return broadcast(block_values[b]); },
                sum[t % sets]);
    };
    for (; offset + together <= end; offset += together, values += together * block) {
      if constexpr (four) {
        const FourEntries entries(offset, values);
        [&]<std::size_t... t>(std::index_sequence<t...>) {
          (add_entry(part.x + entries.template offset<t>(), last_vector,
                     [&](std::size_t) { return entries.template value<t>(); }, sum[t % sets]),
           ...);
        }(std::make_index_sequence<4>());
      } else {
#pragma GCC unroll 8
        for (std::size_t t = 0; t < together; ++t) add_one(t);
      }
    }
    const auto left = static_cast<std::size_t>(end - offset);
#pragma GCC unroll 4
    for (std::size_t t = 0; t + 1 < together; ++t) {
      if (t < left) add_one(t);
    }
    offset = end;
    values += left * block;
#pragma GCC unroll 8
    for (std::size_t b = 0; b < block; ++b) {
#pragma GCC unroll 8
      for (std::size_t v = 0; v < vectors; ++v) {
        Vector<float> total = sum[0][b][v];
#pragma GCC unroll 8
        for (std::size_t t = 1; t < sets; ++t) total += sum[t][b][v];
        store(sums + place(v), total);
      }
      sums += vectors * kLanes<float>;
    }
  }
}

template <std::size_t block, std::size_t vectors = kMostVectors<block>>
inline MultiplyRows rows_of(std::size_t count) {
  if constexpr (vectors > 1) {
    if (count < vectors) return rows_of<block, vectors - 1>(count);
  }
  return multiply_rows<block, vectors>;
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

inline constexpr std::size_t kMostGradientVectors = kVectorRegisters == 32 ? 8 : 4;

template <std::size_t vectors>
void add_gradients(const SparseGradient& part) {
  constexpr std::size_t lanes = kLanes<float>;
  for (std::size_t output = part.first; output < part.last; ++output) {
    Vector<float> dy[vectors];
#pragma GCC unroll 8
    for (std::size_t v = 0; v < vectors; ++v) dy[v] = load(part.dy + (output * vectors + v) * lanes);
    if (part.db != nullptr) {
      Vector<float> sum = part.add ? load(part.db + output * lanes) : Vector<float>{};
#pragma GCC unroll 8
      for (std::size_t v = 0; v < vectors; ++v) sum += dy[v];
      store(part.db + output * lanes, sum);
    }
    const std::size_t end = part.starts[output + 1];
    for (std::size_t e = part.starts[output]; e < end; e += lanes) {
      const std::size_t count = end - e < lanes ? end - e : lanes;
      Vector<float> sums[lanes];
      const auto product = [&](const float* x) {
        Vector<float> sum = dy[0] * load(x);
#pragma GCC unroll 8
        for (std::size_t v = 1; v < vectors; ++v) sum += dy[v] * load(x + v * lanes);
        return sum;
      };
      if (count == lanes) {
#pragma GCC unroll 16
        for (std::size_t l = 0; l < lanes; ++l) sums[l] = product(part.x + part.offsets[e + l]);
      } else {
        for (std::size_t l = 0; l < lanes; ++l) {
          sums[l] = l < count ? product(part.x + part.offsets[e + l]) : Vector<float>{};
        }
      }
      transpose_in_registers<float>(sums);
#pragma GCC unroll 4
      for (std::size_t step = lanes / 2; step > 0; step /= 2) {
#pragma GCC unroll 8
        for (std::size_t l = 0; l < step; ++l) sums[l] += sums[l + step];
      }
      if (count == lanes) {
        store(part.dw + e, part.add ? load(part.dw + e) + sums[0] : sums[0]);
      } else {
        store_first(part.dw + e, count, part.add ? load_first(part.dw + e, count) + sums[0] : sums[0]);
      }
    }
  }
}

template <std::size_t vectors = kMostGradientVectors>
inline AddGradients gradients_of(std::size_t count) {
  if constexpr (vectors > 1) {
    if (count < vectors) return gradients_of<vectors - 1>(count);
  }
  return add_gradients<vectors>;
}

inline AddGradients sparse_gradients(std::size_t vectors) { return gradients_of<>(vectors); }

std::size_t count_non_zeros(const float* x, std::size_t count) {
  constexpr std::size_t lanes = kLanes<float>;
  std::size_t found = 0, i = 0;
  while (i + lanes <= count) {
    const std::size_t most = i + lanes * (std::size_t{1} << 20), end = most < count ? most : count;
    auto hits = load(x + i) != Vector<float>{};  // -1 in lanes that are not zero
    for (i += lanes; i + lanes <= end; i += lanes) hits += load(x + i) != Vector<float>{};
    for (std::size_t lane = 0; lane < lanes; ++lane) found += static_cast<std::size_t>(-hits[lane]);
  }
  for (; i < count; ++i) found += x[i] != 0.0f;
  return found;
}

void transpose_rows(const float* x, std::size_t rows, std::size_t row_stride, std::size_t first, std::size_t last,
                    float* x_t, std::size_t stride) {
  constexpr std::size_t lanes = kLanes<float>;
  if (last - first < lanes) {
    for (std::size_t column = first; column < last; ++column) {
      for (std::size_t r = 0; r < lanes; ++r) x_t[column * stride + r] = r < rows ? x[r * row_stride + column] : 0.0f;
    }
    return;
  }
  for (std::size_t column = first, end = first; end < last;) {
    if (column + lanes > last) column = last - lanes;
    end = column + lanes;
    Vector<float> block[lanes];
#pragma GCC unroll 16
    for (std::size_t r = 0; r < lanes; ++r) block[r] = r < rows ? load(x + r * row_stride + column) : Vector<float>{};
    transpose_in_registers<float>(block);
#pragma GCC unroll 16
    for (std::size_t c = 0; c < lanes; ++c) store(x_t + (column + c) * stride, block[c]);
    // From the second on, vectors begin where lines of the cache do, if rows are whole lines: one that crosses a line is
    // read twice. The first and the last overlap others.
    column = end - reinterpret_cast<std::uintptr_t>(x + end) / sizeof(float) % lanes;
  }
}

inline Vector<float> limited(const SparseEnding& ending, Vector<float> y) {
  if (!ending.has_limits) return y;
  const Vector<float> lower = broadcast(ending.lower), upper = broadcast(ending.upper);
  y = y < lower ? lower : y;
  return y > upper ? upper : y;
}

#if defined(ONNXTRAIN_SHUFFLES)
template <int... lane>
inline Vector<float> lanes_in_turn(Vector<float> low, Vector<float> high, std::integer_sequence<int, lane...>, bool odd) {
  return odd ? __builtin_shufflevector(low, high, (2 * lane + 1)...) : __builtin_shufflevector(low, high, (2 * lane)...);
}

// The even lanes of two vectors, or the odd ones.
inline Vector<float> every_second(Vector<float> low, Vector<float> high, bool odd) {
  return lanes_in_turn(low, high, std::make_integer_sequence<int, kLanes<float>>(), odd);
}
#else
inline Vector<float> every_second(Vector<float> low, Vector<float> high, bool odd) {
  constexpr std::size_t lanes = kLanes<float>;
  Vector<float> half = {};
  for (std::size_t lane = 0; lane < lanes; ++lane) {
    const std::size_t from = 2 * lane + (odd ? 1 : 0);
    half[lane] = from < lanes ? low[from] : high[from - lanes];
  }
  return half;
}
#endif

inline void store_some(float* to, std::size_t count, Vector<float> value) {
  if (count < kLanes<float>) {
    store_first(to, count, value);
  } else {
    store(to, value);
  }
}

// A vector of the even elements, and one of the odd ones, of the first `count`: more than none, and at most two vectors.
inline void store_halves(const float* from, std::size_t count, float* evens, float* odds) {
  constexpr std::size_t lanes = kLanes<float>;
  const Vector<float> low = count < lanes ? load_first(from, count) : load(from);
  const Vector<float> high = count <= lanes      ? Vector<float>{}
                             : count < 2 * lanes ? load_first(from + lanes, count - lanes)
                                                 : load(from + lanes);
  store_some(evens, (count + 1) / 2, every_second(low, high, false));
  if (odds != nullptr && count > 1) store_some(odds, count / 2, every_second(low, high, true));
}

// The even elements of a row, and the odd ones unless null. The last vectors overlap those before.
inline void split_row(const float* from, std::size_t count, float* evens, float* odds) {
  constexpr std::size_t lanes = kLanes<float>;
  std::size_t i = 0;
  for (; 2 * (i + lanes) <= count; i += lanes) {
    const Vector<float> low = load(from + 2 * i), high = load(from + 2 * i + lanes);
    store(evens + i, every_second(low, high, false));
    if (odds != nullptr) store(odds + i, every_second(low, high, true));
  }
  if (2 * i == count) return;
  if (i > 0) i = (count + 1) / 2 - lanes;
  store_halves(from + 2 * i, count - 2 * i, evens + i, odds == nullptr ? nullptr : odds + i);
}

// Copies `count` elements, every stride-th.
inline void copy_row(const float* from, std::size_t stride, std::size_t count, float* to) {
  constexpr std::size_t lanes = kLanes<float>;
  std::size_t i = 0;
  if (stride == 1) {
    for (; i + lanes <= count; i += lanes) store(to + i, load(from + i));
    if (i < count) store_first(to + i, count - i, load_first(from + i, count - i));
  } else if (stride == 2 && count > 0) {
    split_row(from, 2 * count - 1, to, nullptr);
  } else {
    for (; i < count; ++i) to[i] = from[i * stride];
  }
}

inline void clear_border(const PaddedAxis& rows, const PaddedAxis& columns, float* to) {
  if (columns.count < columns.total || rows.count < rows.total) fill_zero(to, rows.total * columns.total);
}

void pad_plane(const PaddedAxis& rows, const PaddedAxis& columns, const float* from, std::size_t row_size, float* to) {
  clear_border(rows, columns, to);
  to += rows.before * columns.total + columns.before;
  from += rows.first * row_size + columns.first;
  for (std::size_t row = 0; row < rows.count; ++row, from += rows.stride * row_size, to += columns.total) {
    copy_row(from, columns.stride, columns.count, to);
  }
}

void split_plane(const PaddedAxis& rows, const PaddedAxis& even, const PaddedAxis& odd, const float* from,
                 std::size_t row_size, float* evens, float* odds) {
  clear_border(rows, even, evens);
  clear_border(rows, odd, odds);
  evens += rows.before * even.total + even.before;
  odds += rows.before * odd.total + odd.before;
  from += rows.first * row_size;
  for (std::size_t row = 0; row < rows.count; ++row, from += rows.stride * row_size) {
    split_row(from, even.count + odd.count, evens, odds);
    evens += even.total;
    odds += odd.total;
  }
}

inline Vector<float> gated(Vector<float> gate, Vector<float> y) {
  return y * (gate > Vector<float>{} ? broadcast(1.0f) : Vector<float>{});
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

// The windows of a span that lie in one row: `count` from sums + from, from window `column` of row `row` on.
struct SpanRow {
  std::size_t from, row, column, count;
};

inline std::size_t rows_of_span(const SparseSpan& span, SpanRow* rows) {
  std::size_t count = 0;
  for (std::size_t position = span.begin; position < span.end;) {
    const std::size_t row = position / span.columns, column = position % span.columns;
    const std::size_t next = span.end < (row + 1) * span.columns ? span.end : (row + 1) * span.columns;
    if (column < span.windows) {
      const std::size_t last = next < row * span.columns + span.windows ? next : row * span.columns + span.windows;
      rows[count++] = {position - span.begin, row, column, last - position};
    }
    position = next;
  }
  return count;
}

template <bool has_residual, bool has_limits>
void end_rows(const SparseEnding& ending, const SparseSpan& span, std::size_t outputs, const float* sums, float* y) {
  constexpr std::size_t lanes = kLanes<float>;
  SpanRow rows[kMostSpan];
  const std::size_t count = rows_of_span(span, rows);
  if (count == 0) return;
  const SpanRow& final_row = rows[count - 1];
  // Of rows without gaps, the next one is written over what is too much, unless the residual is there.
  const bool dense = span.y.columns == span.windows && ending.residual != y;
  const bool bordered = span.before + span.after > 0;
  const std::size_t final_end = final_row.row * span.y.columns + final_row.column + final_row.count;
  for (std::size_t o = 0; o < outputs; ++o, sums += span.sums_stride, y += span.y.size) {
    const Vector<float> shift = broadcast(ending.bias != nullptr ? ending.bias[o] + ending.shift : ending.shift);
    const float* const residual = has_residual ? ending.residual + o * span.residual.size : nullptr;
    const auto ended = [&](Vector<float> sum) { return has_limits ? limited(ending, sum) : sum; };
    for (std::size_t r = 0; r < count; ++r) {
      const SpanRow& row = rows[r];
      const std::size_t first = row.row * span.y.columns + row.column, from = row.from;
      const std::size_t end = dense ? final_end : first + row.count;
      float* const to = y + first;
      const float* const other = has_residual ? residual + row.row * span.residual.columns + row.column : nullptr;
      if (bordered && row.column == 0) fill_zero(to - span.before, span.before);
      for (std::size_t i = 0; i < row.count; i += lanes) {
        Vector<float> sum = load(sums + from + i) + shift;
        if (first + i + lanes <= end) {
          if (has_residual) sum += load(other + i);
          store(to + i, ended(sum));
        } else {
          const std::size_t left = end - first - i < row.count - i ? end - first - i : row.count - i;
          if (has_residual) sum += load_first(other + i, left);
          store_first(to + i, left, ended(sum));
        }
      }
      if (bordered && row.column + row.count == span.windows) fill_zero(to + row.count, span.after);
    }
  }
}

void end_windows(const SparseEnding& ending, const SparseSpan& span, std::size_t outputs, const float* sums, float* y) {
  const auto end = ending.residual != nullptr ? (ending.has_limits ? end_rows<true, true> : end_rows<true, false>)
                                              : (ending.has_limits ? end_rows<false, true> : end_rows<false, false>);
  end(ending, span, outputs, sums, y);
}

inline Vector<float> masked(Vector<float> y, const std::int32_t* mask) {
  return (Vector<float>)((Vector<std::int32_t>)y & load(mask));
}

// Asks for what the next run of an output reads or writes, which may have left the L2 cache.
inline void prefetch_next(const float* place, std::size_t run) { __builtin_prefetch(place + run, 1, 2); }

template <bool has_residual, bool has_limits, bool has_masks>
void end_vectors(const SparseEnding& ending, const SparseRun& run, std::size_t outputs, const float* sums, float* y) {
  constexpr std::size_t lanes = kLanes<float>;
  const float* residual = ending.residual;
  for (std::size_t o = 0; o < outputs; ++o, sums += run.vectors * lanes, y += run.y_stride) {
    const Vector<float> shift = broadcast(ending.bias != nullptr ? ending.bias[o] + ending.shift : ending.shift);
    const auto ended = [&](std::size_t place, Vector<float> other) {
      Vector<float> sum = load(sums + place) + shift;
      if (has_residual) sum += other;
      if (has_limits) sum = limited(ending, sum);
      return has_masks ? masked(sum, run.masks + place) : sum;
    };
    const auto of_residual = [&](std::size_t place) {
      if (has_residual) prefetch_next(residual + place, run.vectors * lanes);
      return has_residual ? load(residual + place) : Vector<float>{};
    };
    // First, since it may overlap the one before and y may be written over the residual.
    const bool whole = run.count == lanes;
    const Vector<float> last = whole          ? of_residual(run.last_vector)
                               : has_residual ? load_first(residual + run.last_vector, run.count)
                                              : Vector<float>{};
    for (std::size_t v = 0; v + 1 < run.vectors; ++v) {
      prefetch_next(y + v * lanes, run.vectors * lanes);
      store(y + v * lanes, ended(v * lanes, of_residual(v * lanes)));
    }
    if (whole) {
      prefetch_next(y + run.last_vector, run.vectors * lanes);
      store(y + run.last_vector, ended(run.last_vector, last));
    } else {
      store_first(y + run.last_vector, run.count, ended(run.last_vector, last));
    }
    if (has_residual) residual += run.residual_stride;
  }
}

void end_run(const SparseEnding& ending, const SparseRun& run, std::size_t outputs, const float* sums, float* y) {
  const auto of = [&]<bool has_residual, bool has_limits>() {
    return run.masks != nullptr ? end_vectors<has_residual, has_limits, true>
                                : end_vectors<has_residual, has_limits, false>;
  };
  const auto end =
      ending.residual != nullptr
          ? (ending.has_limits ? of.template operator()<true, true>() : of.template operator()<true, false>())
          : (ending.has_limits ? of.template operator()<false, true>() : of.template operator()<false, false>());
  end(ending, run, outputs, sums, y);
}

void end_transposed(const SparseEnding& ending, std::size_t outputs, std::size_t rows, std::size_t sums_stride,
                    const float* sums, float* y, std::size_t y_stride) {
  constexpr std::size_t lanes = kLanes<float>;
  for (std::size_t first = 0; first < outputs; first += lanes) {
    const std::size_t count = outputs - first < lanes ? outputs - first : lanes;
    Vector<float> shift = broadcast(ending.shift);
    if (ending.bias != nullptr) {
      shift += count == lanes ? load(ending.bias + first) : load_first(ending.bias + first, count);
    }
    for (std::size_t row = 0; row < rows; row += lanes) {
      Vector<float> block[lanes];
#pragma GCC unroll 16
      for (std::size_t o = 0; o < lanes; ++o) {
        block[o] = o < count ? load(sums + (first + o) * sums_stride + row) : Vector<float>{};
      }
      transpose_in_registers<float>(block);
      const std::size_t in_block = rows - row < lanes ? rows - row : lanes;
      for (std::size_t r = 0; r < in_block; ++r) {
        const std::size_t place = (row + r) * y_stride + first;
        Vector<float> sum = block[r] + shift;
        if (count == lanes) {
          if (ending.residual != nullptr) sum += load(ending.residual + place);
          sum = limited(ending, sum);
          if (ending.gate != nullptr) sum = gated(load(ending.gate + place), sum);
          store(y + place, sum);
        } else {
          if (ending.residual != nullptr) sum += load_first(ending.residual + place, count);
          sum = limited(ending, sum);
          if (ending.gate != nullptr) sum = gated(load_first(ending.gate + place, count), sum);
          store_first(y + place, count, sum);
        }
      }
    }
  }
}

}  // namespace
}  // namespace onnxtrain
