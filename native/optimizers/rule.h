// How an update rule is written. Each is a file in rules/, which the build finds, with a `Rule` in a namespace of the
// file's name:
//
//   struct Rule {
//     static constexpr Description kDescription = {.name = "Adagrad", .domain = kTrainingDomain};
//     struct Attributes { double epsilon = 1e-6f; };            // as a file stores them, with their defaults
//     static constexpr AttributeOf<Attributes> kAttributes[] = {ONNXTRAIN_NUMBER(epsilon)};
//     static const char* states(const Attributes&);             // the states' letters, in the operator's order;
//                                                           // one that is called H is never negative
//     template <typename T> struct Scalars { T rate, epsilon; };  // what an element's update needs, all of type T
//     static Scalars<double> scalars(const Attributes&, double R, std::int64_t T);  // once for a call, in float64
//     template <int variant, typename T>
//     static void update(const Scalars<T>&, T& x, T g, T& h);   // one element; the compiler makes vectors of it
//   };
//
// A rule may have `kVariants` and `static int variant(const Attributes&)`, where attributes choose among forms of the
// update; `static void check(const Attributes&)`, which throws std::invalid_argument; and, where an element's update
// depends on its whole tensor, kernels and a run of its own, in two passes (lamb.h, ssgd.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/elementwise.h"
#include "kernels/kernel_table.h"

namespace onnxtrain {

inline constexpr const char *kTrainingDomain = "ai.onnx.preview.training", *kOwnDomain = "onnxtrain";

struct Description {
  const char* name;  // of the operator
  const char* domain;
};

inline constexpr int kMostVariants = 6;

// One attribute: a number, or one of some words, of which the number is kept.
template <typename Attributes>
struct AttributeOf {
  const char* name;
  double Attributes::* number = nullptr;
  int Attributes::* word = nullptr;
  const char* words[kMostVariants] = {};
  bool required = false;
};

#define ONNXTRAIN_NUMBER(attribute) {.name = #attribute, .number = &Attributes::attribute}
#define ONNXTRAIN_REQUIRED_NUMBER(attribute) {.name = #attribute, .number = &Attributes::attribute, .required = true}

// A kernel that looks at a whole layer before its update.
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

}  // namespace onnxtrain
