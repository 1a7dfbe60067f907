// The kernels of LSTM, GRU and RNN: one step of one part of the units, forward or backward. Functions over pointers,
// compiled once per instruction set and called through a table. Multiply-add may be fused, so instruction sets differ
// in the last bits; one instruction set always gives the same bits, however the units are split. Strides count
// elements.
#pragma once

#include <cstddef>

#include "kernels/by_type.h"

namespace onnxtrain {

// kGruAfter is the GRU with linear_before_reset: the reset gate scales the recurrent term.
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

// Constant across steps.
struct CellSettings {
  Activation functions[3];  // of the gates, of the candidate (RNN uses the first), of an LSTM's output
  bool clipped = false;
  double clip = 0;
  bool keeps_inputs = false;  // keeps the gates' inputs instead of their values
  bool coupled = false;       // LSTM: the forget gate is 1 - i
};

// Packed recurrent weights: panels of columns, one block of the depth after the other.
template <typename T>
struct PackedFactor {
  const T* panels;
  std::size_t depth, columns;
  bool far;  // prefetch the columns, since no core's cache holds all weights
};

// Columns of a matrix to pack: element (k, j) is source[k * row + j * column].
template <typename T>
struct FactorSource {
  const T *source, *end;  // end: one past the last element of the whole matrix
  std::ptrdiff_t row, column;  // one of them is 1
  std::size_t depth, columns;
  const std::ptrdiff_t* ones;
  T* panels;
};

// One step of the units [begin, begin + units) for all batch rows. `gates` and the others point to the first row and
// unit 0 of one direction; rows of gates are `gates_row` apart, those of `linear` `linear_row`, all others `hidden`.
template <typename T>
struct RecurrentStep {
  const CellSettings* settings;
  std::size_t batch, hidden, begin, units;
  const bool* active;  // per row, true if this step is within its length; null: all are
  const std::ptrdiff_t* ones;
  T* scratch;  // `scratch(units)` elements
  const T* zeros;  // `hidden` zeros

  // Forward: one per gate. Backward: one with the depth of all gates (GRU: one for z and r, then the candidate's).
  PackedFactor<T> factors[kMostGates];

  T* gates;  // forward: the contribution of x, then the kept values; backward: the kept values
  std::ptrdiff_t gates_row;
  T* linear;  // kGruAfter: the recurrent term of the candidate
  std::ptrdiff_t linear_row;
  const T *before, *cells_before;  // null: zeros
  T* cells;                        // LSTM; read-only in the backward pass
  // Per row, true if its sequence begins with this step, so that `first_cells` (null: zeros) are used instead of
  // `cells_before`; null if all rows begin at the first step, where `cells_before` applies.
  const bool* begins;
  const T* first_cells;
  const T* peepholes;              // [3 hidden] or null
  const T* recurrent_bias;         // kGruAfter: [hidden] or null
  T* reset;                        // kGru: r times the previous state; backward its gradient: [batch, hidden]

  T *y, *state;  // forward: the result, and the state if it differs from the result (else null)

  // Backward.
  const T* dy;                            // null: zeros
  T *dgates, *dlinear;                    // with the strides of gates and linear; may be the same buffers
  const T *later_dgates, *later_dlinear;  // results of the previously computed step; null at the first
  T *dstate, *dcells;                     // [batch, hidden]: in-out, for the step before
  T* reset_states;                        // kGru: receives r times the previous state, [batch, hidden]
  double* dpeepholes;                     // [3 hidden], accumulated; null: not requested
};

template <typename T>
struct RecurrentKernels {
  // Elements of packed weights.
  std::size_t (*packed_size)(std::size_t depth, std::size_t columns);
  void (*pack)(const FactorSource<T>&);
  std::size_t (*scratch)(std::size_t units);
  // By cell; kGru runs a step in two phases with a barrier over all units between them.
  void (*forward[kCells])(const RecurrentStep<T>&, int phase);
  void (*backward[kCells])(const RecurrentStep<T>&, int phase);
  // Only the multiplications with the later gates' gradients: the last step's gradient of the initial state.
  void (*leave[kCells])(const RecurrentStep<T>&);
};

struct RecurrentTable : ByType<RecurrentKernels> {};

}  // namespace onnxtrain
