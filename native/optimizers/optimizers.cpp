#include "optimizers/optimizers.h"

#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>

namespace onnxtrain {
namespace {

template <typename Value>
[[noreturn]] void refuse(const char* what, Value got, const char* need) {
  std::ostringstream text;
  text << what << " is " << got << ": " << need;
  throw std::invalid_argument(text.str());
}

void run_elementwise(const ElementwiseKernel (&kernel)[kElementTypes], const void* scalars, Arity arity,
                     const std::vector<Variable>& variables, const ParallelFor& parallel_for) {
  const Schedule schedule(variables);
  schedule.for_each_block(parallel_for, [&](std::size_t index) {
    const Schedule::Block& block = schedule.blocks()[index];
    const Variable& variable = variables[block.variable];
    run_kernel(kernel[variable.type], scalars, arity, variable, block.begin, block.end);
  });
}

}  // namespace

bool nesterov_from(const std::string& mode) {
  if (mode == "standard") return false;
  if (mode == "nesterov") return true;
  refuse("mode", "'" + mode + "'", "it must be 'standard' or 'nesterov'.");
}

Measure measure_from(const std::string& name) {
  const char* const names[] = {"log-sum", "p-norm", "arctan", "geman-mcclure", "exponential", "tanh"};
  for (int measure = 0; measure < kMeasures; ++measure) {
    if (name == names[measure]) return static_cast<Measure>(measure);
  }
  refuse("measure", "'" + name + "'",
         "it must be 'log-sum', 'p-norm', 'arctan', 'geman-mcclure', 'exponential' or 'tanh'.");
}

bool l1_from(const std::string& reweighting) {
  if (reweighting == "l1") return true;
  if (reweighting == "l2") return false;
  refuse("reweighting", "'" + reweighting + "'", "it must be 'l1' or 'l2'.");
}

void SsgdAttributes::check() const {
  // Written so that NaN is refused too.
  if (measure == kPNorm) {
    if (!(p > 0.0 && p <= (l1 ? 1.0 : 2.0))) {
      refuse("p", p, l1 ? "with reweighting 'l1' it must be above 0 and at most 1, where 1 is plain SGD."
                        : "with reweighting 'l2' it must be above 0 and at most 2, where 2 is plain SGD.");
    }
  } else if (!(epsilon > 0.0 && std::isfinite(epsilon))) {
    refuse("epsilon", epsilon, "it must be above 0 and finite, or the measure is not finite at zero weights.");
  }
  if (!(regularization >= 0.0)) refuse("regularization", regularization, "it must be 0 or more.");
  if (!(alpha >= 0.0)) refuse("alpha", alpha, "it must be 0 (no momentum) or more.");
  if (!(max_scale >= 0.0)) refuse("max_scale", max_scale, "it must be 0 (no cap) or more.");
}

void run_adagrad(const AdagradAttributes& attributes, double R, std::int64_t T, const std::vector<Variable>& variables,
                 const ParallelFor& parallel_for) {
  const double decay = 1.0 + static_cast<double>(T) * attributes.decay_factor;
  if (!(decay > 0.0)) {
    std::ostringstream text;
    text << "1 + T * decay_factor is " << decay << " at T = " << T << " and decay_factor = " << attributes.decay_factor
         << ", which would turn the step uphill: it must be above 0, so use a larger T or decay_factor.";
    throw std::invalid_argument(text.str());
  }
  const AdagradScalars scalars = {R / decay, attributes.norm_coefficient, attributes.epsilon};
  run_elementwise(kernels()->adagrad, &scalars, {3, 2}, variables, parallel_for);
}

void run_adam(const AdamAttributes& attributes, double R, std::int64_t T, const std::vector<Variable>& variables,
              const ParallelFor& parallel_for) {
  const double alpha = attributes.alpha, beta = attributes.beta, count = static_cast<double>(T);
  AdamScalars scalars = {};
  scalars.rate = T > 0 ? R * std::sqrt(1.0 - std::pow(beta, count)) / (1.0 - std::pow(alpha, count)) : R;
  scalars.norm_coefficient = attributes.norm_coefficient;
  scalars.alpha = alpha;
  scalars.one_minus_alpha = 1.0 - alpha;
  scalars.beta = beta;
  scalars.one_minus_beta = 1.0 - beta;
  scalars.epsilon = attributes.epsilon;
  scalars.one_minus_post = 1.0 - attributes.norm_coefficient_post;
  run_elementwise(kernels()->adam, &scalars, {4, 3}, variables, parallel_for);
}

void run_momentum(const MomentumAttributes& attributes, double R, std::int64_t T,
                  const std::vector<Variable>& variables, const ParallelFor& parallel_for) {
  const MomentumScalars scalars = {R, attributes.norm_coefficient, attributes.alpha, T > 0 ? attributes.beta : 1.0};
  const KernelTable& table = *kernels();
  run_elementwise(attributes.nesterov ? table.nesterov : table.momentum, &scalars, {3, 2}, variables, parallel_for);
}

namespace {

MeasureScalars measure_scalars(const SsgdAttributes& attributes) {
  MeasureScalars measure = {};
  measure.l1 = attributes.l1;
  measure.epsilon = attributes.epsilon;
  measure.inverse_epsilon = 1.0 / attributes.epsilon;
  measure.exponent = attributes.l1 ? 1.0 - attributes.p : 1.0 - 0.5 * attributes.p;  // z is a or a^2
  return measure;
}

// The constant that the kernels leave out of h: h(z) = factor * relative h(z).
double factor_of(const SsgdAttributes& attributes, double largest) {
  const double epsilon = attributes.epsilon;
  switch (attributes.measure) {
    case kLogSum:
      return 1.0;
    case kPNorm:
      return (attributes.l1 ? 1.0 : 2.0) / attributes.p;
    case kArctan:
    case kGemanMcClure:
      return 1.0 / epsilon;
    case kExponential:
      return epsilon * std::exp(largest / epsilon);
    default:
      return 0.25 * epsilon * std::exp(2.0 * (largest / epsilon));
  }
}

// The sum of `count` layer sums relative to the z `largest`, by halves: the rounding error grows with the logarithm.
double add_by_halves(const SsgdAttributes& attributes, const LayerSum* sums, std::size_t count, double largest) {
  if (count > 1) {
    const std::size_t half = count / 2;
    return add_by_halves(attributes, sums, half, largest) +
           add_by_halves(attributes, sums + half, count - half, largest);
  }
  if (attributes.measure != kExponential && attributes.measure != kTanh) return sums->sum;
  const double powers = (attributes.measure == kTanh ? 2.0 : 1.0) * (attributes.l1 ? 2.0 : 1.0);
  return sums->sum * std::exp(powers * ((sums->largest - largest) / attributes.epsilon));
}

SsgdScalars layer_scalars(const SsgdAttributes& attributes, double R, const LayerSum* sums, std::size_t blocks,
                          std::size_t count) {
  SsgdScalars scalars = {};
  scalars.measure = measure_scalars(attributes);
  for (std::size_t b = 0; b < blocks; ++b) {
    if (sums[b].largest > scalars.measure.largest) scalars.measure.largest = sums[b].largest;
  }
  const double largest = scalars.measure.largest;
  const double mean = add_by_halves(attributes, sums, blocks, largest) / static_cast<double>(count);
  // A layer of zeros under a p-norm has w = 0 everywhere: zero is absorbing, the layer does not move.
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

}  // namespace

void run_ssgd(const SsgdAttributes& attributes, double R, const std::vector<Variable>& variables,
              const ParallelFor& parallel_for) {
  const KernelTable& table = *kernels();
  const Schedule schedule(variables);
  const std::vector<Schedule::Block>& blocks = schedule.blocks();

  const MeasureScalars measure = measure_scalars(attributes);
  std::vector<LayerSum> sums(blocks.size());
  schedule.for_each_block(parallel_for, [&](std::size_t index) {
    const Schedule::Block& block = blocks[index];
    const Variable& variable = variables[block.variable];
    const void* x = static_cast<const unsigned char*>(variable.inputs[0]) + block.begin * size_of(variable.type);
    sums[index] = table.layer_sum[variable.type][attributes.measure](measure, block.end - block.begin, x);
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
    run_kernel(table.ssgd[variable.type][attributes.measure], &layers[block.variable], arity, variable, block.begin,
               block.end);
  });
}

}  // namespace onnxtrain
