#include "resize/node.h"

#include <algorithm>

#include "operators/shapes.h"
#include "ranges.h"
#include "scratch.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// The sums of one axis, and the memory of their weights.
template <typename T>
struct Taps {
  std::vector<std::size_t> first;
  std::vector<T> weights;  // [taps][out]
  ResizeAxis axis;

  // From a matrix whose element for input i and output j is at i * in_stride + j * out_stride.
  Taps(const T* matrix, std::size_t in, std::size_t out, std::size_t in_stride, std::size_t out_stride) : first(out, 0) {
    std::size_t taps = 1;
    for (std::size_t j = 0; j < out; ++j) {
      const auto is_zero = [&](std::size_t i) { return matrix[i * in_stride + j * out_stride] == T(0); };
      std::size_t begin = 0, end = in;
      while (begin < end && is_zero(begin)) ++begin;
      while (end > begin && is_zero(end - 1)) --end;
      first[j] = begin;
      taps = std::max(taps, end - begin);
    }
    weights.resize(checked_product(taps, out));
    for (std::size_t j = 0; j < out; ++j) {
      first[j] = std::min(first[j], in - taps);
      for (std::size_t tap = 0; tap < taps; ++tap) {
        weights[tap * out + j] = matrix[(first[j] + tap) * in_stride + j * out_stride];
      }
    }
    axis = {in, out, taps, first.data(), weights.data()};
  }
};

template <typename T>
void resize_as(const Tensor& x, const Tensor (&matrices)[2], bool transposed, std::size_t planes, void* y,
               const ParallelFor& parallel_for) {
  const auto taps_of = [&](const Tensor& matrix) {
    const auto rows = static_cast<std::size_t>(matrix.shape[0]), columns = static_cast<std::size_t>(matrix.shape[1]);
    const T* data = static_cast<const T*>(matrix.data);
    return transposed ? Taps<T>(data, columns, rows, 1, columns) : Taps<T>(data, rows, columns, columns, 1);
  };
  const Taps<T> columns = taps_of(matrices[0]), rows = taps_of(matrices[1]);
  const ResizeAxis &h = columns.axis, &w = rows.axis;
  const std::size_t in_between = h.in <= h.out ? checked_product(h.in, w.out) : checked_product(h.out, w.in);
  const std::size_t volume = std::max(checked_product(h.in, w.in), checked_product(h.out, w.out));
  const std::size_t items = items_per_task(volume);
  const std::size_t at_once = std::min(items, std::max<std::size_t>(1, tuning::kTaskElements / in_between));
  const ResizeCall call = {{h, w}, at_once, x.data, y};
  const auto kernel = kernels()->resize[sizeof(T) == sizeof(float) ? kFloat : kDouble];
  constexpr std::size_t kMostLanes = 64 / sizeof(T);
  BufferPool pool(checked_product(
      checked_sum(checked_product(at_once, in_between), checked_product(checked_sum(w.in, w.out), kMostLanes)), sizeof(T)));
  for_each_range(parallel_for, planes, items, [&](std::size_t first, std::size_t last) {
    pool.lend([&](const Buffer& buffer) { kernel(call, first, last, buffer.as<T>()); });
  });
}

}  // namespace

const Signature ResizeByMatricesNode::kSignature = {"ResizeByMatrices", {"x", "rows", "columns"}, 3, 1, {-1}, {}};

ResizeByMatricesNode::ResizeByMatricesNode(const Attributes& attributes)
    : transposed_(attributes.integer("transposed", 0) != 0) {}

void ResizeByMatricesNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  std::vector<std::int64_t> shape = inputs[0].shape;
  if (shape.size() < 2) {
    throw std::invalid_argument("input 0 (x) has shape " + text_of(shape) + ", and must have two axes or more.");
  }
  const Tensor matrices[] = {inputs[1], inputs[2]};
  for (std::size_t i = 0; i < 2; ++i) {
    inputs.require_same_type(1 + i, 0);
    const std::vector<std::int64_t>& matrix = matrices[i].shape;
    std::int64_t& size = shape[shape.size() - 2 + i];
    if (matrix.size() != 2 || matrix[transposed_ ? 1 : 0] != size) {
      throw std::invalid_argument("input " + std::to_string(1 + i) + (i == 0 ? " (rows)" : " (columns)") + " has shape " +
                                  text_of(matrix) + ", and must have two axes, axis " + (transposed_ ? "1" : "0") + " of size " +
                                  std::to_string(size) + " as x.");
    }
    size = matrix[transposed_ ? 0 : 1];
  }
  void* y = call.output(0, shape);
  const std::size_t planes = product(shape, 0, shape.size() - 2), count = product(shape, 0, shape.size());
  if (count == 0) return;
  if (inputs[0].count() == 0) {  // sums of nothing
    std::fill_n(static_cast<char*>(y), checked_product(count, size_of(type)), 0);
    return;
  }
  (type == kFloat ? resize_as<float> : resize_as<double>)(inputs[0], matrices, transposed_, planes, y, call.parallel_for());
}

}  // namespace onnxtrain
