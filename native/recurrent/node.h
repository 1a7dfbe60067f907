// LSTM, GRU and RNN of the domain onnxtrain, which keep the values that their gradients read, and those gradients, as
// nodes. Attributes: direction ("forward"); activations, names separated by spaces, for all directions;
// activation_alpha and activation_beta, one number for each; clip (none); input_forget (0); linear_before_reset (0). A
// placeholder of shape [0] marks a missing input.
#pragma once

#include <memory>

#include "operators/fused_node.h"
#include "recurrent/recurrent.h"

namespace onnxtrain {

// The parsed attributes.
struct RecurrentAttributes {
  RecurrentAttributes(const Attributes& attributes, Cell cell);

  Cell cell;
  CellSettings settings[2];
  std::size_t directions = 1;
  bool reversed = false;
};

// Attributes and sizes that the nodes of a layer and of its gradient share.
class NodeOfCell : public FusedNode {
 public:
  NodeOfCell(const Attributes& attributes, Cell cell, const Signature& signature)
      : attributes_(attributes, cell), signature_(signature), outputs_(attributes.output_count()),
        memory_(attributes.memory()) {}

 protected:
  RecurrentAttributes attributes_;
  const Signature& signature_;
  std::size_t outputs_;  // number of outputs of the node
  std::unique_ptr<const Memory> memory_;
};

// From X, W, R, B?, sequence_lens?, initial_h? and, for an LSTM, initial_c? and P?: Y, Y_h, Y_c of an LSTM, gates, and
// the cells of an LSTM or, for a GRU with linear_before_reset, the values that its reset gate scales.
class RecurrentNode : public NodeOfCell {
 public:
  using NodeOfCell::NodeOfCell;
  void compute(const Call& call) const override;
};

// From those and Y, gates, cells or linear, dY?, dY_h?, dY_c?: the gradients of X, W, R, B, initial_h, initial_c, P,
// and of the gate inputs.
class RecurrentGradientNode : public NodeOfCell {
 public:
  using NodeOfCell::NodeOfCell;
  void compute(const Call& call) const override;
};

// From X?, W?, sequence_lens?, initial_h?, Y? and the gradients of the gate inputs, of an LSTM or RNN or, with dlinear,
// of a GRU with linear_before_reset: the gradients of X (reads W), W (reads X), R (reads Y) and B, as matrix
// multiplications over all steps. Attributes: `direction` and `batch_first` (0), for X laid out as [batch, steps,
// inputs].
class RecurrentProductsGradientNode final : public FusedNode {
 public:
  static const Signature kSignature;

  explicit RecurrentProductsGradientNode(const Attributes& attributes)
      : attributes_(attributes, kRnn), batch_first_(attributes.integer("batch_first", 0) != 0),
        outputs_(attributes.output_count()), memory_(attributes.memory()) {}
  void compute(const Call& call) const override;

 private:
  RecurrentAttributes attributes_;
  bool batch_first_;
  std::size_t outputs_;  // number of outputs of the node
  std::unique_ptr<const Memory> memory_;
};

template <typename Base, Cell cell>
class RecurrentNodeOf final : public Base {
 public:
  static const Signature kSignature;

  explicit RecurrentNodeOf(const Attributes& attributes) : Base(attributes, cell, kSignature) {}
};

using GruNode = RecurrentNodeOf<RecurrentNode, kGru>;
using LstmNode = RecurrentNodeOf<RecurrentNode, kLstm>;
using RnnNode = RecurrentNodeOf<RecurrentNode, kRnn>;
using GruGradientNode = RecurrentNodeOf<RecurrentGradientNode, kGru>;
using LstmGradientNode = RecurrentNodeOf<RecurrentGradientNode, kLstm>;
using RnnGradientNode = RecurrentNodeOf<RecurrentGradientNode, kRnn>;

template <>
const Signature GruNode::kSignature;
template <>
const Signature LstmNode::kSignature;
template <>
const Signature RnnNode::kSignature;
template <>
const Signature GruGradientNode::kSignature;
template <>
const Signature LstmGradientNode::kSignature;
template <>
const Signature RnnGradientNode::kSignature;

}  // namespace onnxtrain
