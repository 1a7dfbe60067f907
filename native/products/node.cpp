#include "products/node.h"

#include "operators/shapes.h"
#include "products/products.h"
#include "scratch.h"

namespace onnxtrain {
namespace {

// The axes but the last, and the last.
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

}  // namespace

const Signature LinearNode::kSignature = {"Linear", {"x", "w", "b"}, 2, 1, {-1}, {}};

void LinearNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  inputs.require_same_type(1, 0);
  const Rows x(inputs, 0, "x");
  const std::vector<std::int64_t>& w = inputs[1].shape;
  const std::size_t over_outputs = transposed_ ? 0 : 1;
  if (w.size() != 2 || static_cast<std::size_t>(w[1 - over_outputs]) != x.size) {
    throw std::invalid_argument("input 1 (w) has shape " + text_of(w) + ", and must be " +
                                (transposed_ ? "[outputs, " + std::to_string(x.size) + "]"
                                             : "[" + std::to_string(x.size) + ", outputs]") +
                                ": the last axis of x has size " + std::to_string(x.size) + ".");
  }
  const void* bias = nullptr;
  if (inputs.has(2)) {
    inputs.require_same_type(2, 0);
    inputs.require_shape(2, {w[over_outputs]});
    bias = inputs[2].data;
  }
  std::vector<std::int64_t> y_shape = inputs[0].shape;
  y_shape.back() = w[over_outputs];
  void* y = call.output(0, y_shape);
  linear(type, {x.count, x.size, static_cast<std::size_t>(w[over_outputs]), transposed_}, inputs[0].data,
         inputs[1].data, bias, y, call.parallel_for());
}

const Signature LinearWeightGradientNode::kSignature = {"LinearWeightGradient", {"dy", "x"}, 2, 2, {-1}, {}};

void LinearWeightGradientNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  inputs.require_same_type(1, 0);
  const Rows dy(inputs, 0, "dy"), x(inputs, 1, "x");
  std::vector<std::int64_t> x_shape = inputs[0].shape;
  x_shape.back() = inputs[1].shape.back();
  inputs.require_shape(1, x_shape);
  const std::int64_t in = x_shape.back(), out = inputs[0].shape.back();
  void* dw = call.output(0, transposed_ ? std::vector<std::int64_t>{out, in} : std::vector<std::int64_t>{in, out});
  const Buffer unwanted(dw == nullptr ? checked_product(x.size, dy.size, size_of(type)) : 0);
  if (dw == nullptr) dw = unwanted.as<void>();
  void* db = with_bias_ ? call.output(1, {out}) : nullptr;
  linear_weight_gradient(type, {x.count, x.size, dy.size, transposed_}, inputs[0].data, inputs[1].data, dw, db,
                         call.parallel_for());
}

}  // namespace onnxtrain
