#include "sparse/node.h"

#include <algorithm>
#include <limits>

#include "operators/shapes.h"
#include "sparse/products.h"

namespace onnxtrain {
namespace {

const std::vector<const char*> kInputs = {"x", "values", "deltas", "bias", "residual"};
const std::vector<int> kTypes = {ort::kTypeFloat, ort::kTypeFloat, ort::kTypeUint16, ort::kTypeFloat, ort::kTypeFloat};

float limit(const Attributes& attributes, const char* name, double otherwise) {
  return static_cast<float>(attributes.number(name, otherwise));
}

const float* floats(const Inputs& inputs, std::size_t index) { return static_cast<const float*>(inputs[index].data); }

ConvolutionAttributes convolution_attributes(const Attributes& attributes) {
  ConvolutionAttributes result;
  result.kernel_shape = attributes.integers("kernel_shape");
  const std::size_t rank = result.kernel_shape.size();
  if (rank < 1 || rank > 2) {
    throw std::invalid_argument("attribute 'kernel_shape' is " + text_of(result.kernel_shape) +
                                ": it must have one or two sizes.");
  }
  result.strides = attributes.integers("strides");
  result.dilations = attributes.integers("dilations");
  result.pads = attributes.integers("pads");
  if (result.strides.empty()) result.strides.assign(rank, 1);
  if (result.dilations.empty()) result.dilations.assign(rank, 1);
  if (result.pads.empty()) result.pads.assign(2 * rank, 0);
  result.check();
  return result;
}

// Elements around windows, by axis the ones before and the ones behind, laid out like pads; none if not given.
std::vector<std::int64_t> border_attribute(const Attributes& attributes, const char* name, std::size_t rank) {
  std::vector<std::int64_t> border = attributes.integers(name);
  if (border.empty()) border.assign(2 * rank, 0);
  const bool negative = std::any_of(border.begin(), border.end(), [](std::int64_t size) { return size < 0; });
  if (border.size() == 2 * rank && !negative) return border;
  throw std::invalid_argument("attribute '" + std::string(name) + "' is " + text_of(border) + ": it must have " +
                              std::to_string(2 * rank) + " sizes that are not negative.");
}

std::vector<std::int64_t> with_border(std::vector<std::int64_t> shape, const std::vector<std::int64_t>& border) {
  const std::size_t rank = border.size() / 2;
  for (std::size_t axis = 0; axis < rank; ++axis) {
    shape[2 + axis] = checked_sum(shape[2 + axis], border[axis], border[rank + axis]);
  }
  return shape;
}

std::vector<std::int64_t> without_border(std::vector<std::int64_t> shape, const std::vector<std::int64_t>& border) {
  const std::vector<std::int64_t> whole = shape;
  const std::size_t rank = border.size() / 2;
  for (std::size_t axis = 0; axis < rank; ++axis) {
    shape[2 + axis] -= checked_sum(border[axis], border[rank + axis]);
    if (shape[2 + axis] >= 0) continue;
    throw std::invalid_argument("input 0 (x) has shape " + text_of(whole) +
                                ": it is smaller than attribute 'x_pads', " + text_of(border) + ".");
  }
  return shape;
}

// Rows of a panel of transposed rows, at most; 0 if not given.
std::size_t panel_attribute(const Attributes& attributes, const char* name) {
  const std::int64_t rows = attributes.integer(name, 0);
  if (rows >= 0) return static_cast<std::size_t>(rows);
  throw std::invalid_argument(std::string("attribute '") + name + "' is " + std::to_string(rows) +
                              ": it must be a number of rows, or 0.");
}

SparseBorder border_of(const std::vector<std::int64_t>& sizes) {
  SparseBorder border;
  const std::size_t rank = sizes.size() / 2;
  for (std::size_t axis = 0; axis < rank; ++axis) {
    border.before[2 - rank + axis] = static_cast<std::size_t>(sizes[axis]);
    border.after[2 - rank + axis] = static_cast<std::size_t>(sizes[rank + axis]);
  }
  return border;
}

// Zeros around x that take the place of padding belong to the image that is convolved.
void use_border(SparseWindows& windows) {
  for (std::size_t axis = 0; axis < 2; ++axis) {
    const std::size_t end = windows.padded[axis] - windows.size[axis] - windows.begin[axis];
    const std::size_t before = std::min(windows.begin[axis], windows.x.before[axis]);
    const std::size_t after = std::min(end, windows.x.after[axis]);
    windows.begin[axis] -= before;
    windows.x.before[axis] -= before;
    windows.x.after[axis] -= after;
    windows.size[axis] += before + after;
  }
}

}  // namespace

SparseNode::SparseNode(const Attributes& attributes)
    : weights_(attributes.integers("shape"), attributes.constant(1, "values"), attributes.constant(2, "deltas")),
      constants_(kInputs.size()),
      lower_(limit(attributes, "lower", -std::numeric_limits<double>::infinity())),
      upper_(limit(attributes, "upper", std::numeric_limits<double>::infinity())),
      memory_(attributes.memory()) {
  for (std::size_t index = 0; index < constants_.size(); ++index) attributes.is_constant(index, &constants_[index]);
}

void SparseNode::require_float(const Inputs& inputs) const {
  inputs.require_type(0, ort::kTypeFloat);
  inputs.require_type(3, ort::kTypeFloat);
  inputs.require_type(4, ort::kTypeFloat);
}

SparseEnding SparseNode::ending(const Inputs& inputs, const std::vector<std::int64_t>& residual_shape) const {
  SparseEnding ending = {};
  inputs.require_shape(3, {static_cast<std::int64_t>(weights_.outputs())});
  ending.bias = floats(inputs, 3);
  if (inputs[4].count() == 1 && inputs[4].shape != residual_shape) {
    ending.shift = *floats(inputs, 4);
  } else {
    inputs.require_shape(4, residual_shape);
    ending.residual = floats(inputs, 4);
  }
  ending.lower = lower_;
  ending.upper = upper_;
  ending.has_limits = lower_ > -std::numeric_limits<float>::infinity() || upper_ < std::numeric_limits<float>::infinity();
  return ending;
}

SparseLinearNode::SparseLinearNode(const Attributes& attributes)
    : SparseNode(attributes),
      transposed_{panel_attribute(attributes, "x_panel"), panel_attribute(attributes, "y_panel")} {}

const Signature SparseLinearNode::kSignature = {"SparseLinear", kInputs, 5, 1, {-1}, {}, kTypes};

void SparseLinearNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call, &constants_);
  require_float(inputs);
  const std::vector<std::int64_t>& x = inputs[0].shape;
  if (x.empty() || static_cast<std::size_t>(x.back()) != weights_.depth()) {
    throw std::invalid_argument("input 0 (x) has shape " + text_of(x) + ": its last axis must have size " +
                                std::to_string(weights_.depth()) + ", the depth of the weights.");
  }
  std::vector<std::int64_t> y_shape = x;
  y_shape.back() = static_cast<std::int64_t>(weights_.outputs());
  const SparseEnding ends = ending(inputs, y_shape);
  auto* y = static_cast<float*>(call.output(0, y_shape));
  sparse_linear(weights_, product(x, 0, x.size() - 1), floats(inputs, 0), ends, y, transposed_, call.parallel_for(),
                memory_.get());
}

const Signature TransposeRowsNode::kSignature = {"TransposeRows", {"x"}, 1, 1, {0}, {}, {ort::kTypeFloat}};

TransposeRowsNode::TransposeRowsNode(const Attributes& attributes) : panel_(panel_attribute(attributes, "panel")) {}

void TransposeRowsNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  inputs.require_type(0, ort::kTypeFloat);
  const std::vector<std::int64_t>& shape = inputs[0].shape;
  if (shape.empty()) throw std::invalid_argument("input 0 (x) has shape []: it must have at least one axis.");
  auto* y = static_cast<float*>(call.output(0, shape));
  transpose_rows(product(shape, 0, shape.size() - 1), static_cast<std::size_t>(shape.back()), panel_,
                 floats(inputs, 0), y, call.parallel_for());
}

const Signature SparseConvNode::kSignature = {"SparseConv", kInputs, 5, 1, {-1}, {{4, 0}}, kTypes};

SparseConvNode::SparseConvNode(const Attributes& attributes)
    : SparseNode(attributes),
      attributes_(convolution_attributes(attributes)),
      x_pads_(border_attribute(attributes, "x_pads", attributes_.kernel_shape.size())),
      y_pads_(border_attribute(attributes, "y_pads", attributes_.kernel_shape.size())),
      residual_pads_(border_attribute(attributes, "residual_pads", attributes_.kernel_shape.size())) {
  std::int64_t taps = 1;
  for (const std::int64_t size : attributes_.kernel_shape) taps = checked_product(taps, size);
  if (weights_.depth() % static_cast<std::size_t>(taps) == 0) return;
  throw std::invalid_argument("attribute 'shape' has a depth of " + std::to_string(weights_.depth()) +
                              ": it must be a multiple of the " + std::to_string(taps) +
                              " elements of attribute 'kernel_shape'.");
}

void SparseConvNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call, &constants_);
  require_float(inputs);
  const std::vector<std::int64_t>& x = inputs[0].shape;
  const std::size_t rank = attributes_.kernel_shape.size();
  std::vector<std::int64_t> w = {static_cast<std::int64_t>(weights_.outputs()), 0};
  w.insert(w.end(), attributes_.kernel_shape.begin(), attributes_.kernel_shape.end());
  std::int64_t channels = static_cast<std::int64_t>(weights_.depth());
  for (const std::int64_t size : attributes_.kernel_shape) channels /= size;
  if (x.size() != rank + 2 || x[1] != channels) {
    throw std::invalid_argument("input 0 (x) has shape " + text_of(x) + ": it must have " + std::to_string(rank + 2) +
                                " axes and " + std::to_string(channels) + " channels.");
  }
  w[1] = channels;
  const std::vector<std::int64_t> inner = without_border(x, x_pads_);
  const std::vector<std::int64_t> windows_shape = attributes_.output_shape(inner, w);
  Convolution(attributes_, inner, windows_shape);  // checks that windows stay within the addressable range
  SparseWindows windows = {static_cast<std::size_t>(x[0]), static_cast<std::size_t>(channels), {1, 1}, {1, 1}, {1, 1},
                           {1, 1}, {1, 1}, {0, 0}, {1, 1}, border_of(x_pads_), border_of(y_pads_),
                           border_of(residual_pads_)};
  for (std::size_t axis = 0; axis < rank; ++axis) {
    const std::size_t to = 2 - rank + axis;
    windows.size[to] = static_cast<std::size_t>(inner[2 + axis]);
    windows.windows[to] = static_cast<std::size_t>(windows_shape[2 + axis]);
    windows.kernel[to] = static_cast<std::size_t>(attributes_.kernel_shape[axis]);
    windows.strides[to] = static_cast<std::size_t>(attributes_.strides[axis]);
    windows.dilations[to] = static_cast<std::size_t>(attributes_.dilations[axis]);
    windows.begin[to] = static_cast<std::size_t>(attributes_.pads[axis]);
    windows.padded[to] = static_cast<std::size_t>(attributes_.padded(axis, inner[2 + axis]));
  }
  use_border(windows);
  SparseEnding ends = ending(inputs, with_border(windows_shape, residual_pads_));
  auto* y = static_cast<float*>(call.output(0, with_border(windows_shape, y_pads_)));
  // Each element of the residual is read before y is written in its place, if that is the same one.
  const bool moves = ends.residual != nullptr && ends.residual == y && y_pads_ != residual_pads_;
  const Buffer copy(moves ? checked_product(inputs[4].count(), sizeof(float)) : 0, memory_.get());
  if (moves) ends.residual = std::copy_n(ends.residual, inputs[4].count(), copy.as<float>()) - inputs[4].count();
  sparse_convolution(weights_, windows, floats(inputs, 0), ends, y, call.parallel_for(), memory_.get());
}

const Signature ConvReluMaxPoolNode::kSignature = {"ConvReluMaxPool", {"x", "w", "bias"}, 3, 1, {-1}, {},
                                               {ort::kTypeFloat, ort::kTypeFloat, ort::kTypeFloat}};

namespace {

void require_numbers(const char* name, const std::vector<std::int64_t>& numbers, std::size_t count, std::int64_t least,
                     std::int64_t most) {
  const bool fit = std::all_of(numbers.begin(), numbers.end(),
                               [&](std::int64_t number) { return number >= least && number <= most; });
  if (numbers.size() == count && fit) return;
  throw std::invalid_argument("attribute '" + std::string(name) + "' is " + text_of(numbers) + ": it must have " +
                              std::to_string(count) + " numbers from " + std::to_string(least) + " to " +
                              std::to_string(most) + ".");
}

std::unique_ptr<const TileWeights> tile_weights(const Tensor& w, const ConvolutionAttributes& attributes) {
  const std::vector<std::int64_t>& shape = w.shape;
  const std::vector<std::int64_t>& kernel = attributes.kernel_shape;
  if (w.type != ort::kTypeFloat || shape.size() != 4 || shape[0] < 1 || shape[1] < 1 || static_cast<std::size_t>(shape[0]) % kTileBlock != 0 ||
      shape[2] != kernel[0] || shape[3] != kernel[1]) {
    throw std::invalid_argument("input 1 (w) has type " + type_name(w.type) + " and shape " + text_of(shape) +
                                ": it must be float with shape [outputs, channels, " + std::to_string(kernel[0]) + ", " +
                                std::to_string(kernel[1]) + "], and a multiple of " + std::to_string(kTileBlock) +
                                " outputs.");
  }
  const std::size_t sizes[] = {static_cast<std::size_t>(kernel[0]), static_cast<std::size_t>(kernel[1])};
  return std::make_unique<TileWeights>(static_cast<const float*>(w.data), static_cast<std::size_t>(shape[0]),
                                       static_cast<std::size_t>(shape[1]), sizes,
                                       static_cast<std::size_t>(attributes.strides[1]));
}

}  // namespace

ConvReluMaxPoolNode::ConvReluMaxPoolNode(const Attributes& attributes)
    : attributes_(convolution_attributes(attributes)),
      pool_shape_(attributes.integers("pool_shape")),
      pool_pads_(attributes.integers("pool_pads")),
      y_pads_(border_attribute(attributes, "y_pads", attributes_.kernel_shape.size())),
      memory_(attributes.memory()) {
  const std::vector<std::int64_t>& kernel = attributes_.kernel_shape;
  if (kernel.size() != 2 || kernel[1] > static_cast<std::int64_t>(kTileTaps) * std::min<std::int64_t>(attributes_.strides[1], 4)) {
    throw std::invalid_argument("attribute 'kernel_shape' is " + text_of(kernel) + ", and 'strides' is " +
                                text_of(attributes_.strides) + ": there must be two sizes, and at most " +
                                std::to_string(kTileTaps) + " columns for each step of a stride of at most 4.");
  }
  if (std::any_of(attributes_.strides.begin(), attributes_.strides.end(), [](std::int64_t s) { return s > 4 || s == 3; })) {
    throw std::invalid_argument("attribute 'strides' is " + text_of(attributes_.strides) + ": each must be 1, 2 or 4.");
  }
  if (attributes_.dilations != std::vector<std::int64_t>{1, 1}) {
    throw std::invalid_argument("attribute 'dilations' is " + text_of(attributes_.dilations) + ": it must be [1, 1].");
  }
  require_numbers("pool_shape", pool_shape_, 2, 2, 3);
  if (pool_pads_.empty()) pool_pads_.assign(4, 0);
  require_numbers("pool_pads", pool_pads_, 4, 0, 1);
  const Tensor w = attributes.constant(1, "w");
  w_shape_ = w.shape;
  weights_ = tile_weights(w, attributes_);
}

void ConvReluMaxPoolNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const std::vector<std::int64_t>& x = inputs[0].shape;
  inputs.require_type(0, ort::kTypeFloat);
  inputs.require_type(2, ort::kTypeFloat);
  inputs.require_shape(2, {w_shape_[0]});
  if (x.size() != 4 || x[1] != w_shape_[1]) {
    throw std::invalid_argument("input 0 (x) has shape " + text_of(x) + ": it must have 4 axes and " +
                                std::to_string(w_shape_[1]) + " channels.");
  }
  const std::vector<std::int64_t> windows_shape = attributes_.output_shape(x, w_shape_);
  Convolution(attributes_, x, windows_shape);  // checks that windows stay within the addressable range
  std::vector<std::int64_t> y_shape = windows_shape;
  PooledWindows windows = {};
  windows.images = static_cast<std::size_t>(x[0]);
  windows.channels = static_cast<std::size_t>(x[1]);
  windows.outputs = static_cast<std::size_t>(w_shape_[0]);
  windows.y = border_of(y_pads_);
  for (std::size_t axis = 0; axis < 2; ++axis) {
    if (windows_shape[2 + axis] < 1) {
      throw std::invalid_argument("input 0 (x) has shape " + text_of(x) + ": with its pads it is smaller than the kernel, " +
                                  text_of(attributes_.kernel_shape) + ".");
    }
    const std::int64_t room = windows_shape[2 + axis] + pool_pads_[axis] + pool_pads_[2 + axis] - pool_shape_[axis];
    y_shape[2 + axis] = room < 0 ? 0 : room / 2 + 1;
    windows.size[axis] = static_cast<std::size_t>(x[2 + axis]);
    windows.kernel[axis] = static_cast<std::size_t>(attributes_.kernel_shape[axis]);
    windows.strides[axis] = static_cast<std::size_t>(attributes_.strides[axis]);
    windows.begin[axis] = static_cast<std::size_t>(attributes_.pads[axis]);
    windows.windows[axis] = static_cast<std::size_t>(windows_shape[2 + axis]);
    windows.pool[axis] = static_cast<std::size_t>(pool_shape_[axis]);
    windows.pool_begin[axis] = static_cast<std::size_t>(pool_pads_[axis]);
    windows.groups[axis] = static_cast<std::size_t>(y_shape[2 + axis]);
  }
  auto* y = static_cast<float*>(call.output(0, with_border(y_shape, y_pads_)));
  pooled_convolution(*weights_, windows, floats(inputs, 0), floats(inputs, 2), y, call.parallel_for(), memory_.get());
}

}  // namespace onnxtrain
