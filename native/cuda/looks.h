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
struct LookKernel {
  Tensors<T, states> tensors;
  Rule rule;
  typename Rule::Found* found;

  ONNXTRAIN_DEVICE void operator()(Block block) const {
    rule.look(block, tensors, tensors.of_block(block.index), found + tensors.first_block + block.index);
  }
};

// One block per tensor combines the partial results.
template <typename T, int states, typename Rule>
struct ConcludeKernel {
  Tensors<T, states> tensors;
  Rule rule;
  const typename Rule::Found* found;
  typename Rule::Conclusion* conclusions;

  ONNXTRAIN_DEVICE void operator()(Block block) const {
    const Tensor<T, states>& tensor = tensors.tensors[block.index];
    block.each_thread([&](unsigned thread) {
      if (thread != 0) return;
      const auto* const own = found + tensors.first_block + tensor.first_block;
      conclusions[tensor.number] = rule.conclude(own, tensor.blocks, tensor.count);
    });
  }
};

// Calls update(results) with the results of all tensors of type T, in order.
template <typename T, int states, typename Rule, typename Update>
void look_then(const std::vector<Variable>& variables, Factor factor, const Rule& rule, Stream stream, Update update) {
  std::size_t blocks = 0, count = 0;
  for_each_launch<T, states>(variables, factor, kMostLookers, [&](const auto& tensors, std::uint32_t more) {
    blocks += more;
    count += tensors.count;
  });
  if (count == 0) return;
  const Scratch found(blocks * sizeof(typename Rule::Found), stream);
  const Scratch conclusions(count * sizeof(typename Rule::Conclusion), stream);
  auto* const of_blocks = static_cast<typename Rule::Found*>(found.data());
  auto* const of_tensors = static_cast<typename Rule::Conclusion*>(conclusions.data());
  for_each_launch<T, states>(variables, factor, kMostLookers, [&](const auto& tensors, std::uint32_t more) {
    launch(LookKernel<T, states, Rule>{tensors, rule, of_blocks}, more, stream);
    launch(ConcludeKernel<T, states, Rule>{tensors, rule, of_blocks, of_tensors}, tensors.count, stream);
  });
  update(static_cast<const typename Rule::Conclusion*>(of_tensors));
}

}  // namespace onnxtrain::cuda
