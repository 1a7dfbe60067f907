// The inner kernels of convolutions and their gradients: pure functions over pointers, compiled once per instruction
// set and called through a table. Multiply-add may be fused, so instruction sets differ in the last bits; one
// instruction set always gives the same bits. Strides and offsets count elements.
#pragma once

#include <cstddef>

#include "kernels/by_type.h"
#include "matmul/table.h"
#include "tuning.h"

namespace onnxtrain {

// Spatial axes; missing ones are leading axes of size 1.
inline constexpr int kAxes = 3;

// Copies boxes out of planes, with zeros outside of the plane.
template <typename T>
struct BoxCopy {
  std::ptrdiff_t size[kAxes];    // of a plane
  std::ptrdiff_t start[kAxes];   // of the box in the plane, may be negative
  std::ptrdiff_t extent[kAxes];  // of the box
  std::size_t planes;
  const T* source;
  std::ptrdiff_t source_stride;  // between planes
  T* target;
  std::ptrdiff_t target_stride;
};

// Rows up to `end` of one strip that read the same kernel elements: [runs[0], runs[1]), [runs[2], runs[3]) and so on.
struct RowClass {
  std::size_t end;
  const std::size_t* runs;
  std::size_t run_count;
};

// target[row, column] = sum over the depth of source[row, depth] * panels[depth, column]. The depth is channels and
// taps: chunks of channels, within them tap by tap; rows skip the taps that their class lacks.
template <typename T>
struct Correlation {
  const T* source;
  const std::ptrdiff_t* row_offsets;    // in the source: [rows]
  const std::ptrdiff_t* depth_offsets;  // in the source: [depth]
  const RowClass* classes;
  const std::size_t* chunks;  // first channel of each chunk, and the end
  std::size_t chunk_count, taps;
  std::size_t rows, depth, columns;
  std::size_t first_panel, end_panel;
  const T* panels;
  T* target;
  const std::ptrdiff_t* target_offsets;  // of the positions: [rows]
  const std::size_t* sum_rows;           // of the positions, within their strip: [rows]
  std::ptrdiff_t column_stride;          // in the target
  const T* bias;                         // [columns] or null
};

// Positions of a target that lie side by side: lanes of a vector from `lane` on, the first at offset `target`.
struct PositionRun {
  std::size_t lane, count;
  std::ptrdiff_t target;
};

// Neighbouring positions, as many as a vector has lanes: where they begin in the source, and their runs. Lanes in no run
// lie between the rows of a block's copy, or are those of another vector.
struct PositionVector {
  std::ptrdiff_t source;
  std::size_t first_run, end_run;
};

// Correlation by vectors of positions. The depth is channels and taps, channel by channel; no tap is skipped.
template <typename T>
struct PositionCorrelation {
  const T* source;
  const std::ptrdiff_t* depth_offsets;  // in the source: [depth]
  std::size_t depth, columns;
  std::size_t first_panel, end_panel;
  const T* panels;
  const PositionVector* vectors;
  std::size_t vector_count;
  const PositionRun* runs;
  std::ptrdiff_t run_step;  // between positions of a run in the target
  T* target;
  std::ptrdiff_t column_stride;  // in the target
  const T* bias;                 // [columns] or null
};

// sums[panel][row, column] (+)= sum over the depth of source[row, depth] * panels[depth, column].
template <typename T>
struct Accumulation {
  const T* source;
  const std::ptrdiff_t* row_offsets;
  const std::ptrdiff_t* depth_offsets;
  std::size_t rows, depth, columns;
  const T* panels;          // at the first depth element, in the first panel
  std::size_t panel_depth;  // depth of a panel in memory
  bool accumulate;
  T* sums;
};

// target[row * row_stride + column * column_stride] = sums[panel][row, column].
template <typename T>
struct Unpacking {
  const T* sums;
  std::size_t rows, columns;
  T* target;
  std::ptrdiff_t row_stride, column_stride;
};

// Of tiles of 2 x 2 positions: kernel elements, and points of the input tile [4, 4].
inline constexpr std::size_t kWinogradTaps = 9, kWinogradPoints = 16;

// 3 x 3 weights, transformed and packed for the multiplications per point: [panel][point][channel][columns of the
// panel].
template <typename T>
struct WinogradWeights {
  const T *source, *source_end;
  std::ptrdiff_t column_stride;
  const std::ptrdiff_t* offsets;  // of channels and taps in the source, channel by channel
  const std::size_t* order;       // index of the tap for each element, row by row
  std::size_t columns, channels;
  std::size_t panel, begin, end;  // the part to pack: channels begin to end
  T* points;
  T* scratch;  // [end - begin][9][columns of a panel]
};

// Transformed input, or gradient of the result, of rows of tiles, numbered across all images: [point][tile][row_stride].
template <typename T>
struct WinogradSource {
  const T *source, *source_end;
  std::ptrdiff_t plane, image;     // between channels and between images
  std::ptrdiff_t size[2];          // of a plane
  std::ptrdiff_t start[2];         // first tile in the plane, may be negative
  std::size_t tile_rows, tiles_in_row;  // per image
  std::size_t first, last, channels;
  const std::ptrdiff_t* ones;  // 0, 1, 2, ...: as many as a row of tiles, or an image, reads
  T* points;
  std::size_t row_stride, point_stride;
  T* scratch;  // as many, [columns of a panel]
};

// Some tiles whose positions are computed together.
struct WinogradStrip {
  std::size_t first_tile, tiles, first_position, positions;
};

// target[position, column] = bias[column] + inverse transform of the points' products with the weights.
template <typename T>
struct WinogradProducts {
  const T* source;
  std::size_t tiles, row_stride, point_stride;
  const std::ptrdiff_t* ones;  // 0, 1, 2, ...: [channels]
  std::size_t channels, columns;
  std::size_t first_panel, end_panel;
  const T* panels;
  T* sums;  // [panel][point][tile][columns of the panel], a point winograd_stride(tiles * columns of the first panel)
  const WinogradStrip* strips;
  std::size_t strip_count;
  T* results;  // [tiles of a strip][4][columns of a panel]
  T* target;
  const std::ptrdiff_t* target_offsets;  // of the positions
  const std::size_t* result_rows;        // of the positions, within their strip
  std::ptrdiff_t column_stride;          // in the target
  const T* bias;                         // [columns] or null
};

// sums[panel][point][channel][column] = sum over some tiles of source[point][tile][channel] * factors[point][tile][column].
// Sums of a point are winograd_stride(channels * columns of the first panel) elements.
template <typename T>
struct WinogradGradient {
  const T* source;
  std::size_t row_stride, point_stride;
  const T* factors;
  std::size_t factor_stride, factor_point_stride;
  std::size_t tiles, channels, columns;
  bool accumulate;
  T* sums;
};

// taps[panel][channel * 9 + tap][column] = inverse transform of these sums, for channels begin to end.
template <typename T>
struct WinogradTaps {
  const T* sums;
  std::size_t channels, columns, begin, end;
  const std::size_t* order;  // index of the tap for each element, row by row
  T* taps;
};

// target[row * line + k] = source[k * rows + row], for rows begin to end and k below `depth`.
template <typename T>
struct Turning {
  const T* source;
  std::size_t depth, rows, begin, end;
  T* target;
  std::size_t line;
};

// target[image, row, pixel] = bias[row] + sum over the depth of weights[row, depth] * source[image, depth, pixel], for
// some pixels, numbered across all images.
template <typename T>
struct Pointwise {
  const T* weights;
  std::ptrdiff_t row_stride;
  const std::ptrdiff_t* depth_offsets;  // in a row of the weights
  std::size_t rows, depth;
  const T* source;
  std::ptrdiff_t source_image;  // between images
  T* target;
  std::ptrdiff_t target_image;
  std::size_t pixels;  // of an image
  std::size_t begin, end;
  const T* bias;
  std::size_t block;  // pixels at a time, a multiple of `pointwise_width`
  T* scratch;         // [depth][block]
};

// A kernel element: grid positions [first, last) reach the plane with it, at their own offset plus `offset`.
struct SpreadTap {
  std::ptrdiff_t first[kAxes], last[kAxes], offset;
  bool inside;  // true if all do
};

// target[image, channel, position] = sum over the taps and positions that reach it, and over the depth, of
// weights[channel * taps + tap, depth] * source[image, depth, position]. The rows of `products` are channels and taps,
// its pixels all positions of some images, its target the first channel's.
template <typename T>
struct Spreading {
  Pointwise<T> products;
  const SpreadTap* taps;
  std::size_t tap_count;
  std::ptrdiff_t grid[kAxes], step[kAxes], target_size[kAxes];
};

// Layout of the copy of a plane: one part per phase of the step, each of size `phase_extent`. Windows of neighbouring
// grid positions are `step` apart in the plane; the first begins at `start`.
struct FilterGeometry {
  std::ptrdiff_t size[kAxes], start[kAxes], step[kAxes], phase_extent[kAxes], grid[kAxes];
  std::ptrdiff_t target_size[kAxes], target_start[kAxes], target_step[kAxes];
  std::size_t length;  // from the first position to one past the last, in rows of phase_extent[2]
};

// target[item, column, position] = bias[column] + sum over the depth of weights[group, column, depth] *
// copy of source[item][position + offset of depth], for items (a group of an image) first to last.
template <typename T>
struct Filtering {
  const FilterGeometry* geometry;
  const std::ptrdiff_t *offsets, *weight_offsets;  // [depth]
  std::size_t depth, channels, columns, groups;
  const T *source, *weights, *bias;
  std::ptrdiff_t group_weight, column_weight;
  T* target;
  std::size_t first, last;
  T* scratch;  // [channels + 1][copy_stride], [depth]
  std::size_t copy_stride;
};

// target[group, column, depth] = sum over images and positions of factors[image, group, column, position] *
// copy of source[image, group][position + offset of depth], for groups first to last.
template <typename T>
struct FilterGradient {
  const FilterGeometry* geometry;
  const std::ptrdiff_t* offsets;  // [depth]
  std::size_t depth, channels, columns, groups, images;
  const T *source, *factors;
  T* target;
  std::size_t first, last;
  T* scratch;  // [channels + 1][copy_stride], [last - first][columns][depth][lanes]
  std::size_t copy_stride;
};

// Target positions that the same kernel elements reach.
struct LanePhase {
  std::size_t positions, depth;
  const std::ptrdiff_t *starts, *target_starts;    // of a position in the copy and in the results: [positions]
  const std::ptrdiff_t *offsets, *weight_offsets;  // of channels and taps in the copy and in the weights: [depth]
  std::size_t first_depth;                         // depth of the phases before this one
};

// Layout in cache of the planes of as many groups as a vector has lanes, with padding, one vector after the other.
struct LaneLayout {
  std::size_t images, groups, channels, columns;  // channels and columns per group
  std::size_t positions, target_positions;        // of a plane
  const std::ptrdiff_t* starts;                   // offsets of a plane's positions in its copy
  std::size_t copy_size;
  const LanePhase* phases;
  std::size_t phase_count, total_depth;
};

// target[image, group, column, position] = bias + sum over the depth of weights * source, for items first to last: all
// images of the first vector of groups, then all of the next.
template <typename T>
struct Depthwise {
  const LaneLayout* layout;
  const T *source, *weights, *bias;
  std::ptrdiff_t group_weight, column_weight;
  T* target;
  std::size_t first, last;
  T* scratch;  // [channels][copy_size], [target_positions][lanes], [columns][total_depth][lanes]
};

// target[group, column, depth] = sum over positions, and images first to last, of factors * source, for the vector of
// groups from `group` on. The layout has one phase.
template <typename T>
struct DepthwiseGradient {
  const LaneLayout* layout;
  const T *source, *factors;
  T* target;
  std::size_t group, first, last;
  T* scratch;  // [channels][copy_size], [target_positions][lanes], [columns][total_depth][lanes]
};

template <typename T>
struct ConvolutionKernels {
  std::size_t lanes;            // per vector
  std::size_t pointwise_width;  // tile width of `pointwise`
  std::size_t (*panels)(std::size_t columns);  // number of panels
  void (*copy_boxes)(const BoxCopy<T>&);
  void (*pack)(const Packing<T>&);
  void (*correlate)(const Correlation<T>&);
  void (*correlate_positions)(const PositionCorrelation<T>&);
  std::size_t (*winograd_stride)(std::size_t channels);
  void (*winograd_weights)(const WinogradWeights<T>&);
  void (*winograd_source)(const WinogradSource<T>&);
  void (*winograd_products)(const WinogradProducts<T>&);
  void (*winograd_factors)(const WinogradSource<T>&);
  void (*winograd_gradient)(const WinogradGradient<T>&);
  void (*winograd_taps)(const WinogradTaps<T>&);
  void (*accumulate)(const Accumulation<T>&);
  void (*unpack)(const Unpacking<T>&);
  void (*add)(const T* from, std::size_t count, T* to);
  void (*turn)(const Turning<T>&);
  void (*pointwise)(const Pointwise<T>&);
  void (*spread)(const Spreading<T>&);
  void (*filter)(const Filtering<T>&);
  void (*filter_gradient)(const FilterGradient<T>&);
  void (*depthwise)(const Depthwise<T>&);
  void (*depthwise_gradient)(const DepthwiseGradient<T>&);
};

struct ConvolutionTable : ByType<ConvolutionKernels> {};

}  // namespace onnxtrain
