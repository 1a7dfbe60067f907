// Attention of short sequences: a vector holds the same number of as many heads as it has lanes. Sequences and heads of
// any size are then without padding, and no sum goes across lanes.
//
// Included by kernels.cpp only. A lane's results do not depend on the other lanes.
#pragma once

#include <cstdint>

#include "attention/head_kernels.h"
#include "attention/layout.h"
#include "attention/softmax_kernels.h"
#include "attention/table.h"
#include "matmul/matrix_tile.h"

namespace onnxtrain {
namespace {

// Moving heads into lanes and back. -----------------------------------------------------------------------------------

template <typename T>
inline constexpr std::size_t kHalfLanes = kLanes<T> / 2;

template <typename T>
struct HalfOf {
  typedef T type __attribute__((vector_size(kVectorBytes / 2)));
  typedef T unaligned __attribute__((vector_size(kVectorBytes / 2), aligned(sizeof(T)), may_alias));
};

#if defined(ONNXTRAIN_SHUFFLES)

// A vector of two halves in memory, and back.
template <typename T, int... lane>
inline Vector<T> joined(const T* low, const T* high, std::integer_sequence<int, lane...>) {
  const typename HalfOf<T>::type a = *reinterpret_cast<const typename HalfOf<T>::unaligned*>(low);
  const typename HalfOf<T>::type b = *reinterpret_cast<const typename HalfOf<T>::unaligned*>(high);
  return __builtin_shufflevector(a, b, lane...);
}

template <int first, typename T, int... lane>
inline void store_half(const Vector<T>& value, T* to, std::integer_sequence<int, lane...>) {
  *reinterpret_cast<typename HalfOf<T>::unaligned*>(to) = __builtin_shufflevector(value, value, (first + lane)...);
}

template <typename T>
inline Vector<T> joined(const T* low, const T* high) {
  return joined(low, high, std::make_integer_sequence<int, kLanes<T>>());
}

template <bool upper, typename T>
inline void store_half(const Vector<T>& value, T* to) {
  constexpr int half = kHalfLanes<T>;
  store_half<upper ? half : 0, T>(value, to, std::make_integer_sequence<int, half>());
}

#else

template <typename T>
inline Vector<T> joined(const T* low, const T* high) {
  Vector<T> value;
  __builtin_memcpy(&value, low, sizeof value / 2);
  __builtin_memcpy(reinterpret_cast<char*>(&value) + sizeof value / 2, high, sizeof value / 2);
  return value;
}

template <bool upper, typename T>
inline void store_half(const Vector<T>& value, T* to) {
  __builtin_memcpy(to, reinterpret_cast<const char*>(&value) + (upper ? sizeof value / 2 : 0), sizeof value / 2);
}

#endif

// Transposes the square blocks of the lower and of the upper halves of vectors, each on its own.
template <typename T, int block = 1>
inline void transpose_halves(Vector<T> (&rows)[kHalfLanes<T>]) {
  if constexpr (block < static_cast<int>(kHalfLanes<T>)) {
#if defined(ONNXTRAIN_SHUFFLES)
#pragma GCC unroll 8
    for (int row = 0; row < static_cast<int>(kHalfLanes<T>); ++row) {
      if ((row & block) == 0) {
        exchange<block>(rows[row], rows[row + block], std::make_integer_sequence<int, kLanes<T>>());
      }
    }
    transpose_halves<T, 2 * block>(rows);
#else
    for (std::size_t row = 0; row < kHalfLanes<T>; ++row) {
      for (std::size_t lane = row + 1; lane < kLanes<T>; ++lane) {
        const std::size_t other = lane % kHalfLanes<T>, half = lane - other;
        if (other <= row) continue;
        const T kept = rows[row][lane];
        rows[row][lane] = rows[other][half + row];
        rows[other][half + row] = kept;
      }
    }
#endif
  }
}

// to[i] = factor times element i of every lane, for `count` neighbouring elements of each.
template <typename T>
inline void load_lanes(const T* const* from, std::size_t offset, std::size_t count, T factor, Vector<T>* to) {
  constexpr std::size_t half = kHalfLanes<T>;
  std::size_t i = 0;
  for (; i + half <= count; i += half) {
    Vector<T> rows[half];
#pragma GCC unroll 8
    for (std::size_t r = 0; r < half; ++r) rows[r] = joined(from[r] + offset + i, from[half + r] + offset + i);
    transpose_halves<T>(rows);
#pragma GCC unroll 8
    for (std::size_t r = 0; r < half; ++r) to[i + r] = rows[r] * factor;
  }
  for (; i < count; ++i) {
    for (std::size_t lane = 0; lane < kLanes<T>; ++lane) to[i][lane] = from[lane][offset + i] * factor;
  }
}

// The inverse of load_lanes, for the first `lanes` lanes.
template <typename T>
inline void store_lanes(const Vector<T>* from, std::size_t count, T factor, T* const* to, std::size_t offset,
                        std::size_t lanes) {
  constexpr std::size_t half = kHalfLanes<T>;
  std::size_t i = 0;
  for (; i + half <= count; i += half) {
    Vector<T> rows[half];
#pragma GCC unroll 8
    for (std::size_t r = 0; r < half; ++r) rows[r] = from[i + r] * factor;
    transpose_halves<T>(rows);
#pragma GCC unroll 8
    for (std::size_t r = 0; r < half; ++r) {
      if (r < lanes) store_half<false, T>(rows[r], to[r] + offset + i);
      if (half + r < lanes) store_half<true, T>(rows[r], to[half + r] + offset + i);
    }
  }
  for (; i < count; ++i) {
    for (std::size_t lane = 0; lane < lanes; ++lane) to[lane][offset + i] = from[i][lane] * factor;
  }
}

// Products. -----------------------------------------------------------------------------------------------------------

// sums[row, column] (+)= sum over the depth of left[row, depth] * right[column, depth], lane by lane. Strides count
// vectors.
template <typename T>
struct LaneProduct {
  const Vector<T>* left;
  std::size_t left_row, left_depth;
  const Vector<T>* right;
  std::size_t right_column, right_depth;
  std::size_t rows, columns, depth;
  Vector<T>* sums;
  std::size_t sums_row;
};

// With 32 registers sixteen sums, four columns and a row; with 16, nine and three.
inline constexpr std::size_t kLaneTile = kVectorRegisters == 32 ? 4 : 3;

// Tiles one below the other, from `row` on.
template <typename T, bool accumulate, std::size_t rows, std::size_t columns>
void multiply_lanes(const LaneProduct<T>& product, std::size_t row, std::size_t tiles, std::size_t column) {
  const std::size_t left_row = product.left_row, right_column = product.right_column, sums_row = product.sums_row;
  const std::size_t left_depth = product.left_depth, right_depth = product.right_depth, depth = product.depth;
  const Vector<T>* first = product.left + row * left_row;
  Vector<T>* to = product.sums + row * sums_row + column;
  for (; tiles > 0; --tiles, first += rows * left_row) {
    const Vector<T> *left = first, *right = product.right + column * right_column;
    Vector<T> sums[rows][columns];
#pragma GCC unroll 4
    for (std::size_t r = 0; r < rows; ++r) {
#pragma GCC unroll 4
      for (std::size_t c = 0; c < columns; ++c) sums[r][c] = accumulate ? to[r * sums_row + c] : Vector<T>{};
    }
    for (std::size_t k = 0; k < depth; ++k, left += left_depth, right += right_depth) {
      Vector<T> factors[columns];
#pragma GCC unroll 4
      for (std::size_t c = 0; c < columns; ++c) factors[c] = right[c * right_column];
#pragma GCC unroll 4
      for (std::size_t r = 0; r < rows; ++r) {
        const Vector<T> factor = left[r * left_row];
#pragma GCC unroll 4
        for (std::size_t c = 0; c < columns; ++c) sums[r][c] += factor * factors[c];
      }
    }
#pragma GCC unroll 4
    for (std::size_t r = 0; r < rows; ++r, to += sums_row) {
#pragma GCC unroll 4
      for (std::size_t c = 0; c < columns; ++c) to[c] = sums[r][c];
    }
  }
}

template <typename T>
using MultiplyLanes = void (*)(const LaneProduct<T>&, std::size_t row, std::size_t tiles, std::size_t column);

template <typename T, bool accumulate>
inline MultiplyLanes<T> multiply_lanes_of(std::size_t rows, std::size_t columns) {
  constexpr std::size_t most = kLaneTile;
  static constexpr MultiplyLanes<T> kernels[4][4] = {
      {multiply_lanes<T, accumulate, 1, 1>, multiply_lanes<T, accumulate, 1, 2>, multiply_lanes<T, accumulate, 1, 3>,
       multiply_lanes<T, accumulate, 1, most>},
      {multiply_lanes<T, accumulate, 2, 1>, multiply_lanes<T, accumulate, 2, 2>, multiply_lanes<T, accumulate, 2, 3>,
       multiply_lanes<T, accumulate, 2, most>},
      {multiply_lanes<T, accumulate, 3, 1>, multiply_lanes<T, accumulate, 3, 2>, multiply_lanes<T, accumulate, 3, 3>,
       multiply_lanes<T, accumulate, 3, most>},
      {multiply_lanes<T, accumulate, most, 1>, multiply_lanes<T, accumulate, most, 2>,
       multiply_lanes<T, accumulate, most, 3>, multiply_lanes<T, accumulate, most, most>}};
  return kernels[rows - 1][columns - 1];
}

template <bool accumulate, typename T>
void multiply_lanes(const LaneProduct<T>& product) {
  const Parts down(product.rows, kLaneTile), across(product.columns, kLaneTile);
  for (std::size_t c = 0; c < across.count; ++c) {
    const std::size_t column = across.begin(c), columns = across.size(c);
    const auto multiply = [&](std::size_t row, std::size_t rows, std::size_t tiles) {
      if (tiles > 0) multiply_lanes_of<T, accumulate>(rows, columns)(product, row, tiles, column);
    };
    multiply(0, down.smaller + 1, down.larger);
    multiply(down.begin(down.larger), down.smaller, down.count - down.larger);
  }
}

// Softmax. ------------------------------------------------------------------------------------------------------------

inline Vector<float> probabilities(Vector<float> logarithms) {
  typedef std::uint32_t Bits __attribute__((vector_size(kVectorBytes)));
  return exp_of_single<Vector<float>, Bits>(logarithms);
}

inline Vector<double> probabilities(Vector<double> logarithms) {
  for (std::size_t lane = 0; lane < kLanes<double>; ++lane) logarithms[lane] = probability(logarithms[lane]);
  return logarithms;
}

// The heads in the lanes. Behind the last one, a lane repeats it, and its results are not stored.
template <typename T>
struct LaneHeads {
  const AttentionCall& call;
  std::size_t count;
  std::size_t batch[kLanes<T>], head[kLanes<T>];

  LaneHeads(const AttentionCall& call_, std::size_t group) : call(call_) {
    const std::size_t heads = call.shape.batch * call.shape.heads, first = group * kLanes<T>;
    count = heads - first < kLanes<T> ? heads - first : kLanes<T>;
    for (std::size_t lane = 0; lane < kLanes<T>; ++lane) {
      const std::size_t number = first + (lane < count ? lane : count - 1);
      batch[lane] = number / call.shape.heads;
      head[lane] = number % call.shape.heads;
    }
  }
};

// The rows of a tensor [batch, rows, heads, size], by lane, `stride_` apart.
template <typename T>
struct LaneRows {
  T* start[kLanes<T>];
  std::size_t stride, size, lanes;

  LaneRows(const LaneHeads<T>& heads, const void* data, std::size_t rows, std::size_t size_, std::size_t stride_)
      : stride(stride_), size(size_), lanes(heads.count) {
    for (std::size_t lane = 0; lane < kLanes<T>; ++lane) {
      start[lane] = const_cast<T*>(static_cast<const T*>(data)) + heads.batch[lane] * rows * stride +
                    heads.head[lane] * size;
    }
  }

  // Rows [first, first + count), one after the other.
  void load(std::size_t first, std::size_t count, T factor, Vector<T>* to) const {
    for (std::size_t row = 0; row < count; ++row) {
      load_lanes(start, (first + row) * stride, size, factor, to + row * size);
    }
  }
  void store(const Vector<T>* from, std::size_t first, std::size_t count, T factor) const {
    for (std::size_t row = 0; row < count; ++row) {
      store_lanes(from + row * size, size, factor, start, (first + row) * stride, lanes);
    }
  }
};

// The logarithms of sums [batch, heads, queries]: neighbours are queries.
template <typename T>
struct LaneSums {
  T* start[kLanes<T>];

  explicit LaneSums(const LaneHeads<T>& heads) {
    const AttentionShape& s = heads.call.shape;
    for (std::size_t lane = 0; lane < kLanes<T>; ++lane) {
      start[lane] = static_cast<T*>(heads.call.log_sum) + (heads.batch[lane] * s.heads + heads.head[lane]) * s.queries;
    }
  }
};

// The bias of the heads in the lanes.
template <typename T>
class LaneBias {
 public:
  LaneBias(const LaneHeads<T>& heads, Vector<T>* row) : call_(heads.call), keys_(call_.shape.keys), row_(row) {
    if (call_.bias == nullptr) return;
    for (std::size_t lane = 0; lane < kLanes<T>; ++lane) {
      const auto batch = static_cast<std::ptrdiff_t>(heads.batch[lane]);
      const auto head = static_cast<std::ptrdiff_t>(heads.head[lane]);
      if (call_.ranges != nullptr) {
        ranges_[lane] = call_.ranges + batch * call_.range_stride[0] + head * call_.range_stride[1];
      }
      start_[lane] = static_cast<const T*>(call_.bias) + batch * call_.bias_stride[0] + head * call_.bias_stride[1];
      shared_ = shared_ && start_[lane] == start_[0];
    }
  }

  // The keys that any query in [first, last) of any lane sees.
  KeyRange seen(std::size_t first, std::size_t last) const {
    KeyRange all = {0, static_cast<std::uint32_t>(keys_)};
    if (call_.ranges == nullptr) return all;
    all = {all.end, 0};
    for (std::size_t lane = 0; lane < (shared_ ? 1 : kLanes<T>); ++lane) {
      for (std::size_t query = first; query < last; ++query) {
        const KeyRange range = range_of(lane, query);
        if (range.begin < all.begin) all.begin = range.begin;
        if (range.end > all.end) all.end = range.end;
      }
    }
    return all;
  }

  // Adds the bias of a query to its scores of keys [begin, end): scores[0] is the first one's.
  void add(std::size_t query, KeyRange keys, Vector<T>* scores) {
    if (call_.bias == nullptr) return;
    const std::size_t count = keys.end - keys.begin;
    if (call_.ranges != nullptr) return hide(query, keys, scores);
    const std::ptrdiff_t offset = static_cast<std::ptrdiff_t>(query) * call_.bias_stride[2], key = call_.bias_stride[3];
    if (shared_) {
      const T* from = start_[0] + offset + static_cast<std::ptrdiff_t>(keys.begin) * key;
      for (std::size_t i = 0; i < count; ++i) scores[i] += from[static_cast<std::ptrdiff_t>(i) * key];
      return;
    }
    if (call_.bias_stride[2] != 0 || !read_) {
      load_lanes(start_, static_cast<std::size_t>(offset), key == 0 ? 1 : keys_, T(1), row_);
      read_ = true;
    }
    for (std::size_t i = 0; i < count; ++i) scores[i] += row_[key == 0 ? 0 : keys.begin + i];
  }

 private:
  KeyRange range_of(std::size_t lane, std::size_t query) const {
    return ranges_[lane][static_cast<std::ptrdiff_t>(query) * call_.range_stride[2]];
  }

  void hide(std::size_t query, KeyRange keys, Vector<T>* scores) const {
    if (shared_) {
      const KeyRange own = range_of(0, query);
      for (std::size_t key = keys.begin; key < keys.end; ++key) {
        if (key < own.begin || key >= own.end) scores[key - keys.begin] = broadcast(kMinusInfinity<T>);
      }
      return;
    }
    Vector<T> begin, end;
    for (std::size_t lane = 0; lane < kLanes<T>; ++lane) {
      const KeyRange own = range_of(lane, query);
      begin[lane] = static_cast<T>(own.begin);
      end[lane] = static_cast<T>(own.end);
    }
    const Vector<T> hidden = broadcast(kMinusInfinity<T>);
    for (std::size_t i = 0; i < keys.end - keys.begin; ++i) {
      const Vector<T> key = broadcast(static_cast<T>(keys.begin + i));
      scores[i] = key < begin ? hidden : key < end ? scores[i] : hidden;
    }
  }

  const AttentionCall& call_;
  const T* start_[kLanes<T>];
  const KeyRange* ranges_[kLanes<T>];
  std::size_t keys_;
  Vector<T>* row_;
  bool shared_ = true, read_ = false;
};

// Forward pass. -------------------------------------------------------------------------------------------------------

// Rows of a block of scores: it fits the L1 cache beside keys and values.
inline std::size_t lane_block(const AttentionShape& s) {
  const std::size_t fitting = tuning::kLaneScores / s.keys / kLaneTile * kLaneTile;
  const std::size_t rows = fitting < kLaneTile ? kLaneTile : fitting;
  return rows < s.queries ? rows : s.queries;
}

// Offsets in vectors.
template <typename T>
struct LaneForwardLayout : ScratchLayout<Vector<T>> {
  std::size_t block, q, keys, values, bias, scores, results, largest, sums;

  explicit LaneForwardLayout(const AttentionShape& s) : block(lane_block(s)) {
    q = this->take(block * s.size);
    keys = this->take(s.keys * s.size);
    values = this->take(s.keys * s.value_size);
    bias = this->take(s.keys);
    scores = this->take(block * s.keys);
    results = this->take(block * s.value_size);
    largest = this->take(block);
    sums = this->take(block);
  }
};

// Attends a group of heads, one in each lane.
template <typename T>
void attend_lanes(const AttentionCall& call, std::size_t group, void* buffer) {
  typedef Vector<T> V;
  const AttentionShape& s = call.shape;
  const LaneForwardLayout<T> layout(s);
  V* scratch = static_cast<V*>(buffer);
  V *q = scratch + layout.q, *k = scratch + layout.keys, *v = scratch + layout.values;
  V *scores = scratch + layout.scores, *results = scratch + layout.results;
  V *largest = scratch + layout.largest, *sums = scratch + layout.sums;
  const LaneHeads<T> heads(call, group);
  const LaneRows<T> queries(heads, call.q, s.queries, s.size, s.line());
  const LaneRows<T> outputs(heads, call.y, s.queries, s.value_size, s.output_line());
  LaneRows<T>(heads, call.k, s.keys, s.size, s.line()).load(0, s.keys, T(1), k);
  LaneRows<T>(heads, call.v, s.keys, s.value_size, s.value_line()).load(0, s.keys, T(1), v);
  LaneBias<T> bias(heads, scratch + layout.bias);
  const V none = broadcast(call.zero_empty_rows ? T(0) : kNotANumber<T>);

  const Parts blocks(s.queries, layout.block);
  for (std::size_t block = 0; block < blocks.count; ++block) {
    const std::size_t query = blocks.begin(block), rows = blocks.size(block);
    const KeyRange keys = bias.seen(query, query + rows);
    const std::size_t count = keys.end > keys.begin ? keys.end - keys.begin : 0;
    queries.load(query, rows, static_cast<T>(call.scale), q);
    multiply_lanes<false>(LaneProduct<T>{q, s.size, 1, k + keys.begin * s.size, s.size, 1, rows, count, s.size, scores,
                                         count});
    for (std::size_t row = 0; row < rows; ++row) {
      V* at = scores + row * count;
      bias.add(query + row, keys, at);
      V most = broadcast(kMinusInfinity<T>), sum = {};
      for (std::size_t i = 0; i < count; ++i) most = at[i] > most ? at[i] : most;
      const V shift = most == broadcast(kMinusInfinity<T>) ? V{} : most;  // an empty row has a sum of 0
      for (std::size_t i = 0; i < count; ++i) {
        at[i] = probabilities(at[i] - shift);
        sum += at[i];
      }
      largest[row] = most;
      sums[row] = sum;
    }
    if (call.y != nullptr) {
      multiply_lanes<false>(LaneProduct<T>{scores, count, 1, v + keys.begin * s.value_size, 1, s.value_size, rows,
                                           s.value_size, count, results, s.value_size});
      for (std::size_t row = 0; row < rows; ++row) {
        const V inverse = T(1) / sums[row];
        V* y = results + row * s.value_size;
        for (std::size_t i = 0; i < s.value_size; ++i) y[i] = sums[row] > T(0) ? y[i] * inverse : none;
      }
      outputs.store(results, query, rows, T(1));
    }
    if (call.log_sum != nullptr) {
      for (std::size_t row = 0; row < rows; ++row) {
        const V sum = sums[row], usable = sum > T(0) ? sum : broadcast(T(1));
        V found;
        const T *most = reinterpret_cast<const T*>(largest + row), *from = reinterpret_cast<const T*>(&usable);
        T* to = reinterpret_cast<T*>(&found);
        ONNXTRAIN_VECTORIZE
        for (std::size_t lane = 0; lane < kLanes<T>; ++lane) {
          to[lane] = static_cast<T>(static_cast<double>(most[lane]) + logarithm(static_cast<double>(from[lane])));
        }
        const V other = sum == T(0) ? broadcast(kMinusInfinity<T>) : broadcast(kNotANumber<T>);
        sums[row] = sum > T(0) ? found : other;
      }
      store_lanes(sums, rows, T(1), LaneSums<T>(heads).start, query, heads.count);
    }
  }
}

// Gradient. -----------------------------------------------------------------------------------------------------------

template <typename T>
struct LaneGradientLayout : ScratchLayout<Vector<T>> {
  std::size_t block, q, dy, y, keys, values, bias, bias_rows, log_sum, scores, slopes, dq, dk, dv;

  explicit LaneGradientLayout(const AttentionShape& s) : block(lane_block(s)) {
    q = this->take(block * s.size);
    dy = this->take(block * s.value_size);
    y = this->take(s.value_size);
    keys = this->take(s.keys * s.size);
    values = this->take(s.keys * s.value_size);
    bias = this->take(s.keys);
    bias_rows = this->take(s.keys);
    log_sum = this->take(block);
    scores = this->take(block * s.keys);
    slopes = this->take(block * s.keys);
    dq = this->take(block * s.size);
    dk = this->take(s.keys * s.size);
    dv = this->take(s.keys * s.value_size);
  }
};

// Adds the slopes of the scores of a query, of keys in a range, to the gradient of the bias, lane after lane. `rows` has
// room for a row of each lane.
template <typename T>
void add_bias_gradient(const LaneHeads<T>& heads, const Vector<T>* slopes, std::size_t query, KeyRange keys, T* rows) {
  const std::size_t count = keys.end - keys.begin;
  T* starts[kLanes<T>];
  for (std::size_t lane = 0; lane < kLanes<T>; ++lane) starts[lane] = rows + lane * count;
  store_lanes(slopes, count, T(1), starts, 0, heads.count);
  for (std::size_t lane = 0; lane < heads.count; ++lane) {
    add_bias_gradient(heads.call, heads.batch[lane], heads.head[lane], query, keys.begin, starts[lane], count);
  }
}

template <typename T>
void attention_gradient_lanes(const AttentionCall& call, std::size_t group, void* buffer) {
  typedef Vector<T> V;
  const AttentionShape& s = call.shape;
  const LaneGradientLayout<T> layout(s);
  V* scratch = static_cast<V*>(buffer);
  V *q = scratch + layout.q, *k = scratch + layout.keys, *v = scratch + layout.values;
  V *dy = scratch + layout.dy, *y = scratch + layout.y, *log_sum = scratch + layout.log_sum;
  V *scores = scratch + layout.scores, *slopes = scratch + layout.slopes;
  V *dq = scratch + layout.dq, *dk = scratch + layout.dk, *dv = scratch + layout.dv;
  const LaneHeads<T> heads(call, group);
  const LaneRows<T> queries(heads, call.q, s.queries, s.size, s.line());
  const LaneRows<T> keys_of(heads, call.k, s.keys, s.size, s.line());
  const LaneRows<T> values_of(heads, call.v, s.keys, s.value_size, s.value_line());
  const LaneRows<T> slopes_of(heads, call.dy, s.queries, s.value_size, s.output_line());
  const LaneRows<T> outputs(heads, call.y, s.queries, s.value_size, s.output_line());
  const LaneSums<T> sums(heads);
  keys_of.load(0, s.keys, T(1), k);
  values_of.load(0, s.keys, T(1), v);
  for (std::size_t i = 0; i < s.keys * s.size; ++i) dk[i] = V{};
  for (std::size_t i = 0; i < s.keys * s.value_size; ++i) dv[i] = V{};
  LaneBias<T> bias(heads, scratch + layout.bias);
  const T scale = static_cast<T>(call.scale);
  T* rows_of_lanes = reinterpret_cast<T*>(scratch + layout.bias_rows);

  const Parts blocks(s.queries, layout.block);
  for (std::size_t block = 0; block < blocks.count; ++block) {
    const std::size_t query = blocks.begin(block), rows = blocks.size(block);
    const KeyRange keys = bias.seen(query, query + rows);
    const std::size_t count = keys.end > keys.begin ? keys.end - keys.begin : 0;
    queries.load(query, rows, scale, q);
    slopes_of.load(query, rows, T(1), dy);
    load_lanes(sums.start, query, rows, T(1), log_sum);
    const V *k_seen = k + keys.begin * s.size, *v_seen = v + keys.begin * s.value_size;
    multiply_lanes<false>(LaneProduct<T>{q, s.size, 1, k_seen, s.size, 1, rows, count, s.size, scores, count});
    multiply_lanes<false>(LaneProduct<T>{dy, s.value_size, 1, v_seen, s.value_size, 1, rows, count, s.value_size,
                                         slopes, count});
    for (std::size_t row = 0; row < rows; ++row) {
      V *p = scores + row * count, *slope = slopes + row * count;
      bias.add(query + row, keys, p);
      outputs.load(query + row, 1, T(1), y);
      V delta = {};
      for (std::size_t i = 0; i < s.value_size; ++i) delta += dy[row * s.value_size + i] * y[i];
      const V shift = log_sum[row];
      for (std::size_t i = 0; i < count; ++i) {
        p[i] = probabilities(p[i] - shift);
        slope[i] = p[i] * (slope[i] - delta);
      }
      if (!call.zero_empty_rows) continue;
      for (std::size_t i = 0; i < count; ++i) {  // rows whose logarithm is NaN or -inf
        p[i] = shift - shift == T(0) ? p[i] : V{};
        slope[i] = shift - shift == T(0) ? slope[i] : V{};
      }
    }
    if (call.dv != nullptr) {
      multiply_lanes<true>(LaneProduct<T>{scores, 1, count, dy, 1, s.value_size, count, s.value_size, rows,
                                          dv + keys.begin * s.value_size, s.value_size});
    }
    if (call.dk != nullptr) {
      multiply_lanes<true>(LaneProduct<T>{slopes, 1, count, q, 1, s.size, count, s.size, rows,
                                          dk + keys.begin * s.size, s.size});
    }
    if (call.dbias != nullptr) {
      for (std::size_t row = 0; row < rows; ++row) {
        add_bias_gradient(heads, slopes + row * count, query + row, keys, rows_of_lanes);
      }
    }
    if (call.dq != nullptr) {
      multiply_lanes<false>(LaneProduct<T>{slopes, count, 1, k_seen, 1, s.size, rows, s.size, count, dq, s.size});
      LaneRows<T>(heads, call.dq, s.queries, s.size, s.line()).store(dq, query, rows, scale);
    }
  }
  if (call.dk != nullptr) LaneRows<T>(heads, call.dk, s.keys, s.size, s.line()).store(dk, 0, s.keys, T(1));
  if (call.dv != nullptr) LaneRows<T>(heads, call.dv, s.keys, s.value_size, s.value_line()).store(dv, 0, s.keys, T(1));
}

// Returns whether padding the rows of heads to vectors would cost more than lanes without a head do in small batches.
// Depends on the shape of a head alone, so that a batch and its parts have the same bits.
inline bool is_short(const AttentionShape& s) {
  const std::size_t size = s.size > s.value_size ? s.size : s.value_size;
  return s.keys <= tuning::kShortKeys && s.keys * size <= tuning::kShortHead;
}

template <typename T>
std::size_t lane_scratch(const AttentionCall& call, bool gradient) {
  const AttentionShape& s = call.shape;
  return (gradient ? LaneGradientLayout<T>(s).total : LaneForwardLayout<T>(s).total) * sizeof(Vector<T>);
}

}  // namespace
}  // namespace onnxtrain
