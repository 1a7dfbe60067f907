// Lion of domain onnxtrain: steps of fixed size along the sign of an averaged gradient.
#pragma once

#include "optimizers/rule.h"

namespace onnxtrain::lion {
namespace {

struct Rule {
  static constexpr Description kDescription = {.name = "Lion", .domain = kOwnDomain};

  struct Attributes {
    double alpha = 0.9f, beta = 0.99f, weight_decay = 0.0;
  };
  static constexpr AttributeOf<Attributes> kAttributes[] = {ONNXTRAIN_NUMBER(alpha), ONNXTRAIN_NUMBER(beta),
                                                            ONNXTRAIN_NUMBER(weight_decay)};

  static const char* states(const Attributes&) { return "V"; }

  template <typename T>
  struct Scalars {
    T rate, decay, alpha, one_minus_alpha, beta, one_minus_beta;
  };

  static Scalars<double> scalars(const Attributes& attributes, double R, std::int64_t) {
    return {.rate = R,
            .decay = 1.0 - R * attributes.weight_decay,
            .alpha = attributes.alpha,
            .one_minus_alpha = 1.0 - attributes.alpha,
            .beta = attributes.beta,
            .one_minus_beta = 1.0 - attributes.beta};
  }

  template <int, typename T>
  ONNXTRAIN_ANYWHERE static void update(const Scalars<T>& s, T& x, T g, T& v) {
    const T direction = s.alpha * v + s.one_minus_alpha * g;
    const T sign = direction > T(0) ? T(1) : direction < T(0) ? T(-1) : direction - direction;  // 0, or NaN
    v = s.beta * v + s.one_minus_beta * g;
    x = s.decay * x - s.rate * sign;
  }
};

}  // namespace
}  // namespace onnxtrain::lion
