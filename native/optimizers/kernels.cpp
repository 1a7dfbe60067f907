// The kernels of the update rules for one instruction set: compiled like kernels/kernels.cpp, without fused
// multiply-add, so that all sets give the same bits.
#include <type_traits>

#include "kernels/elementwise.h"
#include "kernels/instruction_set.h"
#include "optimizer_rules.h"
#include "optimizers/rule.h"

namespace onnxtrain {
namespace {

template <typename Rule, typename T, int variant>
void update(const void* scalars, std::size_t count, const void* const* inputs, void* const* outputs) {
  using Scalars = typename Rule::template Scalars<T>;
  const Scalars s = rounded<Rule, T>(*static_cast<const typename Rule::template Scalars<double>*>(scalars));
  const T *X = static_cast<const T*>(inputs[0]), *G = static_cast<const T*>(inputs[1]);
  T* X_new = static_cast<T*>(outputs[0]);
  constexpr int states = states_of_update<Rule, variant>();
  if constexpr (states == 0) {
    for_each_element<T>(count, {X, G}, [=](std::size_t i) {
      T x = X[i];
      Rule::template update<variant>(s, x, G[i]);
      X_new[i] = x;
    });
  } else if constexpr (states == 1) {
    const T* V = static_cast<const T*>(inputs[2]);
    T* V_new = static_cast<T*>(outputs[1]);
    for_each_element<T>(count, {X, G, V}, [=](std::size_t i) {
      T x = X[i], v = V[i];
      Rule::template update<variant>(s, x, G[i], v);
      V_new[i] = v;
      X_new[i] = x;
    });
  } else {
    const T *V = static_cast<const T*>(inputs[2]), *H = static_cast<const T*>(inputs[3]);
    T *V_new = static_cast<T*>(outputs[1]), *H_new = static_cast<T*>(outputs[2]);
    for_each_element<T>(count, {X, G, V, H}, [=](std::size_t i) {
      T x = X[i], v = V[i], h = H[i];
      Rule::template update<variant>(s, x, G[i], v, h);
      V_new[i] = v;
      H_new[i] = h;
      X_new[i] = x;
    });
  }
}

template <typename Rule, int variant>
constexpr void add_variants(OptimizerKernels& kernels) {
  if constexpr (variant < variants_of<Rule>()) {
    if constexpr (requires { Rule::template Kernels<float, variant>::update; }) {
      kernels.update[variant][kFloat] = Rule::template Kernels<float, variant>::update;
      kernels.update[variant][kDouble] = Rule::template Kernels<double, variant>::update;
      kernels.layer[variant][kFloat] = Rule::template Kernels<float, variant>::layer;
      kernels.layer[variant][kDouble] = Rule::template Kernels<double, variant>::layer;
    } else {
      kernels.update[variant][kFloat] = update<Rule, float, variant>;
      kernels.update[variant][kDouble] = update<Rule, double, variant>;
    }
    add_variants<Rule, variant + 1>(kernels);
  }
}

template <typename Rule>
constexpr OptimizerKernels kernels_of() {
  OptimizerKernels kernels;
  add_variants<Rule, 0>(kernels);
  return kernels;
}

}  // namespace

extern const OptimizerKernels ONNXTRAIN_OF_SET(kOptimizers_)[];

#define ONNXTRAIN_KERNELS_OF(rule) kernels_of<rule::Rule>(),
constinit const OptimizerKernels ONNXTRAIN_OF_SET(kOptimizers_)[] = {ONNXTRAIN_OPTIMIZER_RULES(ONNXTRAIN_KERNELS_OF)};

}  // namespace onnxtrain
