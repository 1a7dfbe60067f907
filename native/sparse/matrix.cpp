#include "sparse/matrix.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "kernels/kernel_table.h"
#include "operators/fused_node.h"
#include "sizes.h"
#include "sparse/table.h"

namespace onnxtrain {
namespace {

// Offsets are 32 bits wide.
constexpr std::int64_t kMostElements = std::numeric_limits<std::int32_t>::max();

void check_shape(const std::vector<std::int64_t>& shape) {
  const bool sizes = shape.size() == 3 && shape[0] >= 1 && shape[1] >= 1 && shape[0] <= kMostElements / shape[1];
  const bool block = sizes && (shape[2] == 1 || shape[2] == 4 || shape[2] == 16);
  if (block && shape[0] * shape[1] <= kMostElements / shape[2]) return;
  throw std::invalid_argument("attribute 'shape' is " + text_of(shape) +
                              ": it must be [block rows, depth, block], with a block of 1, 4 or 16 and fewer than "
                              "2147483648 elements.");
}

void check_tensors(const std::vector<std::int64_t>& shape, const Tensor& values, const Tensor& deltas) {
  if (deltas.type != ort::kTypeUint16 || deltas.shape.size() != 1) {
    throw std::invalid_argument("input 2 (deltas) has type " + type_name(deltas.type) + " and shape " +
                                text_of(deltas.shape) + ": it must be uint16 with one axis.");
  }
  const std::vector<std::int64_t> expected = {deltas.shape[0], shape[2]};
  if (values.type != ort::kTypeFloat || values.shape != expected) {
    throw std::invalid_argument("input 1 (values) has type " + type_name(values.type) + " and shape " +
                                text_of(values.shape) + ": it must be float with shape " + text_of(expected) +
                                ", a row for each delta.");
  }
}

}  // namespace

SparseMatrix::SparseMatrix(const std::vector<std::int64_t>& shape, const Tensor& values, const Tensor& deltas) {
  check_shape(shape);
  check_tensors(shape, values, deltas);
  const auto block_rows = static_cast<std::size_t>(shape[0]), stored = static_cast<std::size_t>(shape[2]);
  depth_ = static_cast<std::size_t>(shape[1]);
  outputs_ = block_rows * stored;
  block_ = std::min<std::size_t>(stored, 8);
  const std::size_t entries = deltas.count(), parts = stored / block_, total = block_rows * depth_;
  const auto* delta = static_cast<const std::uint16_t*>(deltas.data);
  const auto* value = static_cast<const float*>(values.data);

  // Entries of zeros alone bridge gaps that exceed 16 bits.
  std::vector<std::size_t> flat, kept;
  std::size_t index = 0;
  for (std::size_t e = 0; e < entries; ++e) {
    index += delta[e];
    if (index >= total) {
      throw std::invalid_argument("input 2 (deltas) leads to index " + std::to_string(index) + " at element " +
                                  std::to_string(e) + ", beyond the " + std::to_string(total) + " blocks of attribute "
                                  "'shape' " + text_of(shape) + ".");
    }
    if (e > 0 && delta[e] == 0) {
      throw std::invalid_argument("input 2 (deltas) is 0 at element " + std::to_string(e) +
                                  ": every block after the first needs a delta of at least 1.");
    }
    if (std::all_of(value + e * stored, value + (e + 1) * stored, [](float v) { return v == 0.0f; })) continue;
    flat.push_back(index);
    kept.push_back(e);
  }

  starts_.reserve(block_rows * parts + 1);
  starts_.push_back(0);
  positions_.reserve(kept.size() * parts);
  values_.reserve(kept.size() * stored);
  std::size_t first = 0;
  for (std::size_t row = 0; row < block_rows; ++row) {
    std::size_t last = first;
    while (last < flat.size() && flat[last] < (row + 1) * depth_) ++last;
    for (std::size_t part = 0; part < parts; ++part) {
      for (std::size_t k = first; k < last; ++k) {
        positions_.push_back(static_cast<std::int32_t>(flat[k] - row * depth_));
        const float* from = value + kept[k] * stored + part * block_;
        values_.insert(values_.end(), from, from + block_);
      }
      starts_.push_back(static_cast<std::uint32_t>(positions_.size()));
    }
    first = last;
  }
}

SparseMatrix::SparseMatrix(const Tensor& mask, bool transposed, bool in_blocks) {
  const std::vector<std::int64_t>& shape = mask.shape;
  if (mask.type != ort::kTypeBool || shape.size() != 2 || shape[0] < 1 || shape[1] < 1 ||
      shape[0] > kMostElements / shape[1]) {
    throw std::invalid_argument("the mask has type " + type_name(mask.type) + " and shape " + text_of(shape) +
                                ": it must be bool with two axes and 1 to 2147483647 elements.");
  }
  outputs_ = static_cast<std::size_t>(shape[transposed ? 0 : 1]);
  depth_ = static_cast<std::size_t>(shape[transposed ? 1 : 0]);
  const auto* bytes = static_cast<const std::uint8_t*>(mask.data);  // a file may have others than 0 and 1
  const auto index = [&](std::size_t output, std::size_t position) {
    return transposed ? output * depth_ + position : position * outputs_ + output;
  };
  const auto is_kept = [&](std::size_t output, std::size_t position) { return bytes[index(output, position)] != 0; };
  const auto fits = [&](std::size_t block) {
    if (outputs_ % block != 0) return false;
    for (std::size_t output = 0; output < outputs_; ++output) {
      const std::size_t first = output / block * block;
      for (std::size_t position = 0; position < depth_; ++position) {
        if (is_kept(output, position) != is_kept(first, position)) return false;
      }
    }
    return true;
  };
  block_ = in_blocks && fits(8) ? 8 : in_blocks && fits(4) ? 4 : 1;
  starts_.push_back(0);
  for (std::size_t first = 0; first < outputs_; first += block_) {
    for (std::size_t position = 0; position < depth_; ++position) {
      if (!is_kept(first, position)) continue;
      positions_.push_back(static_cast<std::int32_t>(position));
      for (std::size_t b = 0; b < block_; ++b) {
        sources_.push_back(static_cast<std::int32_t>(index(first + b, position)));
      }
    }
    starts_.push_back(static_cast<std::uint32_t>(positions_.size()));
  }
}

SparseMatrix::Entries SparseMatrix::entries(const std::vector<std::size_t>& key, std::size_t slice,
                                            const std::function<std::int32_t(std::size_t)>& offset_of) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Kept& kept : kept_) {
    if (kept.entries != nullptr && kept.key == key) return kept.entries;
  }
  Entries made = sliced(slice, offset_of);
  kept_[next_] = {key, made};
  next_ = (next_ + 1) % kept_.size();
  return made;
}

SparseMatrix::Entries SparseMatrix::sliced(std::size_t slice,
                                           const std::function<std::int32_t(std::size_t)>& offset_of) const {
  auto made = std::make_shared<SlicedEntries>();
  made->slices = divided_up(depth_, slice);
  made->starts.reserve(made->slices * (block_rows() + 1));
  made->rows.reserve(made->slices * block_rows());
  made->offsets.reserve(positions_.size());
  made->values.reserve(values_.size());
  const std::size_t rows = block_rows(), together = kOutputsTogether / block_;
  std::vector<std::uint32_t> next(starts_.begin(), starts_.end() - 1), last = next;  // of each block row
  std::vector<std::uint32_t> order(rows);
  for (std::size_t end = slice; end < depth_ + slice; end += slice) {
    for (std::size_t row = 0; row < rows; ++row) {
      while (last[row] < starts_[row + 1] && static_cast<std::size_t>(positions_[last[row]]) < end) ++last[row];
    }
    std::iota(order.begin(), order.end(), std::uint32_t{0});
    for (std::size_t first = 0; first < rows && !values_.empty(); first += together) {
      std::stable_sort(order.begin() + first, order.begin() + std::min(rows, first + together),
                       [&](std::uint32_t a, std::uint32_t b) { return last[a] - next[a] < last[b] - next[b]; });
    }
    for (const std::uint32_t row : order) {
      made->starts.push_back(static_cast<std::uint32_t>(made->offsets.size()));
      for (std::uint32_t entry = next[row]; entry < last[row]; ++entry) {
        made->offsets.push_back(offset_of(static_cast<std::size_t>(positions_[entry])));
        if (values_.empty()) continue;
        const float* const from = values_.data() + entry * block_;
        made->values.insert(made->values.end(), from, from + block_);
      }
    }
    made->starts.push_back(static_cast<std::uint32_t>(made->offsets.size()));
    made->rows.insert(made->rows.end(), order.begin(), order.end());
    next = last;
  }
  return made;
}

const LanesOfOutputs& SparseMatrix::by_lanes() const {
  std::call_once(packed_, [&] { lanes_ = pack_lanes(); });
  return lanes_;
}

LanesOfOutputs SparseMatrix::pack_lanes() const {
  const std::size_t lanes = kernels()->sparse->lanes;
  const auto length = [&](std::size_t output) { return starts_[output / block_ + 1] - starts_[output / block_]; };
  std::vector<std::size_t> order(outputs_);  // by length, so that a group has equally many entries in each lane
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return length(a) > length(b); });

  LanesOfOutputs packed;
  packed.starts.push_back(0);
  for (std::size_t first = 0; first < outputs_; first += lanes) {
    const std::size_t rows = length(order[first]), before = packed.starts.back();
    packed.starts.push_back(static_cast<std::uint32_t>(before + rows));
    packed.positions.resize((before + rows) * lanes, 0);
    packed.values.resize((before + rows) * lanes, 0.0f);
    for (std::size_t lane = 0; lane < lanes; ++lane) {
      const std::size_t place = first + lane;
      packed.outputs.push_back(place < outputs_ ? static_cast<std::int32_t>(order[place]) : -1);
      if (place >= outputs_) continue;
      const std::size_t output = order[place], start = starts_[output / block_];
      for (std::size_t e = 0; e < length(output); ++e) {
        packed.positions[(before + e) * lanes + lane] = positions_[start + e];
        packed.values[(before + e) * lanes + lane] = values_[(start + e) * block_ + output % block_];
      }
    }
  }
  return packed;
}

}  // namespace onnxtrain
