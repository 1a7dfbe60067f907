// LSTM, GRU and RNN over whole sequences, and their gradients: matrix multiplications over all steps at once, and how
// the rest is shared among threads. Independent of ONNX Runtime. Results do not depend on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernel_table.h"
#include "parallel.h"
#include "recurrent/table.h"
#include "scratch.h"

namespace onnxtrain {

inline std::size_t gate_count(Cell cell) { return cell == kLstm ? 4 : cell == kRnn ? 1 : 3; }

// Notation of ONNX, with D directions, G gates: x [steps, batch, inputs], w [D, G hidden, inputs], r [D, G hidden,
// hidden], b [D, 2 G hidden], y [steps, D, batch, hidden], states [D, batch, hidden], peepholes [D, 3 hidden]. Kept for
// the gradient: gates and their gradients [steps, batch, D, G hidden], linear [steps, batch, D, hidden] for kGruAfter,
// cells [steps, D, batch, hidden] for an LSTM; undefined beyond the lengths.
struct Recurrent {
  Cell cell;
  CellSettings settings[2];
  bool reversed;  // true if the first direction goes back in time; the second always does
  std::size_t steps, batch, inputs, hidden, directions;
  const Memory* memory;  // allocator of tensor-sized buffers; null: the heap

  const void *x, *w, *r;
  const void *b, *initial_state, *initial_cells, *peepholes;  // null if absent
  const std::int32_t* lengths;                                // from 0 to steps; null: all steps

  void *y, *gates, *linear, *cells;
  void *last_state, *last_cells;  // null: not requested

  // The gradient reads those above except b and the last two; null: zeros.
  const void *dy, *dlast_state, *dlast_cells;
  void *dgates, *dlinear;  // may be the buffers of gates and linear
  void *dx, *dw, *dr, *db, *dinitial_state, *dinitial_cells, *dpeepholes;  // null: not requested
};

void run_recurrent(ElementType type, const Recurrent& call, const ParallelFor& parallel_for);
// Computes the requested ones of dx, dw, dr and db from x, w, y, initial_state, lengths, dgates and dlinear (not for a
// GRU whose reset gate comes first). run_recurrent_gradient computes its requested ones, too. With
// `batch_first`, x is [batch, steps, inputs].
void run_recurrent_products(ElementType type, const Recurrent& call, bool batch_first, const ParallelFor& parallel_for);
void run_recurrent_gradient(ElementType type, const Recurrent& call, const ParallelFor& parallel_for);

}  // namespace onnxtrain
