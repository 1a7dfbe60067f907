// Updates all elements of many tensors in one launch, by the given rule.
#pragma once

#include <cstdint>

#include "cuda/tensors.h"

namespace onnxtrain::cuda {

// `rule.of(number)` returns the update for the elements of that tensor: a function of (x, gradient, states) that
// computes the new x and states.
template <typename T, int states, typename Rule>
struct UpdateKernel {
  Tensors<T, states> tensors;
  Rule rule;

  ONNXTRAIN_DEVICE void operator()(Block block) const {
    const Tensor<T, states>& tensor = tensors.of_block(block.index);
    const T scale = tensors.scale();
    const auto element = rule.of(tensor.number);
    block.each_thread([&](unsigned thread) {
      tensors.each_pack(tensor, block.index, thread, [&](std::size_t first, std::size_t last) {
        if (tensor.packs != 0 && last - first == Pack<T>::kElements) {
          update_pack(element, tensor, first, scale);
        } else {
          for (std::size_t i = first; i < last; ++i) update_one(element, tensor, i, scale);
        }
      });
    });
  }

 private:
  template <typename Element>
  ONNXTRAIN_DEVICE static void update_one(const Element& element, const Tensor<T, states>& tensor, std::size_t i,
                                          T scale) {
    T x = tensor.X[i], kept[Tensor<T, states>::kRoom] = {};
    for (int s = 0; s < states; ++s) kept[s] = tensor.old_states[s][i];
    element(x, prepared(tensor.G[i], tensor.mask, i, scale), kept);
    for (int s = 0; s < states; ++s) {
      if (tensor.new_states[s] != nullptr) tensor.new_states[s][i] = kept[s];
    }
    if (tensor.X_new != nullptr) tensor.X_new[i] = x;
  }

  template <typename Element>
  ONNXTRAIN_DEVICE static void update_pack(const Element& element, const Tensor<T, states>& tensor, std::size_t first,
                                           T scale) {
    Pack<T> X = *reinterpret_cast<const Pack<T>*>(tensor.X + first), kept[Tensor<T, states>::kRoom];
    const Pack<T> G = *reinterpret_cast<const Pack<T>*>(tensor.G + first);
    for (int s = 0; s < states; ++s) kept[s] = *reinterpret_cast<const Pack<T>*>(tensor.old_states[s] + first);
    for (std::size_t i = 0; i < Pack<T>::kElements; ++i) {
      T one[Tensor<T, states>::kRoom] = {};
      for (int s = 0; s < states; ++s) one[s] = kept[s].elements[i];
      element(X.elements[i], prepared(G.elements[i], tensor.mask, first + i, scale), one);
      for (int s = 0; s < states; ++s) kept[s].elements[i] = one[s];
    }
    for (int s = 0; s < states; ++s) {
      if (tensor.new_states[s] != nullptr) *reinterpret_cast<Pack<T>*>(tensor.new_states[s] + first) = kept[s];
    }
    if (tensor.X_new != nullptr) *reinterpret_cast<Pack<T>*>(tensor.X_new + first) = X;
  }
};

template <typename T, int states, typename Rule>
void update_all(const std::vector<Variable>& variables, Factor factor, const Rule& rule, Stream stream) {
  for_each_launch<T, states>(variables, factor, kNoLimit, [&](const auto& tensors, std::uint32_t blocks) {
    launch(UpdateKernel<T, states, Rule>{tensors, rule}, blocks, stream);
  });
}

}  // namespace onnxtrain::cuda
