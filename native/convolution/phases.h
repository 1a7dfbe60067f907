// The kernel elements of a convolution, and which of them reach which positions.
#pragma once

#include <cstddef>
#include <vector>

#include "convolution/blocks.h"
#include "convolution/convolution.h"

namespace onnxtrain {

// Target positions that the same taps reach: start + target_step * q, from source step * q + tap, for q in a grid of
// `count`.
struct Phase {
  Index size, step, target_start, target_step;
  std::vector<Tap> taps;
};

inline Index index_of(const std::ptrdiff_t (&sizes)[kAxes]) { return {sizes[0], sizes[1], sizes[2]}; }

// Offsets of the kernel over x, in the order of the weights.
std::vector<Tap> taps_of(const Convolution& convolution);

// The phases of x, or, where there are too many, those that some kernel element reaches; `all` says which.
std::vector<Phase> phases_of(const Index& size, const Index& stride, const std::vector<Tap>& taps, bool& all);

// Grid of the positions of all phases, with all taps.
Grid grid_of(const std::vector<Phase>& phases);

// Whether y is a product of w with x: one kernel element at each position of x.
bool is_pointwise(const Convolution& convolution);

}  // namespace onnxtrain
