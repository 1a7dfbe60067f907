// Offsets of the states and gates of a direction and step.
#pragma once

#include <cstddef>
#include <cstring>

#include "recurrent/recurrent.h"
#include "scratch.h"
#include "sizes.h"

namespace onnxtrain {
namespace {

// Bytes of that many elements.
template <typename T, typename... Sizes>
std::size_t bytes_of(Sizes... sizes) {
  return checked_product(static_cast<std::size_t>(sizes)..., sizeof(T));
}

template <typename T>
void copy_out(const T* from, std::size_t count, void* to) {
  if (to != nullptr && count > 0) std::memcpy(to, from, count * sizeof(T));
}

template <typename T>
void copy_or_clear(const void* from, std::size_t count, T* to) {
  if (from == nullptr) {
    std::memset(to, 0, count * sizeof(T));
  } else {
    copy_out(static_cast<const T*>(from), count, to);
  }
}

template <typename T>
struct Layout {
  const Recurrent& call;
  std::size_t gates, state_size;  // gates per cell, elements of a state [batch, hidden]

  explicit Layout(const Recurrent& call_)
      : call(call_), gates(gate_count(call_.cell)), state_size(checked_product(call_.batch, call_.hidden)) {}

  bool is_backwards(std::size_t direction) const { return direction == 1 || call.reversed; }

  // Offset of a direction's step `number`.
  std::size_t time(std::size_t direction, std::size_t number) const {
    return is_backwards(direction) ? call.steps - 1 - number : number;
  }

  const T* of_direction(const void* states, std::size_t direction) const {
    return states == nullptr ? nullptr : static_cast<const T*>(states) + direction * state_size;
  }

  template <typename Element>
  Element* in_time(Element* sequence, std::size_t direction, std::size_t t) const {
    return sequence + (t * call.directions + direction) * state_size;
  }

  // Results of step `number` of a direction.
  const T* y_of(std::size_t direction, std::size_t number) const {
    return in_time(static_cast<const T*>(call.y), direction, time(direction, number));
  }

  std::size_t gates_row() const { return call.directions * gates * call.hidden; }

  T* gates_of(void* buffer, std::size_t direction, std::size_t t) const {
    return static_cast<T*>(buffer) + t * call.batch * gates_row() + direction * gates * call.hidden;
  }

  T* linear_of(void* linear, std::size_t direction, std::size_t t) const {
    if (linear == nullptr) return nullptr;
    return static_cast<T*>(linear) + (t * call.batch * call.directions + direction) * call.hidden;
  }

  const T* cells_before(std::size_t direction, std::size_t number) const {
    if (call.cell != kLstm) return nullptr;
    if (number == 0) return of_direction(call.initial_cells, direction);
    return in_time(static_cast<const T*>(call.cells), direction, time(direction, number - 1));
  }
};

}  // namespace
}  // namespace onnxtrain
