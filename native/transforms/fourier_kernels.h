// The discrete Fourier transform of many lines.
//
// Included by kernels.cpp only. A vector has an element of as many lines as lanes; the lines are transposed on the way in
// and out. Stockham's passes, one for each factor of the length, leave the bins in order.
#pragma once

#include "kernels/vector.h"
#include "transforms/table.h"

namespace onnxtrain {
namespace {

template <typename T>
struct Complex {
  Vector<T> re, im;
};

template <typename T>
inline Complex<T> load_complex(const T* from) {
  return {load(from), load(from + kLanes<T>)};
}

template <typename T>
inline Complex<T> turned(const Complex<T>& value, const T* turn) {
  const Vector<T> cosine = broadcast(turn[0]), sine = broadcast(turn[1]);
  return {value.re * cosine - value.im * sine, value.re * sine + value.im * cosine};
}

// One pass: `size` elements in steps of `step` (their product is the length) become `factor` times fewer.
template <typename T>
void fourier_pass(const FourierCall& call, std::size_t factor, std::size_t size, std::size_t step, const T* from, T* to) {
  constexpr std::size_t element = 2 * kLanes<T>;
  const T* turns = static_cast<const T*>(call.turns);
  const std::size_t rest = size / factor, quarter = call.length / factor;
  const T direction = factor == 4 ? turns[2 * quarter + 1] : T(0);  // of a quarter turn: 1 or -1
  const auto put = [](T* at, const Complex<T>& value) {
    store(at, value.re);
    store(at + kLanes<T>, value.im);
  };
  for (std::size_t p = 0; p < rest; ++p) {
    for (std::size_t q = 0; q < step; ++q) {
      const T* source = from + (q + step * p) * element;
      const std::size_t stride = step * rest * element;
      T* target = to + (q + step * factor * p) * element;
      const auto bin = [&](std::size_t k) { return target + k * step * element; };
      const auto turn = [&](std::size_t k) { return turns + 2 * (p * k * step); };
      if (factor == 2) {
        const Complex<T> a = load_complex(source), b = load_complex(source + stride);
        put(bin(0), {a.re + b.re, a.im + b.im});
        put(bin(1), turned<T>({a.re - b.re, a.im - b.im}, turn(1)));
      } else if (factor == 4) {
        const Complex<T> a = load_complex(source), b = load_complex(source + stride);
        const Complex<T> c = load_complex(source + 2 * stride), d = load_complex(source + 3 * stride);
        const Complex<T> even = {a.re + c.re, a.im + c.im}, odd = {b.re + d.re, b.im + d.im};
        const Complex<T> apart = {a.re - c.re, a.im - c.im};
        const Vector<T> sign = broadcast(direction);
        const Complex<T> side = {(d.im - b.im) * sign, (b.re - d.re) * sign};
        put(bin(0), {even.re + odd.re, even.im + odd.im});
        put(bin(1), turned<T>({apart.re + side.re, apart.im + side.im}, turn(1)));
        put(bin(2), turned<T>({even.re - odd.re, even.im - odd.im}, turn(2)));
        put(bin(3), turned<T>({apart.re - side.re, apart.im - side.im}, turn(3)));
      } else {
        for (std::size_t k = 0; k < factor; ++k) {
          Complex<T> sum = load_complex(source);
          for (std::size_t j = 1; j < factor; ++j) {
            const Complex<T> term = turned(load_complex(source + j * stride), turns + 2 * (j * k % factor * quarter));
            sum = {sum.re + term.re, sum.im + term.im};
          }
          put(bin(k), turned(sum, turn(k)));
        }
      }
    }
  }
}

template <typename T>
void fourier(const FourierCall& call, std::size_t first, std::size_t last, void* scratch) {
  constexpr std::size_t lanes = kLanes<T>;
  const std::size_t used = call.size < call.length ? call.size : call.length, inner = call.inner;
  T *from = static_cast<T*>(scratch), *to = from + 2 * call.length * lanes;
  const T* x = static_cast<const T*>(call.x);
  T* y = static_cast<T*>(call.y);
  for (std::size_t begin = first; begin < last; begin += lanes) {
    const std::size_t count = last - begin < lanes ? last - begin : lanes, parts = call.parts, bin_parts = call.bin_parts;
    const auto line = [&](std::size_t lane, std::size_t size, std::size_t each) {
      const std::size_t number = begin + lane;
      return (number / inner * size * inner + number % inner) * each;
    };
    for (std::size_t i = 0; i < 2 * call.length * lanes; ++i) from[i] = T(0);
    if (inner == 1 && count == lanes) {
      const T* source = x + line(0, call.size, parts);
      transpose(source, call.size * parts, lanes, used * parts, from, parts == 1 ? 2 * lanes : lanes);
    } else {
      for (std::size_t lane = 0; lane < count; ++lane) {
        const T* source = x + line(lane, call.size, parts);
        for (std::size_t n = 0; n < used; ++n) {
          for (std::size_t part = 0; part < parts; ++part) {
            from[(2 * n + part) * lanes + lane] = source[n * inner * parts + part];
          }
        }
      }
    }
    std::size_t size = call.length, step = 1;
    for (std::size_t i = 0; i < call.factor_count; ++i) {
      fourier_pass(call, call.factors[i], size, step, from, to);
      T* const swapped = from;
      from = to;
      to = swapped;
      size /= call.factors[i];
      step *= call.factors[i];
    }
    if (call.scale != 1) {
      const Vector<T> scale = broadcast(static_cast<T>(call.scale));
      for (std::size_t i = 0; i < 2 * call.bins; ++i) store(from + i * lanes, load(from + i * lanes) * scale);
    }
    if (inner == 1 && count == lanes) {
      T* target = y + line(0, call.bins, bin_parts);
      transpose(from, bin_parts == 1 ? 2 * lanes : lanes, call.bins * bin_parts, lanes, target, call.bins * bin_parts);
    } else {
      for (std::size_t lane = 0; lane < count; ++lane) {
        T* target = y + line(lane, call.bins, bin_parts);
        for (std::size_t k = 0; k < call.bins; ++k) {
          for (std::size_t part = 0; part < bin_parts; ++part) {
            target[k * inner * bin_parts + part] = from[(2 * k + part) * lanes + lane];
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace onnxtrain
