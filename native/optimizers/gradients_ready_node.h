// Notifies the program that a group of gradients is ready, while the backward pass continues (communication overlap).
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "operators/runtime.h"

namespace onnxtrain {

// Inputs: the address of a function (int64, 0 for none), and gradients of any type; output: the index of the group.
class GradientsReadyNode {
 public:
  // Takes the index of the group, and the gradients in input order; returns nonzero to abort the step.
  using Function = int (*)(std::int64_t group, const void* const* gradients, std::int64_t count);

  explicit GradientsReadyNode(const Attributes& attributes) : group_(attributes.integer("group")) {}

  void compute(const Call& call) const {
    Tensor tensor;
    call.input(0, tensor);
    if (tensor.count() != 1) throw std::invalid_argument("input 1 must have exactly one element.");
    *static_cast<std::int64_t*>(call.output(0, tensor.shape)) = group_;
    const std::int64_t address = *static_cast<const std::int64_t*>(tensor.data);
    if (address == 0) return;
    std::vector<const void*> gradients(call.input_count() - 1);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      call.input(i + 1, tensor);
      gradients[i] = tensor.data;
    }
    const auto function = reinterpret_cast<Function>(static_cast<std::intptr_t>(address));
    if (function(group_, gradients.data(), static_cast<std::int64_t>(gradients.size())) != 0) {
      throw std::runtime_error("GradientsReady: the function that was to take the gradients failed.");
    }
  }

 private:
  std::int64_t group_;
};

}  // namespace onnxtrain
