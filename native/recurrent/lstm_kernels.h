// A step of LSTM, forward and backward.
#pragma once

#include "recurrent/step_kernels.h"

namespace onnxtrain {
namespace {

// Returns whether an LSTM has the default functions only: a row then takes one or two loops instead of one per
// function, which saves a fifth of a step's time.
template <typename T>
bool is_plain_lstm(const RecurrentStep<T>& s) {
  const CellSettings& settings = *s.settings;
  return settings.functions[0].function == Function::kSigmoid && settings.functions[1].function == Function::kTanh &&
         settings.functions[2].function == Function::kTanh && !settings.keeps_inputs && !settings.coupled &&
         s.peepholes == nullptr && s.dpeepholes == nullptr;
}

template <typename T>
void plain_lstm_forward(const RowPart<T>& row) {
  const RecurrentStep<T>& s = row.s;
  T *i = row.gate(s.gates, 0), *o = row.gate(s.gates, 1), *f = row.gate(s.gates, 2), *g = row.gate(s.gates, 3);
  const T* before = row.cells_before();
  T *c = row.state(s.cells), *h = row.state(s.y);
  ONNXTRAIN_VECTORIZE
  for (std::size_t j = 0; j < s.units; ++j) {
    const T of_i = sigmoid(i[j]), of_o = sigmoid(o[j]), of_f = sigmoid(f[j]), of_g = hyperbolic_tangent(g[j]);
    i[j] = of_i;
    o[j] = of_o;
    f[j] = of_f;
    g[j] = of_g;
    c[j] = of_f * before[j] + of_i * of_g;
  }
  // A separate loop: fused with the above it would wait for all of its results, a third of the time of both.
  ONNXTRAIN_VECTORIZE
  for (std::size_t j = 0; j < s.units; ++j) h[j] = o[j] * hyperbolic_tangent(c[j]);
}

template <typename T>
void plain_lstm_backward(const RowPart<T>& row) {
  const RecurrentStep<T>& s = row.s;
  const T *i = row.gate(s.gates, 0), *o = row.gate(s.gates, 1), *f = row.gate(s.gates, 2), *g = row.gate(s.gates, 3);
  const T *c = row.state(s.cells), *before = row.cells_before(), *dy = row.state_or_zeros(s.dy);
  T *di = row.gate(s.dgates, 0), *d_o = row.gate(s.dgates, 1), *df = row.gate(s.dgates, 2), *dg = row.gate(s.dgates, 3);
  T *dh = row.state(s.dstate), *dc = row.state(s.dcells);
  ONNXTRAIN_VECTORIZE
  for (std::size_t j = 0; j < s.units; ++j) {
    const T of_i = i[j], of_o = o[j], of_f = f[j], of_g = g[j], squashed = hyperbolic_tangent(c[j]);
    const T arriving = dh[j] + dy[j];
    const T to_c = dc[j] + arriving * of_o * ((T(1) - squashed) * (T(1) + squashed));
    di[j] = to_c * of_g * (of_i * (T(1) - of_i));
    d_o[j] = arriving * squashed * (of_o * (T(1) - of_o));
    df[j] = to_c * before[j] * (of_f * (T(1) - of_f));
    dg[j] = to_c * of_i * ((T(1) - of_g) * (T(1) + of_g));
    dc[j] = to_c * of_f;
    dh[j] = T(0);
  }
}

template <typename T>
void lstm_forward(const RecurrentStep<T>& s, int) {
  add_recurrence(s, s.before, 0, 4);
  const CellSettings& settings = *s.settings;
  const bool plain = is_plain_lstm(s);
  const Activation &gate = settings.functions[0], &candidate = settings.functions[1];
  const T *pi = nullptr, *po = nullptr, *pf = nullptr;
  if (s.peepholes != nullptr) {
    pi = s.peepholes + s.begin;
    po = pi + s.hidden;
    pf = po + s.hidden;
  }
  for (std::size_t number = 0; number < s.batch; ++number) {
    const RowPart<T> row = {s, number};
    if (!row.active()) {
      pass_on(row);
      continue;
    }
    if (plain) {
      plain_lstm_forward(row);
      if (s.state != nullptr) copy_units(row.state(s.y), s.units, row.state(s.state));
      continue;
    }
    T *ai = row.gate(s.gates, 0), *ao = row.gate(s.gates, 1), *af = row.gate(s.gates, 2), *ag = row.gate(s.gates, 3);
    const T* before = row.cells_before();
    T *c = row.state(s.cells), *h = row.state(s.y);
    if (pi != nullptr) {
      ONNXTRAIN_VECTORIZE
      for (std::size_t j = 0; j < s.units; ++j) {
        ai[j] += pi[j] * before[j];
        af[j] += pf[j] * before[j];
      }
    }
    const T* i = activate(s, gate, ai, row.room(0));
    const T* f;
    if (settings.coupled) {
      T* rest = settings.keeps_inputs ? row.room(1) : af;
      over_elements(s.units, i, rest, [](T v) { return T(1) - v; });
      f = rest;
    } else {
      f = activate(s, gate, af, row.room(1));
    }
    const T* g = activate(s, candidate, ag, row.room(2));
    ONNXTRAIN_VECTORIZE
    for (std::size_t j = 0; j < s.units; ++j) c[j] = f[j] * before[j] + i[j] * g[j];
    if (po != nullptr) {
      ONNXTRAIN_VECTORIZE
      for (std::size_t j = 0; j < s.units; ++j) ao[j] += po[j] * c[j];
    }
    const T* o = activate(s, gate, ao, row.room(3));
    T* squashed = row.room(4);
    apply(settings.functions[2], s.units, c, squashed);
    ONNXTRAIN_VECTORIZE
    for (std::size_t j = 0; j < s.units; ++j) h[j] = o[j] * squashed[j];
    if (s.state != nullptr) copy_units(h, s.units, row.state(s.state));
  }
}

template <typename T>
void add_peephole_gradients(const RowPart<T>& row, const T* before, const T* c) {
  const RecurrentStep<T>& s = row.s;
  const T *dai = row.gate(s.dgates, 0), *dao = row.gate(s.dgates, 1), *daf = row.gate(s.dgates, 2);
  double *di = s.dpeepholes + s.begin, *d_o = di + s.hidden, *df = d_o + s.hidden;
  ONNXTRAIN_VECTORIZE
  for (std::size_t j = 0; j < s.units; ++j) {
    di[j] += static_cast<double>(dai[j]) * static_cast<double>(before[j]);
    d_o[j] += static_cast<double>(dao[j]) * static_cast<double>(c[j]);
    df[j] += static_cast<double>(daf[j]) * static_cast<double>(before[j]);
  }
}

template <typename T>
void lstm_backward(const RecurrentStep<T>& s, int) {
  leave_gates(s);
  const CellSettings& settings = *s.settings;
  const Activation &gate = settings.functions[0], &candidate = settings.functions[1], &output = settings.functions[2];
  const bool peepholes = s.peepholes != nullptr, coupled = settings.coupled, plain = is_plain_lstm(s);
  const T* pi = peepholes ? s.peepholes + s.begin : s.zeros;
  const T* po = peepholes ? pi + s.hidden : s.zeros;
  const T* pf = peepholes ? po + s.hidden : s.zeros;
  for (std::size_t number = 0; number < s.batch; ++number) {
    const RowPart<T> row = {s, number};
    if (!row.active()) {
      for (std::size_t g = 0; g < 4; ++g) fill_zero(row.gate(s.dgates, g), s.units);
      continue;
    }
    if (plain) {
      plain_lstm_backward(row);
      continue;
    }
    T *si = row.room(8), *so = row.room(9), *sf = row.room(10), *sg = row.room(11);
    const T* i = recalled(row, gate, row.gate(s.gates, 0), 0, si);
    const T* o = recalled(row, gate, row.gate(s.gates, 1), 2, so);
    const T* f = row.gate(s.gates, 2);
    if (!coupled) {
      f = recalled(row, gate, f, 4, sf);
    } else if (settings.keeps_inputs) {
      over_elements(s.units, i, row.room(5), [](T v) { return T(1) - v; });
      f = row.room(5);
    }
    const T* g = recalled(row, candidate, row.gate(s.gates, 3), 6, sg);
    const T *c = row.state_or_zeros(s.cells), *before = row.cells_before();
    T *squashed = row.room(12), *slope = row.room(13);
    apply(output, s.units, c, squashed);
    slopes(output, s.units, c, squashed, slope);
    T *dai = row.gate(s.dgates, 0), *dao = row.gate(s.dgates, 1), *daf = row.gate(s.dgates, 2);
    T *dag = row.gate(s.dgates, 3), *dh = row.state(s.dstate), *dc = row.state(s.dcells);
    const T* dy = row.state_or_zeros(s.dy);
    ONNXTRAIN_VECTORIZE
    for (std::size_t j = 0; j < s.units; ++j) {
      const T arriving = dh[j] + dy[j], value_i = i[j], value_f = f[j];
      const T to_o = arriving * squashed[j] * so[j];
      const T to_c = dc[j] + arriving * o[j] * slope[j] + po[j] * to_o;
      const T of_f = to_c * before[j];
      const T to_i = (to_c * g[j] - (coupled ? of_f : T(0))) * si[j];
      const T to_f = coupled ? T(0) : of_f * sf[j];
      dag[j] = to_c * value_i * sg[j];
      dai[j] = to_i;
      dao[j] = to_o;
      daf[j] = to_f;
      dc[j] = to_c * value_f + pi[j] * to_i + pf[j] * to_f;
      dh[j] = T(0);
    }
    if (s.dpeepholes != nullptr) add_peephole_gradients(row, before, c);
  }
}

}  // namespace
}  // namespace onnxtrain
