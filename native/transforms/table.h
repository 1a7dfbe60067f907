// Kernels of transforms: sampling at points of a grid, and the discrete Fourier transform.
#pragma once

#include <cstddef>

#include "kernels/kernel_table.h"

namespace onnxtrain {

enum class Padding { kZeros, kBorder, kReflection };

// Bilinear samples of x [images, channels, height, width] at grid [images, points, 2] (x, then y, from -1 to 1): y [images,
// channels, points]. Backward: dx and dgrid from dy, x and grid; either may be null. For images [first, last).
struct GridSampleCall {
  std::size_t channels, height, width, points;
  Padding padding;
  bool align_corners;
  const void *x, *grid, *dy;
  void *y, *dx, *dgrid;
};

inline constexpr std::size_t kSampledPoints = 64;  // at a time

// Elements of scratch memory of one image: x and dx with their channels together, a pixel of zeros behind each, and some points.
inline std::size_t grid_sample_scratch(const GridSampleCall& call) {
  return (2 * (call.height * call.width + 1) + kSampledPoints) * call.channels;
}

using GridSampleKernel = void (*)(const GridSampleCall& call, std::size_t first, std::size_t last, void* scratch);

// Lines of x [outer, size, inner, parts] to y [outer, bins, inner, bin_parts]: y[k] = scale * sum x[n] w^(n k) for n below
// `size` and `length`, where w = exp(-+2 pi i / length) and `turns` [length] has its powers (cosine, sine). One part is the
// real one.
struct FourierCall {
  std::size_t length, size, bins, inner, parts, bin_parts;
  const std::size_t* factors;  // of the length
  std::size_t factor_count;
  double scale;
  const void *turns, *x;
  void* y;
};

// Bytes of scratch memory.
inline std::size_t fourier_scratch(const FourierCall& call) { return 4 * call.length * 64; }

using FourierKernel = void (*)(const FourierCall& call, std::size_t first, std::size_t last, void* scratch);

struct TransformTable {
  GridSampleKernel grid_sample[kElementTypes], grid_sample_gradient[kElementTypes];
  FourierKernel fourier[kElementTypes];
};

}  // namespace onnxtrain
