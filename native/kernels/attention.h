// softmax(scale q kᵀ + bias) v of one head, a block of queries at a time, and its gradient, which computes the
// probabilities again from the logarithm of their sum.
//
// Included by attention.cpp only. Heads are read where they stand in [batch, row, head, element]: what a product
// broadcasts through pointers to its rows, what it reads as columns from panels that are packed once per head.
#pragma once

#include "attention_table.h"
#include "correlation.h"

namespace onnxtrain {
namespace {

template <typename T>
constexpr T kMinusInfinity = -static_cast<T>(__builtin_inf());

template <typename T>
constexpr T kNotANumber = static_cast<T>(__builtin_nan(""));

inline constexpr std::size_t kLineBytes = 64;

inline std::size_t rounded_up(std::size_t count, std::size_t to) { return (count + to - 1) / to * to; }

template <typename T>
std::size_t padded(std::size_t columns) {
  return rounded_up(columns, kLanes<T>);
}

// An odd number of cache lines: rows that are read side by side then lie in different sets of the cache.
template <typename T>
std::size_t score_stride(std::size_t keys) {
  constexpr std::size_t line = kLineBytes / sizeof(T);
  return ((padded<T>(keys) + line - 1) / line | 1) * line;
}

// sums[row, column] (+)= sum over the depth of source[row * row_stride + depth_offsets[depth]] * panels[depth, column],
// for the panels that hold the columns before `wanted`.
template <typename T>
struct Product {
  const T* source;
  std::ptrdiff_t row_stride;
  const std::ptrdiff_t* depth_offsets;
  std::size_t rows, depth;
  const T* panels;
  std::size_t panel_depth, columns, wanted;
  bool accumulate;
  T* sums;
  std::size_t sums_stride;
};

template <typename T>
void multiply_panels(const Product<T>& product) {
  const Panels<T> panels(product.columns);
  const Parts depths(product.depth, kAccumulationDepth);
  if (product.depth == 0 && !product.accumulate) {
    for (std::size_t row = 0; row < product.rows; ++row) {
      fill_zero(product.sums + row * product.sums_stride, padded<T>(product.columns));
    }
  }
  for (std::size_t part = 0; part < depths.count; ++part) {
    for (std::size_t panel = 0; panel < panels.count() && panels.begin(panel) < product.wanted; ++panel) {
      const std::size_t first = panels.begin(panel), vectors = panels.vectors(panel);
      const T* columns = product.panels + first * product.panel_depth + depths.begin(part) * panels.width(panel);
      const Multiply<T> full = multiply_of<T>(tile_rows(vectors), vectors);
      const Parts tiles(product.rows, tile_rows(vectors));
      for (std::size_t t = 0; t < tiles.count; ++t) {
        const std::size_t row = tiles.begin(t), rows = tiles.size(t);
        const T* starts[kMaxTileRows];
        for (std::size_t r = 0; r < rows; ++r) {
          starts[r] = product.source + static_cast<std::ptrdiff_t>(row + r) * product.row_stride;
        }
        const Tile<T> tile = {starts,
                              product.depth_offsets + depths.begin(part),
                              depths.size(part),
                              columns,
                              part > 0 || product.accumulate,
                              product.sums + row * product.sums_stride + first,
                              product.sums_stride};
        (rows == tile_rows(vectors) ? full : multiply_of<T>(rows, vectors))(tile);
      }
    }
  }
}

// All of a matrix [columns][depth], or of one [depth][columns] whose columns are neighbours, as panels.
template <typename T>
void pack_all(const T* source, const T* end, std::ptrdiff_t column_stride, const std::ptrdiff_t* offsets,
              std::size_t columns, std::size_t depth, T* panels) {
  pack(Packing<T>{source, end, column_stride, offsets, columns, depth, 0, depth, 0, panel_count<T>(columns), panels});
}

// Where the tensors of one head begin, and how far apart its rows are.
template <typename T>
struct Head {
  const AttentionShape& shape;
  std::size_t batch, head;
  std::ptrdiff_t stride, value_stride;

  Head(const AttentionCall& call, std::size_t number)
      : shape(call.shape),
        batch(number / shape.heads),
        head(number % shape.heads),
        stride(static_cast<std::ptrdiff_t>(shape.heads * shape.size)),
        value_stride(static_cast<std::ptrdiff_t>(shape.heads * shape.value_size)) {}

  // The first element of a row of a tensor [batch, rows, heads, size].
  const T* at(const void* data, std::size_t rows, std::size_t row, std::size_t size) const {
    return static_cast<const T*>(data) + ((batch * rows + row) * shape.heads + head) * size;
  }
  T* at(void* data, std::size_t rows, std::size_t row, std::size_t size) const {
    return const_cast<T*>(at(static_cast<const void*>(data), rows, row, size));
  }
};

// The bias of a query, as long as a row of scores, with -inf behind the last key.
template <typename T>
class BiasRows {
 public:
  BiasRows(const AttentionCall& call, const Head<T>& head, T* row)
      : data_(static_cast<const T*>(call.bias)),
        query_(call.bias_stride[2]),
        key_(call.bias_stride[3]),
        keys_(call.shape.keys),
        row_(row) {
    if (data_ != nullptr) {
      data_ += static_cast<std::ptrdiff_t>(head.batch) * call.bias_stride[0] +
               static_cast<std::ptrdiff_t>(head.head) * call.bias_stride[1];
    }
    for (std::size_t i = keys_; i < padded<T>(keys_); ++i) row_[i] = kMinusInfinity<T>;
    if (data_ == nullptr) {
      fill_zero(row_, keys_);
    } else if (query_ == 0) {
      write(data_);
    }
  }

  // Valid until the next one is asked for.
  const T* operator[](std::size_t query) const {
    if (data_ == nullptr || query_ == 0) return row_;
    const T* from = data_ + static_cast<std::ptrdiff_t>(query) * query_;
    if (key_ == 1 && keys_ % kLanes<T> == 0) return from;
    write(from);
    return row_;
  }

  // Keys that some query of [first, last) sees, up to the last of them; at least one.
  std::size_t reach(std::size_t first, std::size_t last) const {
    if (data_ == nullptr || key_ == 0) return keys_;
    if (query_ == 0) last = first + 1;
    std::size_t seen = 1;
    for (std::size_t query = first; query < last && seen < keys_; ++query) {
      const T* from = data_ + static_cast<std::ptrdiff_t>(query) * query_;
      std::size_t end = keys_;
      while (end > seen && from[end - 1] == kMinusInfinity<T>) --end;
      seen = end;
    }
    return seen;
  }

 private:
  void write(const T* from) const {
    if (key_ == 1) {
      copy(from, keys_, row_);
    } else {
      for (std::size_t i = 0; i < keys_; ++i) row_[i] = *from;
    }
  }

  const T* data_;
  std::ptrdiff_t query_, key_;
  std::size_t keys_;
  T* row_;
};

// The natural logarithm of a normal number that is at least 1.
inline double logarithm(double value) {
  const double near = log2_approximate(value) * 0x1.62e42fefa39efp-1;
  return near + (value * exp_nonpositive<double>(-near) - 1.0);
}

// All lanes as one number: the halves of a vector together, then those of the half, down to one.
template <std::size_t bytes, typename T, typename Together>
inline T of_lanes(const T* lanes, Together together) {
  if constexpr (bytes == sizeof(T)) {
    return *lanes;
  } else {
    typedef T Half __attribute__((vector_size(bytes / 2), aligned(sizeof(T)), may_alias));
    const Half *halves = reinterpret_cast<const Half*>(lanes);
    const Half half = together(halves[0], halves[1]);
    return of_lanes<bytes / 2>(reinterpret_cast<const T*>(&half), together);
  }
}

template <typename T>
inline T sum_of_lanes(const Vector<T>& lanes) {
  return of_lanes<kVectorBytes>(reinterpret_cast<const T*>(&lanes), [](auto a, auto b) { return a + b; });
}

template <typename T>
inline T largest_lane(const Vector<T>& lanes) {
  return of_lanes<kVectorBytes>(reinterpret_cast<const T*>(&lanes), [](auto a, auto b) { return a > b ? a : b; });
}

// What a row of scores had before it became exp(score - largest), whose sum is `sum`.
template <typename T>
struct RowSum {
  T largest, sum;
};

// A row of products, as many as fill vectors, becomes exp(score - largest of the row).
template <typename T>
RowSum<T> exponentials(T* row, const T* bias, std::size_t count, T scale, bool zero_empty) {
  Vector<T> most = broadcast(kMinusInfinity<T>);
  for (std::size_t i = 0; i < count; i += kLanes<T>) {
    const Vector<T> score = load(row + i) * scale + load(bias + i);
    store(row + i, score);
    most = score > most ? score : most;
  }
  const T largest = largest_lane<T>(most);
  bool empty = largest == kMinusInfinity<T>;
  for (std::size_t i = 0; empty && i < count; ++i) empty = row[i] == kMinusInfinity<T>;  // and none is NaN
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) row[i] = probability(row[i] - largest);
  Vector<T> sums = {};
  for (std::size_t i = 0; i < count; i += kLanes<T>) sums += load(row + i);
  const T sum = sum_of_lanes<T>(sums);
  if (sum == sum) return {largest, sum};
  if (zero_empty) fill_zero(row, count);
  return {empty ? kMinusInfinity<T> : kNotANumber<T>, T(1)};
}

// Places in a scratch buffer.
template <typename T>
struct Places {
  std::size_t total = 0;

  std::size_t take(std::size_t count) {
    const std::size_t begin = total;
    total += rounded_up(count, kLineBytes / sizeof(T));
    return begin;
  }
};

template <typename T>
struct ForwardPlaces : Places<T> {
  std::size_t keys, values, bias, scores, results, largest, sums;

  explicit ForwardPlaces(const AttentionCall& call) {
    const AttentionShape& s = call.shape;
    keys = this->take(s.size * padded<T>(s.keys));
    values = this->take(s.keys * padded<T>(s.value_size));
    bias = this->take(padded<T>(s.keys));
    scores = this->take(call.block * score_stride<T>(s.keys));
    results = this->take(call.block * padded<T>(s.value_size));
    largest = this->take(call.block);
    sums = this->take(call.block);
  }
};

template <typename T>
void attend(const AttentionCall& call, std::size_t number, std::size_t first, std::size_t last, void* buffer) {
  const ForwardPlaces<T> places(call);
  T* scratch = static_cast<T*>(buffer);
  const AttentionShape& s = call.shape;
  const Head<T> head(call, number);
  const std::size_t stride = score_stride<T>(s.keys), width = padded<T>(s.value_size);
  const T scale = static_cast<T>(call.scale);
  T *scores = scratch + places.scores, *results = scratch + places.results;
  T *largest = scratch + places.largest, *sums = scratch + places.sums;
  const T *k = head.at(call.k, s.keys, 0, s.size), *v = head.at(call.v, s.keys, 0, s.value_size);
  const std::size_t all_keys = s.batch * s.keys * s.heads;
  pack_all(k, static_cast<const T*>(call.k) + all_keys * s.size, head.stride, call.ones, s.keys, s.size,
           scratch + places.keys);
  pack_all(v, static_cast<const T*>(call.v) + all_keys * s.value_size, 1, call.value_rows, s.value_size, s.keys,
           scratch + places.values);
  const BiasRows<T> bias(call, head, scratch + places.bias);

  const Parts blocks(last - first, call.block);
  for (std::size_t block = 0; block < blocks.count; ++block) {
    const std::size_t query = first + blocks.begin(block), rows = blocks.size(block);
    const std::size_t reach = bias.reach(query, query + rows);
    multiply_panels(Product<T>{head.at(call.q, s.queries, query, s.size), head.stride, call.ones, rows, s.size,
                               scratch + places.keys, s.size, s.keys, reach, false, scores, stride});
    for (std::size_t row = 0; row < rows; ++row) {
      const RowSum<T> sum =
          exponentials(scores + row * stride, bias[query + row], padded<T>(reach), scale, call.zero_empty_rows);
      largest[row] = sum.largest;
      sums[row] = sum.sum;
    }
    if (call.log_sum != nullptr) {
      T* log_sum = static_cast<T*>(call.log_sum) + number * s.queries + query;
      ONNXTRAIN_VECTORIZE
      for (std::size_t row = 0; row < rows; ++row) {
        log_sum[row] = static_cast<T>(static_cast<double>(largest[row]) + logarithm(static_cast<double>(sums[row])));
      }
    }
    if (call.y == nullptr) continue;
    multiply_panels(Product<T>{scores, static_cast<std::ptrdiff_t>(stride), call.ones, rows, reach,
                               scratch + places.values, s.keys, s.value_size, s.value_size, false, results, width});
    for (std::size_t row = 0; row < rows; ++row) {
      T *y = head.at(call.y, s.queries, query + row, s.value_size), *from = results + row * width;
      const T inverse = T(1) / sums[row];
      ONNXTRAIN_VECTORIZE
      for (std::size_t i = 0; i < s.value_size; ++i) y[i] = from[i] * inverse;
    }
  }
}

template <typename T>
struct GradientPlaces : Places<T> {
  std::size_t keys, values, key_rows, q, dy, bias, scores, slopes, dq, dk, dv;

  explicit GradientPlaces(const AttentionCall& call) {
    const AttentionShape& s = call.shape;
    const std::size_t width = padded<T>(s.size), value_width = padded<T>(s.value_size);
    keys = this->take(s.size * padded<T>(s.keys));
    values = this->take(s.value_size * padded<T>(s.keys));
    key_rows = this->take(s.keys * width);
    q = this->take(call.block * width);
    dy = this->take(call.block * value_width);
    bias = this->take(padded<T>(s.keys));
    scores = this->take(call.block * score_stride<T>(s.keys));
    slopes = this->take(call.block * score_stride<T>(s.keys));
    dq = this->take(call.block * width);
    dk = this->take(s.keys * width);
    dv = this->take(s.keys * value_width);
  }
};

template <typename T>
inline T dot(const T* a, const T* b, std::size_t count) {
  Vector<T> sums = {};
  std::size_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) sums += load(a + i) * load(b + i);
  T sum = sum_of_lanes<T>(sums);
  for (; i < count; ++i) sum += a[i] * b[i];
  return sum;
}

// A row of products becomes the probabilities p, and one of dp the gradient by the products: p (dp - delta) scale.
template <typename T>
void score_gradient(T* row, T* slopes, const T* bias, std::size_t count, T scale, T log_sum, T delta,
                    bool zero_empty) {
  if (zero_empty && !(log_sum - log_sum == T(0))) {  // neither NaN nor -inf
    fill_zero(row, count);
    fill_zero(slopes, count);
    return;
  }
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) {
    const T p = probability(row[i] * scale + bias[i] - log_sum);
    row[i] = p;
    slopes[i] = p * (slopes[i] - delta) * scale;
  }
}

// Rows `width` apart to rows `stride` apart.
template <typename T>
void copy_rows(const T* from, std::size_t width, std::size_t rows, std::size_t count, T* to, std::ptrdiff_t stride) {
  for (std::size_t row = 0; row < rows; ++row) {
    copy(from + row * width, count, to + static_cast<std::ptrdiff_t>(row) * stride);
  }
}

template <typename T>
void attention_gradient(const AttentionCall& call, std::size_t number, void* buffer) {
  const GradientPlaces<T> places(call);
  T* scratch = static_cast<T*>(buffer);
  const AttentionShape& s = call.shape;
  const Head<T> head(call, number);
  const std::size_t width = padded<T>(s.size), value_width = padded<T>(s.value_size);
  const std::size_t stride = score_stride<T>(s.keys);
  const auto row_stride = static_cast<std::ptrdiff_t>(stride);
  const T scale = static_cast<T>(call.scale);
  T *scores = scratch + places.scores, *slopes = scratch + places.slopes;
  T *dq = scratch + places.dq, *dk = scratch + places.dk, *dv = scratch + places.dv;
  const std::size_t all_keys = s.batch * s.keys * s.heads, all_queries = s.batch * s.queries * s.heads;
  const T *k = head.at(call.k, s.keys, 0, s.size), *k_end = static_cast<const T*>(call.k) + all_keys * s.size;
  const T *v = head.at(call.v, s.keys, 0, s.value_size);
  const T* v_end = static_cast<const T*>(call.v) + all_keys * s.value_size;
  pack_all(k, k_end, head.stride, call.ones, s.keys, s.size, scratch + places.keys);
  pack_all(v, v_end, head.value_stride, call.ones, s.keys, s.value_size, scratch + places.values);
  pack_all(k, k_end, 1, call.rows, s.size, s.keys, scratch + places.key_rows);
  fill_zero(dk, s.keys * width);
  fill_zero(dv, s.keys * value_width);
  const BiasRows<T> bias(call, head, scratch + places.bias);

  const Parts blocks(s.queries, call.block);
  for (std::size_t block = 0; block < blocks.count; ++block) {
    const std::size_t query = blocks.begin(block), rows = blocks.size(block);
    const std::size_t reach = bias.reach(query, query + rows);
    const T* q = head.at(call.q, s.queries, query, s.size);
    const T* dy = head.at(call.dy, s.queries, query, s.value_size);
    const T* y = head.at(static_cast<const void*>(call.y), s.queries, query, s.value_size);
    const T* log_sum = static_cast<const T*>(call.log_sum) + number * s.queries + query;
    multiply_panels(Product<T>{q, head.stride, call.ones, rows, s.size, scratch + places.keys, s.size, s.keys, reach,
                               false, scores, stride});
    multiply_panels(Product<T>{dy, head.value_stride, call.ones, rows, s.value_size, scratch + places.values,
                               s.value_size, s.keys, reach, false, slopes, stride});
    for (std::size_t row = 0; row < rows; ++row) {
      const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(row) * head.value_stride;
      score_gradient(scores + row * stride, slopes + row * stride, bias[query + row], padded<T>(reach), scale,
                     log_sum[row], dot(dy + at, y + at, s.value_size), call.zero_empty_rows);
    }
    if (call.dv != nullptr) {
      pack_all(dy, static_cast<const T*>(call.dy) + all_queries * s.value_size, 1, call.value_rows, s.value_size, rows,
               scratch + places.dy);
      multiply_panels(Product<T>{scores, 1, call.score_rows, reach, rows, scratch + places.dy, rows, s.value_size,
                                 s.value_size, true, dv, value_width});
    }
    if (call.dk != nullptr) {
      pack_all(q, static_cast<const T*>(call.q) + all_queries * s.size, 1, call.rows, s.size, rows,
               scratch + places.q);
      multiply_panels(Product<T>{slopes, 1, call.score_rows, reach, rows, scratch + places.q, rows, s.size, s.size,
                                 true, dk, width});
    }
    if (call.dq != nullptr) {
      multiply_panels(Product<T>{slopes, row_stride, call.ones, rows, reach, scratch + places.key_rows, s.keys, s.size,
                                 s.size, false, dq, width});
      copy_rows(dq, width, rows, s.size, head.at(call.dq, s.queries, query, s.size), head.stride);
    }
  }
  if (call.dk != nullptr) {
    copy_rows(dk, width, s.keys, s.size, head.at(call.dk, s.keys, 0, s.size), head.stride);
  }
  if (call.dv != nullptr) {
    copy_rows(dv, value_width, s.keys, s.value_size, head.at(call.dv, s.keys, 0, s.value_size), head.value_stride);
  }
}

template <typename T>
std::size_t attention_scratch(const AttentionCall& call, bool gradient) {
  return (gradient ? GradientPlaces<T>(call).total : ForwardPlaces<T>(call).total) * sizeof(T);
}

}  // namespace
}  // namespace onnxtrain
