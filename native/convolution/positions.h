// The positions of a block as vectors of neighbours, for kernels whose lanes are positions.
#pragma once

#include <vector>

#include "convolution/blocks.h"

namespace onnxtrain {

// Where the positions of a grid lie in a tensor with planes of size `plane`: position q at start + step * q.
struct Placement {
  Index plane, start, step;
  std::ptrdiff_t image_stride;
};

struct PositionVectors {
  std::vector<PositionVector> vectors;
  std::vector<PositionRun> runs;

  // Rows of whole vectors are taken apart. Otherwise the rows of a plane are one line, with the elements of the copy between
  // them; its last vector ends with it, and positions that it shares with the vector before belong to that one.
  PositionVectors(const Blocks& blocks, const Block& block, const Placement& target, std::size_t lanes);

  // Number of vectors of a box of positions, at most, if rows of the copy have `row` elements.
  static std::size_t count(const Index& box, std::ptrdiff_t row, std::size_t lanes);

 private:
  void add_line(std::ptrdiff_t source, std::ptrdiff_t target, const Index& box, std::ptrdiff_t row,
                const Placement& placement, std::size_t lanes);
};

// Whether neighbouring positions of a grid read neighbouring elements, in every row.
inline bool reads_neighbours(const Grid& grid) { return grid.step == Index{1, 1, 1}; }

}  // namespace onnxtrain
