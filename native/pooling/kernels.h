// The gradient of MaxPool: dy goes to the first maximum of its window.
//
// Included by kernels.cpp only. The windows of one output row are compared side by side, one window position after the
// other; near borders each position has a range of windows for which it lies within x. Three spatial axes: missing ones
// are leading axes of size 1. Adjacent windows of 2 x 2 or 2 x 2 x 2, the most common case, have a separate path that
// needs no indices.
#pragma once

#include "kernels/elementwise.h"
#include "kernels/kernel_table.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Indices are as wide as the values, so that both fit the same vectors.
template <typename T>
struct PositionOf;
template <>
struct PositionOf<float> {
  using type = std::int32_t;
};
template <>
struct PositionOf<double> {
  using type = std::int64_t;
};

constexpr std::int64_t kNowhere = -1;

inline std::int64_t at_most(std::int64_t value, std::int64_t bound) { return value < bound ? value : bound; }
inline std::int64_t at_least(std::int64_t value, std::int64_t bound) { return value > bound ? value : bound; }

// The windows j in [begin, end) whose position j * stride + offset lies in [0, size).
struct Reach {
  std::int64_t begin, end;
};

inline Reach reach_of(std::int64_t stride, std::int64_t offset, std::int64_t size, Reach all) {
  const std::int64_t first = offset >= 0 ? 0 : (-offset + stride - 1) / stride;
  const std::int64_t last = offset >= size ? 0 : (size - 1 - offset) / stride + 1;
  return {at_least(all.begin, first), at_most(all.end, last)};
}

// The largest x of each window so far, and its index in the image.
template <typename T>
struct Maxima {
  using Position = typename PositionOf<T>::type;
  T best[tuning::kPooledWindows];
  Position at[tuning::kPooledWindows];
};

// Compares element `offset + j * stride` of a row of x with the largest of window j, for the reachable j; the row
// begins at index `row` of the image. NaN counts as larger.
template <typename T, int known_stride>
void compare_row(Maxima<T>& maxima, const T* x, std::int64_t row, std::int64_t stride, std::int64_t offset,
                 Reach reach, std::int64_t begin) {
  using Position = typename Maxima<T>::Position;
  const std::int64_t step = known_stride > 0 ? known_stride : stride;
  const T* values = x + row + offset + reach.begin * step;
  const auto position = static_cast<Position>(row + offset + reach.begin * step);
  T* best = maxima.best + (reach.begin - begin);
  Position* at = maxima.at + (reach.begin - begin);
  const auto count = static_cast<Position>(reach.end - reach.begin);
  ONNXTRAIN_VECTORIZE
  for (Position j = 0; j < count; ++j) {
    const T value = values[j * step];
    const bool larger = !(value <= best[j]);
    best[j] = larger ? value : best[j];
    at[j] = larger ? static_cast<Position>(position + j * static_cast<Position>(step)) : at[j];
  }
}

template <typename T>
class MaxPoolImage {
 public:
  MaxPoolImage(const MaxPoolCall& call, std::size_t image)
      : call_(call),
        x_(static_cast<const T*>(call.x) + image * volume(call.size)),
        dy_(static_cast<const T*>(call.dy) + image * volume(call.windows)),
        dx_(static_cast<T*>(call.dx) + image * volume(call.size)) {}

  void run() const {
    const std::size_t count = volume(call_.size);
    for (std::size_t i = 0; i < count; ++i) dx_[i] = T(0);
    const std::int64_t* windows = call_.windows;
    for (std::int64_t z = 0; z < windows[0]; ++z) {
      for (std::int64_t y = 0; y < windows[1]; ++y) {
        for (std::int64_t begin = 0; begin < windows[2]; begin += tuning::kPooledWindows) {
          run_row(z, y, {begin, at_most(begin + tuning::kPooledWindows, windows[2])});
        }
      }
    }
  }

 private:
  static std::size_t volume(const std::int64_t* sizes) {
    return static_cast<std::size_t>(sizes[0] * sizes[1] * sizes[2]);
  }

  std::int64_t start(int axis, std::int64_t window) const {
    return window * call_.strides[axis] - call_.begin[axis];
  }

  // The first position of a window along an axis that lies within x, relative to the image; at least the size of x if
  // there is none.
  std::int64_t first_inside(int axis, std::int64_t from) const {
    const std::int64_t step = call_.dilations[axis], elements = (-from + step - 1) / step;  // before x
    if (from >= 0) return from;
    return elements < call_.kernel[axis] ? from + elements * step : call_.size[axis];
  }

  // Every window starts with its first element within x, which is the result if all are -infinity; a window entirely
  // outside of x has none and is skipped.
  void start_row(Maxima<T>& maxima, std::int64_t z, std::int64_t y, Reach all) const {
    const std::int64_t* size = call_.size;
    const std::int64_t row = z < size[0] && y < size[1] ? (z * size[1] + y) * size[2] : kNowhere;
    for (std::int64_t j = all.begin; j < all.end; ++j) {
      const std::int64_t first = first_inside(2, start(2, j));
      const bool inside = row != kNowhere && first < size[2];
      maxima.at[j - all.begin] = static_cast<typename Maxima<T>::Position>(inside ? row + first : kNowhere);
      maxima.best[j - all.begin] = -static_cast<T>(__builtin_inf());
    }
  }

  void run_row(std::int64_t z, std::int64_t y, Reach all) const {
    Maxima<T> maxima;
    const std::int64_t *size = call_.size, *kernel = call_.kernel, *dilations = call_.dilations;
    const std::int64_t from_z = start(0, z), from_y = start(1, y);
    start_row(maxima, first_inside(0, from_z), first_inside(1, from_y), all);
    // Elements of the window that lie within x: far fewer than all, where a window reaches far over the border.
    const Reach in_z = reach_of(dilations[0], from_z, size[0], {0, kernel[0]});
    const Reach in_y = reach_of(dilations[1], from_y, size[1], {0, kernel[1]});
    for (std::int64_t k = in_z.begin; k < in_z.end; ++k) {
      for (std::int64_t l = in_y.begin; l < in_y.end; ++l) {
        const std::int64_t at_z = from_z + k * dilations[0], at_y = from_y + l * dilations[1];
        compare_positions(maxima, (at_z * size[1] + at_y) * size[2], all);
      }
    }
    const T* dy = dy_ + (z * call_.windows[1] + y) * call_.windows[2];
    for (std::int64_t j = all.begin; j < all.end; ++j) {
      const std::int64_t at = maxima.at[j - all.begin];
      if (at != kNowhere) dx_[at] += dy[j];
    }
  }

  void compare_positions(Maxima<T>& maxima, std::int64_t row, Reach all) const {
    const std::int64_t stride = call_.strides[2], dilation = call_.dilations[2];
    const Reach elements = {0, call_.kernel[2]};  // those that lie within x in some window
    const std::int64_t first = reach_of(dilation, start(2, all.end - 1), call_.size[2], elements).begin;
    const std::int64_t last = reach_of(dilation, start(2, all.begin), call_.size[2], elements).end;
    for (std::int64_t m = first; m < last; ++m) {
      const std::int64_t offset = m * dilation - call_.begin[2];
      const Reach reach = reach_of(stride, offset, call_.size[2], all);
      if (reach.begin >= reach.end) continue;
      if (stride == 1) {
        compare_row<T, 1>(maxima, x_, row, stride, offset, reach, all.begin);
      } else if (stride == 2) {
        compare_row<T, 2>(maxima, x_, row, stride, offset, reach, all.begin);
      } else {
        compare_row<T, 0>(maxima, x_, row, stride, offset, reach, all.begin);
      }
    }
  }

  const MaxPoolCall& call_;
  const T* x_;
  const T* dy_;
  T* dx_;
};

// Adjacent windows within x of 2 elements along the last two axes, and of `planes` along the first.
inline bool is_adjacent(const MaxPoolCall& call, std::int64_t planes) {
  for (int axis = 0; axis < 3; ++axis) {
    const std::int64_t elements = axis == 0 ? planes : 2;
    if (call.kernel[axis] != elements || call.strides[axis] != elements || call.dilations[axis] != 1 ||
        call.begin[axis] != 0 || elements * call.windows[axis] > call.size[axis]) {
      return false;
    }
  }
  return planes == 2 || call.windows[0] == call.size[0];
}

// Where the rows of a block of windows begin: in x and in dx, in the order of the elements of a window.
template <typename T, int rows>
struct WindowRows {
  const T* x[rows];
  T* dx[rows];

  WindowRows from(std::size_t column) const {
    WindowRows moved;
    for (int row = 0; row < rows; ++row) {
      moved.x[row] = x[row] + column;
      moved.dx[row] = dx[row] + column;
    }
    return moved;
  }
};

// A block of windows over two rows. Not inlined, because compilers then emit branches instead of vectors.
template <typename T>
__attribute__((noinline)) void adjacent_block(const WindowRows<T, 2>& rows, const T* dy) {
  const T *x = rows.x[0], *below = rows.x[1];
  T *dx = rows.dx[0], *dx_below = rows.dx[1];
  ONNXTRAIN_VECTORIZE
  for (std::size_t j = 0; j < tuning::kPooledTogether; ++j) {
    const T a = x[2 * j], b = x[2 * j + 1], c = below[2 * j], d = below[2 * j + 1];
    const bool b_larger = !(b <= a);
    const T of_two = b_larger ? b : a;
    const bool c_larger = !(c <= of_two);
    const T of_three = c_larger ? c : of_two;
    const bool d_larger = !(d <= of_three);
    const T not_d = d_larger ? T(0) : dy[j], not_c = c_larger ? T(0) : not_d;
    dx[2 * j] = b_larger ? T(0) : not_c;
    dx[2 * j + 1] = b_larger ? not_c : T(0);
    dx_below[2 * j] = c_larger ? not_d : T(0);
    dx_below[2 * j + 1] = d_larger ? dy[j] : T(0);
  }
}

// A block of windows over two rows of two planes.
template <typename T>
__attribute__((noinline)) void adjacent_block(const WindowRows<T, 4>& rows, const T* dy) {
  const T *x = rows.x[0], *below = rows.x[1], *behind = rows.x[2], *last = rows.x[3];
  T *dx = rows.dx[0], *dx_below = rows.dx[1], *dx_behind = rows.dx[2], *dx_last = rows.dx[3];
  ONNXTRAIN_VECTORIZE
  for (std::size_t j = 0; j < tuning::kPooledTogether; ++j) {
    const T a = x[2 * j], b = x[2 * j + 1], c = below[2 * j], d = below[2 * j + 1];
    const T e = behind[2 * j], f = behind[2 * j + 1], g = last[2 * j], h = last[2 * j + 1];
    const bool b_larger = !(b <= a);
    const T of_two = b_larger ? b : a;
    const bool c_larger = !(c <= of_two);
    const T of_three = c_larger ? c : of_two;
    const bool d_larger = !(d <= of_three);
    const T of_four = d_larger ? d : of_three;
    const bool e_larger = !(e <= of_four);
    const T of_five = e_larger ? e : of_four;
    const bool f_larger = !(f <= of_five);
    const T of_six = f_larger ? f : of_five;
    const bool g_larger = !(g <= of_six);
    const T of_seven = g_larger ? g : of_six;
    const bool h_larger = !(h <= of_seven);
    const T not_h = h_larger ? T(0) : dy[j], not_g = g_larger ? T(0) : not_h, not_f = f_larger ? T(0) : not_g;
    const T not_e = e_larger ? T(0) : not_f, not_d = d_larger ? T(0) : not_e, not_c = c_larger ? T(0) : not_d;
    dx[2 * j] = b_larger ? T(0) : not_c;
    dx[2 * j + 1] = b_larger ? not_c : T(0);
    dx_below[2 * j] = c_larger ? not_d : T(0);
    dx_below[2 * j + 1] = d_larger ? not_e : T(0);
    dx_behind[2 * j] = e_larger ? not_f : T(0);
    dx_behind[2 * j + 1] = f_larger ? not_g : T(0);
    dx_last[2 * j] = g_larger ? not_h : T(0);
    dx_last[2 * j + 1] = h_larger ? dy[j] : T(0);
  }
}

// A partial block of windows.
template <typename T, int rows>
void adjacent_few(const WindowRows<T, rows>& given, const T* dy, std::size_t count) {
  T x[rows][2 * tuning::kPooledTogether] = {}, dx[rows][2 * tuning::kPooledTogether],
      slopes[tuning::kPooledTogether] = {};
  WindowRows<T, rows> few;
  for (int row = 0; row < rows; ++row) {
    for (std::size_t i = 0; i < 2 * count; ++i) x[row][i] = given.x[row][i];
    few.x[row] = x[row];
    few.dx[row] = dx[row];
  }
  for (std::size_t j = 0; j < count; ++j) slopes[j] = dy[j];
  adjacent_block(few, slopes);
  for (int row = 0; row < rows; ++row) {
    for (std::size_t i = 0; i < 2 * count; ++i) given.dx[row][i] = dx[row][i];
  }
}

template <typename T, int rows>
void adjacent_row(const WindowRows<T, rows>& given, const T* dy, std::size_t size, std::size_t count) {
  if (count < tuning::kPooledTogether) {
    adjacent_few(given, dy, count);
  } else {
    for (std::size_t j = 0; j < count; j += tuning::kPooledTogether) {
      const std::size_t at = j + tuning::kPooledTogether <= count
                                 ? j
                                 : count - tuning::kPooledTogether;  // the last block ends with the row
      adjacent_block(given.from(2 * at), dy + at);
    }
  }
  for (int row = 0; row < rows; ++row) {
    for (std::size_t i = 2 * count; i < size; ++i) given.dx[row][i] = T(0);
  }
}

template <typename T, int planes>
void adjacent_images(const MaxPoolCall& call, std::size_t first, std::size_t last) {
  const auto depth = static_cast<std::size_t>(call.size[0]), height = static_cast<std::size_t>(call.size[1]);
  const auto width = static_cast<std::size_t>(call.size[2]), slices = static_cast<std::size_t>(call.windows[0]);
  const auto lines = static_cast<std::size_t>(call.windows[1]), count = static_cast<std::size_t>(call.windows[2]);
  const std::size_t plane = height * width;
  for (std::size_t image = first; image < last; ++image) {
    const T *x = static_cast<const T*>(call.x) + image * depth * plane;
    const T* dy = static_cast<const T*>(call.dy) + image * slices * lines * count;
    T* dx = static_cast<T*>(call.dx) + image * depth * plane;
    for (std::size_t z = 0; z < slices; ++z) {
      for (std::size_t y = 0; y < lines; ++y, dy += count) {
        WindowRows<T, 2 * planes> rows;
        for (std::size_t row = 0; row < 2 * planes; ++row) {
          const std::size_t at = (planes * z + row / 2) * plane + (2 * y + row % 2) * width;
          rows.x[row] = x + at;
          rows.dx[row] = dx + at;
        }
        adjacent_row(rows, dy, width, count);
      }
      for (std::size_t behind = planes * z; behind < planes * (z + 1); ++behind) {
        for (std::size_t i = 2 * lines * width; i < plane; ++i) dx[behind * plane + i] = T(0);
      }
    }
    for (std::size_t i = planes * slices * plane; i < depth * plane; ++i) dx[i] = T(0);
  }
}

template <typename T>
void max_pool_gradient(const MaxPoolCall& call, std::size_t first, std::size_t last) {
  if (is_adjacent(call, 1)) return adjacent_images<T, 1>(call, first, last);
  if (is_adjacent(call, 2)) return adjacent_images<T, 2>(call, first, last);
  for (std::size_t image = first; image < last; ++image) MaxPoolImage<T>(call, image).run();
}

}  // namespace
}  // namespace onnxtrain
