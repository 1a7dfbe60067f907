// The kernels: pure functions over pointers, compiled once per instruction set and reached through a table.
//
// A kernel works on `count` consecutive elements. An output may be the very buffer of an input (in place); two buffers
// never overlap otherwise. Scalars come as float64 and are rounded once to the tensor's type. No kernel fuses a
// multiplication with an addition, so all instruction sets give the same bits.
#pragma once

#include <cstddef>

namespace onnxtrain {

enum ElementType : int { kFloat = 0, kDouble = 1 };
inline constexpr int kElementTypes = 2;

inline std::size_t size_of(ElementType type) { return type == kFloat ? sizeof(float) : sizeof(double); }

struct AdagradScalars {
  double rate, norm_coefficient, epsilon;
};

struct AdamScalars {
  double rate, norm_coefficient, alpha, one_minus_alpha, beta, one_minus_beta, epsilon, one_minus_post;
};

struct MomentumScalars {
  double rate, norm_coefficient, alpha, beta;
};

enum Measure : int { kLogSum = 0, kPNorm, kArctan, kGemanMcClure, kExponential, kTanh };
inline constexpr int kMeasures = 6;

// A diversity measure g(u) = f(z), z = u^2 (reweighted l2) or |u| (reweighted l1). With h(z) = 1 / f'(z), w^2 is h for
// l2 and h^2 for l1. Kernels evaluate h without its constant factor, and for the exponential and tanh measures relative
// to the largest z of the layer, so that nothing overflows.
struct MeasureScalars {
  bool l1;
  double epsilon;
  double inverse_epsilon;
  double exponent;  // p-norm: h(z) is z**exponent
  double largest;   // exponential and tanh: the z that h is relative to
};

struct LayerSum {
  double sum;      // of w^2, in the relative form above
  double largest;  // z
};

// One layer's update: s = min(w^2 * inverse_mean, cap).
struct SsgdScalars {
  MeasureScalars measure;
  double rate, norm_coefficient, alpha, inverse_mean, cap;
  double shrinkage;  // rate * regularization / (h's factor * mean), 0 without regularization
  bool momentum;
};

using ElementwiseKernel = void (*)(const void* scalars, std::size_t count, const void* const* inputs,
                                   void* const* outputs);
using LayerSumKernel = LayerSum (*)(const MeasureScalars& measure, std::size_t count, const void* x);

struct KernelTable {
  const char* instruction_set;
  // Inputs X, G and the states, outputs X_new and the new states. Indexed by ElementType.
  ElementwiseKernel adagrad[kElementTypes];
  ElementwiseKernel adam[kElementTypes];
  ElementwiseKernel momentum[kElementTypes];
  ElementwiseKernel nesterov[kElementTypes];
  ElementwiseKernel ssgd[kElementTypes][kMeasures];
  LayerSumKernel layer_sum[kElementTypes][kMeasures];
  // Inputs dy and y, output dx.
  ElementwiseKernel relu_gradient[kElementTypes];
  // The speed limit for the others: reads `count` elements of inputs[0] and adds them to one, two or three outputs.
  void (*stream)(std::size_t arrays, std::size_t count, const float* input, float* const* outputs);
};

// The best table for this processor, or the one that the environment variable ONNXTRAIN_INSTRUCTION_SET names. Null
// where the variable asks for what the processor or the build lacks; `kernels_error` then says so in a sentence.
const KernelTable* kernels();
const char* kernels_error();

}  // namespace onnxtrain
