// SGD of domain onnxtrain: plain, with momentum, and Nesterov, as in PyTorch.
#pragma once

#include "optimizers/rule.h"

namespace onnxtrain::sgd {
namespace {

struct Rule {
  static constexpr Description kDescription = {.name = "SGD", .domain = kOwnDomain};

  enum Mode : int { kStandard, kNesterov };
  struct Attributes {
    double momentum = 0.0, dampening = 0.0, weight_decay = 0.0;
    int mode = kStandard;
  };
  static constexpr AttributeOf<Attributes> kAttributes[] = {
      ONNXTRAIN_NUMBER(momentum),
      ONNXTRAIN_NUMBER(dampening),
      ONNXTRAIN_NUMBER(weight_decay),
      {.name = "mode", .word = &Attributes::mode, .words = {"standard", "nesterov"}}};

  static constexpr int kVariants = 3;
  enum Form : int { kPlain, kMomentum, kNesterovMomentum };
  static int variant(const Attributes& attributes) {
    if (!(attributes.momentum > 0.0)) return kPlain;
    return attributes.mode == kNesterov ? kNesterovMomentum : kMomentum;
  }
  static const char* states(const Attributes& attributes) { return variant(attributes) == kPlain ? "" : "V"; }

  template <typename T>
  struct Scalars {
    T rate, weight_decay, momentum, weight;
  };

  static Scalars<double> scalars(const Attributes& attributes, double R, std::int64_t T) {
    return {.rate = R,
            .weight_decay = attributes.weight_decay,
            .momentum = attributes.momentum,
            .weight = T > 0 ? 1.0 - attributes.dampening : 1.0};
  }

  template <int form, typename T>
    requires(form == kPlain)
  ONNXTRAIN_ANYWHERE static void update(const Scalars<T>& s, T& x, T g) {
    g = s.weight_decay * x + g;
    x = x - s.rate * g;
  }

  template <int form, typename T>
    requires(form != kPlain)
  ONNXTRAIN_ANYWHERE static void update(const Scalars<T>& s, T& x, T g, T& v) {
    g = s.weight_decay * x + g;
    v = s.momentum * v + s.weight * g;
    x = x - s.rate * (form == kNesterovMomentum ? g + s.momentum * v : v);
  }
};

}  // namespace
}  // namespace onnxtrain::sgd
