#include "convolution/positions.h"

#include <algorithm>

namespace onnxtrain {
namespace {

bool has_whole_rows(const Index& box, std::size_t lanes) { return box[2] % static_cast<std::ptrdiff_t>(lanes) == 0; }

// From the first position of a plane to one past the last.
std::ptrdiff_t line_length(const Index& box, std::ptrdiff_t row) { return (box[1] - 1) * row + box[2]; }

}  // namespace

PositionVectors::PositionVectors(const Blocks& blocks, const Block& block, const Placement& target, std::size_t lanes) {
  const Index& box = block.size;
  if (product(box) == 0) return;
  const std::ptrdiff_t row = blocks.extent[2];
  for (std::size_t i = 0; i < block.images; ++i) {
    for (std::ptrdiff_t d = 0; d < box[0]; ++d) {
      const std::ptrdiff_t source = static_cast<std::ptrdiff_t>(i) * blocks.image_stride + d * blocks.extent[1] * row;
      const std::ptrdiff_t at_d = target.start[0] + (block.start[0] + d) * target.step[0];
      const std::ptrdiff_t at_h = target.start[1] + block.start[1] * target.step[1];
      const std::ptrdiff_t at_w = target.start[2] + block.start[2] * target.step[2];
      const std::ptrdiff_t first = static_cast<std::ptrdiff_t>(i) * target.image_stride +
                                   (at_d * target.plane[1] + at_h) * target.plane[2] + at_w;
      add_line(source, first, box, row, target, lanes);
    }
  }
}

void PositionVectors::add_line(std::ptrdiff_t source, std::ptrdiff_t target, const Index& box, std::ptrdiff_t row,
                               const Placement& placement, std::size_t lanes) {
  const auto width = static_cast<std::ptrdiff_t>(lanes), length = line_length(box, row);
  const std::ptrdiff_t target_row = placement.step[1] * placement.plane[2];
  if (has_whole_rows(box, lanes)) {
    for (std::ptrdiff_t h = 0; h < box[1]; ++h) {
      for (std::ptrdiff_t w = 0; w < box[2]; w += width) {
        vectors.push_back({source + h * row + w, runs.size(), runs.size() + 1});
        runs.push_back({0, lanes, target + h * target_row + w * placement.step[2]});
      }
    }
    return;
  }
  for (std::ptrdiff_t at = 0; at < length;) {
    const std::ptrdiff_t start = std::max<std::ptrdiff_t>(std::min(at, length - width), 0);
    const std::ptrdiff_t end = std::min(start + width, length);
    const std::size_t first_run = runs.size();
    while (at < end) {
      const std::ptrdiff_t h = at / row, w = at % row, count = std::min(box[2] - w, end - at);
      if (count > 0) {
        runs.push_back({static_cast<std::size_t>(at - start), static_cast<std::size_t>(count),
                        target + h * target_row + w * placement.step[2]});
      }
      at = count > 0 && at + count == end ? end : std::min(end, (h + 1) * row);
    }
    if (runs.size() > first_run) vectors.push_back({source + start, first_run, runs.size()});
  }
}

std::size_t PositionVectors::count(const Index& box, std::ptrdiff_t row, std::size_t lanes) {
  const auto planes = static_cast<std::size_t>(box[0]);
  if (has_whole_rows(box, lanes)) return planes * static_cast<std::size_t>(box[1] * box[2]) / lanes;
  return planes * divided_up(static_cast<std::size_t>(line_length(box, row)), lanes);
}

}  // namespace onnxtrain
