#include "recurrent/node.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <sstream>
#include <vector>

#include "scratch.h"
#include "sizes.h"

namespace onnxtrain {
namespace {

using Shape = std::vector<std::int64_t>;

constexpr const char* kFunctions[] = {"Sigmoid",    "Tanh",        "Relu", "Affine",   "LeakyRelu", "ThresholdedRelu",
                                      "ScaledTanh", "HardSigmoid", "Elu",  "Softsign", "Softplus"};

Function function_of(const std::string& name) {
  const auto* found = std::find(std::begin(kFunctions), std::end(kFunctions), name);
  if (found == std::end(kFunctions)) {
    throw std::invalid_argument("attribute 'activations' names '" + name + "', which is not an activation function.");
  }
  return static_cast<Function>(found - std::begin(kFunctions));
}

std::string default_activations(Cell cell, std::size_t directions) {
  const std::string one = cell == kLstm ? "Sigmoid Tanh Tanh" : cell == kRnn ? "Tanh" : "Sigmoid Tanh";
  return directions == 1 ? one : one + " " + one;
}

// Returns whether the slope of a function follows from its value, so that only the value is kept.
bool follows_from_value(Function function) { 
  return function == Function::kSigmoid || function == Function::kTanh || function == Function::kRelu;
}

// Indices of the inputs that all nodes share; an LSTM has two more.
struct InputSlots {
  explicit InputSlots(Cell cell) : lstm(cell == kLstm) {}

  bool lstm;
  std::size_t x = 0, w = 1, r = 2, b = 3, lengths = 4, initial_state = 5, initial_cells = 6, peepholes = 7;
  std::size_t forward_inputs() const { return lstm ? 8 : 6; }
  // Inputs of the gradient, after those.
  std::size_t y() const { return forward_inputs(); }
  std::size_t gates() const { return y() + 1; }
  std::size_t kept() const { return y() + 2; }  // cells or linear; an RNN has neither
};

// Returns whether an input is present. A placeholder of shape [0] marks a missing one, since older runtimes abort on a
// missing input between others, and the last input must have the type of the outputs.
bool is_given(const Inputs& given, std::size_t index) { return given.has(index) && given[index].shape != Shape{0}; }

// The sequence lengths of a batch, checked; null if absent.
const std::int32_t* lengths_of(const Inputs& given, std::size_t index, std::int64_t batch, std::int64_t steps) {
  if (!is_given(given, index)) return nullptr;
  given.require_shape(index, {batch});
  const auto* lengths = static_cast<const std::int32_t*>(given[index].data);
  for (std::int64_t n = 0; n < batch; ++n) {
    if (lengths[n] < 0 || lengths[n] > steps) {
      throw std::invalid_argument("input " + std::to_string(index) + " (sequence_lens) has " +
                                  std::to_string(lengths[n]) + ", and must have numbers from 0 to " +
                                  std::to_string(steps) + ", the steps of X.");
    }
  }
  return lengths;
}

// A call, and its sizes as the runtime counts them.
struct Sizes {
  Recurrent call = {};
  std::int64_t steps = 0, batch = 0, inputs = 0, hidden = 0, directions = 0, gates = 0;

  // Fills in the call's fields known so far.
  void fill_in(Cell cell, const RecurrentAttributes& attributes) {
    call.cell = cell;
    std::copy(std::begin(attributes.settings), std::end(attributes.settings), std::begin(call.settings));
    call.reversed = attributes.reversed;
    call.steps = static_cast<std::size_t>(steps);
    call.batch = static_cast<std::size_t>(batch);
    call.inputs = static_cast<std::size_t>(inputs);
    call.hidden = static_cast<std::size_t>(hidden);
    call.directions = attributes.directions;
  }

  Shape states_shape() const { return {directions, batch, hidden}; }
  Shape sequence_shape() const { return {steps, directions, batch, hidden}; }
  Shape gates_shape() const { return {steps, batch, directions, gates}; }
  // Shape of the kept values beside the gates.
  Shape kept_shape() const { return call.cell == kLstm ? sequence_shape() : Shape{steps, batch, directions, hidden}; }
};

void require(const Inputs& given, std::size_t index, const Shape& shape) {
  if (!is_given(given, index)) return;
  given.require_same_type(index, 0);
  given.require_shape(index, shape);
}

// Null if missing.
const void* data(const Inputs& given, std::size_t index) {
  return is_given(given, index) ? given[index].data : nullptr;
}

// Data of a required input.
void* needed(const Inputs& given, const Signature& signature, std::size_t index, const Shape& shape) {
  if (!is_given(given, index)) {
    throw std::invalid_argument("input " + std::to_string(index) + " (" + signature.inputs[index] +
                                ") is missing, and is required.");
  }
  require(given, index, shape);
  return given[index].data;
}

// A call with the inputs that an operator and its gradient share, checked.
struct Reading : Sizes {
  ElementType type;

  Reading(const Inputs& given, const RecurrentAttributes& attributes) : type(given.element_type(0)) {
    const InputSlots slots(attributes.cell);
    const Shape &x = given[slots.x].shape, &r = given[slots.r].shape;
    if (x.size() != 3) {
      throw std::invalid_argument("input 0 (X) has shape " + text_of(x) + ", and must be [steps, batch, inputs].");
    }
    if (r.size() != 3) {
      throw std::invalid_argument("input 2 (R) has shape " + text_of(r) + ", and must be [directions, gates, hidden].");
    }
    steps = x[0], batch = x[1], inputs = x[2], hidden = r[2];
    directions = static_cast<std::int64_t>(attributes.directions);
    gates = checked_product(static_cast<std::int64_t>(gate_count(attributes.cell)), hidden);
    for (const std::size_t index : {slots.w, slots.r}) given.require_same_type(index, 0);
    given.require_shape(slots.r, {directions, gates, hidden});
    given.require_shape(slots.w, {directions, gates, inputs});
    require(given, slots.b, {directions, checked_product<std::int64_t>(2, gates)});
    require(given, slots.initial_state, {directions, batch, hidden});
    if (slots.lstm) {
      require(given, slots.initial_cells, {directions, batch, hidden});
      require(given, slots.peepholes, {directions, checked_product<std::int64_t>(3, hidden)});
      call.initial_cells = data(given, slots.initial_cells);
      call.peepholes = data(given, slots.peepholes);
    }
    fill_in(attributes.cell, attributes);
    call.x = given[slots.x].data;
    call.w = given[slots.w].data;
    call.r = given[slots.r].data;
    call.b = data(given, slots.b);
    call.initial_state = data(given, slots.initial_state);
    call.lengths = lengths_of(given, slots.lengths, batch, steps);
  }
};

// Buffers of outputs; the node has the first `count` of them.
class Outputs {
 public:
  Outputs(const Call& call, ElementType type, std::size_t count) : call_(call), type_(type), count_(count) {}

  // Null if not requested.
  void* wanted(std::size_t index, const Shape& shape) const {
    return index < count_ ? call_.output(index, shape) : nullptr;
  }

  // Of an output that is computed even if not requested.
  void* needed(std::size_t index, const Shape& shape) {
    void* data = wanted(index, shape);
    if (data != nullptr) return data;
    std::size_t count = size_of(type_);
    for (const std::int64_t size : shape) count = checked_product(count, static_cast<std::size_t>(size));
    unwanted_.push_back(std::make_unique<Buffer>(count));
    return unwanted_.back()->as<void>();
  }

 private:
  const Call& call_;
  ElementType type_;
  std::size_t count_;
  std::vector<std::unique_ptr<Buffer>> unwanted_;
};

std::vector<const char*> listed(std::initializer_list<std::vector<const char*>> parts) {
  std::vector<const char*> names;
  for (const auto& part : parts) names.insert(names.end(), part.begin(), part.end());
  return names;
}

const std::vector<const char*> kInputs = {"X", "W", "R", "B", "sequence_lens", "initial_h"};
const std::vector<const char*> kLstmInputs = {"initial_c", "P"};
const std::vector<int> kTypes = {ort::kTypeUndefined, ort::kTypeUndefined, ort::kTypeUndefined, ort::kTypeUndefined,
                                 ort::kTypeInt32};

}  // namespace

template <>
const Signature GruNode::kSignature = {"GRU", kInputs, 3, 4, {-1}, {}, kTypes};
template <>
const Signature LstmNode::kSignature = {"LSTM", listed({kInputs, kLstmInputs}), 3, 5, {-1}, {}, kTypes};
template <>
const Signature RnnNode::kSignature = {"RNN", kInputs, 3, 3, {-1}, {}, kTypes};
template <>
const Signature GruGradientNode::kSignature = {
    "GRUGradient", listed({kInputs, {"Y", "gates", "linear", "dY", "dY_h"}}), 3, 7, {-1}, {{7, 0}, {8, 1}}, kTypes};
template <>
const Signature LstmGradientNode::kSignature = {
    "LSTMGradient", listed({kInputs, kLstmInputs, {"Y", "gates", "cells", "dY", "dY_h", "dY_c"}}),
    3, 8, {-1}, {{9, 0}}, kTypes};
template <>
const Signature RnnGradientNode::kSignature = {
    "RNNGradient", listed({kInputs, {"Y", "gates", "dY", "dY_h"}}), 3, 6, {-1}, {{7, 0}}, kTypes};

const Signature RecurrentProductsGradientNode::kSignature = {
    "RecurrentProductsGradient", {"X", "W", "sequence_lens", "initial_h", "Y", "dgates", "dlinear"}, 6, 4, {-1}, {},
    {ort::kTypeUndefined, ort::kTypeUndefined, ort::kTypeInt32}};

RecurrentAttributes::RecurrentAttributes(const Attributes& attributes, Cell cell_) : cell(cell_) {
  const std::string direction = attributes.text("direction", "forward");
  if (direction != "forward" && direction != "reverse" && direction != "bidirectional") {
    throw std::invalid_argument("attribute 'direction' is '" + direction +
                                "': it must be forward, reverse or bidirectional.");
  }
  if (cell == kGru && attributes.integer("linear_before_reset", 0) != 0) cell = kGruAfter;
  directions = direction == "bidirectional" ? 2 : 1;
  reversed = direction == "reverse";
  std::istringstream text(attributes.text("activations", default_activations(cell, directions)));
  const std::vector<std::string> names{std::istream_iterator<std::string>(text), {}};
  const std::vector<double> alpha = attributes.numbers("activation_alpha"), beta = attributes.numbers("activation_beta");
  const std::size_t functions = cell == kLstm ? 3 : cell == kRnn ? 1 : 2;
  const double clip = attributes.number("clip", -1);
  const bool coupled = attributes.integer("input_forget", 0) != 0;
  if (names.size() != functions * directions) {
    throw std::invalid_argument("attribute 'activations' must name " + std::to_string(functions * directions) +
                                " functions, and names " + std::to_string(names.size()) + ".");
  }
  for (std::size_t i = 0; i < names.size(); ++i) {
    CellSettings& one = settings[i / functions];
    Activation& activation = one.functions[i % functions];
    activation.function = function_of(names[i]);
    activation.alpha = i < alpha.size() ? alpha[i] : 0;
    activation.beta = i < beta.size() ? beta[i] : 0;
    one.keeps_inputs = one.keeps_inputs || !follows_from_value(activation.function);
  }
  for (CellSettings& one : settings) {
    one.clipped = clip >= 0;
    one.clip = clip;
    one.coupled = coupled;
    one.keeps_inputs = settings[0].keeps_inputs || settings[1].keeps_inputs || one.clipped;
  }
}

void RecurrentNode::compute(const Call& call) const {
  const Inputs given(signature_, call);
  Reading reading(given, attributes_);
  Recurrent& recurrent = reading.call;
  recurrent.memory = memory_.get();
  Outputs outputs(call, reading.type, outputs_);
  std::size_t next = 0;
  recurrent.y = outputs.needed(next++, reading.sequence_shape());
  recurrent.last_state = outputs.wanted(next++, reading.states_shape());
  if (attributes_.cell == kLstm) recurrent.last_cells = outputs.wanted(next++, reading.states_shape());
  const std::size_t gates = next++;
  // Before the gates, which are larger (Call::output).
  if (attributes_.cell == kLstm) {
    recurrent.cells = outputs.needed(next, reading.kept_shape());
  } else if (attributes_.cell == kGruAfter) {
    recurrent.linear = outputs.needed(next, reading.kept_shape());
  }
  recurrent.gates = outputs.needed(gates, reading.gates_shape());
  run_recurrent(reading.type, recurrent, call.parallel_for());
}

void RecurrentGradientNode::compute(const Call& call) const {
  const Inputs given(signature_, call);
  Reading reading(given, attributes_);
  const InputSlots slots(attributes_.cell);
  Recurrent& recurrent = reading.call;
  recurrent.memory = memory_.get();
  const auto kept = [&](std::size_t index, const Shape& shape) { return needed(given, signature_, index, shape); };
  recurrent.y = kept(slots.y(), reading.sequence_shape());
  recurrent.gates = kept(slots.gates(), reading.gates_shape());
  const bool lstm = attributes_.cell == kLstm, after = attributes_.cell == kGruAfter;
  if (lstm) recurrent.cells = kept(slots.kept(), reading.kept_shape());
  if (after) recurrent.linear = kept(slots.kept(), reading.kept_shape());
  const std::size_t arriving = attributes_.cell == kRnn ? slots.kept() : slots.kept() + 1;
  require(given, arriving, reading.sequence_shape());
  recurrent.dy = data(given, arriving);
  for (std::size_t index : {1, 2}) {
    if (index == 1 || lstm) require(given, arriving + index, reading.states_shape());
  }
  recurrent.dlast_state = data(given, arriving + 1);
  if (lstm) recurrent.dlast_cells = data(given, arriving + 2);

  Outputs outputs(call, reading.type, outputs_);
  recurrent.dgates = outputs.needed(0, reading.gates_shape());
  std::size_t next = 1;
  if (attributes_.cell == kGru || after) {
    if (after) recurrent.dlinear = outputs.needed(1, reading.kept_shape());
    next = 2;
  }
  const auto output = [&](const Shape& shape) { return outputs.wanted(next++, shape); };
  recurrent.dx = output({reading.steps, reading.batch, reading.inputs});
  recurrent.dw = output({reading.directions, reading.gates, reading.inputs});
  recurrent.dr = output({reading.directions, reading.gates, reading.hidden});
  recurrent.db = output({reading.directions, 2 * reading.gates});
  recurrent.dinitial_state = output(reading.states_shape());
  if (lstm) {
    recurrent.dinitial_cells = output(reading.states_shape());
    recurrent.dpeepholes = output({reading.directions, 3 * reading.hidden});
  }
  run_recurrent_gradient(reading.type, recurrent, call.parallel_for());
}

void RecurrentProductsGradientNode::compute(const Call& call) const {
  const Inputs given(kSignature, call);
  const ElementType type = given.element_type(0);
  enum Place : std::size_t { kX, kW, kLengths, kFirst, kY, kDgates, kDlinear };
  const Shape &x = given[kX].shape, &w = given[kW].shape, &y = given[kY].shape, &dgates = given[kDgates].shape;
  const bool has_x = is_given(given, kX), has_w = is_given(given, kW), has_y = is_given(given, kY);
  if ((has_x && x.size() != 3) || (has_w && w.size() != 3) || (has_y && y.size() != 4) || dgates.size() != 4) {
    throw std::invalid_argument("inputs 0 (X), 1 (W), 4 (Y) and 5 (dgates) have shapes " + text_of(x) + ", " + text_of(w) +
                                ", " + text_of(y) + " and " + text_of(dgates) +
                                ", and must have 3, 3, 4 and 4 axes; the first three may have shape [0], where no result "
                                "reads them.");
  }
  Sizes sizes;
  const bool after = is_given(given, kDlinear);
  sizes.directions = static_cast<std::int64_t>(attributes_.directions);
  sizes.steps = dgates[0], sizes.batch = dgates[1], sizes.gates = dgates[3];
  sizes.inputs = has_x ? x[2] : has_w ? w[2] : 0;
  const std::int64_t gates = sizes.gates, hidden = has_y ? y[3] : after ? gates / 3 : gates;
  sizes.hidden = hidden;
  const Cell cell = after ? kGruAfter : gates == hidden ? kRnn : kLstm;
  if (gates != checked_product(static_cast<std::int64_t>(gate_count(cell)), hidden)) {
    throw std::invalid_argument(
        "input 5 (dgates) has shape " + text_of(dgates) + ", and must have as many gates as Y has units, " +
        std::to_string(hidden) + (after ? ", three times, since dlinear is given." : ", or four times as many."));
  }
  sizes.fill_in(cell, attributes_);
  require(given, kDgates, sizes.gates_shape());
  const Shape steps_first = {sizes.steps, sizes.batch, sizes.inputs};
  require(given, kX, batch_first_ ? Shape{sizes.batch, sizes.steps, sizes.inputs} : steps_first);
  require(given, kW, {sizes.directions, gates, sizes.inputs});
  require(given, kY, sizes.sequence_shape());
  require(given, kFirst, sizes.states_shape());
  require(given, kDlinear, sizes.kept_shape());
  Recurrent& recurrent = sizes.call;
  recurrent.lengths = lengths_of(given, kLengths, sizes.batch, sizes.steps);
  recurrent.initial_state = data(given, kFirst);
  recurrent.dgates = given[kDgates].data;
  recurrent.dlinear = after ? given[kDlinear].data : nullptr;
  const Outputs outputs(call, type, outputs_);
  recurrent.dx = outputs.wanted(0, steps_first);
  recurrent.dw = outputs.wanted(1, {sizes.directions, gates, sizes.inputs});
  recurrent.dr = outputs.wanted(2, {sizes.directions, gates, hidden});
  recurrent.db = outputs.wanted(3, {sizes.directions, checked_product<std::int64_t>(2, gates)});
  // Each result reads one of them.
  if (recurrent.dx != nullptr) recurrent.w = needed(given, kSignature, kW, w);
  if (recurrent.dw != nullptr) recurrent.x = needed(given, kSignature, kX, x);
  if (recurrent.dr != nullptr) recurrent.y = needed(given, kSignature, kY, y);
  recurrent.memory = memory_.get();
  run_recurrent_products(type, recurrent, batch_first_, call.parallel_for());
}

}  // namespace onnxtrain
