// LAMB of domain onnxtrain: the step of AdamW, scaled by the norm of the weights of its tensor. An update needs the
// tensor's norms first, so this rule runs in two passes: both compute the step, the first only for its norm.
#pragma once

#include <cmath>
#include <vector>

#include "optimizers/rule.h"
#include "optimizers/variables.h"
#if defined(ONNXTRAIN_INSTRUCTION_SET)
#include "kernels/elementwise.h"
#include "kernels/lanes.h"
#include "tuning.h"
#endif

namespace onnxtrain::lamb {
namespace {

struct Rule {
  static constexpr Description kDescription = {.name = "LAMB", .domain = kOwnDomain};

  struct Attributes {
    double alpha = 0.9f, beta = 0.999f, epsilon = 1e-6f, weight_decay = 0.01f;
  };
  static constexpr AttributeOf<Attributes> kAttributes[] = {ONNXTRAIN_NUMBER(alpha), ONNXTRAIN_NUMBER(beta),
                                                            ONNXTRAIN_NUMBER(epsilon), ONNXTRAIN_NUMBER(weight_decay)};

  enum Pass : int { kUpdate, kNorms };
  static constexpr int kVariants = 2;

  static const char* states(const Attributes&) { return "VH"; }

  template <typename T>
  struct Scalars {
    T scale, alpha, one_minus_alpha, beta, one_minus_beta, epsilon, weight_decay;

    // Each value is rounded once.
    template <typename Narrow>
    Scalars<Narrow> as() const {
      return {static_cast<Narrow>(scale),         static_cast<Narrow>(alpha),
              static_cast<Narrow>(one_minus_alpha), static_cast<Narrow>(beta),
              static_cast<Narrow>(one_minus_beta),  static_cast<Narrow>(epsilon),
              static_cast<Narrow>(weight_decay)};
    }
  };

  struct Squares {
    double weights = 0.0, steps = 0.0;
  };

  // The first pass adds to `squares`, the second one multiplies by `rate`.
  struct KernelArguments {
    Scalars<double> scalars;
    Squares* squares;
    double rate;
  };

  static Scalars<double> scalars(const Attributes& attributes, std::int64_t T) {
    const double alpha = attributes.alpha, beta = attributes.beta, count = static_cast<double>(T);
    const double correction = std::sqrt(T > 0 ? 1.0 - std::pow(beta, count) : 1.0);
    return {.scale = correction / (T > 0 ? 1.0 - std::pow(alpha, count) : 1.0),
            .alpha = alpha,
            .one_minus_alpha = 1.0 - alpha,
            .beta = beta,
            .one_minus_beta = 1.0 - beta,
            .epsilon = attributes.epsilon * correction,
            .weight_decay = attributes.weight_decay};
  }

  // The step of one element without the learning rate; updates v and h.
  template <typename T>
  ONNXTRAIN_ANYWHERE static T step(const Scalars<T>& s, T x, T g, T& v, T& h) {
    v = s.alpha * v + s.one_minus_alpha * g;
    h = s.beta * h + s.one_minus_beta * g * g;
    return s.scale * v / (square_root(h) + s.epsilon) + s.weight_decay * x;
  }

  // The update of one element.
  template <typename T>
  ONNXTRAIN_ANYWHERE static void take(const Scalars<T>& s, T rate, T& x, T g, T& v, T& h) {
    const T taken = step(s, x, g, v, h);
    x = x - rate * taken;
  }

  // The trust ratio: factor of a tensor's learning rate.
  ONNXTRAIN_ANYWHERE static double trust(const Squares& sums) {
    const double weights = std::sqrt(sums.weights), steps = std::sqrt(sums.steps);
    return weights * steps > 0.0 ? weights / steps : 1.0;
  }

  static void run(const Attributes& attributes, double R, std::int64_t T, const OptimizerKernels& kernels,
                  const std::vector<Variable>& variables, const ParallelFor& parallel_for) {
    const Schedule schedule(variables);
    const std::vector<Schedule::Block>& blocks = schedule.blocks();
    const Scalars<double> numbers = scalars(attributes, T);

    std::vector<Squares> of_blocks(blocks.size());
    schedule.for_each_block(parallel_for, [&](std::size_t index) {
      const Schedule::Block& block = blocks[index];
      const Variable& variable = variables[block.variable];
      const KernelArguments arguments = {numbers, &of_blocks[index], 0.0};
      run_kernel(kernels.update[kNorms][variable.type], &arguments, {.inputs = 4, .outputs = 0}, variable, block.begin,
                 block.end);
    });

    std::vector<Squares> sums(variables.size());
    for (std::size_t index = 0; index < blocks.size(); ++index) {
      sums[blocks[index].variable].weights += of_blocks[index].weights;
      sums[blocks[index].variable].steps += of_blocks[index].steps;
    }
    schedule.for_each_block(parallel_for, [&](std::size_t index) {
      const Schedule::Block& block = blocks[index];
      const Variable& variable = variables[block.variable];
      const KernelArguments arguments = {numbers, nullptr, R * trust(sums[block.variable])};
      run_kernel(kernels.update[kUpdate][variable.type], &arguments, {.inputs = 4, .outputs = 3}, variable, block.begin,
                 block.end);
    });
  }

#if defined(ONNXTRAIN_INSTRUCTION_SET)
  template <typename T>
  static void update(const void* scalars, std::size_t count, const void* const* inputs, void* const* outputs) {
    const KernelArguments& arguments = *static_cast<const KernelArguments*>(scalars);
    const Scalars<T> s = arguments.scalars.template as<T>();
    const T rate = static_cast<T>(arguments.rate);
    const T *X = static_cast<const T*>(inputs[0]), *G = static_cast<const T*>(inputs[1]),
            *V = static_cast<const T*>(inputs[2]), *H = static_cast<const T*>(inputs[3]);
    T *X_new = static_cast<T*>(outputs[0]), *V_new = static_cast<T*>(outputs[1]), *H_new = static_cast<T*>(outputs[2]);
    for_each_element<T>(count, {X, G, V, H}, [=](std::size_t i) {
      T x = X[i], v = V[i], h = H[i];
      take(s, rate, x, G[i], v, h);
      X_new[i] = x;
      V_new[i] = v;
      H_new[i] = h;
    });
  }

  template <typename T>
  static void norms(const void* scalars, std::size_t count, const void* const* inputs, void* const*) {
    const KernelArguments& arguments = *static_cast<const KernelArguments*>(scalars);
    const Scalars<T> s = arguments.scalars.template as<T>();
    const T *X = static_cast<const T*>(inputs[0]), *G = static_cast<const T*>(inputs[1]),
            *V = static_cast<const T*>(inputs[2]), *H = static_cast<const T*>(inputs[3]);
    T taken[tuning::kMeasuredElements];
    for (std::size_t begin = 0; begin < count; begin += tuning::kMeasuredElements) {
      const std::size_t n = count - begin < tuning::kMeasuredElements ? count - begin : tuning::kMeasuredElements;
      ONNXTRAIN_VECTORIZE
      for (std::size_t i = 0; i < n; ++i) {
        T v = V[begin + i], h = H[begin + i];
        taken[i] = step(s, X[begin + i], G[begin + i], v, h);
      }
      arguments.squares->weights += squares(X + begin, n);  // chunk by chunk, however many a call has
      arguments.squares->steps += squares(taken, n);
    }
  }

  template <typename T, int pass>
  struct Kernels {
    static constexpr ElementwiseKernel update = pass == kUpdate ? Rule::update<T> : Rule::norms<T>;
    static constexpr LayerKernel layer = nullptr;
  };
#endif

#if defined(ONNXTRAIN_INSTRUCTION_SET)
 private:
  template <typename T>
  static double squares(const T* values, std::size_t count) {
    LaneSum sum;
    for (std::size_t i = 0; i < count; i += kSumLanes) {
      T padded[kSumLanes];
      const T* source = values + i;
      if (count - i < kSumLanes) {
        pad_lanes(source, count - i, T(0), padded);
        source = padded;
      }
      for (std::size_t v = 0; v < kLaneVectors; ++v) {
        WideVector value;
        load(source + v * kWideLanes, value);
        sum.lanes[v] += value * value;
      }
    }
    return sum.total();
  }
#endif
};

}  // namespace
}  // namespace onnxtrain::lamb
