// AdamW of domain onnxtrain: decoupled weight decay; bias correction and epsilon as in PyTorch.
#pragma once

#include <cmath>

#include "optimizers/rule.h"

namespace onnxtrain::adamw {
namespace {

struct Rule {
  static constexpr Description kDescription = {.name = "AdamW", .domain = kOwnDomain};

  struct Attributes {
    double alpha = 0.9f, beta = 0.999f, epsilon = 1e-8f, weight_decay = 0.01f;
  };
  static constexpr AttributeOf<Attributes> kAttributes[] = {ONNXTRAIN_NUMBER(alpha), ONNXTRAIN_NUMBER(beta),
                                                            ONNXTRAIN_NUMBER(epsilon), ONNXTRAIN_NUMBER(weight_decay)};

  static const char* states(const Attributes&) { return "VH"; }

  template <typename T>
  struct Scalars {
    T rate, decay, alpha, one_minus_alpha, beta, one_minus_beta, epsilon;
  };

  static Scalars<double> scalars(const Attributes& attributes, double R, std::int64_t T) {
    const double alpha = attributes.alpha, beta = attributes.beta, count = static_cast<double>(T);
    const double correction = std::sqrt(T > 0 ? 1.0 - std::pow(beta, count) : 1.0);
    return {.rate = R * correction / (T > 0 ? 1.0 - std::pow(alpha, count) : 1.0),
            .decay = 1.0 - R * attributes.weight_decay,
            .alpha = alpha,
            .one_minus_alpha = 1.0 - alpha,
            .beta = beta,
            .one_minus_beta = 1.0 - beta,
            .epsilon = attributes.epsilon * correction};
  }

  template <int, typename T>
  ONNXTRAIN_ANYWHERE static void update(const Scalars<T>& s, T& x, T g, T& v, T& h) {
    v = s.alpha * v + s.one_minus_alpha * g;
    h = s.beta * h + s.one_minus_beta * g * g;
    x = s.decay * x - s.rate * v / (square_root(h) + s.epsilon);
  }
};

}  // namespace
}  // namespace onnxtrain::adamw
