#include "communication/node.h"

#include <atomic>
#include <cstring>

#include "exported.h"

namespace onnxtrain {
namespace {

// Sums `count` elements over all ranks, in place; `type` is 0 for float and 1 for double. Nonzero on failure.
using AllReduce = int (*)(int type, void* data, std::size_t count);

std::atomic<AllReduce> all_reduce{nullptr};

}  // namespace

const Signature AllReduceNode::kSignature = {"AllReduce", {"x"}, 1, 1, {0}, {{0, 0}}};

void AllReduceNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  const Tensor& x = inputs[0];
  void* const y = call.output(0, x.shape);
  const std::size_t count = x.count();
  if (y != x.data && count > 0) std::memcpy(y, x.data, count * size_of(type));
  const AllReduce function = all_reduce.load();
  if (function == nullptr) throw std::runtime_error("AllReduce: no all-reduce function is registered.");
  if (function(type == kFloat ? 0 : 1, y, count) != 0) {
    throw std::runtime_error("AllReduce: the sum over the processes failed.");
  }
}

}  // namespace onnxtrain

// Sets the function that `AllReduce` nodes call on the thread that runs their session; null to unset.
ONNXTRAIN_API void onnxtrain_set_all_reduce(int (*function)(int type, void* data, std::size_t count)) {
  onnxtrain::all_reduce = function;
}
