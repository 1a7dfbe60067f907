// Sparse weights: what a file holds, checked, and packed for the kernels of this CPU.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "operators/runtime.h"

namespace onnxtrain {

// Entries by groups of outputs, one in each lane of a vector (SparseLanes).
struct LanesOfOutputs {
  std::vector<std::uint32_t> starts;
  std::vector<std::int32_t> positions, outputs;
  std::vector<float> values;
};

// Outputs whose sums a product has together, or a few times as many.
inline constexpr std::size_t kOutputsTogether = 64;

// Entries by slices of the depth, and in a slice by block rows: of each kOutputsTogether outputs, the block rows with the
// fewest entries first, so that the ends of loops over entries can be predicted. Those of a mask stay in their order.
struct SlicedEntries {
  std::size_t slices;
  std::vector<std::uint32_t> rows;    // [slices][block rows]
  std::vector<std::uint32_t> starts;  // [slices][block rows + 1]: of the entries of rows in this order
  std::vector<std::int32_t> offsets;
  std::vector<float> values;
};

// A matrix [outputs, depth] in blocks of outputs that share a position in the depth: constant, or a mask's, whose values
// are read from a dense matrix at each use.
class SparseMatrix {
 public:
  // From `shape` [block rows, depth, block], and the flat indices of the blocks in [block rows, depth] as deltas, with
  // their values [blocks, block]. Throws std::invalid_argument in a sentence if these do not fit together.
  SparseMatrix(const std::vector<std::int64_t>& shape, const Tensor& values, const Tensor& deltas);

  // Where a mask is true: a bool matrix [depth, outputs] or, if transposed, [outputs, depth]. Throws
  // std::invalid_argument for another. Blocks are the largest that the mask has, or of one output if not `in_blocks`.
  SparseMatrix(const Tensor& mask, bool transposed, bool in_blocks);

  std::size_t outputs() const { return outputs_; }
  std::size_t depth() const { return depth_; }
  std::size_t block() const { return block_; }  // of the kernels: 1, 4 or 8
  std::size_t products() const { return positions_.size() * block_; }  // multiplications per row or pixel
  std::size_t block_rows() const { return outputs_ / block_; }

  // The entries in slices of that many positions, with the positions mapped by `offset_of`; kept for the last few keys.
  using Entries = std::shared_ptr<const SlicedEntries>;
  Entries entries(const std::vector<std::size_t>& key, std::size_t slice,
                  const std::function<std::int32_t(std::size_t)>& offset_of) const;
  // Packed at the first use.
  const LanesOfOutputs& by_lanes() const;

  // Of a mask: the entries of each block row begin at starts()[row], one more than there are rows; their positions in
  // the depth; and for each value of an entry its index in the dense matrix, which is laid out like the mask.
  const std::vector<std::uint32_t>& starts() const { return starts_; }
  const std::vector<std::int32_t>& positions() const { return positions_; }
  const std::vector<std::int32_t>& sources() const { return sources_; }

 private:
  LanesOfOutputs pack_lanes() const;
  Entries sliced(std::size_t slice, const std::function<std::int32_t(std::size_t)>& offset_of) const;

  std::size_t outputs_, depth_, block_;
  std::vector<std::uint32_t> starts_;
  std::vector<std::int32_t> positions_, sources_;
  std::vector<float> values_;  // empty for a mask

  struct Kept {
    std::vector<std::size_t> key;
    Entries entries;
  };
  mutable std::mutex mutex_;
  mutable std::array<Kept, 4> kept_;
  mutable std::size_t next_ = 0;
  mutable std::once_flag packed_;
  mutable LanesOfOutputs lanes_;
};

}  // namespace onnxtrain
