// A step of GRU, forward and backward, with the reset gate before or after the recurrent multiplication.
#pragma once

#include "recurrent/step_kernels.h"

namespace onnxtrain {
namespace {

// h = n + z (before - n).
template <typename T>
void gru_result(const RowPart<T>& row, const T* z, const T* n) {
  const RecurrentStep<T>& s = row.s;
  const T* before = row.state_or_zeros(s.before);
  T* h = row.state(s.y);
  ONNXTRAIN_VECTORIZE
  for (std::size_t j = 0; j < s.units; ++j) h[j] = n[j] + z[j] * (before[j] - n[j]);
  if (s.state != nullptr) copy_units(h, s.units, row.state(s.state));
}

// Phase 0: both gates, and r times the previous state. Phase 1: the candidate and the result.
template <typename T>
void gru_forward(const RecurrentStep<T>& s, int phase) {
  const CellSettings& settings = *s.settings;
  add_recurrence(s, phase == 0 ? s.before : s.before == nullptr ? nullptr : static_cast<const T*>(s.reset),
                 phase == 0 ? 0 : 2, phase == 0 ? 2 : 1);
  for (std::size_t number = 0; number < s.batch; ++number) {
    const RowPart<T> row = {s, number};
    const T* before = row.state_or_zeros(s.before);
    if (phase == 0) {
      T* reset = row.state(s.reset);
      if (!row.active()) {
        fill_zero(reset, s.units);
        continue;
      }
      if (!settings.keeps_inputs) activate(s, settings.functions[0], row.gate(s.gates, 0), row.room(0));
      const T* r = activate(s, settings.functions[0], row.gate(s.gates, 1), row.room(0));
      ONNXTRAIN_VECTORIZE
      for (std::size_t j = 0; j < s.units; ++j) reset[j] = r[j] * before[j];
    } else if (!row.active()) {
      pass_on(row);
    } else {
      const T* z = row.gate(s.gates, 0);
      if (settings.keeps_inputs) z = activate(s, settings.functions[0], row.gate(s.gates, 0), row.room(0));
      gru_result(row, z, activate(s, settings.functions[1], row.gate(s.gates, 2), row.room(1)));
    }
  }
}

template <typename T>
void gru_after_forward(const RecurrentStep<T>& s, int) {
  const CellSettings& settings = *s.settings;
  add_recurrence(s, s.before, 0, 2);
  const T* bias = s.recurrent_bias == nullptr ? s.zeros : s.recurrent_bias + s.begin;
  for (std::size_t number = 0; number < s.batch; ++number) {
    const RowPart<T> row = {s, number};
    copy_units(bias, s.units, row.linear(s.linear));
  }
  if (s.before != nullptr) {
    multiply_factor(s.before, static_cast<std::ptrdiff_t>(s.hidden), s.batch, s.ones, s.factors[2], true,
                    s.linear + s.begin, s.linear_row);
  }
  for (std::size_t number = 0; number < s.batch; ++number) {
    const RowPart<T> row = {s, number};
    if (!row.active()) {
      pass_on(row);
      continue;
    }
    const T* z = activate(s, settings.functions[0], row.gate(s.gates, 0), row.room(0));
    const T* r = activate(s, settings.functions[0], row.gate(s.gates, 1), row.room(1));
    const T* q = row.linear(s.linear);
    T* an = row.gate(s.gates, 2);
    ONNXTRAIN_VECTORIZE
    for (std::size_t j = 0; j < s.units; ++j) an[j] += r[j] * q[j];
    gru_result(row, z, activate(s, settings.functions[1], an, row.room(2)));
  }
}

// Phase 0: the gradients of the update gate and of the candidate. Phase 1: the gradient of the reset gate.
template <typename T>
void gru_backward(const RecurrentStep<T>& s, int phase) {
  const CellSettings& settings = *s.settings;
  if (phase == 0) {
    leave_gates(s);
  } else {
    multiply_factor(static_cast<const T*>(s.dgates) + 2 * s.hidden, s.gates_row, s.batch, s.ones, s.factors[1], false,
                    s.reset + s.begin, static_cast<std::ptrdiff_t>(s.hidden));
  }
  for (std::size_t number = 0; number < s.batch; ++number) {
    const RowPart<T> row = {s, number};
    T *daz = row.gate(s.dgates, 0), *dar = row.gate(s.dgates, 1), *dan = row.gate(s.dgates, 2);
    if (!row.active()) {
      for (T* unused : {daz, dar, dan, row.state(s.reset_states)}) fill_zero(unused, s.units);
      continue;
    }
    T* dh = row.state(s.dstate);
    const T* before = row.state_or_zeros(s.before);
    if (phase == 0) {
      T *sz = row.room(4), *sn = row.room(5);
      const T* z = recalled(row, settings.functions[0], row.gate(s.gates, 0), 0, sz);
      const T* n = recalled(row, settings.functions[1], row.gate(s.gates, 2), 2, sn);
      const T* dy = row.state_or_zeros(s.dy);
      ONNXTRAIN_VECTORIZE
      for (std::size_t j = 0; j < s.units; ++j) {
        const T arriving = dh[j] + dy[j], value = z[j], candidate = n[j];
        daz[j] = arriving * (before[j] - candidate) * sz[j];
        dan[j] = arriving * (T(1) - value) * sn[j];
        dh[j] = arriving * value;
      }
    } else {
      T* sr = row.room(2);
      const T* r = recalled(row, settings.functions[0], row.gate(s.gates, 1), 0, sr);
      const T* dreset = row.state(s.reset);
      T* reset_state = row.state(s.reset_states);
      ONNXTRAIN_VECTORIZE
      for (std::size_t j = 0; j < s.units; ++j) {
        const T value = r[j];
        dh[j] += dreset[j] * value;
        reset_state[j] = value * before[j];
        dar[j] = dreset[j] * before[j] * sr[j];
      }
    }
  }
}

template <typename T>
void gru_after_backward(const RecurrentStep<T>& s, int) {
  const CellSettings& settings = *s.settings;
  leave_gates_and_linear(s);
  for (std::size_t number = 0; number < s.batch; ++number) {
    const RowPart<T> row = {s, number};
    T *daz = row.gate(s.dgates, 0), *dar = row.gate(s.dgates, 1), *dan = row.gate(s.dgates, 2);
    T* dq = row.linear(s.dlinear);
    if (!row.active()) {
      for (T* da : {daz, dar, dan, dq}) fill_zero(da, s.units);
      continue;
    }
    T *sz = row.room(6), *sr = row.room(7), *sn = row.room(8), *dh = row.state(s.dstate);
    const T* z = recalled(row, settings.functions[0], row.gate(s.gates, 0), 0, sz);
    const T* r = recalled(row, settings.functions[0], row.gate(s.gates, 1), 2, sr);
    const T* n = recalled(row, settings.functions[1], row.gate(s.gates, 2), 4, sn);
    const T *q = row.linear(s.linear), *before = row.state_or_zeros(s.before), *dy = row.state_or_zeros(s.dy);
    ONNXTRAIN_VECTORIZE
    for (std::size_t j = 0; j < s.units; ++j) {
      const T arriving = dh[j] + dy[j], value = z[j], reset = r[j];
      const T to_n = arriving * (T(1) - value) * sn[j];
      daz[j] = arriving * (before[j] - n[j]) * sz[j];
      dar[j] = to_n * q[j] * sr[j];
      dan[j] = to_n;
      dq[j] = to_n * reset;
      dh[j] = arriving * value;
    }
  }
}

}  // namespace
}  // namespace onnxtrain
