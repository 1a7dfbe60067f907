// The tensors of many variables as one kernel sees them: split into chunks, one or more per block.
//
// The table is a kernel argument. A call with more variables than fit in it is split into several launches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/device.h"
#include "cuda/updates.h"
#include "optimizers/variables.h"

namespace onnxtrain::cuda {

// Elements per chunk. Not tuned; with it, updates on an H100 reach 0.57 to 0.73 of a copy's bandwidth.
inline constexpr std::size_t kChunk = 4096;

// Limit on the blocks that reduce one tensor before its update; one thread adds up their results.
inline constexpr std::size_t kMostReducers = 128;
inline constexpr std::size_t kNoLimit = std::size_t{1} << 30;

// Elements that are read and written at once.
template <typename T>
struct alignas(16) Pack {
  static constexpr std::size_t kElements = 16 / sizeof(T);
  T elements[kElements];
};

// One variable.
template <typename T, int states>
struct Tensor {
  static constexpr int kRoom = states == 0 ? 1 : states;
  const T *X, *G;
  const unsigned char* mask;  // null: all true
  const T* old_states[kRoom];
  T* X_new;  // null, here and below: not requested
  T* new_states[kRoom];
  std::size_t count;
  std::uint32_t first_block, blocks;  // of the launch
  std::uint32_t number;               // index of the variable among those of its type in the call
  std::uint32_t packs;                // 1 if all tensors are aligned to a pack
};

// The variables of one launch.
template <typename T, int states>
struct Tensors {
  using One = Tensor<T, states>;
  static constexpr std::size_t kOthers = 320;  // bytes left for the kernel's other members
  static constexpr std::size_t kMost = (kMostArguments - kOthers) / sizeof(One);

  Factor factor;
  std::uint32_t count;
  std::uint32_t first_block;  // number of blocks in the launches before
  One tensors[kMost];

  ONNXTRAIN_DEVICE const One& of_block(unsigned block) const {
    std::uint32_t low = 0, high = count;  // binary search for the last one that begins at or before `block`
    while (high - low > 1) {
      const std::uint32_t middle = (low + high) / 2;
      if (tensors[middle].first_block <= block) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return tensors[low];
  }

  // Factor of all gradients.
  ONNXTRAIN_DEVICE T scale() const {
    if (factor.data == nullptr) return T(1);
    return factor.is_double ? static_cast<T>(*static_cast<const double*>(factor.data))
                            : static_cast<T>(*static_cast<const float*>(factor.data));
  }

  // Calls work(first, last) for the elements of the block's tensor that belong to a thread: packs in thread order, so
  // that accesses coalesce.
  template <typename Work>
  ONNXTRAIN_DEVICE void each_pack(const One& tensor, unsigned block, unsigned thread, Work work) const {
    constexpr std::size_t pack = Pack<T>::kElements;
    for (std::size_t chunk = block - tensor.first_block; chunk * kChunk < tensor.count; chunk += tensor.blocks) {
      const std::size_t begin = chunk * kChunk;
      const std::size_t end = begin + kChunk < tensor.count ? begin + kChunk : tensor.count;
      for (std::size_t i = begin + thread * pack; i < end; i += kThreads * pack) {
        work(i, i + pack < end ? i + pack : end);
      }
    }
  }
};

// The gradient after factor and mask.
template <typename T>
ONNXTRAIN_DEVICE inline T prepared(T gradient, const unsigned char* mask, std::size_t i, T scale) {
  return (mask == nullptr || mask[i] != 0 ? gradient : T(0)) * scale;
}

// Calls work(tensors, blocks) for every launch that the variables of type T need. `most_blocks` is the limit per
// variable.
template <typename T, int states, typename Work>
void for_each_launch(const std::vector<Variable>& variables, Factor factor, std::size_t most_blocks, Work work) {
  Tensors<T, states> tensors = {};
  tensors.factor = factor;
  std::uint32_t blocks = 0, number = 0;
  const auto finish = [&] {
    if (tensors.count > 0) work(static_cast<const Tensors<T, states>&>(tensors), blocks);
    tensors.first_block += blocks;
    tensors.count = blocks = 0;
  };
  for (const Variable& variable : variables) {
    if (variable.type != (sizeof(T) == sizeof(float) ? kFloat : kDouble) || variable.count == 0) continue;
    Tensor<T, states>& tensor = tensors.tensors[tensors.count++];
    std::uintptr_t addresses = 0;
    const auto record = [&](const void* pointer) {
      addresses |= reinterpret_cast<std::uintptr_t>(pointer);
      return pointer;
    };
    tensor.X = static_cast<const T*>(record(variable.inputs[0]));
    tensor.G = static_cast<const T*>(record(variable.inputs[1]));
    tensor.mask = variable.mask;
    tensor.X_new = static_cast<T*>(const_cast<void*>(record(variable.outputs[0])));
    for (int s = 0; s < states; ++s) {
      tensor.old_states[s] = static_cast<const T*>(record(variable.inputs[2 + s]));
      tensor.new_states[s] = static_cast<T*>(const_cast<void*>(record(variable.outputs[1 + s])));
    }
    tensor.count = variable.count;
    const std::size_t chunks = (variable.count - 1) / kChunk + 1;
    tensor.first_block = blocks;
    tensor.blocks = static_cast<std::uint32_t>(chunks < most_blocks ? chunks : most_blocks);
    tensor.number = number++;
    tensor.packs = addresses % sizeof(Pack<T>) == 0;
    blocks += tensor.blocks;
    if (tensors.count == Tensors<T, states>::kMost) finish();
  }
  finish();
}

}  // namespace onnxtrain::cuda
