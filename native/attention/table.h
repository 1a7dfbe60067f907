// Attention and its gradient, head by head: functions over pointers, compiled once per instruction set and reached
// through a table. Multiplications may be fused with additions, so instruction sets differ in the last places; one
// instruction set always gives the same bits. Strides and offsets count elements.
#pragma once

#include <cstddef>

namespace onnxtrain {

// q is [batch, queries, heads, size], k [batch, keys, heads, size], v [batch, keys, heads, value_size].
struct AttentionShape {
  std::size_t batch, queries, keys, heads, size, value_size;
};

struct AttentionCall {
  AttentionShape shape;
  double scale;
  bool zero_empty_rows;  // a row of scores whose softmax is NaN counts as a row of zeros
  const void *q, *k, *v;
  const void* bias;               // null: none
  std::ptrdiff_t bias_stride[4];  // by batch, head, query and key; 0 where it is repeated
  void* y;                        // [batch, queries, heads, value_size]
  void* log_sum;                  // [batch, heads, queries]; both null where they are results that are not wanted
  const void* dy;
  void *dq, *dk, *dv;  // null: not wanted

  std::size_t block;  // queries at a time, at most
  // Multiples of 1, of heads * size, of heads * value_size, and of the distance between rows of scores.
  const std::ptrdiff_t *ones, *rows, *value_rows, *score_rows;
};

struct AttentionKernels {
  // The distance between the rows of a block of scores.
  std::size_t (*score_stride)(std::size_t keys);
  // Bytes that one head needs.
  std::size_t (*scratch)(const AttentionCall& call, bool gradient);
  // y and log_sum of queries [first, last) of a head, counted through the batch.
  void (*attend)(const AttentionCall& call, std::size_t head, std::size_t first, std::size_t last, void* scratch);
  // dq, dk and dv of a head, from dy, y and log_sum.
  void (*gradient)(const AttentionCall& call, std::size_t head, void* scratch);
};

}  // namespace onnxtrain
