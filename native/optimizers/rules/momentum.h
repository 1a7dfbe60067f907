// Momentum of ai.onnx.preview.training, standard and Nesterov, in the order of operations of its operator page.
#pragma once

#include "optimizers/rule.h"

namespace onnxtrain::momentum {
namespace {

struct Rule {
  static constexpr Description kDescription = {.name = "Momentum", .domain = kTrainingDomain};

  enum Mode : int { kStandard, kNesterov };
  struct Attributes {
    double alpha = 0.0, beta = 0.0, norm_coefficient = 0.0;
    int mode = kStandard;
  };
  static constexpr AttributeOf<Attributes> kAttributes[] = {
      ONNXTRAIN_REQUIRED_NUMBER(alpha),
      ONNXTRAIN_REQUIRED_NUMBER(beta),
      ONNXTRAIN_REQUIRED_NUMBER(norm_coefficient),
      {.name = "mode", .word = &Attributes::mode, .words = {"standard", "nesterov"}, .required = true}};

  static constexpr int kVariants = 2;
  static int variant(const Attributes& attributes) { return attributes.mode; }
  static const char* states(const Attributes&) { return "V"; }

  template <typename T>
  struct Scalars {
    T rate, norm_coefficient, alpha, beta;
  };

  static Scalars<double> scalars(const Attributes& attributes, double R, std::int64_t T) {
    return {.rate = R,
            .norm_coefficient = attributes.norm_coefficient,
            .alpha = attributes.alpha,
            .beta = T > 0 ? attributes.beta : 1.0};
  }

  template <int mode, typename T>
  ONNXTRAIN_ANYWHERE static void update(const Scalars<T>& s, T& x, T g, T& v) {
    g = s.norm_coefficient * x + g;
    v = s.alpha * v + s.beta * g;
    x = x - s.rate * (mode == kNesterov ? g + s.alpha * v : v);
  }
};

}  // namespace
}  // namespace onnxtrain::momentum
