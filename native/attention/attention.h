// Attention and its gradient: splits the work into heads and blocks of queries and shares it among threads. Independent
// of ONNX Runtime. Results do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/table.h"
#include "kernels/kernel_table.h"
#include "parallel.h"

namespace onnxtrain {

// Strides of a bias whose shape broadcasts to [batch, heads, queries, keys].
void set_bias_strides(const std::vector<std::int64_t>& shape, AttentionCall& call);

// Computes y and log_sum. Fills in the call's block size and offset table.
void attend(ElementType type, AttentionCall call, const ParallelFor& parallel_for);

// Computes dq, dk, dv and dbias from dy, y and log_sum.
void attention_gradient(ElementType type, AttentionCall call, const ParallelFor& parallel_for);

}  // namespace onnxtrain
