// RMSprop of domain onnxtrain, as in PyTorch without `centered`.
#pragma once

#include "optimizers/rule.h"

namespace onnxtrain::rmsprop {
namespace {

struct Rule {
  static constexpr Description kDescription = {.name = "RMSprop", .domain = kOwnDomain};

  struct Attributes {
    double alpha = 0.99f, epsilon = 1e-8f, weight_decay = 0.0, momentum = 0.0;
  };
  static constexpr AttributeOf<Attributes> kAttributes[] = {ONNXTRAIN_NUMBER(alpha), ONNXTRAIN_NUMBER(epsilon),
                                                            ONNXTRAIN_NUMBER(weight_decay), ONNXTRAIN_NUMBER(momentum)};

  static constexpr int kVariants = 2;
  static int variant(const Attributes& attributes) { return attributes.momentum > 0.0 ? 1 : 0; }
  static const char* states(const Attributes& attributes) { return attributes.momentum > 0.0 ? "HV" : "H"; }

  template <typename T>
  struct Scalars {
    T rate, weight_decay, alpha, one_minus_alpha, epsilon, momentum;
  };

  static Scalars<double> scalars(const Attributes& attributes, double R, std::int64_t) {
    return {.rate = R,
            .weight_decay = attributes.weight_decay,
            .alpha = attributes.alpha,
            .one_minus_alpha = 1.0 - attributes.alpha,
            .epsilon = attributes.epsilon,
            .momentum = attributes.momentum};
  }

  template <int with_momentum, typename T>
    requires(with_momentum == 0)
  ONNXTRAIN_ANYWHERE static void update(const Scalars<T>& s, T& x, T g, T& h) {
    g = s.weight_decay * x + g;
    h = s.alpha * h + s.one_minus_alpha * g * g;
    x = x - s.rate * (g / (square_root(h) + s.epsilon));
  }

  template <int with_momentum, typename T>
    requires(with_momentum == 1)
  ONNXTRAIN_ANYWHERE static void update(const Scalars<T>& s, T& x, T g, T& h, T& v) {
    g = s.weight_decay * x + g;
    h = s.alpha * h + s.one_minus_alpha * g * g;
    v = s.momentum * v + g / (square_root(h) + s.epsilon);
    x = x - s.rate * v;
  }
};

}  // namespace
}  // namespace onnxtrain::rmsprop
