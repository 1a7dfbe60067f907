// The kernels of LSTM, GRU and RNN: one step of one part of the units, forwards or backwards. Functions over pointers,
// compiled once per instruction set and reached through a table. Multiplications may be fused with additions, so
// instruction sets differ in the last places; one instruction set always gives the same bits, however the units are cut.
// Strides count elements.
#pragma once

#include <cstddef>

#include "kernels/by_type.h"

namespace onnxtrain {

// kGruAfter is the GRU with linear_before_reset: the reset gate scales what the recurrence gives.
enum Cell : int { kRnn = 0, kGru, kGruAfter, kLstm };
inline constexpr int kCells = 4;
inline constexpr std::size_t kMostGates = 4;

enum class Function : int {
  kSigmoid = 0, kTanh, kRelu, kAffine, kLeakyRelu, kThresholdedRelu, kScaledTanh, kHardSigmoid, kElu, kSoftsign,
  kSoftplus
};

struct Activation {
  Function function = Function::kSigmoid;
  double alpha = 0, beta = 0;
};

// What does not change from step to step.
struct CellSettings {
  Activation functions[3];  // of the gates, of the candidate (also that of RNN is the first), of an LSTM's output
  bool clipped = false;
  double clip = 0;
  bool keeps_inputs = false;  // the gates are kept before their activations, not after
  bool coupled = false;       // LSTM: the forget gate is 1 - i
};

// A factor of the recurrent products, arranged in panels of columns, block by block of the depth.
template <typename T>
struct PackedFactor {
  const T* panels;
  std::size_t depth, columns;
  bool far;  // whether columns are asked for ahead of their use, since no core's cache holds all factors
};

// Columns of a matrix to be arranged: element (k, j) of the factor is source[k * row + j * column].
template <typename T>
struct FactorSource {
  const T *source, *end;  // end: behind the last element of the whole matrix
  std::ptrdiff_t row, column;  // one of them is 1
  std::size_t depth, columns;
  const std::ptrdiff_t* ones;
  T* panels;
};

// One step of the units [begin, begin + units) for all rows of the batch. `gates` and the others point to the first row
// and unit 0 of one direction; rows of gates are `gates_row` apart, those of `linear` `linear_row`, all others `hidden`.
template <typename T>
struct RecurrentStep {
  const CellSettings* settings;
  std::size_t batch, hidden, begin, units;
  const bool* active;  // per row, whether this step is within its length; null: all are
  const std::ptrdiff_t* ones;
  T* scratch;  // `scratch(units)` elements
  const T* zeros;  // `hidden` of them

  // Per gate forwards; backwards one whose depth is that of all gates (GRU: of z and r, then that of the candidate).
  PackedFactor<T> factors[kMostGates];

  T* gates;  // forwards: what comes from x, and then what is kept; backwards: what was kept
  std::ptrdiff_t gates_row;
  T* linear;  // kGruAfter: what the recurrence gives the candidate
  std::ptrdiff_t linear_row;
  const T *before, *cells_before;  // null: zeros
  T* cells;                        // LSTM; backwards only read
  // Per row, whether its sequence begins with this step, so that `first_cells` (null: zeros) are before it, not
  // `cells_before`; null: where the first step is all rows', and `cells_before` is right.
  const bool* begins;
  const T* first_cells;
  const T* peepholes;              // [3 hidden] or null
  const T* recurrent_bias;         // kGruAfter: [hidden] or null
  T* reset;                        // kGru: r times the state before; backwards its gradient: [batch, hidden]

  T *y, *state;  // forwards: the result, and the state where it is not the result (null otherwise)

  // Backwards.
  const T* dy;                            // null: zeros
  T *dgates, *dlinear;                    // with the strides of gates and linear; may be the same buffers
  const T *later_dgates, *later_dlinear;  // those of the step that was taken before; null: there was none
  T *dstate, *dcells;                     // [batch, hidden]: arrive, and leave for the step before
  T* reset_states;                        // kGru: gets r times the state before, [batch, hidden]
  double* dpeepholes;                     // [3 hidden], added to; null: not wanted
};

template <typename T>
struct RecurrentKernels {
  // Elements of a factor in panels.
  std::size_t (*packed_size)(std::size_t depth, std::size_t columns);
  void (*pack)(const FactorSource<T>&);
  std::size_t (*scratch)(std::size_t units);
  // By cell; kGru takes a step in two phases, between which all units have to be there.
  void (*forward[kCells])(const RecurrentStep<T>&, int phase);
  void (*backward[kCells])(const RecurrentStep<T>&, int phase);
  // The products with the later gates' gradients alone: what the last step leaves for the initial state.
  void (*leave[kCells])(const RecurrentStep<T>&);
};

struct RecurrentTable : ByType<RecurrentKernels> {};

}  // namespace onnxtrain
