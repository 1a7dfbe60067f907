#include "matmul/node.h"

#include <limits>
#include <utility>

#include "operators/shapes.h"
#include "matmul/bfloat16.h"
#include "matmul/matmul.h"
#include "scratch.h"
#include "sparse/products.h"

namespace onnxtrain {
namespace {

// The product of all axes but the last, and the last.
struct Rows {
  std::size_t count, size;

  Rows(const Inputs& inputs, std::size_t index, const char* name) {
    const std::vector<std::int64_t>& shape = inputs[index].shape;
    if (shape.size() < 2) {
      throw std::invalid_argument("input " + std::to_string(index) + " (" + name + ") has shape " + text_of(shape) +
                                  ", and must have at least two axes.");
    }
    count = product(shape, 0, shape.size() - 1);
    size = static_cast<std::size_t>(shape.back());
  }
};

// Returns whether there is an activation.
bool has_relu(const Attributes& attributes) {
  const std::string activation = attributes.text("activation", "");
  if (activation.empty()) return false;
  if (activation == "Relu") return true;
  throw std::invalid_argument("attribute 'activation' is '" + activation + "': it must be Relu, or be left out.");
}

Stored stored_as(int type) {
  return type == ort::kTypeFloat16 ? Stored::kFloat16 : type == ort::kTypeBfloat16 ? Stored::kBfloat16 : Stored::kFloat;
}

const float* numbers(const Inputs& inputs, std::size_t index) { return static_cast<const float*>(inputs[index].data); }

// y = epilogue(x w + bias), with operands optionally rounded to bfloat16.
void multiply(bool rounded, ElementType type, const Linear& sizes, const void* x, const Tensor& w, const LinearBias& bias,
              void* y, const ParallelFor& parallel_for, const LinearEnding& ending) {
  const Stored stored = stored_as(w.type);
  if (rounded) {
    linear_in_bfloat16(sizes, static_cast<const float*>(x), stored, w.data, bias, static_cast<float*>(y), parallel_for,
                       ending);
  } else {
    linear(type, sizes, x, stored, w.data, bias, y, parallel_for, ending);
  }
}

// dw and, if not null, db.
void sum_over_rows(bool rounded, ElementType type, const Linear& sizes, const void* dy, const void* x, void* dw,
                   void* db, const ParallelFor& parallel_for) {
  if (rounded) {
    linear_weight_gradient_in_bfloat16(sizes, static_cast<const float*>(dy), static_cast<const float*>(x),
                                       static_cast<float*>(dw), static_cast<float*>(db), parallel_for);
  } else {
    linear_weight_gradient(type, sizes, dy, x, dw, db, parallel_for);
  }
}

// Rejects a weight whose axis `axis` has another size.
void require_weight(const Inputs& inputs, std::size_t axis, const Rows& given, const char* sizes, const char* of) {
  const std::vector<std::int64_t>& w = inputs[1].shape;
  if (w.size() == 2 && static_cast<std::size_t>(w[axis]) == given.size) return;
  const std::string size = std::to_string(given.size);
  throw std::invalid_argument("input 1 (w) has shape " + text_of(w) + ", and must be " +
                              (axis == 0 ? "[" + size + ", " + sizes + "]" : std::string("[") + sizes + ", " + size + "]") +
                              ": the last axis of " + of + " has size " + size + ".");
}

// 16-bit weights require float operands.
void require_weight_type(const Inputs& inputs, ElementType type) {
  if (type != kFloat || stored_as(inputs[1].type) == Stored::kFloat) inputs.require_same_type(1, 0);
}

// The mask in an optional input, of weights [depth, outputs] or, if transposed, [outputs, depth]; null if there is none.
std::unique_ptr<const SparseMatrix> mask_of(const Attributes& attributes, std::size_t index, bool transposed,
                                            bool in_blocks) {
  if (attributes.input_count() <= index) return nullptr;
  return std::make_unique<const SparseMatrix>(attributes.constant(index, "mask"), transposed, in_blocks);
}

// A mask has the shape [rows, columns] of w; it is skipped for operands that are not float.
bool is_masked(const Inputs& inputs, std::size_t index, const std::vector<std::int64_t>& w, bool rounded,
               ElementType type, int stored) {
  if (!inputs.has(index)) return false;
  inputs.require_shape(index, w);
  return type == kFloat && !rounded && stored == ort::kTypeFloat;
}

SparseEnding sparse_ending(const float* bias, const float* residual, bool relu, const float* gate) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  return {bias, residual, gate, 0.0f, relu ? 0.0f : -infinity, infinity, relu};
}

}  // namespace

LinearNode::LinearNode(const Attributes& attributes)
    : compute_(compute_of(attributes)),
      transposed_(attributes.integer("transB", 0) != 0),
      relu_(has_relu(attributes)),
      mask_(mask_of(attributes, 3, transposed_, true)) {}

LinearGradientNode::LinearGradientNode(const Attributes& attributes)
    : compute_(compute_of(attributes)),
      transposed_(attributes.integer("transB", 0) != 0),
      relu_(has_relu(attributes)),
      mask_(mask_of(attributes, 3, !transposed_, true)),
      gradient_mask_(mask_of(attributes, 3, transposed_, false)) {}

LinearWeightGradientNode::LinearWeightGradientNode(const Attributes& attributes)
    : compute_(compute_of(attributes)),
      transposed_(attributes.integer("transB", 0) != 0),
      with_bias_(attributes.output_count() > 1),
      mask_(mask_of(attributes, 2, transposed_, false)) {}

const std::vector<int> kMaskTypes = {ort::kTypeUndefined, ort::kTypeUndefined, ort::kTypeUndefined, ort::kTypeBool};

const Signature LinearNode::kSignature = {"Linear", {"x", "w", "b", "mask"}, 2, 1, {-1}, {{2, 0}}, kMaskTypes};

void LinearNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  const bool rounded = in_bfloat16(compute_, type);
  require_weight_type(inputs, type);
  const Rows x(inputs, 0, "x");
  const std::size_t over_outputs = transposed_ ? 0 : 1;
  require_weight(inputs, 1 - over_outputs, x, "outputs", "x");
  const std::vector<std::int64_t>& w = inputs[1].shape;
  std::vector<std::int64_t> y_shape = inputs[0].shape;
  y_shape.back() = w[over_outputs];
  LinearBias bias = {};
  if (inputs.has(2)) {
    inputs.require_same_type(2, 0);
    bias = {inputs[2].data, inputs[2].shape == y_shape};
    if (!bias.by_row) inputs.require_shape(2, {w[over_outputs]});
  }
  void* y = call.output(0, y_shape);
  if (is_masked(inputs, 3, w, rounded, type, inputs[1].type)) {
    const auto* added = static_cast<const float*>(bias.data);
    const SparseEnding ending =
        sparse_ending(bias.by_row ? nullptr : added, bias.by_row ? added : nullptr, relu_, nullptr);
    if (masked_linear(*mask_, x.count, numbers(inputs, 0), numbers(inputs, 1), ending, static_cast<float*>(y),
                      call.parallel_for())) {
      return;
    }
  }
  const Linear sizes = {x.count, x.size, static_cast<std::size_t>(w[over_outputs]), transposed_};
  multiply(rounded, type, sizes, inputs[0].data, inputs[1], bias, y, call.parallel_for(),
           {relu_ ? Ending::kRelu : Ending::kNone, nullptr});
}

const Signature LinearGradientNode::kSignature = {"LinearGradient", {"dy", "w", "x", "mask"}, 3, 3, {2}, {}, kMaskTypes};

void LinearGradientNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  const bool rounded = in_bfloat16(compute_, type);
  require_weight_type(inputs, type);
  inputs.require_same_type(2, 0);
  const Rows dy(inputs, 0, "dy"), x(inputs, 2, "x");
  const std::size_t over_outputs = transposed_ ? 0 : 1;
  require_weight(inputs, over_outputs, dy, "inputs", "dy");
  const std::vector<std::int64_t>& w = inputs[1].shape;
  std::vector<std::int64_t> x_shape = inputs[0].shape;
  x_shape.back() = w[1 - over_outputs];
  inputs.require_shape(2, x_shape);
  // The largest first: it fits the memory that the following layer has freed, which smaller ones would fragment.
  void* dz = call.output(0, x_shape);
  void* db = call.output(2, {w[over_outputs]});
  void* dw = call.output(1, w);
  const Buffer unwanted(dw == nullptr && db != nullptr ? checked_product(x.size, dy.size, size_of(type)) : 0);
  if (dw == nullptr && db != nullptr) dw = unwanted.as<void>();
  const ParallelFor parallel_for = call.parallel_for();
  const bool masked = is_masked(inputs, 3, w, rounded, type, inputs[1].type);
  const SparseEnding ending = sparse_ending(nullptr, nullptr, false, relu_ ? numbers(inputs, 2) : nullptr);
  if (dz != nullptr && !(masked && masked_linear(*mask_, dy.count, numbers(inputs, 0), numbers(inputs, 1), ending,
                                                 static_cast<float*>(dz), parallel_for))) {
    multiply(rounded, type, {dy.count, dy.size, x.size, !transposed_}, inputs[0].data, inputs[1], {}, dz,
             parallel_for, {relu_ ? Ending::kReluGradient : Ending::kNone, inputs[2].data});
  }
  if (dw != nullptr && !(masked && masked_weight_gradient(*gradient_mask_, x.count, numbers(inputs, 0),
                                                          numbers(inputs, 2), static_cast<float*>(dw),
                                                          static_cast<float*>(db), parallel_for))) {
    sum_over_rows(rounded, type, {x.count, x.size, dy.size, transposed_}, inputs[0].data, inputs[2].data, dw, db,
                  parallel_for);
  }
}

const Signature LinearWeightGradientNode::kSignature = {
    "LinearWeightGradient", {"dy", "x", "mask"}, 2, 2, {-1}, {}, {ort::kTypeUndefined, ort::kTypeUndefined,
                                                                   ort::kTypeBool}};

void LinearWeightGradientNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  inputs.require_same_type(1, 0);
  const Rows dy(inputs, 0, "dy"), x(inputs, 1, "x");
  std::vector<std::int64_t> x_shape = inputs[0].shape;
  x_shape.back() = inputs[1].shape.back();
  inputs.require_shape(1, x_shape);
  const std::int64_t in = x_shape.back(), out = inputs[0].shape.back();
  void* db = with_bias_ ? call.output(1, {out}) : nullptr;
  const std::vector<std::int64_t> w = {transposed_ ? out : in, transposed_ ? in : out};
  void* dw = call.output(0, w);
  const Buffer unwanted(dw == nullptr ? checked_product(x.size, dy.size, size_of(type)) : 0);
  if (dw == nullptr) dw = unwanted.as<void>();
  const bool rounded = in_bfloat16(compute_, type);
  if (is_masked(inputs, 2, w, rounded, type, ort::kTypeFloat) &&
      masked_weight_gradient(*mask_, x.count, numbers(inputs, 0), numbers(inputs, 1), static_cast<float*>(dw),
                             static_cast<float*>(db), call.parallel_for())) {
    return;
  }
  const Linear sizes = {x.count, x.size, dy.size, transposed_};
  sum_over_rows(rounded, type, sizes, inputs[0].data, inputs[1].data, dw, db, call.parallel_for());
}

LowBitNode::LowBitNode(const Attributes& attributes)
    : compute_(compute_of(attributes)),
      inputs_(attributes.integer("K")),
      outputs_(attributes.integer("N")),
      bits_(attributes.integer("bits", 4)),
      block_(attributes.integer("block_size")) {
  for (const auto& [name, size] : {std::pair("K", inputs_), {"N", outputs_}}) {
    if (size < 0) {
      throw std::invalid_argument(std::string("attribute '") + name + "' is " + std::to_string(size) +
                                  ": no size may be negative.");
    }
  }
  if (bits_ != 2 && bits_ != 4 && bits_ != 8) {
    throw std::invalid_argument("attribute 'bits' is " + std::to_string(bits_) + ": it must be 2, 4 or 8.");
  }
  if (block_ < 16 || (block_ & (block_ - 1)) != 0) {
    throw std::invalid_argument("attribute 'block_size' is " + std::to_string(block_) +
                                ": it must be a power of two from 16 on.");
  }
}

void LowBitNode::multiply(const Inputs& inputs, const char* name, bool transposed, const Call& call) const {
  const ElementType type = inputs.element_type(0);
  const Rows x(inputs, 0, name);
  std::vector<std::int64_t> shape = inputs[0].shape;
  shape.back() = transposed ? inputs_ : outputs_;
  inputs.require_shape(0, shape);
  const std::int64_t blocks = inputs_ / block_ + (inputs_ % block_ != 0 ? 1 : 0);
  inputs.require_shape(1, {outputs_, blocks, block_ / 8 * bits_});
  inputs.require_same_type(2, 0);
  inputs.require_shape(2, {outputs_, blocks});
  PackedWeights weights = {};
  weights.integers = static_cast<const std::uint8_t*>(inputs[1].data);
  weights.scales = inputs[2].data;
  const std::vector<std::int64_t> none = {0};  // placeholder for a missing input before `zeros`
  if (inputs.has(3) && inputs[3].shape != none) {
    inputs.require_shape(3, {outputs_, (checked_product(blocks, bits_) + 7) / 8});
    weights.packed_zeros = static_cast<const std::uint8_t*>(inputs[3].data);
  }
  if (inputs.has(4)) {
    inputs.require_same_type(4, 0);
    inputs.require_shape(4, {outputs_, blocks});
    weights.zeros = inputs[4].data;
  }
  weights.bits = static_cast<std::size_t>(bits_);
  weights.block = static_cast<std::size_t>(block_);
  weights.rows = static_cast<std::size_t>(outputs_);
  weights.columns = static_cast<std::size_t>(inputs_);
  shape.back() = transposed ? outputs_ : inputs_;
  void* y = call.output(0, shape);
  if (in_bfloat16(compute_, type)) {
    multiply_low_bit_in_bfloat16(x.count, numbers(inputs, 0), weights, transposed, static_cast<float*>(y),
                                  call.parallel_for());
  } else {
    multiply_low_bit(type, x.count, inputs[0].data, weights, transposed, y, call.parallel_for());
  }
}

const Signature MatMulNBitsNode::kSignature = {
    "MatMulNBits",
    {"x", "integers", "scales", "packed_zeros", "zeros"},
    3,
    1,
    {-1},
    {},
    {ort::kTypeUndefined, ort::kTypeUint8, ort::kTypeUndefined, ort::kTypeUint8}};

void MatMulNBitsNode::compute(const Call& call) const { multiply(Inputs(kSignature, call), "x", true, call); }

const Signature MatMulNBitsGradientNode::kSignature = {
    "MatMulNBitsGradient",
    {"dy", "integers", "scales", "packed_zeros", "zeros"},
    3,
    1,
    {-1},
    {},
    {ort::kTypeUndefined, ort::kTypeUint8, ort::kTypeUndefined, ort::kTypeUint8}};

void MatMulNBitsGradientNode::compute(const Call& call) const { multiply(Inputs(kSignature, call), "dy", false, call); }

}  // namespace onnxtrain
