// SSGD on a device: the sum of w^2 of each layer, the scalars derived from it, the update.
#pragma once

#include <cstdint>

#include "cuda/reductions.h"
#include "cuda/update_kernel.h"
#include "optimizers/rules/ssgd.h"
#include "optimizers/ssgd_element.h"

namespace onnxtrain::cuda {

template <typename T, Measure measure>
ONNXTRAIN_DEVICE inline double measure_of(const MeasureScalars& m, T x) {
  const double wide = widen(x), z = m.l1 ? measured<true>(wide) : measured<false>(wide);
  if constexpr (is_simple(measure)) {
    return simple_h<measure>(m, z);
  } else {
    return relative_h<T, measure>(m, z);
  }
}

template <typename T, int states, Measure measure>
struct SsgdSums {
  using Rule = ssgd::Rule;
  using Partial = LayerSum;
  using Result = SsgdScalars;

  Rule::Attributes attributes;
  double R;

  ONNXTRAIN_DEVICE void reduce(Block block, const Tensors<T, states>& tensors, const Tensor<T, states>& tensor,
                               Partial* found) const {
    ONNXTRAIN_SHARED double values[kThreads];
    MeasureScalars m = Rule::measure_scalars(attributes);  // private to each thread
    if constexpr (measure == kExponential || measure == kTanh) {  // h is relative to the largest z
      block.each_thread([&](unsigned thread) {
        double largest = 0.0;
        tensors.each_pack(tensor, block.index, thread, [&](std::size_t first, std::size_t last) {
          for (std::size_t i = first; i < last; ++i) {
            const double size = absolute(widen(tensor.X[i]));
            largest = size > largest ? size : largest;  // NaN is skipped here and shows up in the sum
          }
        });
        values[thread] = largest;
      });
      for (unsigned half = kThreads / 2; half > 0; half /= 2) {
        block.each_thread([&](unsigned thread) {
          if (thread < half && values[thread + half] > values[thread]) values[thread] = values[thread + half];
        });
      }
      block.each_thread([&](unsigned) { m.largest = m.l1 ? measured<true>(values[0]) : measured<false>(values[0]); });
    }
    block.each_thread([&](unsigned thread) {
      double sum = 0.0;
      tensors.each_pack(tensor, block.index, thread, [&](std::size_t first, std::size_t last) {
        for (std::size_t i = first; i < last; ++i) {
          const double h = measure_of<T, measure>(m, tensor.X[i]);
          sum += m.l1 ? h * h : h;
        }
      });
      values[thread] = sum;
    });
    add_up(block, values);
    block.each_thread([&](unsigned thread) {
      if (thread == 0) *found = {values[0], m.largest};
    });
  }

  ONNXTRAIN_DEVICE SsgdScalars combine(const Partial* found, std::uint32_t blocks, std::size_t count) const {
    const double largest = Rule::largest_of(found, blocks);
    double sum = 0.0;
    for (std::uint32_t b = 0; b < blocks; ++b) sum += Rule::relative_sum(attributes, found[b], largest);
    return Rule::scalars_of(attributes, R, sum, largest, count);
  }
};

template <typename T, int states, Measure measure>
struct SsgdUpdate {
  static constexpr bool kMomentum = states == 1;

  class Simple {
   public:
    ONNXTRAIN_DEVICE explicit Simple(const SsgdScalars& s)
        : descent_(s), l1_(s.measure.l1), regularized_(s.shrinkage != 0.0) {}

    ONNXTRAIN_DEVICE void operator()(T& x, T g, T* v) const {
      if (l1_) {
        regularized_ ? descent_.template take<measure, true, kMomentum, true, true>(x, g, *v)
                     : descent_.template take<measure, true, kMomentum, false, true>(x, g, *v);
      } else {
        regularized_ ? descent_.template take<measure, false, kMomentum, true, true>(x, g, *v)
                     : descent_.template take<measure, false, kMomentum, false, true>(x, g, *v);
      }
    }

   private:
    SimpleDescent<T> descent_;
    bool l1_, regularized_;
  };

  class Relative {
   public:
    ONNXTRAIN_DEVICE explicit Relative(const SsgdScalars& s)
        : measure_(s.measure), descent_(s), shrinkage_(s.shrinkage), factor_(static_cast<T>(2.0 * s.shrinkage)) {}

    ONNXTRAIN_DEVICE void operator()(T& x, T g, T* v) const {
      const T before = x;
      const double h = measure_of<T, measure>(measure_, x);
      if (measure_.l1) {
        descent_.template take<true, kMomentum>(h, x, g, *v);
        if (shrinkage_ != 0.0) x -= shrinkage_of<T>(shrinkage_, h, before);
      } else {
        descent_.template take<false, kMomentum>(h, x, g, *v);
        if (shrinkage_ != 0.0) x -= factor_ * before;
      }
    }

   private:
    MeasureScalars measure_;
    RelativeDescent<T> descent_;
    double shrinkage_;
    T factor_;
  };

  const SsgdScalars* layers;

  ONNXTRAIN_DEVICE auto of(std::uint32_t number) const {
    if constexpr (is_simple(measure)) {
      return Simple(layers[number]);
    } else {
      return Relative(layers[number]);
    }
  }
};

template <typename T, int states, int measure>
void update_ssgd(const ssgd::Rule::Attributes& attributes, double R, Factor factor,
                 const std::vector<Variable>& variables, Stream stream) {
  if (attributes.block.axes > 0) throw std::invalid_argument("block has no kernel on a device: use the operator's body.");
  if constexpr (measure < kMeasures) {
    if (measure != attributes.measure) {
      return update_ssgd<T, states, measure + 1>(attributes, R, factor, variables, stream);
    }
    constexpr auto kind = static_cast<Measure>(measure);
    const SsgdSums<T, states, kind> sums = {attributes, R};
    reduce_then<T, states>(variables, factor, sums, stream, [&](const SsgdScalars* layers) {
      update_all<T, states>(variables, factor, SsgdUpdate<T, states, kind>{layers}, stream);
    });
  }
}

template <typename T>
void update_all(const ssgd::Rule::Attributes& attributes, double R, std::int64_t, Factor factor,
                const std::vector<Variable>& variables, Stream stream) {
  if (attributes.alpha > 0.0) {
    update_ssgd<T, 1, 0>(attributes, R, factor, variables, stream);
  } else {
    update_ssgd<T, 0, 0>(attributes, R, factor, variables, stream);
  }
}

}  // namespace onnxtrain::cuda
