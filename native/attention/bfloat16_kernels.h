// softmax(scale q kᵀ + bias) v of one head and its gradient, with the operands of all products rounded to bfloat16.
// Sums, the softmax and its statistics are float. The scale is applied to sums, and so is not rounded.
//
// The gradient goes over blocks of queries and keys, which stay in the L1 cache; dk and dv are added up transposed,
// so that blocks of probabilities are right operands as they are computed. Blocks begin at multiples of a tile's depth:
// sums do not depend on how queries are shared out. Included by bfloat16_kernels.cpp only.
#pragma once

#include "attention/bfloat16_table.h"
#include "attention/head_kernels.h"
#include "attention/layout.h"
#include "attention/softmax_kernels.h"
#include "matmul/bfloat16_kernels.h"

namespace onnxtrain {
namespace {

using Word = std::uint16_t;

inline constexpr std::size_t kTwoTiles = 2 * kTileLines;  // rows or columns; as many words are a tile's depth
inline constexpr std::size_t kPanelColumns = 64;          // most columns of a panel of values, keys or probabilities
inline constexpr std::size_t kForwardQueries = kTwoTiles, kGradientQueries = 64;

// Offsets in words, each from the beginning of a cache line on.
struct WordLayout : ScratchLayout<Word> {
  std::size_t floats(std::size_t count) { return take(2 * count); }
};

// Sizes of a head's operands, padded as products read them.
struct HeadSizes {
  std::size_t size_depth, value_depth;  // words of a row
  std::size_t width, value_width;       // elements in whole vectors
  std::size_t keys, key_depth;          // keys as columns, and as depth

  explicit HeadSizes(const AttentionShape& s)
      : size_depth(2 * padded_pairs(s.size)),
        value_depth(2 * padded_pairs(s.value_size)),
        width(padded<float>(s.size)),
        value_width(padded<float>(s.value_size)),
        keys(rounded_up(s.keys, kTwoTiles)),
        key_depth(2 * padded_pairs(s.keys)) {}

  // Room for two rows of a panel, or a vector's lanes of rows.
  std::size_t lines() const {
    const std::size_t most = size_depth < value_depth ? value_depth : size_depth;
    return 2 * std::max(kPanelColumns, kLanes<float> * padded<Pair>(most / 2));
  }
};

// Multiplies whole tiles of rows by a panel.
inline void multiply_block(PairTile tile, std::size_t rows, std::size_t width) {
  const std::size_t step = kInTiles ? kTwoTiles : tile_rows(width / kLanes<float>);
  for (std::size_t row = 0; row < rows; row += step) {
    multiply_rows(tile, std::min(step, rows - row), width);
    tile.left += step * tile.left_stride;
    tile.sums += step * tile.sums_stride;
  }
}

// Rounds rows to words; zeros follow each.
inline void round_rows(const float* from, std::ptrdiff_t stride, std::size_t rows, std::size_t count, Word* to,
                       std::size_t words) {
  round_lines({from, static_cast<std::size_t>(stride), false, rows, count, to, words, words}, 0, rows);
}

// Packs rows as panels of columns, to be multiplied by rows of the same length.
inline void pack_as_columns(const float* from, std::ptrdiff_t stride, std::size_t rows, std::size_t count, Word* to,
                            std::size_t words, Word* lines) {
  Bfloat16Matmul matrix = {};
  matrix.right = {Stored::kFloat, from, static_cast<std::size_t>(stride), true, nullptr};
  for (std::size_t row = 0; row < rows; row += kTwoTiles) {
    pack_transposed_pairs(matrix, {0, count, row, std::min(kTwoTiles, rows - row), kTwoTiles, to + row * words, lines});
  }
}

// Packs rows as panels of a right operand whose depth they are.
inline void pack_as_depth(const float* from, std::ptrdiff_t stride, std::size_t rows, std::size_t count, Word* to,
                          Word* lines) {
  Bfloat16Matmul matrix = {};
  matrix.right = {Stored::kFloat, from, static_cast<std::size_t>(stride), false, nullptr};
  const std::size_t width = padded<float>(count), depth = 2 * padded_pairs(rows);
  for (std::size_t column = 0; column < width; column += kPanelColumns) {
    pack_pairs(matrix, {0, rows, column, std::min(kPanelColumns, count - column),
                        std::min(kPanelColumns, width - column), to + column * depth, lines});
  }
}

// sums (+)= left times the keys [begin, end) of what `pack_as_depth` packed.
inline void multiply_by_rows(PairTile tile, std::size_t rows, std::size_t begin, std::size_t end, std::size_t depth,
                             std::size_t width) {
  const Word* packed = tile.columns;
  tile.pairs = (std::min(end, depth) - begin) / 2;
  for (std::size_t column = 0; column < width; column += kPanelColumns) {
    const std::size_t columns = std::min(kPanelColumns, width - column);
    tile.columns = packed + column * depth + begin * columns;
    multiply_block(tile, rows, columns);
    tile.sums += columns;
  }
}

// Two vectors as words, those of `first` in front.
inline __m512i two_as_words(Vector<float> first, Vector<float> second) {
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

// Turns a row of scores, in whole vectors, into words of exp(score - largest of the row); the sum is that of the
// exponentials before they are rounded.
inline RowSum<float> exponentials_as_words(float* row, const float* bias, std::size_t count, float scale,
                                           bool zero_empty, Word* words) {
  constexpr std::size_t lanes = kLanes<float>;
  Vector<float> most = broadcast(kMinusInfinity<float>);
  for (std::size_t i = 0; i < count; i += lanes) {
    const Vector<float> score = load(row + i) * scale + load(bias + i);
    store(row + i, score);
    most = score > most ? score : most;
  }
  const float largest = largest_lane<float>(most);
  bool empty = largest == kMinusInfinity<float>;
  for (std::size_t i = 0; empty && i < count; ++i) empty = row[i] == kMinusInfinity<float>;
  Vector<float> sums = {};
  for (std::size_t i = 0; i < count; i += lanes) {
    const auto e = exp_of_single<Vector<float>, Vector<std::uint32_t>>(load(row + i) - largest);
    sums += e;
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)e);
    __builtin_memcpy(words + i, &rounded, sizeof rounded);
  }
  const float sum = sum_of_lanes<float>(sums);
  if (sum == sum) return {largest, sum};
  if (zero_empty) fill_zero_words(words, count);
  return {empty ? kMinusInfinity<float> : kNotANumber<float>, 1.0f};
}

struct Bfloat16ForwardLayout : WordLayout {
  std::size_t keys, values, lines, q, weights, bias, scores, results;

  explicit Bfloat16ForwardLayout(const AttentionCall& call) {
    const HeadSizes sizes(call.shape);
    keys = take(sizes.keys * sizes.size_depth);
    values = take(sizes.key_depth * sizes.value_width);
    lines = take(sizes.lines());
    q = take(kForwardQueries * sizes.size_depth);
    weights = take(kForwardQueries * odd_lines<Word>(sizes.keys));
    bias = floats(padded<float>(call.shape.keys));
    scores = floats(kForwardQueries * odd_lines<float>(sizes.keys));
    results = floats(kForwardQueries * sizes.value_width);
  }
};

inline void attend_in_bfloat16(const AttentionCall& call, std::size_t number, std::size_t first, std::size_t last,
                               void* buffer) {
  const Bfloat16ForwardLayout layout(call);
  const AttentionShape& s = call.shape;
  const HeadSizes sizes(s);
  const Head<float> head(call, number);
  Word *scratch = static_cast<Word*>(buffer), *keys = scratch + layout.keys, *values = scratch + layout.values;
  Word *q = scratch + layout.q, *weights = scratch + layout.weights;
  const auto floats = [scratch](std::size_t at) { return reinterpret_cast<float*>(scratch + at); };
  float *scores = floats(layout.scores), *results = floats(layout.results);
  const std::size_t stride = odd_lines<float>(sizes.keys), weight_stride = odd_lines<Word>(sizes.keys);
  pack_as_columns(head.at(call.k, s.keys, 0, s.size), head.stride, s.keys, s.size, keys, sizes.size_depth,
                  scratch + layout.lines);
  pack_as_depth(head.at(call.v, s.keys, 0, s.value_size), head.value_stride, s.keys, s.value_size, values,
                scratch + layout.lines);
  BiasRows<float> bias(call, head, floats(layout.bias));
  float largest[kForwardQueries], sums[kForwardQueries];
  [[maybe_unused]] const Tiles tiles;

  for (std::size_t query = first; query < last; query += kForwardQueries) {
    const std::size_t rows = std::min(kForwardQueries, last - query), tiled = rounded_up(rows, kTileLines);
    const KeyRange seen = bias.seen(query, query + rows);
    const std::size_t begin = seen.begin / kTwoTiles * kTwoTiles, end = rounded_up(seen.end, kTwoTiles);
    round_rows(head.at(call.q, s.queries, query, s.size), head.stride, rows, s.size, q, sizes.size_depth);
    for (std::size_t key = begin; key < end; key += kTwoTiles) {
      multiply_block({q, sizes.size_depth, sizes.size_depth / 2, keys + key * sizes.size_depth, false, scores + key,
                      stride}, tiled, kTwoTiles);
    }
    for (std::size_t row = 0; row < rows; ++row) {
      const KeyRange own = bias.seen_by(query + row, seen);
      Word* words = weights + row * weight_stride;
      fill_zero_words(words + begin, own.begin - begin);
      fill_zero_words(words + own.end, end - own.end);
      const RowSum<float> sum =
          exponentials_as_words(scores + row * stride + own.begin, bias[query + row] + own.begin, own.end - own.begin,
                                static_cast<float>(call.scale), call.zero_empty_rows, words + own.begin);
      largest[row] = sum.largest;
      sums[row] = sum.sum;
    }
    if (call.log_sum != nullptr) {
      write_log_sums(largest, sums, rows, static_cast<float*>(call.log_sum) + number * s.queries + query);
    }
    if (call.y == nullptr) continue;
    multiply_by_rows({weights + begin, weight_stride, 0, values, false, results, sizes.value_width}, tiled, begin, end,
                     sizes.key_depth, sizes.value_width);
    for (std::size_t row = 0; row < rows; ++row) {
      scale_row(results + row * sizes.value_width, s.value_size, 1.0f / sums[row],
                head.at(call.y, s.queries, query + row, s.value_size));
    }
  }
}

struct Bfloat16GradientLayout : WordLayout {
  std::size_t keys, values, key_rows, lines, q, dy, q_columns, dy_columns, p, slopes, slope_rows, biases[2], scores,
      dp, dq, dk, dv;

  explicit Bfloat16GradientLayout(const AttentionCall& call) {
    const HeadSizes sizes(call.shape);
    keys = take(sizes.keys * sizes.size_depth);
    values = take(sizes.keys * sizes.value_depth);
    key_rows = take(sizes.key_depth * sizes.width);
    lines = take(sizes.lines());
    q = take(kGradientQueries * sizes.size_depth);
    dy = take(kGradientQueries * sizes.value_depth);
    q_columns = take(sizes.width * kGradientQueries);
    dy_columns = take(sizes.value_width * kGradientQueries);
    p = take(kGradientQueries * kPanelColumns);
    slopes = take(kGradientQueries * kPanelColumns);
    slope_rows = take(kGradientQueries * kPanelColumns);
    for (std::size_t& bias : biases) bias = floats(padded<float>(call.shape.keys));
    scores = floats(kTwoTiles * kPanelColumns);
    dp = floats(kTwoTiles * kPanelColumns);
    dq = floats(kGradientQueries * sizes.width);
    dk = floats(sizes.width * odd_lines<float>(sizes.keys));
    dv = floats(sizes.value_width * odd_lines<float>(sizes.keys));
  }
};

// A query within a block of keys: its scores, which become probabilities, and the gradients of these.
struct ScoreRow {
  float *scores, *dp;
  const float* bias;
  std::size_t begin, end;  // of the keys of the block that it sees, in whole vectors
  float log_sum, delta;
};

struct Slopes {
  Vector<float> p, slope;
};

// The probabilities p of a vector of keys, and the gradient of their scores: p (dp - delta).
inline Slopes slopes_of(const ScoreRow& row, std::size_t i, float scale) {
  if (i < row.begin || i >= row.end) return {Vector<float>{}, Vector<float>{}};
  const Vector<float> score = load(row.scores + i) * scale + (load(row.bias + i) - row.log_sum);
  const auto p = exp_of_single<Vector<float>, Vector<std::uint32_t>>(score);
  return {p, p * (load(row.dp + i) - row.delta)};
}

// Writes two rows of probabilities and their slopes as pairs, and the slopes as rows, too. With `keep`, the slopes are
// left in `dp` as well.
inline void round_slopes(const ScoreRow& first, const ScoreRow& second, std::size_t width, float scale, bool keep,
                         Word* p, Word* slopes, Word* slope_rows) {
  alignas(64) static constexpr Word kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                  8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(kOrder);
  for (std::size_t i = 0; i < width; i += kLanes<float>) {
    const Slopes a = slopes_of(first, i, scale), b = slopes_of(second, i, scale);
    if (keep) {
      store(first.dp + i, a.slope);
      store(second.dp + i, b.slope);
    }
    _mm512_storeu_si512(p + 2 * i, _mm512_permutexvar_epi16(order, two_as_words(a.p, b.p)));
    const __m512i words = two_as_words(a.slope, b.slope);
    _mm512_storeu_si512(slopes + 2 * i, _mm512_permutexvar_epi16(order, words));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(slope_rows + i), _mm512_castsi512_si256(words));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(slope_rows + kPanelColumns + i),
                        _mm512_extracti64x4_epi64(words, 1));
  }
}

// to[row, column] = factor * from[column, row].
inline void write_transposed(const float* from, std::size_t from_stride, std::size_t rows, std::size_t count,
                             float factor, float* to, std::ptrdiff_t to_stride) {
  constexpr std::size_t lanes = kLanes<float>;
  for (std::size_t row = 0; row < rows; row += lanes) {
    for (std::size_t column = 0; column < count; column += lanes) {
      Vector<float> square[lanes];
      for (std::size_t i = 0; i < lanes; ++i) square[i] = load(from + (column + i) * from_stride + row) * factor;
      transpose_in_registers<float>(square);
      for (std::size_t i = 0; i < std::min(lanes, rows - row); ++i) {
        copy(reinterpret_cast<const float*>(&square[i]), std::min(lanes, count - column),
             to + static_cast<std::ptrdiff_t>(row + i) * to_stride + column);
      }
    }
  }
}

inline void attention_gradient_in_bfloat16(const AttentionCall& call, std::size_t number, void* buffer) {
  const Bfloat16GradientLayout layout(call);
  const AttentionShape& s = call.shape;
  const HeadSizes sizes(s);
  const Head<float> head(call, number);
  Word* scratch = static_cast<Word*>(buffer);
  const auto floats = [scratch](std::size_t at) { return reinterpret_cast<float*>(scratch + at); };
  Word *keys = scratch + layout.keys, *values = scratch + layout.values, *key_rows = scratch + layout.key_rows;
  Word *q = scratch + layout.q, *dy = scratch + layout.dy, *lines = scratch + layout.lines;
  Word *q_columns = scratch + layout.q_columns, *dy_columns = scratch + layout.dy_columns;
  Word *p = scratch + layout.p, *slopes = scratch + layout.slopes, *slope_rows = scratch + layout.slope_rows;
  float *scores = floats(layout.scores), *dp = floats(layout.dp);
  float *dq = floats(layout.dq), *dk = floats(layout.dk), *dv = floats(layout.dv);
  const std::size_t stride = odd_lines<float>(sizes.keys), size_depth = sizes.size_depth, value_depth = sizes.value_depth;
  const float scale = static_cast<float>(call.scale);
  const float *k = head.at(call.k, s.keys, 0, s.size), *v = head.at(call.v, s.keys, 0, s.value_size);
  pack_as_columns(k, head.stride, s.keys, s.size, keys, size_depth, lines);
  pack_as_columns(v, head.value_stride, s.keys, s.value_size, values, value_depth, lines);
  if (call.dq != nullptr) pack_as_depth(k, head.stride, s.keys, s.size, key_rows, lines);
  fill_zero(dk, sizes.width * stride);
  fill_zero(dv, sizes.value_width * stride);
  BiasRows<float> biases[2] = {{call, head, floats(layout.biases[0])}, {call, head, floats(layout.biases[1])}};
  float deltas[kGradientQueries];
  [[maybe_unused]] const Tiles tiles;

  for (std::size_t query = 0; query < s.queries; query += kGradientQueries) {
    const std::size_t rows = std::min(kGradientQueries, s.queries - query), tiled = rounded_up(rows, kTileLines);
    const std::size_t pairs = padded_pairs(rows);
    const float* q_rows = head.at(call.q, s.queries, query, s.size);
    const float* dy_rows = head.at(call.dy, s.queries, query, s.value_size);
    const float* y_rows = head.at(static_cast<const void*>(call.y), s.queries, query, s.value_size);
    const float* log_sum = static_cast<const float*>(call.log_sum) + number * s.queries + query;
    round_rows(q_rows, head.stride, rows, s.size, q, size_depth);
    round_rows(dy_rows, head.value_stride, rows, s.value_size, dy, value_depth);
    round_transposed({q_rows, static_cast<std::size_t>(head.stride), true, s.size, rows, q_columns, kGradientQueries,
                      kGradientQueries}, 0, s.size);
    round_transposed({dy_rows, static_cast<std::size_t>(head.value_stride), true, s.value_size, rows, dy_columns,
                      kGradientQueries, kGradientQueries}, 0, s.value_size);
    for (std::size_t row = 0; row < rows; ++row) {
      const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(row) * head.value_stride;
      deltas[row] = dot(dy_rows + at, y_rows + at, s.value_size);
    }
    const KeyRange seen = biases[0].seen(query, query + rows);
    const std::size_t begin = seen.begin / kPanelColumns * kPanelColumns;
    for (std::size_t key = begin; key < seen.end; key += kPanelColumns) {
      const std::size_t width = std::min(kPanelColumns, sizes.keys - key);
      // The row of a query, without keys if there is no such query, or if its gradient is zero.
      const auto row_of = [&](std::size_t row, std::size_t within) -> ScoreRow {
        ScoreRow found = {scores + within * kPanelColumns, dp + within * kPanelColumns, nullptr, 0, 0, 0, 0};
        if (row >= rows || (call.zero_empty_rows && !(log_sum[row] - log_sum[row] == 0.0f))) return found;
        const KeyRange own = biases[row % 2].seen_by(query + row, seen);
        const KeyRange both = {std::max(own.begin, static_cast<std::uint32_t>(key)),
                               std::min(own.end, static_cast<std::uint32_t>(key + width))};
        if (both.begin >= both.end) return found;
        found.bias = biases[row % 2].of(query + row, both) + key;
        found.begin = both.begin - key;
        found.end = both.end - key;
        found.log_sum = log_sum[row];
        found.delta = deltas[row];
        return found;
      };
      for (std::size_t half = 0; half < 2 * pairs; half += kTwoTiles) {
        const std::size_t count = half < rows ? rounded_up(std::min(kTwoTiles, rows - half), kTileLines) : 0;
        for (std::size_t column = 0; column < width; column += kTwoTiles) {
          multiply_block({q + half * size_depth, size_depth, size_depth / 2, keys + (key + column) * size_depth, false,
                          scores + column, kPanelColumns}, count, kTwoTiles);
          multiply_block({dy + half * value_depth, value_depth, value_depth / 2, values + (key + column) * value_depth,
                          false, dp + column, kPanelColumns}, count, kTwoTiles);
        }
        for (std::size_t row = half; row < std::min(half + kTwoTiles, 2 * pairs); row += 2) {
          const ScoreRow first = row_of(row, row - half), second = row_of(row + 1, row + 1 - half);
          round_slopes(first, second, width, scale, call.dbias != nullptr, p + row * width, slopes + row * width,
                       slope_rows + row * kPanelColumns);
          if (call.dbias == nullptr) continue;
          for (const ScoreRow* one : {&first, &second}) {
            if (one->begin == one->end) continue;
            const std::size_t at = key + one->begin, end = std::min(key + one->end, s.keys);
            add_bias_gradient(call, head.batch, head.head, query + (one == &first ? row : row + 1), at,
                              one->dp + one->begin, end - at);
          }
        }
      }
      if (call.dv != nullptr) {
        multiply_block({dy_columns, kGradientQueries, pairs, p, true, dv + key, stride}, sizes.value_width, width);
      }
      if (call.dk != nullptr) {
        multiply_block({q_columns, kGradientQueries, pairs, slopes, true, dk + key, stride}, sizes.width, width);
      }
      if (call.dq != nullptr) {
        multiply_by_rows({slope_rows, kPanelColumns, 0, key_rows, key != begin, dq, sizes.width}, tiled, key,
                         key + width, sizes.key_depth, sizes.width);
      }
    }
    if (call.dq == nullptr) continue;
    for (std::size_t row = 0; row < rows; ++row) {
      scale_row(dq + row * sizes.width, s.size, scale, head.at(call.dq, s.queries, query + row, s.size));
    }
  }
  if (call.dk != nullptr) {
    write_transposed(dk, stride, s.keys, s.size, scale, head.at(call.dk, s.keys, 0, s.size), head.stride);
  }
  if (call.dv != nullptr) {
    write_transposed(dv, stride, s.keys, s.value_size, 1.0f, head.at(call.dv, s.keys, 0, s.value_size),
                     head.value_stride);
  }
}

inline std::size_t bfloat16_attention_scratch(const AttentionCall& call, bool gradient) {
  const std::size_t words = gradient ? Bfloat16GradientLayout(call).total : Bfloat16ForwardLayout(call).total;
  return words * sizeof(Word);
}

}  // namespace
}  // namespace onnxtrain
