// The steps of LSTM, GRU and RNN.
//
// What a row of the batch needs of a part of the units lies side by side, so that the
// loops over units are the compiler's to vectorise; what is kept of a gate may be overwritten by its gradient.
#pragma once

#include "recurrent/factor_kernels.h"
#include "recurrent/function_kernels.h"

namespace onnxtrain {
namespace {

inline constexpr std::size_t kRooms = 14;  // of a part's units, that a step may need at once

template <typename T>
std::size_t step_scratch(std::size_t units) {
  return kRooms * padded<T>(units);
}

// What a row has of a part of the units.
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

// f of the input of a gate, in its place or, where the input is kept, in a room.
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

// The value of a gate and the slope of its activation, from what was kept; `rooms` is the first of two.
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

// gates += before factor, for gates [first, first + count).
template <typename T>
void add_recurrence(const RecurrentStep<T>& s, const T* before, std::size_t first, std::size_t count) {
  if (before == nullptr) return;
  for (std::size_t gate = first; gate < first + count; ++gate) {
    multiply_factor(before, static_cast<std::ptrdiff_t>(s.hidden), s.batch, s.ones, s.factors[gate], true,
                    s.gates + gate * s.hidden + s.begin, s.gates_row);
  }
}

// The results of a row that is not active: nothing, and the state before.
template <typename T>
void pass_on(const RowPart<T>& row) {
  const RecurrentStep<T>& s = row.s;
  fill_zero(row.state(s.y), s.units);
  if (s.state != nullptr) copy_units(row.state_or_zeros(s.before), s.units, row.state(s.state));
  if (s.cells != nullptr) copy_units(row.cells_before(), s.units, row.state(s.cells));
}

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

// Whether an LSTM has the functions that almost all have, and nothing else: then a row takes one loop, not one for each
// function, a fifth of a step's time less.
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
    const T cell = of_f * before[j] + of_i * of_g;
    i[j] = of_i;
    o[j] = of_o;
    f[j] = of_f;
    g[j] = of_g;
    c[j] = cell;
    h[j] = of_o * hyperbolic_tangent(cell);
  }
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

// Phase 0: both gates, and r times the state before. Phase 1: the candidate and the result.
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

// dstate += (gradients of the later step's gates) factor.
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

// Phase 0: the gradients of the update gate and of the candidate. Phase 1: that of the reset gate.
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
