// Shared code of the steps of LSTM, GRU and RNN.
//
// The data of one batch row for a part of the units is contiguous, so that the compiler vectorizes the loops over
// units; the kept value of a gate may be overwritten by its gradient.
#pragma once

#include "recurrent/factor_kernels.h"
#include "recurrent/function_kernels.h"

namespace onnxtrain {
namespace {

inline constexpr std::size_t kRooms = 14;  // scratch rows of units that a step may need at once

template <typename T>
std::size_t step_scratch(std::size_t units) {
  return kRooms * padded<T>(units);
}

// The data of a row for a part of the units.
template <typename T>
struct RowPart {
  const RecurrentStep<T>& s;
  std::size_t row;

  bool active() const { return s.active == nullptr || s.active[row]; }
  T* room(std::size_t number) const { return s.scratch + number * padded<T>(s.units); }
  T* gate(T* gates, std::size_t number) const {
    return gates + static_cast<std::ptrdiff_t>(row) * s.gates_row + number * s.hidden + s.begin;
  }
  T* linear(T* linear) const { return linear + static_cast<std::ptrdiff_t>(row) * s.linear_row + s.begin; }
  T* state(T* states) const { return states + row * s.hidden + s.begin; }
  const T* cells_before() const {
    return state_or_zeros(s.begins != nullptr && s.begins[row] ? s.first_cells : s.cells_before);
  }
  const T* state_or_zeros(const T* states) const { return states == nullptr ? s.zeros : states + row * s.hidden + s.begin; }
};

template <typename T>
void copy_units(const T* from, std::size_t count, T* to) {
  copy(from, count, to);
}

template <typename T>
void clip_units(const CellSettings& settings, const T* x, std::size_t count, T* clipped) {
  const T bound = static_cast<T>(settings.clip);
  over_elements(count, x, clipped, [=](T v) {
    const T raised = v < -bound ? -bound : v;
    return raised > bound ? bound : raised;
  });
}

// f of the input of a gate, in place or, where the input is kept, in a scratch row.
template <typename T>
const T* activate(const RecurrentStep<T>& s, const Activation& f, T* gate, T* room) {
  if (!s.settings->keeps_inputs) {
    apply(f, s.units, gate, gate);
    return gate;
  }
  const T* x = gate;
  if (s.settings->clipped) {
    clip_units(*s.settings, x, s.units, room);
    x = room;
  }
  apply(f, s.units, x, room);
  return room;
}

// The value of a gate and the slope of its activation, from the kept value; `rooms` is the first of two scratch rows.
template <typename T>
const T* recalled(const RowPart<T>& row, const Activation& f, const T* kept, std::size_t rooms, T* slope) {
  const RecurrentStep<T>& s = row.s;
  const CellSettings& settings = *s.settings;
  if (!settings.keeps_inputs) {
    slopes(f, s.units, kept, kept, slope);
    return kept;
  }
  const T* x = kept;
  if (settings.clipped) {
    clip_units(settings, x, s.units, row.room(rooms));
    x = row.room(rooms);
  }
  T* value = row.room(rooms + 1);
  apply(f, s.units, x, value);
  slopes(f, s.units, x, value, slope);
  if (settings.clipped) {
    const T bound = static_cast<T>(settings.clip);
    ONNXTRAIN_VECTORIZE
    for (std::size_t i = 0; i < s.units; ++i) slope[i] = kept[i] >= -bound && kept[i] <= bound ? slope[i] : T(0);
  }
  return value;
}

// gates += before times the packed weights, for gates [first, first + count).
template <typename T>
void add_recurrence(const RecurrentStep<T>& s, const T* before, std::size_t first, std::size_t count) {
  if (before == nullptr) return;
  for (std::size_t gate = first; gate < first + count; ++gate) {
    multiply_factor(before, static_cast<std::ptrdiff_t>(s.hidden), s.batch, s.ones, s.factors[gate], true,
                    s.gates + gate * s.hidden + s.begin, s.gates_row);
  }
}

// The results of an inactive row: zeros, and the unchanged state.
template <typename T>
void pass_on(const RowPart<T>& row) {
  const RecurrentStep<T>& s = row.s;
  fill_zero(row.state(s.y), s.units);
  if (s.state != nullptr) copy_units(row.state_or_zeros(s.before), s.units, row.state(s.state));
  if (s.cells != nullptr) copy_units(row.cells_before(), s.units, row.state(s.cells));
}

// dstate += (gradients of the later step's gates) times the packed weights.
template <typename T>
void add_later(const RecurrentStep<T>& s, const T* later, std::ptrdiff_t row, const PackedFactor<T>& factor) {
  if (later == nullptr) return;
  multiply_factor(later, row, s.batch, s.ones, factor, true, s.dstate + s.begin,
                  static_cast<std::ptrdiff_t>(s.hidden));
}

template <typename T>
void leave_gates(const RecurrentStep<T>& s) {
  add_later(s, s.later_dgates, s.gates_row, s.factors[0]);
}

template <typename T>
void leave_gates_and_linear(const RecurrentStep<T>& s) {
  leave_gates(s);
  add_later(s, s.later_dlinear, s.linear_row, s.factors[1]);
}

}  // namespace
}  // namespace onnxtrain
