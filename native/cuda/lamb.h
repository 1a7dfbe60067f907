// LAMB on a device: the norms of weights and steps, the learning rate of each tensor, the update.
#pragma once

#include <cstdint>

#include "cuda/reductions.h"
#include "cuda/update_kernel.h"
#include "optimizers/rules/lamb.h"

namespace onnxtrain::cuda {

template <typename T>
struct LambNorms {
  using Rule = lamb::Rule;
  using Partial = Rule::Squares;
  using Result = double;  // the learning rate

  Rule::Scalars<T> scalars;
  double R;

  ONNXTRAIN_DEVICE void reduce(Block block, const Tensors<T, 2>& tensors, const Tensor<T, 2>& tensor,
                               Partial* found) const {
    ONNXTRAIN_SHARED double weights[kThreads], steps[kThreads];
    const T scale = tensors.scale();
    block.each_thread([&](unsigned thread) {
      double of_weights = 0.0, of_steps = 0.0;
      tensors.each_pack(tensor, block.index, thread, [&](std::size_t first, std::size_t last) {
        for (std::size_t i = first; i < last; ++i) {
          T v = tensor.old_states[0][i], h = tensor.old_states[1][i];
          const T x = tensor.X[i];
          const T taken = Rule::step(scalars, x, prepared(tensor.G[i], tensor.mask, i, scale), v, h);
          of_weights += static_cast<double>(x) * static_cast<double>(x);
          of_steps += static_cast<double>(taken) * static_cast<double>(taken);
        }
      });
      weights[thread] = of_weights;
      steps[thread] = of_steps;
    });
    add_up(block, weights);
    add_up(block, steps);
    block.each_thread([&](unsigned thread) {
      if (thread == 0) *found = {weights[0], steps[0]};
    });
  }

  ONNXTRAIN_DEVICE double combine(const Partial* found, std::uint32_t blocks, std::size_t) const {
    double weights = 0.0, steps = 0.0;
    for (std::uint32_t b = 0; b < blocks; ++b) {
      weights += found[b].weights;
      steps += found[b].steps;
    }
    return R * Rule::trust({weights, steps});
  }
};

template <typename T>
struct LambUpdate {
  struct Element {
    lamb::Rule::Scalars<T> scalars;
    T rate;

    ONNXTRAIN_DEVICE void operator()(T& x, T g, T* states) const {
      lamb::Rule::take(scalars, rate, x, g, states[0], states[1]);
    }
  };

  lamb::Rule::Scalars<T> scalars;
  const double* rates;

  ONNXTRAIN_DEVICE Element of(std::uint32_t number) const { return {scalars, static_cast<T>(rates[number])}; }
};

template <typename T>
void update_all(const lamb::Rule::Attributes& attributes, double R, std::int64_t count, Factor factor,
                const std::vector<Variable>& variables, Stream stream) {
  const auto scalars = lamb::Rule::scalars(attributes, count).as<T>();
  reduce_then<T, 2>(variables, factor, LambNorms<T>{scalars, R}, stream, [&](const double* rates) {
    update_all<T, 2>(variables, factor, LambUpdate<T>{scalars, rates}, stream);
  });
}

}  // namespace onnxtrain::cuda
