#include "normalization/node.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "operators/shapes.h"
#include "ranges.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

constexpr double kEpsilon = 1e-5f, kMomentum = 0.9f;

// The activation behind a batch normalization, and the bounds of a Clip.
ActivationCall activation_of(const Attributes& attributes) {
  constexpr std::pair<const char*, ActivationCall::Kind> kKnown[] = {{"", ActivationCall::kNone},
                                                                     {"Relu", ActivationCall::kRelu},
                                                                     {"Clip", ActivationCall::kClip},
                                                                     {"HardSwish", ActivationCall::kHardSwish}};
  const std::string name = attributes.text("activation", "");
  for (const auto& [known, kind] : kKnown) {
    if (name != known) continue;
    constexpr double kInfinite = std::numeric_limits<double>::infinity();
    return {kind, attributes.number("low", -kInfinite), attributes.number("high", kInfinite)};
  }
  throw std::invalid_argument("attribute 'activation' is '" + name +
                              "': it must be Relu, Clip or HardSwish, or be left out.");
}

// A call for the channels of input 0, of which inputs `vectors`, if they are given, have a number each; all have one type.
template <typename BatchCall>
BatchCall call_for_channels(const Inputs& inputs, const char* name, std::initializer_list<std::size_t> vectors) {
  const std::vector<std::int64_t>& shape = inputs[0].shape;
  if (shape.size() < 2) {
    throw std::invalid_argument("input 0 (" + std::string(name) + ") has shape " + text_of(shape) +
                                ", and must have a batch and a channel axis.");
  }
  for (const std::size_t index : vectors) {
    if (!inputs.has(index)) continue;
    inputs.require_same_type(index, 0);
    inputs.require_shape(index, {shape[1]});
  }
  BatchCall call = {};
  call.batch = static_cast<std::size_t>(shape[0]);
  call.channels = static_cast<std::size_t>(shape[1]);
  call.size = product(shape, 2, shape.size());
  return call;
}

// The data of an optional input.
const void* data_of(const Inputs& inputs, std::size_t index) { return inputs.has(index) ? inputs[index].data : nullptr; }

std::size_t channels_per_task(std::size_t batch, std::size_t size) {
  const std::size_t together = tuning::kNormalizedColumns / 4 / std::max<std::size_t>(size, 1);
  return std::max(items_per_task(saturating_product(batch, size)), together);
}

template <typename BatchCall>
void run_channels(const RangeKernel<BatchCall>& kernel, const BatchCall& channels, const ParallelFor& parallel_for) {
  for_each_range(parallel_for, channels.channels, channels_per_task(channels.batch, channels.size),
                 [&](std::size_t first, std::size_t last) { kernel(channels, first, last); });
}

template <typename T>
void write_totals(const std::vector<double>& parts, std::size_t size, void* result) {
  std::vector<double> totals(size);
  for (std::size_t begin = 0; begin < parts.size(); begin += size) {
    for (std::size_t i = 0; i < size; ++i) totals[i] += parts[begin + i];
  }
  for (std::size_t i = 0; i < size; ++i) static_cast<T*>(result)[i] = static_cast<T>(totals[i]);
}

void write_totals(ElementType type, const std::vector<double>& parts, std::size_t size, void* result) {
  if (result == nullptr) return;
  if (type == kFloat) {
    write_totals<float>(parts, size, result);
  } else {
    write_totals<double>(parts, size, result);
  }
}

// Each block of rows has its own sums, which are added in order at the end.
void run_rows(const LayerNormalizationCall& row_call, ElementType type, std::size_t rows, void* dscale, void* dbias,
              const ParallelFor& parallel_for) {
  const std::size_t size = row_call.size;
  const std::size_t items = std::max(items_per_task(size), divided_up(rows, tuning::kNormalizationBlocks));
  const std::size_t blocks = divided_up(rows, items), parts_size = checked_product(blocks, size, sizeof(double));
  std::vector<double> scale_parts(dscale == nullptr ? 0 : parts_size / sizeof(double));
  std::vector<double> bias_parts(dbias == nullptr ? 0 : parts_size / sizeof(double));
  const auto kernel = kernels()->layer_normalization_gradient[type];
  for_each_range(parallel_for, size == 0 ? 0 : rows, items, [&](std::size_t first, std::size_t last) {
    const std::size_t at = first / items * size;
    std::vector<unsigned char> products(size * size_of(type));
    kernel(row_call, first, last, products.data(), dscale == nullptr ? nullptr : &scale_parts[at],
           dbias == nullptr ? nullptr : &bias_parts[at]);
  });
  write_totals(type, scale_parts, size, dscale);
  write_totals(type, bias_parts, size, dbias);
}

void normalize_rows(const Signature& signature, const Call& call, std::int64_t axis, double epsilon, bool centred) {
  const Inputs inputs(signature, call);
  const ElementType type = inputs.element_type(0);
  for (std::size_t index = 1; index < 3; ++index) inputs.require_same_type(index, 0);
  inputs.require_same_shape(1, 0);
  const std::vector<std::int64_t>& shape = inputs[0].shape;
  const std::size_t first = axis_of(axis, shape);
  inputs.require_shape(2, {shape.begin() + static_cast<std::ptrdiff_t>(first), shape.end()});
  LayerNormalizationCall rows = {};
  rows.size = product(shape, first, shape.size());
  rows.centred = centred;
  rows.epsilon = epsilon;
  rows.dy = inputs[0].data;
  rows.x = inputs[1].data;
  rows.scale = inputs[2].data;
  void* dscale = call.output(1, inputs[2].shape);
  void* dbias = centred ? call.output(2, inputs[2].shape) : nullptr;
  rows.dx = call.output(0, shape);
  if (centred && inputs.has(3)) {
    inputs.require_same_type(3, 0);
    inputs.require_same_shape(3, 2);
    rows.bias = inputs[3].data;
  }
  rows.y = call.output(centred ? 3 : 2, shape);
  run_rows(rows, type, product(shape, 0, first), dscale, dbias, call.parallel_for());
}

}  // namespace

const Signature BatchNormalizationNode::kSignature = {
    "BatchNormalization", {"x", "scale", "bias", "mean", "variance", "addend"}, 5, 5, {0, 3, 4, -1, -1}, {{5, 0}}};

BatchNormalizationNode::BatchNormalizationNode(const Attributes& attributes)
    : epsilon_(attributes.number("epsilon", kEpsilon)),
      momentum_(attributes.number("momentum", kMomentum)),
      activation_(activation_of(attributes)) {}

void BatchNormalizationNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  auto channels = call_for_channels<BatchStatisticsCall>(inputs, "x", {1, 2, 3, 4});
  const std::vector<std::int64_t>& shape = inputs[0].shape;
  if (channels.batch == 0 || channels.size == 0) {
    throw std::invalid_argument("input 0 (x) has shape " + text_of(shape) +
                                ", and must have elements: the statistics of no elements are undefined.");
  }
  if (inputs.has(5)) {
    inputs.require_same_type(5, 0);
    inputs.require_same_shape(5, 0);
  }
  channels.epsilon = epsilon_;
  channels.momentum = momentum_;
  channels.activation = activation_;
  channels.x = inputs[0].data;
  channels.scale = inputs[1].data;
  channels.bias = inputs[2].data;
  channels.mean = inputs[3].data;
  channels.variance = inputs[4].data;
  channels.addend = data_of(inputs, 5);
  channels.new_mean = call.output(1, inputs[3].shape);
  channels.new_variance = call.output(2, inputs[4].shape);
  channels.batch_mean = call.output(3, {2, shape[1]});
  channels.batch_variance = call.output(4, {2, shape[1]});
  channels.y = call.output(0, shape);
  run_channels(kernels()->batch_normalization[type], channels, call.parallel_for());
}

const Signature BatchNormalizationGradientNode::kSignature = {"BatchNormalizationGradient",
                                                              {"dy", "x", "scale", "mean", "variance", "bias", "other"},
                                                              3,
                                                              4,
                                                              {1, 2, 2, 1},
                                                              {{0, 0}, {1, 3}, {1, 0}}};

BatchNormalizationGradientNode::BatchNormalizationGradientNode(const Attributes& attributes)
    : epsilon_(attributes.number("epsilon", kEpsilon)),
      of_batch_(attributes.integer("training_mode", 0) != 0),
      activation_(activation_of(attributes)) {}

void BatchNormalizationGradientNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  const bool has_statistics = inputs.has(3), is_kept = has_statistics && of_batch_;
  if (has_statistics != inputs.has(4)) {
    throw std::invalid_argument("only one of mean and variance is given: give both, or neither to use the statistics of the batch.");
  }
  auto channels = is_kept ? call_for_channels<BatchNormalizationCall>(inputs, "dy", {2, 5})
                          : call_for_channels<BatchNormalizationCall>(inputs, "dy", {2, 3, 4, 5});
  inputs.require_same_type(1, 0);
  inputs.require_same_shape(1, 0);
  const std::vector<std::int64_t>& shape = inputs[0].shape;
  for (std::size_t index = 3; is_kept && index < 5; ++index) {
    inputs.require_same_type(index, 0);
    inputs.require_shape(index, {2, shape[1]});
  }
  if (inputs.has(6)) {
    std::vector<std::int64_t> wanted = shape;
    const std::vector<std::int64_t>& given = inputs[6].shape;
    if (given.size() == shape.size()) wanted[1] = std::max(shape[1], given[1]);
    inputs.require_same_type(6, 0);
    inputs.require_shape(6, wanted);
    channels.other = inputs[6].data;
    channels.other_step = static_cast<std::size_t>(wanted[1]) * channels.size;
  }
  channels.epsilon = epsilon_;
  channels.activation = activation_;
  channels.dy = inputs[0].data;
  channels.x = inputs[1].data;
  channels.scale = inputs[2].data;
  channels.bias = data_of(inputs, 5);
  (is_kept ? channels.batch_mean : channels.mean) = data_of(inputs, 3);
  (is_kept ? channels.batch_variance : channels.variance) = data_of(inputs, 4);
  void* dscale = channels.dscale = call.output(1, inputs[2].shape);
  void* dbias = channels.dbias = call.output(2, inputs[2].shape);
  channels.dx = call.output(0, shape);
  channels.y = call.output(3, shape);
  const bool needs_bias = activation_.kind != ActivationCall::kNone || channels.y != nullptr;
  if (needs_bias && (channels.mean != nullptr || channels.bias == nullptr)) {
    throw std::invalid_argument("an activation, or y, needs the statistics of the batch and the bias.");
  }
  if (channels.batch == 0 || channels.size == 0) {  // empty sums
    for (void* sums : {dscale, dbias}) {
      if (sums != nullptr) std::memset(sums, 0, channels.channels * size_of(type));
    }
    return;
  }
  run_channels(kernels()->batch_normalization_gradient[type], channels, call.parallel_for());
}

const Signature LayerNormalizationGradientNode::kSignature = {
    "LayerNormalizationGradient", {"dy", "x", "scale", "bias"}, 3, 4, {1, 2, 2, 1}, {{0, 0}, {1, 0}}};

LayerNormalizationGradientNode::LayerNormalizationGradientNode(const Attributes& attributes)
    : axis_(attributes.integer("axis", -1)), epsilon_(attributes.number("epsilon", kEpsilon)) {}

void LayerNormalizationGradientNode::compute(const Call& call) const {
  normalize_rows(kSignature, call, axis_, epsilon_, true);
}

const Signature RMSNormalizationGradientNode::kSignature = {
    "RMSNormalizationGradient", {"dy", "x", "scale"}, 3, 3, {1, 2, 1}, {{0, 0}, {1, 0}}};

RMSNormalizationGradientNode::RMSNormalizationGradientNode(const Attributes& attributes)
    : axis_(attributes.integer("axis", -1)), epsilon_(attributes.number("epsilon", kEpsilon)) {}

void RMSNormalizationGradientNode::compute(const Call& call) const {
  normalize_rows(kSignature, call, axis_, epsilon_, false);
}

}  // namespace onnxtrain
