// Operands of convolutions, rounded to bfloat16 as the multiplication of matrices reads them (matmul/bfloat16_table.h), and
// results at positions of images: functions over pointers, compiled once per instruction set. Strides and offsets count elements.
#pragma once

#include <cstddef>
#include <cstdint>

#include "convolution/table.h"

namespace onnxtrain {

// Boxes out of planes, with zeros outside of the plane; elements that are not read are left out. The elements of a row that lie `step` apart are side by side:
// those of the first position, then those of the next, and so on. With `pairs`, the elements of two planes are one pair;
// a last plane without a second has zeros there.
struct BoxRounding {
  std::ptrdiff_t size[kAxes];    // of a plane
  std::ptrdiff_t start[kAxes];   // of the box in the plane, may be negative
  std::ptrdiff_t extent[kAxes];  // of the box; along the last axis a multiple of the step
  std::ptrdiff_t step;
  std::ptrdiff_t every[kAxes];  // 1, or the step of positions, where these read no elements between them
  bool pairs;
  std::size_t planes;
  const float* source;
  std::ptrdiff_t source_stride;  // between planes
  std::uint16_t* target;
  std::ptrdiff_t target_stride;  // between planes or pairs of planes, in words or pairs
};

// A left matrix, in the layout that multiplications read, of `depth` words for each row.
struct LeftRounding {
  std::size_t depth;
  std::uint16_t* target;
  std::size_t stride;
};

// A left matrix of weights. The depth goes over pairs of channels, within them over taps, and within these over the two
// channels; a last channel without a second has zeros beside it.
struct WeightRounding : LeftRounding {
  const float* source;
  std::ptrdiff_t row_stride, channel_stride;
  std::size_t channels, taps;
  const std::ptrdiff_t* offsets;  // of the taps
};

// A left matrix of planes: its depth goes over the elements at `offsets`.
struct PlaneRounding : LeftRounding {
  const float* source;
  std::ptrdiff_t row_stride;
  const std::ptrdiff_t* offsets;
  const std::size_t* run_ends;  // the end of the neighbouring offsets that each belongs to
};

// Rows of sums, to be written to positions of planes.
struct SumScatter {
  const float* sums;
  std::size_t stride, rows, count;  // of a row
  const std::ptrdiff_t* offsets;
  const std::size_t* run_ends;  // the end of the offsets `step` apart that each belongs to
  std::ptrdiff_t step;
  float* target;
  std::ptrdiff_t target_stride;  // between rows
};

struct Bfloat16Convolution {
  void (*round_boxes)(const BoxRounding&);
  void (*round_weights)(const WeightRounding&, std::size_t first_row, std::size_t end_row);
  void (*round_planes)(const PlaneRounding&, std::size_t first_row, std::size_t end_row);
  void (*scatter)(const SumScatter&);
};

// The functions for the layout of `bfloat16_kernels()`.
const Bfloat16Convolution& bfloat16_convolution();

}  // namespace onnxtrain
