// softmax(scale q kᵀ + bias) v of one head, one block of queries at a time, and its gradient, which recomputes the
// probabilities from the logarithm of their sum.
//
// Included by kernels.cpp only.
#pragma once

#include "attention/head_kernels.h"
#include "attention/layout.h"
#include "attention/product_kernels.h"
#include "attention/softmax_kernels.h"
#include "attention/table.h"

namespace onnxtrain {
namespace {

template <typename T>
struct ForwardLayout : ScratchLayout<T> {
  std::size_t keys, values, bias, scores, results, largest, sums;

  explicit ForwardLayout(const AttentionCall& call) {
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

// Sets the scores of a block's other keys to zero.
template <typename T>
void clear_others(T* row, KeyRange own, KeyRange block) {
  fill_zero(row + block.begin, own.begin - block.begin);
  fill_zero(row + own.end, padded<T>(block.end) - own.end);
}

template <typename T>
void attend(const AttentionCall& call, std::size_t number, std::size_t first, std::size_t last, void* buffer) {
  const ForwardLayout<T> layout(call);
  T* scratch = static_cast<T*>(buffer);
  const AttentionShape& s = call.shape;
  const Head<T> head(call, number);
  const std::size_t stride = score_stride<T>(s.keys), width = padded<T>(s.value_size);
  const T scale = static_cast<T>(call.scale);
  T *scores = scratch + layout.scores, *results = scratch + layout.results;
  T *largest = scratch + layout.largest, *sums = scratch + layout.sums;
  const T *k = head.key(call.k, 0), *v = head.value(call.v, 0);
  pack_all(k, head.end(call.k, s.keys), head.stride, call.ones, s.keys, s.size, scratch + layout.keys);
  pack_all(v, head.value_end(call.v), 1, call.value_rows, s.value_size, s.keys, scratch + layout.values);
  BiasRows<T> bias(call, head, scratch + layout.bias);

  const Parts blocks(last - first, call.block);
  for (std::size_t block = 0; block < blocks.count; ++block) {
    const std::size_t query = first + blocks.begin(block), rows = blocks.size(block);
    const KeyRange keys = bias.seen(query, query + rows);
    const std::size_t seen = keys.end - keys.begin;
    multiply_panels(Matmul<T>{head.query(call.q, query), head.stride, call.ones, rows, s.size,
                               scratch + layout.keys, s.size, 0, s.keys, keys.begin, keys.end, false, scores, stride});
    for (std::size_t row = 0; row < rows; ++row) {
      const KeyRange own = bias.seen_by(query + row, keys);
      clear_others(scores + row * stride, own, keys);
      const RowSum<T> sum = exponentials(scores + row * stride + own.begin, bias[query + row] + own.begin,
                                         own.end - own.begin, scale, call.zero_empty_rows);
      largest[row] = sum.largest;
      sums[row] = sum.sum;
    }
    if (call.log_sum != nullptr) {
      write_log_sums(largest, sums, rows, static_cast<T*>(call.log_sum) + number * s.queries + query);
    }
    if (call.y == nullptr) continue;
    multiply_panels(Matmul<T>{scores + keys.begin, static_cast<std::ptrdiff_t>(stride), call.ones, rows, seen,
                               scratch + layout.values, s.keys, keys.begin, s.value_size, 0, s.value_size, false,
                               results, width});
    for (std::size_t row = 0; row < rows; ++row) {
      scale_row(results + row * width, s.value_size, T(1) / sums[row], head.output(call.y, query + row));
    }
  }
}

template <typename T>
struct GradientLayout : ScratchLayout<T> {
  std::size_t keys, values, key_rows, q, dy, bias, scores, slopes, dq, dk, dv;

  explicit GradientLayout(const AttentionCall& call) {
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

// Copies rows `width` apart to rows `stride` apart.
template <typename T>
void copy_rows(const T* from, std::size_t width, std::size_t rows, std::size_t count, T* to, std::ptrdiff_t stride) {
  for (std::size_t row = 0; row < rows; ++row) {
    copy(from + row * width, count, to + static_cast<std::ptrdiff_t>(row) * stride);
  }
}

template <typename T>
void attention_gradient(const AttentionCall& call, std::size_t number, void* buffer) {
  const GradientLayout<T> layout(call);
  T* scratch = static_cast<T*>(buffer);
  const AttentionShape& s = call.shape;
  const Head<T> head(call, number);
  const std::size_t width = padded<T>(s.size), value_width = padded<T>(s.value_size);
  const std::size_t stride = score_stride<T>(s.keys);
  const auto row_stride = static_cast<std::ptrdiff_t>(stride);
  const T scale = static_cast<T>(call.scale);
  T *scores = scratch + layout.scores, *slopes = scratch + layout.slopes;
  T *dq = scratch + layout.dq, *dk = scratch + layout.dk, *dv = scratch + layout.dv;
  const T *k = head.key(call.k, 0), *k_end = head.end(call.k, s.keys), *v = head.value(call.v, 0);
  pack_all(k, k_end, head.stride, call.ones, s.keys, s.size, scratch + layout.keys);
  pack_all(v, head.value_end(call.v), head.value_stride, call.ones, s.keys, s.value_size, scratch + layout.values);
  pack_all(k, k_end, 1, call.rows, s.size, s.keys, scratch + layout.key_rows);
  fill_zero(dk, s.keys * width);
  fill_zero(dv, s.keys * value_width);
  BiasRows<T> bias(call, head, scratch + layout.bias);

  const Parts blocks(s.queries, call.block);
  for (std::size_t block = 0; block < blocks.count; ++block) {
    const std::size_t query = blocks.begin(block), rows = blocks.size(block);
    const KeyRange keys = bias.seen(query, query + rows);
    const std::size_t seen = keys.end - keys.begin;
    const T *q = head.query(call.q, query), *dy = head.output(call.dy, query), *y = head.output(call.y, query);
    const T* log_sum = static_cast<const T*>(call.log_sum) + number * s.queries + query;
    multiply_panels(Matmul<T>{q, head.stride, call.ones, rows, s.size, scratch + layout.keys, s.size, 0, s.keys,
                               keys.begin, keys.end, false, scores, stride});
    multiply_panels(Matmul<T>{dy, head.output_stride, call.ones, rows, s.value_size, scratch + layout.values,
                               s.value_size, 0, s.keys, keys.begin, keys.end, false, slopes, stride});
    for (std::size_t row = 0; row < rows; ++row) {
      const std::ptrdiff_t at = static_cast<std::ptrdiff_t>(row) * head.output_stride;
      const KeyRange own = bias.seen_by(query + row, keys);
      clear_others(scores + row * stride, own, keys);
      clear_others(slopes + row * stride, own, keys);
      T* slope = slopes + row * stride + own.begin;
      const T slope_scale = call.dbias == nullptr ? scale : T(1);
      score_gradient(scores + row * stride + own.begin, slope, bias[query + row] + own.begin, own.end - own.begin,
                     scale, slope_scale, log_sum[row], dot(dy + at, y + at, s.value_size), call.zero_empty_rows);
      if (call.dbias == nullptr) continue;
      const std::size_t end = own.end < s.keys ? own.end : s.keys;
      add_bias_gradient(call, head.batch, head.head, query + row, own.begin, slope, end - own.begin);
      ONNXTRAIN_VECTORIZE
      for (std::size_t i = 0; i < own.end - own.begin; ++i) slope[i] *= scale;
    }
    if (call.dv != nullptr) {
      pack_all(dy, head.output_end(call.dy), 1, call.output_rows, s.value_size, rows, scratch + layout.dy);
      multiply_panels(Matmul<T>{scores + keys.begin, 1, call.score_rows, seen, rows, scratch + layout.dy, rows, 0,
                                 s.value_size, 0, s.value_size, true, dv + keys.begin * value_width, value_width});
    }
    if (call.dk != nullptr) {
      pack_all(q, head.end(call.q, s.queries), 1, call.rows, s.size, rows, scratch + layout.q);
      multiply_panels(Matmul<T>{slopes + keys.begin, 1, call.score_rows, seen, rows, scratch + layout.q, rows, 0,
                                 s.size, 0, s.size, true, dk + keys.begin * width, width});
    }
    if (call.dq != nullptr) {
      multiply_panels(Matmul<T>{slopes + keys.begin, row_stride, call.ones, rows, seen, scratch + layout.key_rows,
                                 s.keys, keys.begin, s.size, 0, s.size, false, dq, width});
      copy_rows(dq, width, rows, s.size, head.query(call.dq, query), head.stride);
    }
  }
  if (call.dk != nullptr) {
    copy_rows(dk, width, s.keys, s.size, head.key(call.dk, 0), head.stride);
  }
  if (call.dv != nullptr) {
    copy_rows(dv, value_width, s.keys, s.value_size, head.value(call.dv, 0), head.value_stride);
  }
}

template <typename T>
std::size_t attention_scratch(const AttentionCall& call, bool gradient) {
  return (gradient ? GradientLayout<T>(call).total : ForwardLayout<T>(call).total) * sizeof(T);
}

}  // namespace
}  // namespace onnxtrain
