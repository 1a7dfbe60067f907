// Attention and its gradient: how the work is cut into heads and blocks of queries and shared among threads. Nothing
// here knows ONNX Runtime. Results do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/table.h"
#include "kernels/kernel_table.h"
#include "parallel.h"

namespace onnxtrain {

// The strides of a bias whose shape broadcasts to [batch, heads, queries, keys].
void set_bias_strides(const std::vector<std::int64_t>& shape, AttentionCall& call);

// y and log_sum. What a call says of blocks and multiples is filled in here.
void attend(ElementType type, AttentionCall call, const ParallelFor& parallel_for);

// dq, dk and dv from dy, y and log_sum.
void attention_gradient(ElementType type, AttentionCall call, const ParallelFor& parallel_for);

}  // namespace onnxtrain
