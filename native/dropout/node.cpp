#include "dropout/node.h"

#include <cmath>

#include "kernels/drawing.h"
#include "ranges.h"

// Integer arithmetic and one multiplication: the same bits on every instruction set, so the compiler may vectorize.
#if defined(__x86_64__) && defined(__ELF__) && !defined(__SANITIZE_ADDRESS__)
#define ONNXTRAIN_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ONNXTRAIN_CLONES
#endif

namespace onnxtrain {
namespace {

#define ONNXTRAIN_DROP(T)                                                                               \
  const T scale = static_cast<T>(drop.scale);                                                           \
  for (std::size_t i = begin; i < end; ++i) {                                                           \
    y[i] = static_cast<std::int32_t>(drawn(drop.draw, i) >> 1) >= static_cast<std::int32_t>(drop.limit) \
               ? x[i] * scale                                                                           \
               : T(0);                                                                                  \
  }

ONNXTRAIN_CLONES void write(const Drop& drop, const float* x, float* y, std::size_t begin, std::size_t end) {
  ONNXTRAIN_DROP(float)
}

ONNXTRAIN_CLONES void write(const Drop& drop, const double* x, double* y, std::size_t begin, std::size_t end) {
  ONNXTRAIN_DROP(double)
}

template <typename T>
void run(const Drop& drop, const Tensor& x, void* y, const ParallelFor& parallel_for) {
  for_each_range(parallel_for, x.count(), items_per_task(1), [&](std::size_t begin, std::size_t end) {
    write(drop, static_cast<const T*>(x.data), static_cast<T*>(y), begin, end);
  });
}

double number(const Inputs& inputs, std::size_t index) {
  if (inputs[index].count() != 1) inputs.require_shape(index, {});
  inputs.require_same_type(index, 0);
  return inputs.element_type(index) == kFloat ? static_cast<double>(*static_cast<const float*>(inputs[index].data))
                                              : *static_cast<const double*>(inputs[index].data);
}

}  // namespace

const Signature CountedDropoutNode::kSignature = {
    "CountedDropout", {"x", "ratio", "count"}, 3, 1, {0}, {{0, 0}},
    {ort::kTypeUndefined, ort::kTypeUndefined, ort::kTypeInt64}};

CountedDropoutNode::CountedDropoutNode(const Attributes& attributes) {
  start_ = start_of(static_cast<std::uint64_t>(attributes.integer("seed")));
}

void CountedDropoutNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  const double ratio = number(inputs, 1);
  if (!(ratio >= 0 && ratio < 1)) {
    throw std::invalid_argument("input 1 (ratio) is " + std::to_string(ratio) + ", and must be in [0, 1).");
  }
  if (inputs[2].count() != 1) inputs.require_shape(2, {});
  const Drop drop = {.draw = draw_of(start_, *static_cast<const std::int64_t*>(inputs[2].data)),
                     .limit = static_cast<std::uint32_t>(std::floor(ratio * 2147483648.0)),
                     .scale = 1.0 / (1.0 - ratio)};
  void* y = call.output(0, inputs[0].shape);
  if (type == kFloat) {
    run<float>(drop, inputs[0], y, call.parallel_for());
  } else {
    run<double>(drop, inputs[0], y, call.parallel_for());
  }
}

}  // namespace onnxtrain
