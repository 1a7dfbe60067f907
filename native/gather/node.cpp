#include "gather/node.h"

#include "operators/shapes.h"
#include "ranges.h"

namespace onnxtrain {
namespace {

// Counting sort of a list of indices: index i stands at positions[starts[i]] ... positions[starts[i + 1] - 1], in
// order.
struct SortedPositions {
  std::vector<std::size_t> starts, positions;
};

std::size_t index_from(std::int64_t value, std::size_t size) {
  const auto signed_size = static_cast<std::int64_t>(size);
  if (value < -signed_size || value >= signed_size) {
    throw std::invalid_argument("an index is " + std::to_string(value) + ", and must be from " +
                                std::to_string(-signed_size) + " to " + std::to_string(signed_size - 1) + ".");
  }
  return static_cast<std::size_t>(value < 0 ? value + signed_size : value);
}

void check_indices(const Tensor& tensor, std::size_t size) {
  const auto* indices = static_cast<const std::int64_t*>(tensor.data);
  for (std::size_t i = 0; i < tensor.count(); ++i) index_from(indices[i], size);
}

SortedPositions sort_positions(const Tensor& tensor, std::size_t size) {
  const auto* indices = static_cast<const std::int64_t*>(tensor.data);
  const std::size_t count = tensor.count();
  SortedPositions sorted;
  sorted.starts.assign(size + 2, 0);
  sorted.positions.resize(count);
  // Offset by one: storing a position advances the start of its index to the next index's start.
  for (std::size_t i = 0; i < count; ++i) ++sorted.starts[index_from(indices[i], size) + 2];
  for (std::size_t i = 2; i < size + 2; ++i) sorted.starts[i] += sorted.starts[i - 1];
  for (std::size_t i = 0; i < count; ++i) sorted.positions[sorted.starts[index_from(indices[i], size) + 1]++] = i;
  return sorted;
}

}  // namespace

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
  const SortedPositions sorted = sort_positions(indices, size);
  const auto* rows = static_cast<const unsigned char*>(inputs[0].data);
  const auto kernel = kernels()->row_sums[type];
  for_each_range(call.parallel_for(), outer * size, items_per_task(width), [&](std::size_t first, std::size_t last) {
    while (first < last) {  // a range may span several tables
      const std::size_t o = first / size, begin = first % size, end = std::min(size, begin + (last - first));
      const std::size_t at = o * size * width * size_of(type);
      const RowSumsCall sums = {width, rows + o * count * width * size_of(type), sorted.starts.data(),
                                sorted.positions.data(), has_other ? other + at : nullptr, table + at};
      kernel(sums, begin, end);
      first += end - begin;
    }
  });
}

}  // namespace onnxtrain
