#include "gather/node.h"

#include <algorithm>

#include "gather/positions.h"
#include "operators/shapes.h"
#include "ranges.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

void check_indices(const Tensor& tensor, std::size_t size) {
  const auto* indices = static_cast<const std::int64_t*>(tensor.data);
  for (std::size_t i = 0; i < tensor.count(); ++i) index_from(indices[i], size);
}

// Copies the rows at indices [first, last), each of `bytes` bytes, and asks for those that follow. Whole cache lines are
// copied without a call.
void copy_rows(const unsigned char* data, std::size_t size, std::size_t bytes, const std::int64_t* indices,
               std::size_t first, std::size_t last, unsigned char* to) {
  constexpr std::size_t kLine = 64;
  const std::size_t asked = std::min(bytes, tuning::kAheadRowBytes);
  for (std::size_t i = first; i < last; ++i, to += bytes) {
    if (i + tuning::kAheadRows < last) {
      const unsigned char* next = data + index_from(indices[i + tuning::kAheadRows], size) * bytes;
      for (std::size_t line = 0; line < asked; line += kLine) __builtin_prefetch(next + line);
    }
    const unsigned char* from = data + index_from(indices[i], size) * bytes;
    std::size_t done = 0;
    for (; done + kLine <= bytes; done += kLine) __builtin_memcpy(to + done, from + done, kLine);
    if (done < bytes) __builtin_memcpy(to + done, from + done, bytes - done);
  }
}

}  // namespace

const Signature GatherNode::kSignature = {
    "Gather", {"data", "indices"}, 2, 1, {-1}, {}, {ort::kTypeUndefined, ort::kTypeInt64}};

void GatherNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  const std::vector<std::int64_t>& table = inputs[0].shape;
  if (table.empty()) throw std::invalid_argument("input 0 (data) is a number, and must have rows.");
  const Tensor& indices = inputs[1];
  std::vector<std::int64_t> shape = indices.shape;
  shape.insert(shape.end(), table.begin() + 1, table.end());
  const auto size = static_cast<std::size_t>(table[0]);
  const std::size_t width = product(table, 1, table.size()), bytes = width * size_of(type);
  auto* to = static_cast<unsigned char*>(call.output(0, shape));
  if (width == 0) return check_indices(indices, size);
  const auto* data = static_cast<const unsigned char*>(inputs[0].data);
  const auto* at = static_cast<const std::int64_t*>(indices.data);
  for_each_range(call.parallel_for(), indices.count(), items_per_task(width), [&](std::size_t first, std::size_t last) {
    copy_rows(data, size, bytes, at, first, last, to + first * bytes);
  });
}

const Signature GatherGradientNode::kSignature = {
    "GatherGradient", {"dy", "indices", "shape", "other"}, 3, 1, {-1}, {{3, 0}},
    {ort::kTypeUndefined, ort::kTypeInt64, ort::kTypeInt64}};

void GatherGradientNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  if (inputs[2].shape.size() != 1) {
    throw std::invalid_argument("input 2 (shape) has shape " + text_of(inputs[2].shape) + ", and must be a list.");
  }
  const std::vector<std::int64_t> shape = inputs.sizes(2);
  const std::size_t axis = axis_of(axis_, shape), size = static_cast<std::size_t>(shape[axis]);
  const Tensor& indices = inputs[1];
  std::vector<std::int64_t> gathered(shape.begin(), shape.begin() + static_cast<std::ptrdiff_t>(axis));
  gathered.insert(gathered.end(), indices.shape.begin(), indices.shape.end());
  gathered.insert(gathered.end(), shape.begin() + static_cast<std::ptrdiff_t>(axis) + 1, shape.end());
  inputs.require_shape(0, gathered);
  const bool has_other = inputs.has(3);
  if (has_other) {
    inputs.require_same_type(3, 0);
    inputs.require_shape(3, shape);
  }

  const std::size_t count = indices.count();
  const std::size_t outer = product(shape, 0, axis), width = product(shape, axis + 1, shape.size());
  auto* table = static_cast<unsigned char*>(call.output(0, shape));
  const auto* other = has_other ? static_cast<const unsigned char*>(inputs[3].data) : nullptr;
  if (outer == 0 || width == 0) return check_indices(indices, size);  // no elements, whatever the number of rows
  const SortedPositions sorted(static_cast<const std::int64_t*>(indices.data), count, size);
  const auto* rows = static_cast<const unsigned char*>(inputs[0].data);
  const auto kernel = kernels()->row_sums[type];
  for_each_range(call.parallel_for(), outer * size, items_per_task(width), [&](std::size_t first, std::size_t last) {
    while (first < last) {  // a range may span several tables
      const std::size_t o = first / size, begin = first % size, end = std::min(size, begin + (last - first));
      const std::size_t at = o * size * width * size_of(type);
      const RowSumsCall sums = {width, rows + o * count * width * size_of(type), sorted.starts.data(),
                                sorted.positions.data(), count, has_other ? other + at : nullptr, table + at};
      kernel(sums, begin, end);
      first += end - begin;
    }
  });
}

}  // namespace onnxtrain
