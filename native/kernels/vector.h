// SIMD vectors of the current instruction set, as the compilers' vector extensions.
#pragma once

#include <cstddef>
#include <utility>

namespace onnxtrain {
namespace {

#if defined(__AVX512F__)
inline constexpr std::size_t kVectorBytes = 64;
#elif defined(__AVX__)
inline constexpr std::size_t kVectorBytes = 32;
#else
inline constexpr std::size_t kVectorBytes = 16;
#endif

#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr std::size_t kVectorRegisters = 32;
#else
inline constexpr std::size_t kVectorRegisters = 16;
#endif

template <typename T>
inline constexpr std::size_t kLanes = kVectorBytes / sizeof(T);

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kVectorBytes)));
  typedef T unaligned __attribute__((vector_size(kVectorBytes), aligned(sizeof(T)), may_alias));
};

template <typename T>
using Vector = typename VectorOf<T>::type;

template <typename T>
inline Vector<T> load(const T* from) {
  return *reinterpret_cast<const typename VectorOf<T>::unaligned*>(from);
}

template <typename T>
inline void store(T* to, Vector<T> value) {
  *reinterpret_cast<typename VectorOf<T>::unaligned*>(to) = value;
}

template <typename T>
inline Vector<T> broadcast(T value) {
  return value - Vector<T>{};
}

// Copies a few elements: rows of images are often shorter than a vector.
template <typename T>
inline void copy(const T* from, std::size_t count, T* to) {
  constexpr std::size_t lanes = kLanes<T>;
  std::size_t i = 0;
  for (; i + lanes <= count; i += lanes) store(to + i, load(from + i));
  if constexpr (lanes >= 16) {
    if (i + 8 <= count) {
      __builtin_memcpy(to + i, from + i, 8 * sizeof(T));
      i += 8;
    }
  }
  if constexpr (lanes >= 8) {
    if (i + 4 <= count) {
      __builtin_memcpy(to + i, from + i, 4 * sizeof(T));
      i += 4;
    }
  }
  for (; i < count; ++i) to[i] = from[i];
}

template <typename T>
inline void fill_zero(T* to, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) to[i] = T(0);
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define ONNXTRAIN_SHUFFLES 1
#endif
#endif

#if defined(ONNXTRAIN_SHUFFLES)

// One step of a transposition: rows `upper` and `lower`, 2^n apart, swap their off-diagonal blocks of 2^n lanes.
template <int block, typename V, int... lane>
inline void exchange(V& upper, V& lower, std::integer_sequence<int, lane...>) {
  constexpr int lanes = sizeof...(lane);
  const V first = __builtin_shufflevector(upper, lower, ((lane & block) != 0 ? lanes + lane - block : lane)...);
  const V second = __builtin_shufflevector(upper, lower, ((lane & block) != 0 ? lanes + lane : lane + block)...);
  upper = first;
  lower = second;
}

template <int block, typename V, int lanes>
inline void transpose_steps(V (&rows)[lanes]) {
  if constexpr (block < lanes) {
#pragma GCC unroll 16
    for (int row = 0; row < lanes; ++row) {
      if ((row & block) == 0) {
        exchange<block>(rows[row], rows[row + block], std::make_integer_sequence<int, lanes>());
      }
    }
    transpose_steps<2 * block>(rows);
  }
}

template <typename T>
inline void transpose_in_registers(Vector<T> (&rows)[kLanes<T>]) {
  transpose_steps<1>(rows);
}

#else

template <typename T>
inline void transpose_in_registers(Vector<T> (&rows)[kLanes<T>]) {
  for (std::size_t row = 0; row < kLanes<T>; ++row) {
    for (std::size_t lane = row + 1; lane < kLanes<T>; ++lane) {
      const T kept = rows[row][lane];
      rows[row][lane] = rows[lane][row];
      rows[lane][row] = kept;
    }
  }
}

#endif

// Transposes a square block of `lanes` rows and columns, from rows `from_stride` apart to rows `to_stride` apart.
template <typename T>
inline void transpose_block(const T* from, std::size_t from_stride, T* to, std::size_t to_stride) {
  Vector<T> rows[kLanes<T>];
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kLanes<T>; ++i) rows[i] = load(from + i * from_stride);
  transpose_in_registers<T>(rows);
#pragma GCC unroll 16
  for (std::size_t i = 0; i < kLanes<T>; ++i) store(to + i * to_stride, rows[i]);
}

// From [rows][columns], rows `from_stride` apart, to [columns][rows], `to_stride` apart.
template <typename T>
inline void transpose(const T* from, std::size_t from_stride, std::size_t rows, std::size_t columns, T* to,
                      std::size_t to_stride) {
  constexpr std::size_t lanes = kLanes<T>;
  std::size_t column = 0;
  const auto one_by_one = [&](std::size_t count, std::size_t row) {
    for (std::size_t c = column; c < column + count; ++c) {
      for (std::size_t r = row; r < rows; ++r) to[c * to_stride + r] = from[r * from_stride + c];
    }
  };
  for (; column + lanes <= columns; column += lanes) {
    std::size_t row = 0;
    for (; row + lanes <= rows; row += lanes) {
      transpose_block(from + row * from_stride + column, from_stride, to + column * to_stride + row, to_stride);
    }
    one_by_one(lanes, row);
  }
  if (column < columns) one_by_one(columns - column, 0);
}

// Horizontal reduction: combines the two halves of a vector, then the halves of that half, down to one value.
template <std::size_t bytes, typename T, typename Together>
inline T of_lanes(const T* lanes, Together together) {
  if constexpr (bytes == sizeof(T)) {
    return *lanes;
  } else {
    typedef T Half __attribute__((vector_size(bytes / 2), aligned(sizeof(T)), may_alias));
    const Half *halves = reinterpret_cast<const Half*>(lanes);
    const Half half = together(halves[0], halves[1]);
    return of_lanes<bytes / 2>(reinterpret_cast<const T*>(&half), together);
  }
}

}  // namespace
}  // namespace onnxtrain
