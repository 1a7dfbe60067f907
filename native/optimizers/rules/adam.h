// Adam of ai.onnx.preview.training, in the order of operations of its operator page.
#pragma once

#include <cmath>

#include "optimizers/rule.h"

namespace onnxtrain::adam {
namespace {

struct Rule {
  static constexpr Description kDescription = {.name = "Adam", .domain = kTrainingDomain};

  struct Attributes {
    double alpha = 0.9f, beta = 0.999f, epsilon = 1e-6f, norm_coefficient = 0.0, norm_coefficient_post = 0.0;
  };
  static constexpr AttributeOf<Attributes> kAttributes[] = {
      ONNXTRAIN_NUMBER(alpha), ONNXTRAIN_NUMBER(beta), ONNXTRAIN_NUMBER(epsilon), ONNXTRAIN_NUMBER(norm_coefficient),
      ONNXTRAIN_NUMBER(norm_coefficient_post)};

  static const char* states(const Attributes&) { return "VH"; }

  template <typename T>
  struct Scalars {
    T rate, norm_coefficient, alpha, one_minus_alpha, beta, one_minus_beta, epsilon, one_minus_post;
  };

  static Scalars<double> scalars(const Attributes& attributes, double R, std::int64_t T) {
    const double alpha = attributes.alpha, beta = attributes.beta, count = static_cast<double>(T);
    return {.rate = T > 0 ? R * std::sqrt(1.0 - std::pow(beta, count)) / (1.0 - std::pow(alpha, count)) : R,
            .norm_coefficient = attributes.norm_coefficient,
            .alpha = alpha,
            .one_minus_alpha = 1.0 - alpha,
            .beta = beta,
            .one_minus_beta = 1.0 - beta,
            .epsilon = attributes.epsilon,
            .one_minus_post = 1.0 - attributes.norm_coefficient_post};
  }

  template <int, typename T>
  ONNXTRAIN_ANYWHERE static void update(const Scalars<T>& s, T& x, T g, T& v, T& h) {
    g = s.norm_coefficient * x + g;
    v = s.alpha * v + s.one_minus_alpha * g;
    h = s.beta * h + s.one_minus_beta * g * g;
    x = s.one_minus_post * (x - s.rate * v / (square_root(h) + s.epsilon));
  }
};

}  // namespace
}  // namespace onnxtrain::adam
