// Vectorized SSGD: the layer's sum of w^2, and the update with s = w^2 / mean(w^2).
//
// Included by files that are compiled once per instruction set. The measure is evaluated in float64 for both types: a
// float32 w^2 would overflow for ordinary weights (Geman-McClure has a^4), and the mean needs a wide accumulator
// anyway. Both kernels process chunks that fit the L1 cache, so that each loop is simple enough to vectorize.
#pragma once

#include "kernels/elementwise.h"
#include "kernels/lanes.h"
#include "optimizers/ssgd_element.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

template <typename T, Measure measure, bool l1>
void relative_h_in(MeasureScalars m, std::size_t count, const T* X, double* h) {
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) h[i] = relative_h<T, measure>(m, measured<l1>(widen(X[i])));
}

template <typename T, Measure measure>
void h_of_blocks(const MeasureScalars& scalars, std::size_t count, const double* z, double* h) {
  const MeasureScalars m = scalars;
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) {
    if constexpr (is_simple(measure)) {
      h[i] = simple_h<measure>(m, z[i]);
    } else {
      h[i] = relative_h<T, measure>(m, z[i]);
    }
  }
}

template <typename T, Measure measure>
void relative_h_of(const MeasureScalars& m, std::size_t count, const T* X, double* h) {
  if (m.l1) {
    relative_h_in<T, measure, true>(m, count, X, h);
  } else {
    relative_h_in<T, measure, false>(m, count, X, h);
  }
}

// Partial results in 32 lanes, combined in a fixed order: the same bits for every vector width.
constexpr std::size_t kSums = 4, kTogether = kSums * kSumLanes;  // parallel sums, and the elements that they take together

// Adds h, or h^2 for l1, to the lanes. `count` is a multiple of their number: callers pad with zeros.
template <bool square>
void add_to(LaneSum (&total)[kSums], std::size_t count, const double* h) {
  LaneSum sums[kSums];
  for (std::size_t s = 0; s < kSums; ++s) sums[s] = total[s];  // in registers
  for (std::size_t i = 0; i < count; i += kTogether) {
    for (std::size_t s = 0; s < kSums; ++s) {
      for (std::size_t v = 0; v < kLaneVectors; ++v) {
        WideVector value;
        load(h + i + s * kSumLanes + v * kWideLanes, value);
        sums[s].lanes[v] += square ? value * value : value;
      }
    }
  }
  for (std::size_t s = 0; s < kSums; ++s) total[s] = sums[s];
}

inline double total_of(const LaneSum (&sums)[kSums]) {
  return (sums[0].total() + sums[2].total()) + (sums[1].total() + sums[3].total());
}

inline std::size_t pad(double* values, std::size_t count) {
  while (count % kTogether != 0) values[count++] = 0.0;
  return count;
}

// The largest z, at least 0; NaN is skipped here and shows up in the sum.
template <typename T>
double largest_of(bool l1, std::size_t count, const T* X) {
  T lanes[kTogether] = {};
  std::size_t i = 0;
  for (; i + kTogether <= count; i += kTogether) {
    for (std::size_t lane = 0; lane < kTogether; ++lane) {
      const T size = X[i + lane] < 0 ? -X[i + lane] : X[i + lane];
      lanes[lane] = size > lanes[lane] ? size : lanes[lane];
    }
  }
  for (std::size_t lane = 0; i < count; ++i, ++lane) {
    const T size = X[i] < 0 ? -X[i] : X[i];
    lanes[lane] = size > lanes[lane] ? size : lanes[lane];
  }
  T largest = 0;
  for (const T lane : lanes) largest = lane > largest ? lane : largest;
  return l1 ? measured<true>(largest) : measured<false>(largest);
}

// The sum of h, or of h^2 for l1, of a simple measure.
template <typename T, Measure measure, bool l1>
double simple_sum(const MeasureScalars& m, std::size_t count, const T* X) {
  LaneSum sums[kSums];
  std::size_t i = 0;
  for (; i + kTogether <= count; i += kTogether) {
    ask_for<kTogether * sizeof(T)>(X + i);
#pragma GCC unroll 4
    for (std::size_t s = 0; s < kSums; ++s) {
#pragma GCC unroll 2
      for (std::size_t v = 0; v < kLaneVectors; ++v) {
        const WideVector h =
            simple_h<measure>(m, measured<l1>(widen(few(X + i + s * kSumLanes + v * kWideLanes))));
        sums[s].lanes[v] += l1 ? h * h : h;
      }
    }
  }
  double terms[kTogether];
  std::size_t last = 0;
  for (; i < count; ++i, ++last) {
    const double h = simple_h<measure>(m, measured<l1>(widen(X[i])));
    terms[last] = l1 ? h * h : h;
  }
  if (last > 0) add_to<false>(sums, pad(terms, last), terms);
  return total_of(sums);
}

template <typename T, Measure measure>
LayerSum layer_sum_of_blocks(const MeasureScalars& scalars, std::size_t count) {
  MeasureScalars m = scalars;
  if (measure == kExponential || measure == kTanh) m.largest = largest_of(true, count, m.z);
  double h[tuning::kMeasuredElements];
  LaneSum lanes[kSums];
  for (std::size_t begin = 0; begin < count; begin += tuning::kMeasuredElements) {
    const std::size_t n = count - begin < tuning::kMeasuredElements ? count - begin : tuning::kMeasuredElements;
    h_of_blocks<T, measure>(m, n, m.z + begin, h);
    if (m.l1) {
      add_to<true>(lanes, pad(h, n), h);
    } else {
      add_to<false>(lanes, pad(h, n), h);
    }
  }
  return {total_of(lanes), m.largest};
}

template <typename T, Measure measure>
LayerSum layer_sum_of(const MeasureScalars& scalars, std::size_t count, const void* x) {
  const T* X = static_cast<const T*>(x);
  if (scalars.z != nullptr) return layer_sum_of_blocks<T, measure>(scalars, count);
  if constexpr (is_simple(measure)) {
    return {scalars.l1 ? simple_sum<T, measure, true>(scalars, count, X)
                       : simple_sum<T, measure, false>(scalars, count, X),
            scalars.largest};
  } else {
    MeasureScalars m = scalars;
    if (measure == kExponential || measure == kTanh) m.largest = largest_of(m.l1, count, X);
    double h[tuning::kMeasuredElements];
    LaneSum lanes[kSums];
    for (std::size_t begin = 0; begin < count; begin += tuning::kMeasuredElements) {
      const std::size_t n = count - begin < tuning::kMeasuredElements ? count - begin : tuning::kMeasuredElements;
      relative_h_of<T, measure>(m, n, X + begin, h);
      if (m.l1) {
        add_to<true>(lanes, pad(h, n), h);
      } else {
        add_to<false>(lanes, pad(h, n), h);
      }
    }
    return {total_of(lanes), m.largest};
  }
}

template <typename T, Measure measure>
void layer_sum(const void* scalars, std::size_t count, const void* x, void* result) {
  *static_cast<LayerSum*>(result) = layer_sum_of<T, measure>(*static_cast<const MeasureScalars*>(scalars), count, x);
}

// The shrinkage by regularization: for l1 h * sign(X), in blocks h * X / z, for l2 2 X, times a factor of the layer.
template <typename T>
void shrinkages_of(const SsgdScalars& scalars, std::size_t count, const double* h, const T* X, const double* z,
                   T* shrinkages) {
  const double shrinkage = scalars.shrinkage;
  if (scalars.measure.l1 && z != nullptr) {
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = 0; i < count; ++i) {
      shrinkages[i] = static_cast<T>(z[i] > 0.0 ? shrinkage * h[i] / z[i] : 0.0) * X[i];
    }
  } else if (scalars.measure.l1) {
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = 0; i < count; ++i) {
      shrinkages[i] = shrinkage_of<T>(shrinkage, h[i], X[i]);
    }
  } else {
    const T factor = static_cast<T>(2.0 * shrinkage);
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = 0; i < count; ++i) shrinkages[i] = factor * X[i];
  }
}

template <typename T>
struct SsgdArrays {
  const T *X, *G, *V;
  T *X_new, *V_new;
};

// X - rate * s * D, given h; with `square`, for l1, s is derived from h^2.
template <typename T, bool square, bool with_momentum>
void descend(const SsgdScalars& scalars, std::size_t count, const double* h, SsgdArrays<T> arrays) {
  const RelativeDescent<T> descent(scalars);
  const auto [X, G, V, X_new, V_new] = arrays;
  ONNXTRAIN_VECTORIZE
  for (std::size_t i = 0; i < count; ++i) {
    T x = X[i], v = with_momentum ? V[i] : T(0);
    descent.template take<square, with_momentum>(h[i], x, G[i], v);
    if (with_momentum) V_new[i] = v;
    X_new[i] = x;
  }
}

template <typename T>
void descend_any(const SsgdScalars& scalars, std::size_t count, const double* h, SsgdArrays<T> arrays) {
  if (scalars.measure.l1) {
    if (scalars.momentum) {
      descend<T, true, true>(scalars, count, h, arrays);
    } else {
      descend<T, true, false>(scalars, count, h, arrays);
    }
  } else {
    if (scalars.momentum) {
      descend<T, false, true>(scalars, count, h, arrays);
    } else {
      descend<T, false, false>(scalars, count, h, arrays);
    }
  }
}

template <typename T, Measure measure, bool l1, bool with_momentum, bool regularized, bool capped>
void descend_simply(const SsgdScalars& scalars, std::size_t count, SsgdArrays<T> arrays) {
  const SimpleDescent<T> descent(scalars);
  const auto vectors = [=](std::size_t i) {
#pragma GCC unroll 8
    for (std::size_t j = i; j < i + tuning::kLoopElements; j += kWideLanes) {
      typename Few<T>::type x = few(arrays.X + j), v = {};
      if (with_momentum) v = few(arrays.V + j);
      descent.template take<measure, l1, with_momentum, regularized, capped>(x, few(arrays.G + j), v);
      if (with_momentum) store(arrays.V_new + j, v);
      store(arrays.X_new + j, x);
    }
  };
  const auto element = [=](std::size_t i) {
    T x = arrays.X[i], v = with_momentum ? arrays.V[i] : T(0);
    descent.template take<measure, l1, with_momentum, regularized, capped>(x, arrays.G[i], v);
    if (with_momentum) arrays.V_new[i] = v;
    arrays.X_new[i] = x;
  };
  if constexpr (with_momentum) {
    for_each_block<T>(count, {arrays.X, arrays.G, arrays.V}, vectors, element);
  } else {
    for_each_block<T>(count, {arrays.X, arrays.G}, vectors, element);
  }
}

template <typename T, Measure measure, bool l1, bool with_momentum, bool regularized>
void descend_simply_capped(const SsgdScalars& scalars, std::size_t count, SsgdArrays<T> arrays) {
  if (scalars.cap == __builtin_huge_val()) {
    descend_simply<T, measure, l1, with_momentum, regularized, false>(scalars, count, arrays);
  } else {
    descend_simply<T, measure, l1, with_momentum, regularized, true>(scalars, count, arrays);
  }
}

template <typename T, Measure measure, bool l1>
void descend_simply_any(const SsgdScalars& scalars, std::size_t count, SsgdArrays<T> arrays) {
  const bool regularized = scalars.shrinkage != 0.0;
  if (scalars.momentum) {
    (regularized ? descend_simply_capped<T, measure, l1, true, true>
                 : descend_simply_capped<T, measure, l1, true, false>)(scalars, count, arrays);
  } else {
    (regularized ? descend_simply_capped<T, measure, l1, false, true>
                 : descend_simply_capped<T, measure, l1, false, false>)(scalars, count, arrays);
  }
}

template <typename T, Measure measure>
void ssgd_update(const void* scalars, std::size_t count, const void* const* inputs, void* const* outputs) {
  const auto& s = *static_cast<const SsgdScalars*>(scalars);
  const T *X = static_cast<const T*>(inputs[0]), *G = static_cast<const T*>(inputs[1]);
  const T* V = s.momentum ? static_cast<const T*>(inputs[2]) : nullptr;
  T* X_new = static_cast<T*>(outputs[0]);
  T* V_new = s.momentum ? static_cast<T*>(outputs[1]) : nullptr;
  const double* const z = s.measure.z;
  bool one_pass = false;
  if constexpr (is_simple(measure)) one_pass = z == nullptr;
  if constexpr (is_simple(measure)) {
    if (one_pass) (s.measure.l1 ? descend_simply_any<T, measure, true> : descend_simply_any<T, measure, false>)(
        s, count, {X, G, V, X_new, V_new});
  }
  if (!one_pass) {
    double h[tuning::kMeasuredElements];
    T shrinkages[tuning::kMeasuredElements];
    for (std::size_t begin = 0; begin < count; begin += tuning::kMeasuredElements) {
      const std::size_t n = count - begin < tuning::kMeasuredElements ? count - begin : tuning::kMeasuredElements;
      if (z != nullptr) {
        h_of_blocks<T, measure>(s.measure, n, z + begin, h);
      } else if constexpr (!is_simple(measure)) {
        relative_h_of<T, measure>(s.measure, n, X + begin, h);
      }
      const double* const own = z == nullptr ? nullptr : z + begin;
      if (s.shrinkage != 0.0) shrinkages_of(s, n, h, X + begin, own, shrinkages);  // before X_new, which may be X
      descend_any<T>(s, n, h, {X + begin, G + begin, s.momentum ? V + begin : nullptr, X_new + begin,
                               s.momentum ? V_new + begin : nullptr});
      if (s.shrinkage != 0.0) {
        for (std::size_t i = 0; i < n; ++i) X_new[begin + i] -= shrinkages[i];
      }
    }
  }
}

}  // namespace
}  // namespace onnxtrain
