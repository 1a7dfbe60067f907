// The interface of an update rule. Each is a file in rules/, found by the build, with a `Rule` in a namespace of the
// file's name:
//
//   struct Rule {
//     static constexpr Description kDescription = {.name = "Adagrad", .domain = kTrainingDomain};
//     struct Attributes { double epsilon = 1e-6f; };            // as a file stores them, with their defaults
//     static constexpr AttributeOf<Attributes> kAttributes[] = {ONNXTRAIN_NUMBER(epsilon)};
//     static const char* states(const Attributes&);             // the states' letters, in the operator's order
//     template <typename T> struct Scalars { T rate, epsilon; };  // what an element's update needs, all of type T
//     static Scalars<double> scalars(const Attributes&, double R, std::int64_t T);  // once for a call, in float64
//     template <int variant, typename T>
//     ONNXTRAIN_ANYWHERE static void update(const Scalars<T>&, T& x, T g, T& h);  // one element
//   };
//
// The compiler vectorizes `update` and, where the CUDA library is built, compiles it for GPUs.
//
// A rule may have `kVariants` and `static int variant(const Attributes&)`, if attributes select a variant of the
// update; `static void check(const Attributes&)`, which throws std::invalid_argument; and, if an element's update
// depends on its whole tensor, kernels and a two-pass run of its own (lamb.h, ssgd.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "anywhere.h"
#include "kernels/elementwise.h"
#include "kernels/kernel_table.h"

namespace onnxtrain {

inline constexpr const char *kTrainingDomain = "ai.onnx.preview.training", *kOwnDomain = "onnxtrain";

struct Description {
  const char* name;  // of the operator
  const char* domain;
};

inline constexpr int kMostVariants = 6;

inline constexpr int kMostAxes = 8;

// One size for each axis of a variable; no axes if the attribute is missing.
struct AxisSizes {
  int axes = 0;
  std::int64_t sizes[kMostAxes] = {};
};

// One attribute: a number, one of several words, stored as its index, or sizes of axes.
template <typename Attributes>
struct AttributeOf {
  const char* name;
  double Attributes::* number = nullptr;
  int Attributes::* word = nullptr;
  const char* words[kMostVariants] = {};
  AxisSizes Attributes::* sizes = nullptr;
  bool required = false;
};

#define ONNXTRAIN_NUMBER(attribute) {.name = #attribute, .number = &Attributes::attribute}
#define ONNXTRAIN_REQUIRED_NUMBER(attribute) {.name = #attribute, .number = &Attributes::attribute, .required = true}

// A kernel that reduces over a whole layer before its update.
using LayerKernel = void (*)(const void* scalars, std::size_t count, const void* x, void* result);

// The kernels of one rule, by variant and ElementType.
struct OptimizerKernels {
  ElementwiseKernel update[kMostVariants][kElementTypes] = {};
  LayerKernel layer[kMostVariants][kElementTypes] = {};
};

template <typename Rule>
constexpr int variants_of() {
  if constexpr (requires { Rule::kVariants; }) {
    return Rule::kVariants;
  } else {
    return 1;
  }
}

// A rule's scalars in the tensor's type, each rounded once.
template <typename Rule, typename T>
typename Rule::template Scalars<T> rounded(const typename Rule::template Scalars<double>& scalars) {
  constexpr std::size_t count = sizeof(typename Rule::template Scalars<T>) / sizeof(T);
  static_assert(sizeof(scalars) == count * sizeof(double));
  double wide[count];
  __builtin_memcpy(wide, &scalars, sizeof(wide));
  T narrow[count];
  for (std::size_t i = 0; i < count; ++i) narrow[i] = static_cast<T>(wide[i]);
  typename Rule::template Scalars<T> result;
  __builtin_memcpy(&result, narrow, sizeof(narrow));
  return result;
}

// Number of states that an element's update changes; -1 if the rule has kernels of its own.
template <typename Rule, int variant>
constexpr int states_of_update() {
  if constexpr (requires { typename Rule::template Scalars<float>; }) {
    using Scalars = typename Rule::template Scalars<float>;
    if constexpr (requires(const Scalars& s, float& x) { Rule::template update<variant>(s, x, x); }) return 0;
    if constexpr (requires(const Scalars& s, float& x) { Rule::template update<variant>(s, x, x, x); }) return 1;
    if constexpr (requires(const Scalars& s, float& x) { Rule::template update<variant>(s, x, x, x, x); }) return 2;
  }
  return -1;
}

}  // namespace onnxtrain
