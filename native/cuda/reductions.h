// Reductions over whole tensors before their update: each block reduces a part, one thread combines the results.
#pragma once

#include <cstdint>

#include "cuda/tensors.h"

namespace onnxtrain::cuda {

// Sums the values of a block's threads in a fixed order into values[0].
ONNXTRAIN_DEVICE inline void add_up(Block block, double* values) {
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    block.each_thread([=](unsigned thread) {
      if (thread < half) values[thread] += values[thread + half];
    });
  }
}

// Each block stores its partial result for a tensor.
template <typename T, int states, typename Rule>
struct ReduceKernel {
  Tensors<T, states> tensors;
  Rule rule;
  typename Rule::Partial* found;

  ONNXTRAIN_DEVICE void operator()(Block block) const {
    rule.reduce(block, tensors, tensors.of_block(block.index), found + tensors.first_block + block.index);
  }
};

// One block per tensor combines the partial results.
template <typename T, int states, typename Rule>
struct CombineKernel {
  Tensors<T, states> tensors;
  Rule rule;
  const typename Rule::Partial* found;
  typename Rule::Result* results;

  ONNXTRAIN_DEVICE void operator()(Block block) const {
    const Tensor<T, states>& tensor = tensors.tensors[block.index];
    block.each_thread([&](unsigned thread) {
      if (thread != 0) return;
      const auto* const own = found + tensors.first_block + tensor.first_block;
      results[tensor.number] = rule.combine(own, tensor.blocks, tensor.count);
    });
  }
};

// Calls update(results) with the results of all tensors of type T, in order.
template <typename T, int states, typename Rule, typename Update>
void reduce_then(const std::vector<Variable>& variables, Factor factor, const Rule& rule, Stream stream,
                 Update update) {
  std::size_t blocks = 0, count = 0;
  for_each_launch<T, states>(variables, factor, kMostReducers, [&](const auto& tensors, std::uint32_t more) {
    blocks += more;
    count += tensors.count;
  });
  if (count == 0) return;
  const Scratch found(blocks * sizeof(typename Rule::Partial), stream);
  const Scratch results(count * sizeof(typename Rule::Result), stream);
  auto* const of_blocks = static_cast<typename Rule::Partial*>(found.data());
  auto* const of_tensors = static_cast<typename Rule::Result*>(results.data());
  for_each_launch<T, states>(variables, factor, kMostReducers, [&](const auto& tensors, std::uint32_t more) {
    launch(ReduceKernel<T, states, Rule>{tensors, rule, of_blocks}, more, stream);
    launch(CombineKernel<T, states, Rule>{tensors, rule, of_blocks, of_tensors}, tensors.count, stream);
  });
  update(static_cast<const typename Rule::Result*>(of_tensors));
}

}  // namespace onnxtrain::cuda
