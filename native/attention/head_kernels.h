// The inputs of one head: its rows within [batch, row, head, element], and the bias of its queries.
//
// Included by attention.cpp only.
#pragma once

#include "attention/rows.h"
#include "attention/table.h"

namespace onnxtrain {
namespace {

// Start of each tensor of one head, and the distance between its rows.
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

  // First element of a row of a tensor [batch, rows, heads, size].
  const T* at(const void* data, std::size_t rows, std::size_t row, std::size_t size) const {
    return static_cast<const T*>(data) + ((batch * rows + row) * shape.heads + head) * size;
  }
  T* at(void* data, std::size_t rows, std::size_t row, std::size_t size) const {
    return const_cast<T*>(at(static_cast<const void*>(data), rows, row, size));
  }
};

// The bias of a query, padded with -inf behind the last key to the length of a row of scores.
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

  // Valid until the next call.
  const T* operator[](std::size_t query) const {
    if (data_ == nullptr || query_ == 0) return row_;
    const T* from = data_ + static_cast<std::ptrdiff_t>(query) * query_;
    if (key_ == 1 && keys_ % kLanes<T> == 0) return from;
    write(from);
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

}  // namespace
}  // namespace onnxtrain
