// A step of RNN, forward and backward.
#pragma once

#include "recurrent/step_kernels.h"

namespace onnxtrain {
namespace {

template <typename T>
void rnn_forward(const RecurrentStep<T>& s, int) {
  add_recurrence(s, s.before, 0, 1);
  for (std::size_t number = 0; number < s.batch; ++number) {
    const RowPart<T> row = {s, number};
    if (!row.active()) {
      pass_on(row);
      continue;
    }
    const T* h = activate(s, s.settings->functions[0], row.gate(s.gates, 0), row.room(0));
    copy_units(h, s.units, row.state(s.y));
    if (s.state != nullptr) copy_units(h, s.units, row.state(s.state));
  }
}

template <typename T>
void rnn_backward(const RecurrentStep<T>& s, int) {
  leave_gates(s);
  for (std::size_t number = 0; number < s.batch; ++number) {
    const RowPart<T> row = {s, number};
    T* da = row.gate(s.dgates, 0);
    if (!row.active()) {
      fill_zero(da, s.units);
      continue;
    }
    T *slope = row.room(2), *dh = row.state(s.dstate);
    recalled(row, s.settings->functions[0], row.gate(s.gates, 0), 0, slope);
    const T* dy = row.state_or_zeros(s.dy);
    ONNXTRAIN_VECTORIZE
    for (std::size_t j = 0; j < s.units; ++j) {
      da[j] = (dh[j] + dy[j]) * slope[j];
      dh[j] = T(0);
    }
  }
}

}  // namespace
}  // namespace onnxtrain
