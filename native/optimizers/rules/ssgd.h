// SSGD of domain onnxtrain: descent whose steps grow with the magnitude of a weight within its layer. An update needs
// the layer's sum of w^2 first, so this rule runs in two passes.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "optimizers/block_means.h"
#include "optimizers/rule.h"
#include "optimizers/ssgd_scalars.h"
#include "optimizers/variables.h"
#if defined(ONNXTRAIN_INSTRUCTION_SET)
#include "optimizers/ssgd_kernels.h"
#endif

namespace onnxtrain::ssgd {
namespace {

template <typename Value>
[[noreturn]] void refuse(const char* what, Value got, const char* need) {
  std::ostringstream text;
  text << what << " is " << got << ": " << need;
  throw std::invalid_argument(text.str());
}

struct Rule {
  static constexpr Description kDescription = {.name = "SSGD", .domain = kOwnDomain};

  enum Reweighting : int { kL1, kL2 };
  struct Attributes {
    int measure = kLogSum, reweighting = kL2;
    double epsilon = 0.01f, p = 0.5, regularization = 0.0, alpha = 0.0, norm_coefficient = 0.0, max_scale = 0.0;
    AxisSizes block;
  };
  static constexpr AttributeOf<Attributes> kAttributes[] = {
      {.name = "measure",
       .word = &Attributes::measure,
       .words = {"log-sum", "p-norm", "arctan", "geman-mcclure", "exponential", "tanh"}},
      {.name = "reweighting", .word = &Attributes::reweighting, .words = {"l1", "l2"}},
      ONNXTRAIN_NUMBER(epsilon),
      ONNXTRAIN_NUMBER(p),
      ONNXTRAIN_NUMBER(regularization),
      ONNXTRAIN_NUMBER(alpha),
      ONNXTRAIN_NUMBER(norm_coefficient),
      ONNXTRAIN_NUMBER(max_scale),
      {.name = "block", .sizes = &Attributes::block}};

  static constexpr int kVariants = kMeasures;
  static int variant(const Attributes& attributes) { return attributes.measure; }
  static const char* states(const Attributes& attributes) { return attributes.alpha > 0.0 ? "V" : ""; }

  static void check(const Attributes& attributes) {
    // Written so that NaN is rejected too.
    if (attributes.measure == kPNorm) {
      if (!(attributes.p > 0.0 && attributes.p <= (attributes.reweighting == kL1 ? 1.0 : 2.0))) {
        refuse("p", attributes.p,
               attributes.reweighting == kL1
                   ? "with reweighting 'l1' it must be above 0 and at most 1, where 1 is plain SGD."
                   : "with reweighting 'l2' it must be above 0 and at most 2, where 2 is plain SGD.");
      }
    } else if (!(attributes.epsilon > 0.0 && std::isfinite(attributes.epsilon))) {
      refuse("epsilon", attributes.epsilon,
             "it must be above 0 and finite, or the measure is not finite at zero weights.");
    }
    if (!(attributes.regularization >= 0.0))
      refuse("regularization", attributes.regularization, "it must be 0 or more.");
    if (!(attributes.alpha >= 0.0)) refuse("alpha", attributes.alpha, "it must be 0 (no momentum) or more.");
    if (!(attributes.max_scale >= 0.0)) refuse("max_scale", attributes.max_scale, "it must be 0 (no cap) or more.");
  }

  static void run(const Attributes& attributes, double R, std::int64_t, const OptimizerKernels& kernels,
                  const std::vector<Variable>& variables, const ParallelFor& parallel_for) {
    const Schedule schedule(variables);
    const std::vector<Schedule::Block>& blocks = schedule.blocks();

    const MeasureScalars measure = measure_scalars(attributes);
    std::vector<BlockMeans> means;
    if (attributes.block.axes > 0) {
      for (const Variable& variable : variables) {
        means.emplace_back(variable, attributes.block, attributes.reweighting == kL1, parallel_for);
      }
    }
    std::vector<LayerSum> sums(blocks.size());
    schedule.for_each_block(parallel_for, [&](std::size_t index) {
      const Schedule::Block& block = blocks[index];
      const Variable& variable = variables[block.variable];
      const std::size_t count = block.end - block.begin;
      const void* x = static_cast<const unsigned char*>(variable.inputs[0]) + block.begin * size_of(variable.type);
      std::vector<float> wide(variable.parameter_draw == nullptr ? 0 : count);
      if (!wide.empty()) {  // X is in bfloat16
        const auto* const rounded = static_cast<const std::uint16_t*>(variable.inputs[0]);
        onnxtrain::kernels()->widen_states(count, rounded + block.begin, wide.data());
        x = wide.data();
      }
      MeasureScalars own = measure;
      std::vector<double> z(means.empty() ? 0 : count);
      if (!means.empty()) {
        means[block.variable].spread(block.begin, block.end, z.data());
        own.z = z.data();
      }
      kernels.layer[attributes.measure][variable.type](&own, count, x, &sums[index]);
    });

    std::vector<SsgdScalars> layers(variables.size());
    for (std::size_t first = 0; first < blocks.size();) {
      std::size_t last = first;
      while (last < blocks.size() && blocks[last].variable == blocks[first].variable) ++last;
      const std::size_t v = blocks[first].variable;
      layers[v] = layer_scalars(attributes, R, &sums[first], last - first, variables[v].count);
      first = last;
    }

    const bool momentum = attributes.alpha > 0.0;
    const Arity arity = momentum ? Arity{3, 2} : Arity{2, 1};
    schedule.for_each_block(parallel_for, [&](std::size_t index) {
      const Schedule::Block& block = blocks[index];
      const Variable& variable = variables[block.variable];
      const ElementwiseKernel update = kernels.update[attributes.measure][variable.type];
      if (means.empty()) {
        run_kernel(update, &layers[block.variable], arity, variable, block.begin, block.end);
        return;
      }
      double z[tuning::kPreparedElements];
      SsgdScalars own = layers[block.variable];
      own.measure.z = z;
      for (std::size_t begin = block.begin; begin < block.end; begin += tuning::kPreparedElements) {
        const std::size_t end = std::min(begin + tuning::kPreparedElements, block.end);
        means[block.variable].spread(begin, end, z);
        run_kernel(update, &own, arity, variable, begin, end);
      }
    });
  }

#if defined(ONNXTRAIN_INSTRUCTION_SET)
  template <typename T, int measure>
  struct Kernels {
    static constexpr ElementwiseKernel update = onnxtrain::ssgd_update<T, static_cast<Measure>(measure)>;
    static constexpr LayerKernel layer = layer_sum<T, static_cast<Measure>(measure)>;
  };
#endif

  ONNXTRAIN_ANYWHERE static MeasureScalars measure_scalars(const Attributes& attributes) {
    MeasureScalars measure = {};
    measure.l1 = (attributes.reweighting == kL1);
    measure.epsilon = attributes.epsilon;
    measure.inverse_epsilon = 1.0 / attributes.epsilon;
    measure.exponent =
        (attributes.reweighting == kL1) ? 1.0 - attributes.p : 1.0 - 0.5 * attributes.p;  // z is a or a^2
    return measure;
  }

  // Constant factor that the kernels omit from h: h(z) = factor * relative h(z).
  ONNXTRAIN_ANYWHERE static double factor_of(const Attributes& attributes, double largest) {
    const double epsilon = attributes.epsilon;
    switch (attributes.measure) {
      case kLogSum:
        return 1.0;
      case kPNorm:
        return ((attributes.reweighting == kL1) ? 1.0 : 2.0) / attributes.p;
      case kArctan:
      case kGemanMcClure:
        return 1.0 / epsilon;
      case kExponential:
        return epsilon * std::exp(largest / epsilon);
      default:
        return 0.25 * epsilon * std::exp(2.0 * (largest / epsilon));
    }
  }

  // A sum relative to `largest`, a value of z.
  ONNXTRAIN_ANYWHERE static double relative_sum(const Attributes& attributes, const LayerSum& sum, double largest) {
    if (attributes.measure != kExponential && attributes.measure != kTanh) return sum.sum;
    const double powers = (attributes.measure == kTanh ? 2.0 : 1.0) * ((attributes.reweighting == kL1) ? 2.0 : 1.0);
    return sum.sum * std::exp(powers * ((sum.largest - largest) / attributes.epsilon));
  }

  // Pairwise sum of `count` layer sums relative to `largest`: the rounding error grows with the logarithm.
  static double add_by_halves(const Attributes& attributes, const LayerSum* sums, std::size_t count, double largest) {
    if (count > 1) {
      const std::size_t half = count / 2;
      return add_by_halves(attributes, sums, half, largest) +
             add_by_halves(attributes, sums + half, count - half, largest);
    }
    return relative_sum(attributes, *sums, largest);
  }

  static SsgdScalars layer_scalars(const Attributes& attributes, double R, const LayerSum* sums, std::size_t blocks,
                                   std::size_t count) {
    const double largest = largest_of(sums, blocks);
    const double sum = add_by_halves(attributes, sums, blocks, largest);
    return scalars_of(attributes, R, sum, largest, count);
  }

  ONNXTRAIN_ANYWHERE static double largest_of(const LayerSum* sums, std::size_t count) {
    double largest = 0.0;
    for (std::size_t i = 0; i < count; ++i) {
      if (sums[i].largest > largest) largest = sums[i].largest;
    }
    return largest;
  }

  // For a layer of `count` elements whose sum is `sum` relative to `largest`.
  ONNXTRAIN_ANYWHERE static SsgdScalars scalars_of(const Attributes& attributes, double R, double sum, double largest,
                                                   std::size_t count) {
    SsgdScalars scalars = {};
    scalars.measure = measure_scalars(attributes);
    scalars.measure.largest = largest;
    const double mean = sum / static_cast<double>(count);
    // A layer of zeros under a p-norm has w = 0 everywhere: zero is absorbing and the layer does not move.
    scalars.inverse_mean = mean < std::numeric_limits<double>::min() ? 0.0 : 1.0 / mean;
    scalars.rate = R;
    scalars.norm_coefficient = attributes.norm_coefficient;
    scalars.alpha = attributes.alpha;
    scalars.momentum = attributes.alpha > 0.0;
    scalars.cap = attributes.max_scale > 0.0 ? attributes.max_scale : HUGE_VAL;
    if (attributes.regularization > 0.0) {
      scalars.shrinkage = R * attributes.regularization * scalars.inverse_mean / factor_of(attributes, largest);
    }
    return scalars;
  }
};

}  // namespace
}  // namespace onnxtrain::ssgd
