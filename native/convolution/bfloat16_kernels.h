// Rounds the operands of convolutions to bfloat16. Included by bfloat16_kernels.cpp only.
#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <algorithm>

#include "convolution/bfloat16_table.h"
#include "matmul/bfloat16_packing.h"

namespace onnxtrain {
namespace {

// Rounds two lines to pairs; `second` may be null for zeros.
inline void round_lines_to_pairs(const float* first, const float* second, std::size_t count, std::uint16_t* to) {
#if defined(__AVX512BF16__)
  alignas(64) static constexpr std::uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                           8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i order = _mm512_load_si512(kOrder);
  for (std::size_t i = 0; i < count; i += 16) {
    const auto mask = static_cast<__mmask16>(count - i >= 16 ? 0xffffu : (1u << (count - i)) - 1);
    const __m512 one = _mm512_maskz_loadu_ps(mask, first + i);
    const __m512 other = second == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, second + i);
    const auto words = (__m512i)_mm512_cvtne2ps_pbh(other, one);
    _mm512_mask_storeu_epi32(to + 2 * i, mask, _mm512_permutexvar_epi16(order, words));
  }
#else
  for (std::size_t i = 0; i < count; ++i) {
    to[2 * i] = rounded(first[i]);
    to[2 * i + 1] = second == nullptr ? 0 : rounded(second[i]);
  }
#endif
}

// One row of a box, from elements [0, size) of a row of a plane, or of two.
inline void round_box_row(const BoxRounding& box, const float* first, const float* second, std::uint16_t* target) {
  constexpr std::size_t kGathered = 256;
  const std::ptrdiff_t step = box.step, width = box.extent[2] / step, words = box.pairs ? 2 : 1;
  const auto convert = [&](const float* one, const float* other, std::size_t count, std::uint16_t* to) {
    if (box.pairs) {
      round_lines_to_pairs(one, other, count, to);
    } else {
      round_to_words(one, count, to);
    }
  };
  for (std::ptrdiff_t phase = 0; phase < step; phase += box.every[2], target += words * width) {
    const std::ptrdiff_t origin = box.start[2] + phase;  // elements origin + step * i, as far as they exist
    const std::ptrdiff_t begin = std::min(width, origin >= 0 ? 0 : (step - 1 - origin) / step);
    const std::ptrdiff_t end =
        std::clamp(box.size[2] <= origin ? 0 : (box.size[2] - origin + step - 1) / step, begin, width);
    fill_zero_words(target, static_cast<std::size_t>(words * begin));
    fill_zero_words(target + words * end, static_cast<std::size_t>(words * (width - end)));
    const std::ptrdiff_t at = origin + begin * step;
    const auto count = static_cast<std::size_t>(end - begin);
    std::uint16_t* to = target + words * begin;
    if (step == 1) {
      if (count != 0) convert(first + at, second == nullptr ? nullptr : second + at, count, to);
      continue;
    }
    float lines[2][kGathered];
    for (std::size_t i = 0; i < count; i += kGathered) {
      const std::size_t some = std::min(count - i, kGathered);
      const std::ptrdiff_t from = at + static_cast<std::ptrdiff_t>(i) * step;
      for (std::size_t j = 0; j < some; ++j) lines[0][j] = first[from + static_cast<std::ptrdiff_t>(j) * step];
      for (std::size_t j = 0; second != nullptr && j < some; ++j) {
        lines[1][j] = second[from + static_cast<std::ptrdiff_t>(j) * step];
      }
      convert(lines[0], second == nullptr ? nullptr : lines[1], some, to + words * static_cast<std::ptrdiff_t>(i));
    }
  }
}

// Asks for the part of a row that a box covers, and in the next plane, too, if it reads two: each is far from the last.
inline void prefetch_row(const BoxRounding& box, const float* row) {
  const std::ptrdiff_t end = std::min(box.size[2], box.start[2] + box.extent[2]);
  for (std::ptrdiff_t at = std::max<std::ptrdiff_t>(box.start[2], 0); at < end; at += 16) {
    __builtin_prefetch(row + at);
    if (box.pairs) __builtin_prefetch(row + box.source_stride + at);
  }
}

inline void round_boxes(const BoxRounding& box) {
  const std::size_t together = box.pairs ? 2 : 1;
  const std::ptrdiff_t row_words = static_cast<std::ptrdiff_t>(together) * box.extent[2];
  const auto is_outside = [&box](int axis, std::ptrdiff_t at) {
    return at + box.start[axis] < 0 || at + box.start[axis] >= box.size[axis];
  };
  for (std::size_t plane = 0; plane < box.planes; plane += together) {
    const float* source = box.source + static_cast<std::ptrdiff_t>(plane) * box.source_stride;
    const bool two = box.pairs && plane + 1 < box.planes;
    std::uint16_t* target = box.target + static_cast<std::ptrdiff_t>(plane) * box.target_stride;
    for (std::ptrdiff_t d = 0; d < box.extent[0]; d += box.every[0]) {
      for (std::ptrdiff_t h = 0; h < box.extent[1]; h += box.every[1]) {
        std::uint16_t* to = target + (d * box.extent[1] + h) * row_words;
        if (is_outside(0, d) || is_outside(1, h)) {
          fill_zero_words(to, static_cast<std::size_t>(row_words));
          continue;
        }
        const float* row = source + ((d + box.start[0]) * box.size[1] + h + box.start[1]) * box.size[2];
        prefetch_row(box, row + static_cast<std::ptrdiff_t>(together) * box.source_stride);
        round_box_row(box, row, two ? row + box.source_stride : nullptr, to);
      }
    }
  }
}

// The weights of a row and of two channels for all taps, the second null for zeros.
inline void round_taps(const WeightRounding& w, const float* first, const float* second, bool in_line, std::uint16_t* to) {
  if (in_line) {
    round_lines_to_pairs(first + w.offsets[0], second == nullptr ? nullptr : second + w.offsets[0], w.taps, to);
    return;
  }
  for (std::size_t t = 0; t < w.taps; ++t) {
    to[2 * t] = rounded(first[w.offsets[t]]);
    to[2 * t + 1] = second == nullptr ? 0 : rounded(second[w.offsets[t]]);
  }
}

// 16 pairs of channels at a time, which fill whole pieces of a row, for some rows: their weights lie together if rows are
// a weight's second axis.
inline void round_weights(const WeightRounding& w, std::size_t first_row, std::size_t end_row) {
  constexpr std::size_t kPairs = kLeftWords / 2, kWords = 16384;
  const std::size_t pairs = (w.channels + 1) / 2, of_pair = 2 * w.taps, line = kPairs * of_pair;
  const std::size_t rows = kWords / line;
  bool in_line = true;
  for (std::size_t t = 1; t < w.taps; ++t) in_line = in_line && w.offsets[t] == w.offsets[0] + static_cast<std::ptrdiff_t>(t);
  alignas(kVectorBytes) std::uint16_t words[kWords];
  const auto weight = [&w](std::size_t row, std::size_t channel) {
    return w.source + static_cast<std::ptrdiff_t>(row) * w.row_stride + static_cast<std::ptrdiff_t>(channel) * w.channel_stride;
  };
  if (rows == 0) {  // kernels of hundreds of elements
    for (std::size_t row = first_row; row < end_row; ++row) {
      for (std::size_t k = 0; k < rounded_up(w.depth, kLeftWords); ++k) {
        const std::size_t channel = k / of_pair * 2 + k % 2, tap = k % of_pair / 2;
        w.target[left_at(row, k, w.stride)] = channel < w.channels ? rounded(weight(row, channel)[w.offsets[tap]]) : 0;
      }
    }
    return;
  }
  for (std::size_t first = first_row; first < end_row; first += rows) {
    const std::size_t end = std::min(first + rows, end_row);
    for (std::size_t begin = 0; begin < pairs; begin += kPairs) {
      const std::size_t count = std::min(pairs - begin, kPairs), whole = rounded_up(count * of_pair, kLeftWords);
      for (std::size_t pair = begin; pair < begin + count; ++pair) {
        for (std::size_t row = first; row < end; ++row) {
          const float* second = 2 * pair + 1 < w.channels ? weight(row, 2 * pair + 1) : nullptr;
          round_taps(w, weight(row, 2 * pair), second, in_line, words + (row - first) * line + (pair - begin) * of_pair);
        }
      }
      for (std::size_t row = first; row < end; ++row) {
        std::uint16_t* from = words + (row - first) * line;
        fill_zero_words(from + count * of_pair, whole - count * of_pair);
        place_words(from, row, begin * of_pair, whole, w.stride, w.target);
      }
    }
  }
}

inline void round_planes(const PlaneRounding& r, std::size_t first_row, std::size_t end_row) {
  constexpr std::size_t kWords = 2048;
  alignas(kVectorBytes) std::uint16_t words[kWords];
  for (std::size_t row = first_row; row < end_row; ++row) {
    const float* source = r.source + static_cast<std::ptrdiff_t>(row) * r.row_stride;
    for (std::size_t begin = 0; begin < r.depth; begin += kWords) {
      const std::size_t end = std::min(begin + kWords, r.depth), whole = rounded_up(end - begin, kLeftWords);
      for (std::size_t k = begin; k < end;) {
        const std::size_t run_end = std::min(r.run_ends[k], end);
        round_to_words(source + r.offsets[k], run_end - k, words + k - begin);
        k = run_end;
      }
      fill_zero_words(words + end - begin, whole - (end - begin));
      place_words(words, row, begin, whole, r.stride, r.target);
    }
  }
}

inline void write_apart(const float* from, std::size_t count, std::ptrdiff_t step, float* to) {
  std::size_t i = 0;
#if defined(__AVX512F__)
  if (step == 2) {
    const __m512i order = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    for (; i < count; i += 8) {
      const std::size_t some = std::min<std::size_t>(count - i, 8);
      const __m256 sums = _mm256_maskz_loadu_ps(static_cast<__mmask8>((1u << some) - 1), from + i);
      const auto mask = static_cast<__mmask16>(0x5555u & ((1u << 2 * some) - 1));
      _mm512_mask_storeu_ps(to + 2 * i, mask, _mm512_permutexvar_ps(order, _mm512_castps256_ps512(sums)));
    }
    return;
  }
#endif
  for (; i < count; ++i) to[static_cast<std::ptrdiff_t>(i) * step] = from[i];
}

inline void scatter(const SumScatter& s) {
  for (std::size_t row = 0; row < s.rows; ++row) {
    const float* sums = s.sums + row * s.stride;
    float* target = s.target + static_cast<std::ptrdiff_t>(row) * s.target_stride;
    for (std::size_t i = 0; i < s.count; i = s.run_ends[i]) {
      const std::size_t count = s.run_ends[i] - i;
      if (s.step == 1) {
        copy(sums + i, count, target + s.offsets[i]);
      } else {
        write_apart(sums + i, count, s.step, target + s.offsets[i]);
      }
    }
  }
}

}  // namespace
}  // namespace onnxtrain
