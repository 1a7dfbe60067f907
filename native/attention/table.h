// Attention and its gradient, one head at a time: functions over pointers, compiled once per instruction set and called
// through a table. Multiply-add may be fused, so instruction sets differ in the last bits; one instruction set always
// gives the same bits. Strides and offsets count elements.
#pragma once

#include <cstddef>
#include <cstdint>

namespace onnxtrain {

// q is [batch, queries, heads, size], k [batch, keys, heads, size], v [batch, keys, heads, value_size]. Packed, their
// rows are parts of the rows of one tensor [batch, queries, 3, heads, size].
struct AttentionShape {
  std::size_t batch, queries, keys, heads, size, value_size;
  bool packed;

  // From a row of q or k, of v, and of y, to the next one. Gradients are laid out alike.
  std::size_t line() const { return (packed ? 3 : 1) * heads * size; }
  std::size_t value_line() const { return packed ? line() : output_line(); }
  std::size_t output_line() const { return heads * value_size; }
};

// Keys [begin, end).
struct KeyRange {
  std::uint32_t begin, end;
};

struct AttentionCall {
  AttentionShape shape;
  double scale;
  bool zero_empty_rows;  // treats a row of scores whose softmax is NaN as zeros
  bool in_bfloat16;      // rounds the operands of products where the CPU has instructions for it, but for short heads
  const void *q, *k, *v;
  const void* bias;               // null if absent
  std::ptrdiff_t bias_stride[4];  // by batch, head, query and key; 0 where broadcast
  // The keys that each query sees, where the bias only hides the others; null if it does more. Strides by batch, head
  // and query.
  const KeyRange* ranges;
  std::ptrdiff_t range_stride[3];
  void* y;                        // [batch, queries, heads, value_size]
  void* log_sum;                  // [batch, heads, queries]; both are null if not requested
  const void* dy;
  void *dq, *dk, *dv;  // null if not requested
  void* dbias;         // added to, in the shape of the bias; null if not requested

  std::size_t block;  // maximum number of queries at a time
  // Multiples of 1, of the distances between rows of q and k, of v, and of y, and of the row stride of the scores.
  const std::ptrdiff_t *ones, *rows, *value_rows, *output_rows, *score_rows;
};

struct AttentionKernels {
  // Row stride of a block of scores.
  std::size_t (*score_stride)(std::size_t keys);
  // Scratch bytes per head.
  std::size_t (*scratch)(const AttentionCall& call, bool gradient);
  // Reads `count` rows of a bias. Returns false if one is not zero for a range of keys and as good as -inf for the rest.
  bool (*find_ranges)(const void* bias, std::size_t count, std::size_t keys, KeyRange* ranges);
  // Computes y and log_sum of queries [first, last) of a head, numbered across the batch.
  void (*attend)(const AttentionCall& call, std::size_t head, std::size_t first, std::size_t last, void* scratch);
  // Computes dq, dk and dv of a head from dy, y and log_sum, and adds to dbias.
  void (*gradient)(const AttentionCall& call, std::size_t head, void* scratch);

  // The same for short sequences, a group of `lanes` heads at a time, of which each has a lane of the vectors.
  std::size_t lanes;
  bool (*is_short)(const AttentionShape& shape);
  std::size_t (*lane_scratch)(const AttentionCall& call, bool gradient);
  void (*attend_lanes)(const AttentionCall& call, std::size_t group, void* scratch);
  void (*gradient_lanes)(const AttentionCall& call, std::size_t group, void* scratch);
};

}  // namespace onnxtrain
