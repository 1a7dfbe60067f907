// Adagrad of ai.onnx.preview.training, in the order of operations of its operator page.
#pragma once

#include <sstream>
#include <stdexcept>

#include "optimizers/rule.h"

namespace onnxtrain::adagrad {
namespace {

struct Rule {
  static constexpr Description kDescription = {.name = "Adagrad", .domain = kTrainingDomain};

  struct Attributes {
    double decay_factor = 0.0, epsilon = 1e-6f, norm_coefficient = 0.0;
  };
  static constexpr AttributeOf<Attributes> kAttributes[] = {ONNXTRAIN_NUMBER(decay_factor), ONNXTRAIN_NUMBER(epsilon),
                                                            ONNXTRAIN_NUMBER(norm_coefficient)};

  static const char* states(const Attributes&) { return "H"; }

  template <typename T>
  struct Scalars {
    T rate, norm_coefficient, epsilon;
  };

  static Scalars<double> scalars(const Attributes& attributes, double R, std::int64_t T) {
    const double decay = 1.0 + static_cast<double>(T) * attributes.decay_factor;
    if (!(decay > 0.0)) {
      std::ostringstream text;
      text << "1 + T * decay_factor is " << decay << " at T = " << T
           << " and decay_factor = " << attributes.decay_factor
           << ", which would turn the step uphill: it must be above 0, so use a larger T or decay_factor.";
      throw std::invalid_argument(text.str());
    }
    return {.rate = R / decay, .norm_coefficient = attributes.norm_coefficient, .epsilon = attributes.epsilon};
  }

  template <int, typename T>
  ONNXTRAIN_ANYWHERE static void update(const Scalars<T>& s, T& x, T g, T& h) {
    g = s.norm_coefficient * x + g;
    h = h + g * g;
    x = x - s.rate * g / (square_root(h) + s.epsilon);
  }
};

}  // namespace
}  // namespace onnxtrain::adagrad
