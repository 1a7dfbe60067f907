// The gradient of MaxPool: dy goes to the first maximum of its window.
//
// Included by kernels.cpp only. The windows of one output row are compared side by side, one window position after the
// other; near borders each position has a range of windows for which it lies within x. Three spatial axes: missing ones
// are leading axes of size 1. Adjacent 2 x 2 windows, the most common case, have a separate path that needs no indices.
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

// Adjacent 2 x 2 windows within x.
inline bool is_two_by_two(const MaxPoolCall& call) {
  if (call.kernel[0] != 1 || call.strides[0] != 1 || call.begin[0] != 0 || call.windows[0] != call.size[0]) return false;
  for (int axis = 1; axis < 3; ++axis) {
    if (call.kernel[axis] != 2 || call.strides[axis] != 2 || call.dilations[axis] != 1 || call.begin[axis] != 0 ||
        2 * call.windows[axis] > call.size[axis]) {
      return false;
    }
  }
  return true;
}

// A block of windows over two rows. Not inlined, because compilers then emit branches instead of vectors.
template <typename T>
__attribute__((noinline)) void two_by_two_block(const T* x, const T* below, const T* dy, T* dx, T* dx_below) {
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

// A partial block of windows.
template <typename T>
void two_by_two_few(const T* x, const T* below, const T* dy, T* dx, T* dx_below, std::size_t count) {
  T upper[2 * tuning::kPooledTogether] = {}, lower[2 * tuning::kPooledTogether] = {},
              slopes[tuning::kPooledTogether] = {};
  T d_upper[2 * tuning::kPooledTogether], d_lower[2 * tuning::kPooledTogether];
  for (std::size_t i = 0; i < 2 * count; ++i) {
    upper[i] = x[i];
    lower[i] = below[i];
  }
  for (std::size_t j = 0; j < count; ++j) slopes[j] = dy[j];
  two_by_two_block(upper, lower, slopes, d_upper, d_lower);
  for (std::size_t i = 0; i < 2 * count; ++i) {
    dx[i] = d_upper[i];
    dx_below[i] = d_lower[i];
  }
}

template <typename T>
void two_by_two_row(const T* x, const T* dy, T* dx, std::size_t size, std::size_t count) {
  if (count < tuning::kPooledTogether) {
    two_by_two_few(x, x + size, dy, dx, dx + size, count);
  } else {
    for (std::size_t j = 0; j < count; j += tuning::kPooledTogether) {
      const std::size_t at = j + tuning::kPooledTogether <= count
                                 ? j
                                 : count - tuning::kPooledTogether;  // the last block ends with the row
      two_by_two_block(x + 2 * at, x + size + 2 * at, dy + at, dx + 2 * at, dx + size + 2 * at);
    }
  }
  for (std::size_t i = 2 * count; i < size; ++i) dx[i] = dx[size + i] = T(0);
}

template <typename T>
void two_by_two_images(const MaxPoolCall& call, std::size_t first, std::size_t last) {
  const auto height = static_cast<std::size_t>(call.size[1]), width = static_cast<std::size_t>(call.size[2]);
  const auto rows = static_cast<std::size_t>(call.windows[1]), count = static_cast<std::size_t>(call.windows[2]);
  for (std::size_t image = first; image < last; ++image) {
    const T *x = static_cast<const T*>(call.x) + image * height * width;
    const T* dy = static_cast<const T*>(call.dy) + image * rows * count;
    T* dx = static_cast<T*>(call.dx) + image * height * width;
    for (std::size_t y = 0; y < rows; ++y) {
      two_by_two_row(x + 2 * y * width, dy + y * count, dx + 2 * y * width, width, count);
    }
    for (std::size_t i = 2 * rows * width; i < height * width; ++i) dx[i] = T(0);
  }
}

template <typename T>
void max_pool_gradient(const MaxPoolCall& call, std::size_t first, std::size_t last) {
  if (is_two_by_two(call)) {
    const auto depth = static_cast<std::size_t>(call.size[0]);
    two_by_two_images<T>(call, first * depth, last * depth);
    return;
  }
  for (std::size_t image = first; image < last; ++image) MaxPoolImage<T>(call, image).run();
}

}  // namespace
}  // namespace onnxtrain
