// Overflow-checked size arithmetic. Shapes and attributes come from untrusted files; a wrapped result would pass every
// limit and the kernel would write out of bounds.
#pragma once

#include <cstddef>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace onnxtrain {

template <typename Integer>
[[noreturn]] inline void refuse_result(Integer a, const char* operation, Integer b) {
  throw std::invalid_argument("a size of this call, " + std::to_string(a) + operation + std::to_string(b) +
                              ", does not fit into 64 bits: its shapes or attributes are too large.");
}

// a + b + ...; throws std::invalid_argument on overflow.
template <typename Integer>
Integer checked_sum(Integer a, Integer b) {
  Integer result;
  if (__builtin_add_overflow(a, b, &result)) refuse_result(a, " + ", b);
  return result;
}

// a * b * ...; throws std::invalid_argument on overflow.
template <typename Integer>
Integer checked_product(Integer a, Integer b) {
  Integer result;
  if (__builtin_mul_overflow(a, b, &result)) refuse_result(a, " * ", b);
  return result;
}

// a + b + ..., saturating: for cost estimates and for comparison with a limit.
template <typename Integer>
Integer saturating_sum(Integer a, Integer b) {
  static_assert(std::is_unsigned_v<Integer>);
  Integer result;
  return __builtin_add_overflow(a, b, &result) ? std::numeric_limits<Integer>::max() : result;
}

// a * b * ..., saturating.
template <typename Integer>
Integer saturating_product(Integer a, Integer b) {
  static_assert(std::is_unsigned_v<Integer>);
  Integer result;
  return __builtin_mul_overflow(a, b, &result) ? std::numeric_limits<Integer>::max() : result;
}

template <typename Integer, typename... Rest>
Integer checked_sum(Integer a, Integer b, Integer c, Rest... rest) {
  return checked_sum(checked_sum(a, b), c, rest...);
}

// A zero operand gives zero whatever the others are: empty tensors may have shapes such as [0, 2^40, 2^40].
template <typename Integer, typename... Rest>
Integer checked_product(Integer a, Integer b, Integer c, Rest... rest) {
  if (a == 0 || b == 0 || c == 0 || ((rest == 0) || ...)) return 0;
  return checked_product(checked_product(a, b), c, rest...);
}

template <typename Integer, typename... Rest>
Integer saturating_product(Integer a, Integer b, Integer c, Rest... rest) {
  if (a == 0 || b == 0 || c == 0 || ((rest == 0) || ...)) return 0;
  return saturating_product(saturating_product(a, b), c, rest...);
}

}  // namespace onnxtrain
