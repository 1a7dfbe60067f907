// The inputs of one head: its rows within [batch, row, head, element], and the bias of its queries.
//
// Included by kernels.cpp only.
#pragma once

#include "attention/rows.h"
#include "attention/table.h"
#include "kernels/elementwise.h"

namespace onnxtrain {
namespace {

// Start of each tensor of one head, and the distances between rows of q and k, of v, and of y.
template <typename T>
struct Head {
  const AttentionShape& shape;
  std::size_t batch, head;
  std::ptrdiff_t stride, value_stride, output_stride;

  Head(const AttentionCall& call, std::size_t number)
      : shape(call.shape),
        batch(number / shape.heads),
        head(number % shape.heads),
        stride(static_cast<std::ptrdiff_t>(shape.line())),
        value_stride(static_cast<std::ptrdiff_t>(shape.value_line())),
        output_stride(static_cast<std::ptrdiff_t>(shape.output_line())) {}

  // First element of a row of q, k, v or y, or of its gradient.
  template <typename Data>
  auto* query(Data* data, std::size_t row) const { return at(data, shape.queries, row, stride, shape.size); }
  template <typename Data>
  auto* key(Data* data, std::size_t row) const { return at(data, shape.keys, row, stride, shape.size); }
  template <typename Data>
  auto* value(Data* data, std::size_t row) const { return at(data, shape.keys, row, value_stride, shape.value_size); }
  template <typename Data>
  auto* output(Data* data, std::size_t row) const {
    return at(data, shape.queries, row, output_stride, shape.value_size);
  }

  // One past the last element of all rows of q or k, of v, and of y, beginning at the first head of the first row.
  const T* end(const void* data, std::size_t rows) const { return end(data, rows, stride, shape.size); }
  const T* value_end(const void* data) const { return end(data, shape.keys, value_stride, shape.value_size); }
  const T* output_end(const void* data) const { return end(data, shape.queries, output_stride, shape.value_size); }

 private:
  const T* at(const void* data, std::size_t rows, std::size_t row, std::ptrdiff_t line, std::size_t size) const {
    return static_cast<const T*>(data) + static_cast<std::ptrdiff_t>(batch * rows + row) * line + head * size;
  }
  T* at(void* data, std::size_t rows, std::size_t row, std::ptrdiff_t line, std::size_t size) const {
    return const_cast<T*>(at(static_cast<const void*>(data), rows, row, line, size));
  }
  const T* end(const void* data, std::size_t rows, std::ptrdiff_t line, std::size_t size) const {
    return static_cast<const T*>(data) + static_cast<std::ptrdiff_t>(shape.batch * rows - 1) * line +
           shape.heads * size;
  }
};

// A bias from here on hides a key: added to any score of a network that still computes, it has an exponential of zero.
// Masks have -inf, or the lowest finite number (PyTorch's finfo.min).
template <typename T>
constexpr T kHidden = sizeof(T) == sizeof(float) ? static_cast<T>(-0x1p127f) : static_cast<T>(-0x1p1023);

template <typename T>
bool find_ranges(const void* bias, std::size_t count, std::size_t keys, KeyRange* ranges) {
  const T* row = static_cast<const T*>(bias);
  for (std::size_t i = 0; i < count; ++i, row += keys) {
    // Integers, since the compiler does not vectorize a loop over bool.
    const auto hides = [&](std::size_t from, std::size_t to) {
      int seen = 0;
      ONNXTRAIN_VECTORIZE
      for (std::size_t key = from; key < to; ++key) seen |= row[key] <= kHidden<T> ? 0 : 1;
      return seen == 0;
    };
    std::size_t begin = 0, end = keys;
    constexpr std::size_t kStep = 64;
    while (begin + kStep <= end && hides(begin, begin + kStep)) begin += kStep;
    while (end >= begin + kStep && hides(end - kStep, end)) end -= kStep;
    while (begin < end && row[begin] <= kHidden<T>) ++begin;
    while (begin < end && row[end - 1] <= kHidden<T>) --end;
    int other = begin == end ? 1 : 0;
    ONNXTRAIN_VECTORIZE
    for (std::size_t key = begin; key < end; ++key) other |= row[key] == T(0) ? 0 : 1;
    if (other != 0) return false;
    ranges[i] = {static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(end)};
  }
  return true;
}

// Adds the slopes of `count` scores of a query, of the keys from `key` on, to the gradient of the bias.
template <typename T>
void add_bias_gradient(const AttentionCall& call, std::size_t batch, std::size_t head, std::size_t query,
                       std::size_t key, const T* slopes, std::size_t count) {
  const std::ptrdiff_t* stride = call.bias_stride;
  T* to = static_cast<T*>(call.dbias) + static_cast<std::ptrdiff_t>(batch) * stride[0] +
          static_cast<std::ptrdiff_t>(head) * stride[1] + static_cast<std::ptrdiff_t>(query) * stride[2];
  if (stride[3] == 0) {
    T sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += slopes[i];
    *to += sum;
    return;
  }
  to += key;
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) to[i] += slopes[i];
}

// Keys of a row of scores, in whole vectors.
template <typename T>
KeyRange in_vectors(KeyRange keys) {
  return {static_cast<std::uint32_t>(keys.begin / kLanes<T> * kLanes<T>), static_cast<std::uint32_t>(padded<T>(keys.end))};
}

// The bias of a query, padded with -inf behind the last key to the length of a row of scores.
template <typename T>
class BiasRows {
 public:
  BiasRows(const AttentionCall& call, const Head<T>& head, T* row)
      : data_(static_cast<const T*>(call.bias)),
        ranges_(call.ranges),
        query_(call.bias_stride[2]),
        key_(call.bias_stride[3]),
        range_(call.range_stride[2]),
        keys_(call.shape.keys),
        row_(row) {
    const auto batch = static_cast<std::ptrdiff_t>(head.batch), number = static_cast<std::ptrdiff_t>(head.head);
    if (ranges_ != nullptr) {
      ranges_ += batch * call.range_stride[0] + number * call.range_stride[1];
      for (std::size_t i = 0; i < padded<T>(keys_); ++i) row_[i] = kMinusInfinity<T>;
      return;
    }
    if (data_ != nullptr) data_ += batch * call.bias_stride[0] + number * call.bias_stride[1];
    for (std::size_t i = keys_; i < padded<T>(keys_); ++i) row_[i] = kMinusInfinity<T>;
    if (data_ == nullptr) {
      fill_zero(row_, keys_);
    } else if (query_ == 0) {
      write(data_, {0, static_cast<std::uint32_t>(keys_)});
    }
  }

  // Valid until the next call, for the query's keys in whole vectors.
  const T* operator[](std::size_t query) { return of(query, {0, static_cast<std::uint32_t>(keys_)}); }

  // The same for those of its keys that are in a range.
  const T* of(std::size_t query, KeyRange keys) {
    if (ranges_ != nullptr) return show(range_of(query));
    if (data_ == nullptr || query_ == 0) return row_;
    const T* from = data_ + static_cast<std::ptrdiff_t>(query) * query_;
    if (key_ == 1 && keys_ % kLanes<T> == 0) return from;
    write(from, keys);
    return row_;
  }

  // The keys that any query in [first, last) sees, from the beginning of a vector on; at least one.
  KeyRange seen(std::size_t first, std::size_t last) const {
    if (ranges_ == nullptr) return {0, static_cast<std::uint32_t>(reach(first, last))};
    KeyRange all = range_of(first);
    for (std::size_t query = first + 1; query < last; ++query) {
      const KeyRange range = range_of(query);
      if (range.begin < all.begin) all.begin = range.begin;
      if (range.end > all.end) all.end = range.end;
    }
    return {in_vectors<T>(all).begin, all.end};
  }

  // The keys that a query sees, out of those of its block, in whole vectors.
  KeyRange seen_by(std::size_t query, KeyRange block) const {
    return in_vectors<T>(ranges_ == nullptr ? block : range_of(query));
  }

 private:
  KeyRange range_of(std::size_t query) const { return ranges_[static_cast<std::ptrdiff_t>(query) * range_]; }

  // Moves the zeros in a row of -inf to other keys.
  const T* show(KeyRange to) {
    const auto move = [&](std::uint32_t from, std::uint32_t until) {
      for (std::uint32_t i = from < until ? from : until; i < (from < until ? until : from); ++i) {
        row_[i] = i >= to.begin && i < to.end ? T(0) : kMinusInfinity<T>;
      }
    };
    move(shown_.begin, to.begin);
    move(shown_.end, to.end);
    shown_ = to;
    return row_;
  }

  // One past the last key that any query in [first, last) attends to; at least one.
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

  void write(const T* from, KeyRange keys) const {
    const std::size_t end = keys.end < keys_ ? keys.end : keys_;
    if (key_ == 1) {
      copy(from + keys.begin, end - keys.begin, row_ + keys.begin);
    } else {
      for (std::size_t i = keys.begin; i < end; ++i) row_[i] = *from;
    }
  }

  const T* data_;
  const KeyRange* ranges_;
  KeyRange shown_ = {0, 0};
  std::ptrdiff_t query_, key_, range_;
  std::size_t keys_;
  T* row_;
};

}  // namespace
}  // namespace onnxtrain
