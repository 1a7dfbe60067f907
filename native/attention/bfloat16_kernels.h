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
inline constexpr std::size_t kPanelColumns = 64;          // most columns of a panel of probabilities
inline constexpr std::size_t kPackedColumns = kInTiles ? kTwoTiles : kPanelColumns;  // of values or keys, as they are packed
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

inline std::size_t parts_of(std::size_t count, std::size_t most) { return (count + most - 1) / most; }

// Multiplies whole tiles of rows by a panel.
inline void multiply_block(PairTile tile, std::size_t rows, std::size_t width) {
  const std::size_t step = kInTiles ? kTwoTiles : tile_rows(width / kLanes<float>);
  for (std::size_t row = 0; row < rows; row += step) {
    multiply_rows(tile, std::min(step, rows - row), width);
    tile.left += step * tile.left_stride;
    tile.sums += step * tile.sums_stride;
  }
}

// Fetches a row of a tensor into the L2 cache. Rows of a head are too far apart for the CPU to foresee them.
template <int writes>
inline void ask_for_row(const float* from, std::size_t count) {
  for (std::size_t i = 0; i < count; i += kLineBytes / sizeof(float)) __builtin_prefetch(from + i, writes, 2);
}

// Writes rounded parts of rows, `stride` words apart; zeros follow each row.
struct WriteRows {
  const Rounding& r;

  void operator()(const float* from, std::size_t row, std::size_t begin, std::size_t count) const {
    Word* to = r.target + row * r.stride + begin;
    round_to_words(from, count, to);
    if (begin + count == r.depth) fill_zero_words(to + count, r.stride - r.depth);
  }
};

// Rounds rows to words.
inline void round_rows(const float* from, std::ptrdiff_t stride, std::size_t rows, std::size_t count, Word* to,
                       std::size_t words) {
  const Rounding r = {from, static_cast<std::size_t>(stride), false, rows, count, to, words};
  round_lines(r, 0, rows, WriteRows{r});
}

// Rounds rows of queries as rows of a head's elements.
inline void round_columns(const float* from, std::ptrdiff_t stride, std::size_t rows, std::size_t count, Word* to) {
  const Rounding r = {from, static_cast<std::size_t>(stride), true, count, rows, to, kGradientQueries};
  round_transposed(r, 0, count, WriteRows{r});
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
  for (std::size_t column = 0; column < width; column += kPackedColumns) {
    pack_pairs(matrix, {0, rows, column, std::min(kPackedColumns, count - column),
                        std::min(kPackedColumns, width - column), to + column * depth, lines});
  }
}

// sums (+)= left times the keys [begin, end) of what `pack_as_depth` packed.
inline void multiply_by_rows(PairTile tile, std::size_t rows, std::size_t begin, std::size_t end, std::size_t depth,
                             std::size_t width) {
  const Word* packed = tile.columns;
  tile.pairs = (std::min(end, depth) - begin) / 2;
  for (std::size_t column = 0; column < width; column += kPackedColumns) {
    const std::size_t columns = std::min(kPackedColumns, width - column);
    tile.columns = packed + column * depth + begin * columns;
    multiply_block(tile, rows, columns);
    tile.sums += columns;
  }
}

// Two vectors as words, those of `first` in front.
inline __m512i two_as_words(Vector<float> first, Vector<float> second) {
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}

// e**t for t <= 80 with a relative error below 1e-6; 0 below 1e-37, where the CPU is slow. NaN stays NaN.
inline Vector<float> exponential(Vector<float> t) {
  const __m512 lowest = (__m512)broadcast(-87.0f);
  const __mmask16 is_seen = _mm512_cmp_ps_mask((__m512)t, lowest, _CMP_NLT_UQ);
  t = (Vector<float>)_mm512_max_ps(lowest, (__m512)t);  // the second if one is NaN
  const Vector<float> k = (t * 0x1.715476p0f + 0x1.8p23f) - 0x1.8p23f;       // rounded to an integer
  const Vector<float> r = t - k * 0x1.62e430p-1f;
  Vector<float> sum = r * (1.0f / 720.0f) + 1.0f / 120.0f;
  sum = sum * r + 1.0f / 24.0f;
  sum = sum * r + 1.0f / 6.0f;
  sum = sum * r + 0.5f;
  sum = sum * r + 1.0f;
  sum = sum * r + 1.0f;
  return (Vector<float>)_mm512_maskz_scalef_ps(is_seen, (__m512)sum, (__m512)k);
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
    most = (Vector<float>)_mm512_max_ps((__m512)score, (__m512)most);  // the second if the first is NaN
  }
  const float largest = largest_lane<float>(most);
  bool empty = largest == kMinusInfinity<float>;
  for (std::size_t i = 0; empty && i < count; ++i) empty = row[i] == kMinusInfinity<float>;
  Vector<float> sums = {};
  for (std::size_t i = 0; i < count; i += lanes) {
    const Vector<float> e = exponential(load(row + i) - largest);
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
  pack_as_columns(head.key(call.k, 0), head.stride, s.keys, s.size, keys, sizes.size_depth,
                  scratch + layout.lines);
  pack_as_depth(head.value(call.v, 0), head.value_stride, s.keys, s.value_size, values,
                scratch + layout.lines);
  BiasRows<float> bias(call, head, floats(layout.bias));
  float largest[kForwardQueries], sums[kForwardQueries];
  [[maybe_unused]] const Tiles tiles;

  for (std::size_t query = first; query < last; query += kForwardQueries) {
    const std::size_t rows = std::min(kForwardQueries, last - query), tiled = rounded_up(rows, kTileLines);
    const KeyRange seen = bias.seen(query, query + rows);
    const std::size_t begin = seen.begin / kTwoTiles * kTwoTiles, end = rounded_up(seen.end, kTwoTiles);
    round_rows(head.query(call.q, query), head.stride, rows, s.size, q, sizes.size_depth);
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
                head.output(call.y, query + row));
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
  const Vector<float> p = exponential(score);
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

// The gradient of one head. Each block of 64 queries goes over the keys in steps of 32 queries by 64 keys.
class Bfloat16Gradient {
 public:
  Bfloat16Gradient(const AttentionCall& call, std::size_t number, Word* scratch)
      : call_(call),
        s_(call.shape),
        sizes_(call.shape),
        layout_(call),
        head_(call, number),
        scratch_(scratch),
        stride_(odd_lines<float>(sizes_.keys)),
        biases_{{call, head_, floats(layout_.biases[0])}, {call, head_, floats(layout_.biases[1])}},
        log_sums_(static_cast<const float*>(call.log_sum) + number * call.shape.queries) {
    const float *k = head_.key(call.k, 0), *v = head_.value(call.v, 0);
    Word* lines = words(layout_.lines);
    pack_as_columns(k, head_.stride, s_.keys, s_.size, words(layout_.keys), sizes_.size_depth, lines);
    pack_as_columns(v, head_.value_stride, s_.keys, s_.value_size, words(layout_.values), sizes_.value_depth, lines);
    if (call.dq != nullptr) pack_as_depth(k, head_.stride, s_.keys, s_.size, words(layout_.key_rows), lines);
    fill_zero(floats(layout_.dk), sizes_.width * stride_);
    fill_zero(floats(layout_.dv), sizes_.value_width * stride_);
  }

  // Adds the gradients of queries [query, query + 64).
  void add_queries(std::size_t query) {
    query_ = query;
    rows_ = std::min(kGradientQueries, s_.queries - query);
    read_queries();
    seen_ = biases_[0].seen(query, query + rows_);
    begin_ = seen_.begin / kPanelColumns * kPanelColumns;
    halves_ = parts_of(rows_, kTwoTiles);
    const std::size_t steps = parts_of(seen_.end - begin_, kPanelColumns) * halves_;
    for (std::size_t step = 0; step < steps; ++step) {
      multiply_scores(step);
      round_step(step);
      if (step % halves_ == halves_ - 1) multiply_slopes(key_of(step));
    }
    if (call_.dq == nullptr) return;
    for (std::size_t row = 0; row < rows_; ++row) {
      scale_row(floats(layout_.dq) + row * sizes_.width, s_.size, static_cast<float>(call_.scale),
                head_.query(call_.dq, query_ + row));
    }
  }

  void write_keys() const {
    if (call_.dk != nullptr) {
      write_transposed(floats(layout_.dk), stride_, s_.keys, s_.size, static_cast<float>(call_.scale),
                       head_.key(call_.dk, 0), head_.stride);
    }
    if (call_.dv != nullptr) {
      write_transposed(floats(layout_.dv), stride_, s_.keys, s_.value_size, 1.0f,
                       head_.value(call_.dv, 0), head_.value_stride);
    }
  }

 private:
  Word* words(std::size_t at) const { return scratch_ + at; }
  float* floats(std::size_t at) const { return reinterpret_cast<float*>(scratch_ + at); }
  std::size_t key_of(std::size_t step) const { return begin_ + step / halves_ * kPanelColumns; }
  std::size_t width_of(std::size_t key) const { return std::min(kPanelColumns, sizes_.keys - key); }

  // Rounds q and dy, as rows and as columns, and multiplies dy by y.
  void read_queries() {
    const float* q = head_.query(call_.q, query_);
    const float* dy = head_.output(call_.dy, query_);
    const float* y = head_.output(call_.y, query_);
    round_rows(q, head_.stride, rows_, s_.size, words(layout_.q), sizes_.size_depth);
    round_rows(dy, head_.output_stride, rows_, s_.value_size, words(layout_.dy), sizes_.value_depth);
    round_columns(q, head_.stride, rows_, s_.size, words(layout_.q_columns));
    round_columns(dy, head_.output_stride, rows_, s_.value_size, words(layout_.dy_columns));
    for (std::size_t row = 0; row < rows_; ++row) {
      const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(row) * head_.output_stride;
      deltas_[row] = dot(dy + at, y + at, s_.value_size);
    }
  }

  // The scores of a step, and the gradients of its probabilities.
  void multiply_scores(std::size_t step) const {
    const std::size_t key = key_of(step), half = step % halves_ * kTwoTiles;
    const std::size_t rows = rounded_up(std::min(kTwoTiles, rows_ - half), kTileLines);
    const std::size_t depth = sizes_.size_depth, value_depth = sizes_.value_depth;
    for (std::size_t column = 0; column < width_of(key); column += kTwoTiles) {
      multiply_block({words(layout_.q) + half * depth, depth, depth / 2, words(layout_.keys) + (key + column) * depth,
                      false, floats(layout_.scores) + column, kPanelColumns}, rows, kTwoTiles);
      multiply_block({words(layout_.dy) + half * value_depth, value_depth, value_depth / 2,
                      words(layout_.values) + (key + column) * value_depth, false,
                      floats(layout_.dp) + column, kPanelColumns}, rows, kTwoTiles);
    }
  }

  // A query of a step; without keys if there is no such query, or if its gradient is zero.
  ScoreRow row_of(std::size_t step, std::size_t row) {
    const std::size_t at = row % kTwoTiles * kPanelColumns, key = key_of(step);
    ScoreRow found = {floats(layout_.scores) + at, floats(layout_.dp) + at, nullptr, 0, 0, 0, 0};
    if (row >= rows_) return found;
    found.log_sum = log_sums_[query_ + row];
    found.delta = deltas_[row];
    if (call_.zero_empty_rows && !(found.log_sum - found.log_sum == 0.0f)) return found;
    const KeyRange own = biases_[row % 2].seen_by(query_ + row, seen_);
    const KeyRange both = {std::max(own.begin, static_cast<std::uint32_t>(key)),
                           std::min(own.end, static_cast<std::uint32_t>(key + width_of(key)))};
    if (both.begin >= both.end) return found;
    found.bias = biases_[row % 2].of(query_ + row, both) + key;
    found.begin = both.begin - key;
    found.end = both.end - key;
    return found;
  }

  void round_step(std::size_t step) {
    const std::size_t key = key_of(step), width = width_of(key), first = step % halves_ * kTwoTiles;
    const std::size_t last = std::min(first + kTwoTiles, 2 * padded_pairs(rows_));
    for (std::size_t row = first; row < last; row += 2) {
      if (key == begin_) ask_for_queries(row);
      if (query_ + kGradientQueries >= s_.queries) ask_for_keys(key + row);
      const ScoreRow rows[2] = {row_of(step, row), row_of(step, row + 1)};
      round_slopes(rows[0], rows[1], width, static_cast<float>(call_.scale), call_.dbias != nullptr,
                   words(layout_.p) + row * width, words(layout_.slopes) + row * width,
                   words(layout_.slope_rows) + row * kPanelColumns);
      for (std::size_t i = 0; i < 2 && call_.dbias != nullptr; ++i) {
        if (rows[i].begin == rows[i].end) continue;
        const std::size_t at = key + rows[i].begin, end = std::min(key + rows[i].end, s_.keys);
        add_bias_gradient(call_, head_.batch, head_.head, query_ + row + i, at, rows[i].dp + rows[i].begin, end - at);
      }
    }
  }

  // Two rows of the next block of queries, and of this one's result.
  void ask_for_queries(std::size_t row) const {
    for (const std::size_t query : {query_ + row, query_ + row + 1}) {
      if (const std::size_t next = query + kGradientQueries; next < s_.queries) {
        ask_for_row<0>(head_.query(call_.q, next), s_.size);
        ask_for_row<0>(head_.output(call_.dy, next), s_.value_size);
        ask_for_row<0>(head_.output(call_.y, next), s_.value_size);
      }
      if (call_.dq != nullptr && query < s_.queries) ask_for_row<1>(head_.query(call_.dq, query), s_.size);
    }
  }

  // Two rows of the results by key.
  void ask_for_keys(std::size_t row) const {
    for (const std::size_t key : {row, row + 1}) {
      if (key >= s_.keys) continue;
      if (call_.dk != nullptr) ask_for_row<1>(head_.key(call_.dk, key), s_.size);
      if (call_.dv != nullptr) ask_for_row<1>(head_.value(call_.dv, key), s_.value_size);
    }
  }

  // Adds a block's products of slopes and probabilities.
  void multiply_slopes(std::size_t key) const {
    const std::size_t pairs = padded_pairs(rows_), width = width_of(key);
    if (call_.dv != nullptr) {
      multiply_block({words(layout_.dy_columns), kGradientQueries, pairs, words(layout_.p), true,
                      floats(layout_.dv) + key, stride_}, sizes_.value_width, width);
    }
    if (call_.dk != nullptr) {
      multiply_block({words(layout_.q_columns), kGradientQueries, pairs, words(layout_.slopes), true,
                      floats(layout_.dk) + key, stride_}, sizes_.width, width);
    }
    if (call_.dq != nullptr) {
      multiply_by_rows({words(layout_.slope_rows), kPanelColumns, 0, words(layout_.key_rows), key != begin_,
                        floats(layout_.dq), sizes_.width}, rounded_up(rows_, kTileLines), key, key + width,
                       sizes_.key_depth, sizes_.width);
    }
  }

  const AttentionCall& call_;
  const AttentionShape& s_;
  const HeadSizes sizes_;
  const Bfloat16GradientLayout layout_;
  const Head<float> head_;
  Word* const scratch_;
  const std::size_t stride_;  // of dk and dv, transposed
  BiasRows<float> biases_[2];  // of even and of odd queries
  const float* log_sums_;
  float deltas_[kGradientQueries];
  std::size_t query_ = 0, rows_ = 0, begin_ = 0, halves_ = 0;
  KeyRange seen_ = {0, 0};
};

inline void attention_gradient_in_bfloat16(const AttentionCall& call, std::size_t number, void* buffer) {
  Bfloat16Gradient gradient(call, number, static_cast<Word*>(buffer));
  [[maybe_unused]] const Tiles tiles;
  for (std::size_t query = 0; query < call.shape.queries; query += kGradientQueries) gradient.add_queries(query);
  gradient.write_keys();
}

inline std::size_t bfloat16_attention_scratch(const AttentionCall& call, bool gradient) {
  const std::size_t words = gradient ? Bfloat16GradientLayout(call).total : Bfloat16ForwardLayout(call).total;
  return words * sizeof(Word);
}

}  // namespace
}  // namespace onnxtrain
