// The kernels: pure functions over pointers, compiled once per instruction set and called through a table.
//
// A kernel works on `count` consecutive elements. An output may be the buffer of an input (in place); buffers do not
// overlap otherwise. Scalars are float64 and rounded once to the tensor's type. No kernel fuses multiply-add, so all
// instruction sets give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace onnxtrain {

struct Draw;

enum ElementType : int { kFloat = 0, kDouble = 1 };
inline constexpr int kElementTypes = 2;

inline std::size_t size_of(ElementType type) { return type == kFloat ? sizeof(float) : sizeof(double); }

struct ClipScalars {
  double low, high;
};

// The activation behind a batch normalization; a Clip has the bounds.
struct ActivationCall {
  enum Kind { kNone, kRelu, kClip, kHardSwish };
  Kind kind;
  double low, high;
};

// Batch normalization of x [batch, channels, size] by the statistics of the batch; null results are not
// computed. The addend, of the shape of x, is added before the activation; it may be null. batch_mean and batch_variance are
// [2, channels]: each statistic is the sum of two numbers.
struct BatchStatisticsCall {
  std::size_t batch, channels, size;
  double epsilon, momentum;
  ActivationCall activation;
  const void *x, *scale, *bias, *mean, *variance, *addend;
  void *y, *new_mean, *new_variance, *batch_mean, *batch_variance;
};

// x and dy are [batch, channels, size], not empty; scale, bias, mean and variance have one element per channel. Null results
// are not computed. dx may be the buffer of dy or of x, y that of x. The statistics of the batch are those kept by the forward
// pass, or computed if these are null, too; with given statistics there is no activation and no y. `other`, if not null, is
// added to dx: the first channels of images `other_step` elements apart.
struct BatchNormalizationCall {
  std::size_t batch, channels, size;
  double epsilon;
  ActivationCall activation;
  const void *dy, *x, *scale, *bias;  // bias: null if there is no activation
  const void *mean, *variance;  // null: the statistics of the batch
  const void *batch_mean, *batch_variance;
  const void* other;
  std::size_t other_step;
  void *dx, *dscale, *dbias, *y;
};

// x and dy are [rows, size], scale and bias are [size]; bias may be null. dx may be the buffer of dy or of x, or null. y is
// the result of the normalization again, or null.
struct LayerNormalizationCall {
  std::size_t size;
  bool centred;  // true if the mean is subtracted
  double epsilon;
  const void *dy, *x, *scale, *bias;
  void *dx, *y;
};

// x is [images, size...], dy is [images, windows...]: three spatial axes, leading ones of size 1 if there are fewer.
// Window w spans `kernel` positions, `dilations` apart, from w * strides - begin on.
struct MaxPoolCall {
  std::int64_t size[3], windows[3], kernel[3], strides[3], dilations[3], begin[3];
  const void *dy, *x;
  void* dx;
};

// Over the first axes of x [size, columns], or the last ones of [rows, size].
enum class ReductionKind : int { kSum, kMean, kSumOfSquares, kProduct };
inline constexpr int kReductionKinds = 4;

struct ReductionCall {
  std::size_t size, columns;
  const void* x;
  void* y;
};

// Running sums or products along the middle axis of [outer, size, inner]; y may be the buffer of x.
struct ScanCall {
  std::size_t size, inner;
  bool exclusive, reverse;
  const void* x;
  void* y;
};

// The sums along an axis: element j of the result is the sum over taps t of weights[t, j] * x[first[j] + t].
struct ResizeAxis {
  std::size_t in, out, taps;
  const std::size_t* first;
  const void* weights;
};

// x is [planes, axes[0].in, axes[1].in], y [planes, axes[0].out, axes[1].out].
struct ResizeCall {
  ResizeAxis axes[2];
  std::size_t planes_at_once;
  const void* x;
  void* y;
};

using ResizeKernel = void (*)(const ResizeCall& call, std::size_t first, std::size_t last, void* scratch);

// dy, y and dx are [outer, size, inner]; dx may be the buffer of dy or of y.
struct SoftmaxCall {
  std::size_t size, inner;
  const void *dy, *y;
  void* dx;
};

// x and y are [outer, size, inner]; y may be the buffer of x.
struct LogSoftmaxCall {
  std::size_t size, inner;
  const void* x;
  void* y;
};

// log_probability and dx are [outer, classes, inner], labels (0 to classes - 1) and coefficient are [outer, inner]; a
// coefficient with step 0 is the same for all. dx may be the buffer of log_probability.
struct CrossEntropyCall {
  std::size_t classes, inner, coefficient_step;
  const void *coefficient, *log_probability;
  const std::int64_t* labels;
  void* dx;
};

// Row r of the table is row r of `other` (null: zeros; it may be the table), plus the sum of the rows whose positions stand
// beside r in `entries`: r in the upper 32 bits, the position in the lower ones, sorted by r.
struct RowSumsCall {
  std::size_t width;
  const void* rows;
  const std::uint64_t* entries;
  std::size_t count;  // of entries
  const void* other;
  void* table;
};

inline constexpr std::size_t kMostChainInputs = 8, kMostChainSteps = 16;

// One step of a chain of element-wise operators: operands are inputs, then earlier steps.
struct ElementwiseStep {
  enum Operator {
    kAbs, kAdd, kAtanh, kCast, kCos, kCosh, kDiv, kEqual, kExp, kGreater, kLess, kLog, kLog1p, kMax, kMin, kMod, kMul, kNeg,
    kPow, kRelu, kSigmoid, kSign, kSin, kSinh, kSub, kTan, kWhere,
    // Two steps in one, with the operands of both: of numbers, the second of the sum and one more; Where of a comparison.
    kAddAdd, kAddSub, kAddMul, kAddFrom, kSubAdd, kSubSub, kSubMul, kSubFrom, kMulAdd, kMulSub, kMulMul, kMulFrom,
    kGreaterWhere, kLessWhere, kMinRelu
  };
  Operator what;
  std::size_t operands[4];
};

// A chain; an input with one element counts for all.
struct ElementwiseCall {
  std::size_t inputs, steps;
  const void* data[kMostChainInputs];
  bool is_number[kMostChainInputs];
  ElementwiseStep program[kMostChainSteps];
  void* y;
};

using ChainKernel = void (*)(const ElementwiseCall& call, std::size_t first, std::size_t last, void* scratch);

using ElementwiseKernel = void (*)(const void* scalars, std::size_t count, const void* const* inputs,
                                   void* const* outputs);
// (mask ? gradient : 0) * factor; a null mask is all true.
using PreparationKernel = void (*)(double factor, std::size_t count, const void* gradient,
                                   const unsigned char* mask, void* prepared);
// Conversion between bfloat16 states and the float values of an update.
using WideningKernel = void (*)(std::size_t count, const std::uint16_t* states, float* wide);
using RoundingKernel = void (*)(const Draw& draw, std::size_t first, std::size_t count, const float* wide,
                                std::uint16_t* states);

// Elements of an 8-bit state that share a scale.
inline constexpr std::size_t kStateBlock = 256;

// Conversion between 8-bit states, with a scale per block, and the float values of an update.
using DecodingKernel = void (*)(bool is_signed, std::size_t count, const std::uint8_t* codes, const float* scales,
                                float* wide);
using EncodingKernel = void (*)(bool is_signed, const Draw& draw, std::size_t first, std::size_t count,
                                const float* wide, std::uint8_t* codes, float* scales);

// Kernels of a whole call, for its channels, images or rows [first, last).
template <typename Call>
using RangeKernel = void (*)(const Call& call, std::size_t first, std::size_t last);
// `products` holds one row; the sums over the rows are added to dscale and dbias; null: not requested.
using LayerNormalizationKernel = void (*)(const LayerNormalizationCall& call, std::size_t first, std::size_t last,
                                          void* products, double* dscale, double* dbias);

struct AttentionKernels;
struct Bfloat16Convolution;
struct Bfloat16Kernels;
struct ConvolutionTable;
struct OptimizerKernels;
struct MatmulTable;
struct RecurrentTable;
struct SparseTable;
struct TransformTable;

struct KernelTable {
  const char* instruction_set;
  // Inputs X, G and the states; outputs X_new and the new states. Indexed by rule.
  const OptimizerKernels* optimizers;
  PreparationKernel prepare_gradient[kElementTypes];
  WideningKernel widen_states;
  RoundingKernel round_states;
  DecodingKernel decode_states;
  EncodingKernel encode_states;
  ChainKernel elementwise[kElementTypes];
  // Inputs dy and y, output dx.
  ElementwiseKernel relu_gradient[kElementTypes];
  // Inputs dy and x, output dx; the second of each pair also gives y.
  ElementwiseKernel clip_gradient[2][kElementTypes];
  ElementwiseKernel gelu_gradient[2][kElementTypes];
  ElementwiseKernel gelu_tanh_gradient[2][kElementTypes];
  ElementwiseKernel gelu_logistic_gradient[2][kElementTypes];  // its scalar: alpha, a double
  RangeKernel<BatchStatisticsCall> batch_normalization[kElementTypes];
  RangeKernel<BatchNormalizationCall> batch_normalization_gradient[kElementTypes];
  LayerNormalizationKernel layer_normalization_gradient[kElementTypes];
  RangeKernel<MaxPoolCall> max_pool_gradient[kElementTypes];
  RangeKernel<ReductionCall> reduce_columns[kReductionKinds][kElementTypes];
  RangeKernel<ReductionCall> multiply_rows[kElementTypes];  // [rows, size]
  RangeKernel<ScanCall> scan[2][kElementTypes];  // sums, products
  ResizeKernel resize[kElementTypes];
  RangeKernel<LogSoftmaxCall> log_softmax[kElementTypes];
  RangeKernel<SoftmaxCall> softmax_gradient[kElementTypes];
  RangeKernel<SoftmaxCall> log_softmax_gradient[kElementTypes];
  RangeKernel<CrossEntropyCall> cross_entropy_gradient[kElementTypes];
  RangeKernel<RowSumsCall> row_sums[kElementTypes];
  // The bandwidth limit: reads `count` elements of inputs[0] and adds them to one, two or three outputs.
  void (*stream)(std::size_t arrays, std::size_t count, const float* input, float* const* outputs);
  const ConvolutionTable* convolution;
  const AttentionKernels* attention;  // indexed by ElementType
  const MatmulTable* product;
  const Bfloat16Kernels* bfloat16;
  const Bfloat16Convolution* bfloat16_convolution;
  const RecurrentTable* recurrent;
  const SparseTable* sparse;
  const TransformTable* transforms;
};

// Returns the best table for this CPU, or the one named by the environment variable ONNXTRAIN_INSTRUCTION_SET. Returns
// null if the CPU or the build lacks that one; `kernels_error` then has the message.
const KernelTable* kernels();
const char* kernels_error();

}  // namespace onnxtrain
