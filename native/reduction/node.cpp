#include "reduction/node.h"

#include <algorithm>
#include <vector>

#include "operators/shapes.h"
#include "ranges.h"

namespace onnxtrain {
namespace {

// Columns that a task reduces or scans at least: some cache lines of each row.
constexpr std::size_t kLeastColumns = 256;

std::vector<std::int64_t> integers_of(const Tensor& tensor) {
  const auto* data = static_cast<const std::int64_t*>(tensor.data);
  return {data, data + tensor.count()};
}

void reduce(const Signature& signature, const Call& call, ReductionKind kind, bool keeps) {
  const Inputs inputs(signature, call);
  const ElementType type = inputs.element_type(0);
  const std::vector<std::int64_t>& shape = inputs[0].shape;
  std::vector<bool> reduced(shape.size());
  for (const std::int64_t axis : integers_of(inputs[1])) reduced[axis_of(axis, shape)] = true;
  std::vector<std::int64_t> result;
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    if (!reduced[axis] || keeps) result.push_back(reduced[axis] ? 1 : shape[axis]);
  }
  const bool is_first = !shape.empty() && reduced.front();
  const auto count = static_cast<std::size_t>(std::count(reduced.begin(), reduced.end(), true));
  const std::size_t edge = is_first ? count : shape.size() - count;
  const bool together = std::is_partitioned(reduced.begin(), reduced.end(), [&](bool each) { return each == is_first; });
  if (shape.empty() || count == 0 || !together || (!is_first && kind != ReductionKind::kProduct)) {
    throw std::invalid_argument("input 1 (axes) has " + std::to_string(count) + " axes of x, of shape " + text_of(shape) +
                                ", and must have the first ones" +
                                (kind == ReductionKind::kProduct ? " or the last ones." : "."));
  }
  const std::size_t before = product(shape, 0, edge), behind = product(shape, edge, shape.size());
  const ReductionCall reduction = {is_first ? before : behind, behind, inputs[0].data, call.output(0, result)};
  const auto kernel =
      is_first ? kernels()->reduce_columns[static_cast<int>(kind)][type] : kernels()->multiply_rows[type];
  const std::size_t items = std::max(items_per_task(reduction.size), is_first ? kLeastColumns : 1);
  for_each_range(call.parallel_for(), is_first ? behind : before, items,
                 [&](std::size_t first, std::size_t last) { kernel(reduction, first, last); });
}

void scan(const Signature& signature, const Call& call, bool multiplies, bool exclusive, bool reverse) {
  const Inputs inputs(signature, call);
  const ElementType type = inputs.element_type(0);
  const std::vector<std::int64_t>& shape = inputs[0].shape;
  if (inputs[1].count() != 1) {
    throw std::invalid_argument("input 1 (axis) has shape " + text_of(inputs[1].shape) + ", and must be one number.");
  }
  const std::size_t axis = axis_of(*static_cast<const std::int64_t*>(inputs[1].data), shape);
  const ScanCall lines = {static_cast<std::size_t>(shape[axis]), product(shape, axis + 1, shape.size()), exclusive, reverse,
                          inputs[0].data, call.output(0, shape)};
  if (inputs[0].count() == 0) return;
  const auto kernel = kernels()->scan[multiplies][type];
  const std::size_t items = std::max(items_per_task(lines.size), lines.inner == 1 ? 1 : kLeastColumns);
  for_each_range(call.parallel_for(), product(shape, 0, axis) * lines.inner, items,
                 [&](std::size_t first, std::size_t last) { kernel(lines, first, last); });
}

Signature of_axes(const char* name) {
  return {name, {"x", "axes"}, 2, 1, {-1}, {}, {ort::kTypeUndefined, ort::kTypeInt64}};
}

Signature along_axis(const char* name) {
  return {name, {"x", "axis"}, 2, 1, {0}, {{0, 0}}, {ort::kTypeUndefined, ort::kTypeInt64}};
}

}  // namespace

template <>
const Signature ReductionNode<ReductionKind::kSum>::kSignature = of_axes("ReduceSum");
template <>
const Signature ReductionNode<ReductionKind::kMean>::kSignature = of_axes("ReduceMean");
template <>
const Signature ReductionNode<ReductionKind::kSumOfSquares>::kSignature = of_axes("ReduceSumSquare");
template <>
const Signature ReductionNode<ReductionKind::kProduct>::kSignature = of_axes("ReduceProd");

template <ReductionKind kind>
void ReductionNode<kind>::compute(const Call& call) const {
  reduce(kSignature, call, kind, keeps_);
}

template class ReductionNode<ReductionKind::kSum>;
template class ReductionNode<ReductionKind::kMean>;
template class ReductionNode<ReductionKind::kSumOfSquares>;
template class ReductionNode<ReductionKind::kProduct>;

template <>
const Signature ScanNode<false>::kSignature = along_axis("CumSum");
template <>
const Signature ScanNode<true>::kSignature = along_axis("CumProd");

template <bool multiplies>
void ScanNode<multiplies>::compute(const Call& call) const {
  scan(kSignature, call, multiplies, exclusive_, reverse_);
}

template class ScanNode<false>;
template class ScanNode<true>;

}  // namespace onnxtrain
