#include "gather/node.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include "operators/shapes.h"
#include "ranges.h"
#include "sizes.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// `name` is that of the input, if it has to be told from others.
std::size_t index_from(std::int64_t value, std::size_t size, const char* name = "") {
  const auto signed_size = static_cast<std::int64_t>(size);
  if (value < -signed_size || value >= signed_size) {
    throw std::invalid_argument(std::string(name) + "an index is " + std::to_string(value) + ", and must be from " +
                                std::to_string(-signed_size) + " to " + std::to_string(signed_size - 1) + ".");
  }
  return static_cast<std::size_t>(value < 0 ? value + signed_size : value);
}

constexpr const char* kTaken = "input 4 (taken): ";

void check_indices(const Tensor& tensor, std::size_t size, const char* name = "") {
  const auto* indices = static_cast<const std::int64_t*>(tensor.data);
  for (std::size_t i = 0; i < tensor.count(); ++i) index_from(indices[i], size, name);
}

// Indices below `size` with what is taken at their positions, `row(position)`, as RowSumsCall has them: sorted by index, in
// the order of the positions. A radix sort: its tables fit an L1 cache, however many rows there are.
template <typename Row>
std::unique_ptr<std::uint64_t[]> sort_entries(const Tensor& tensor, std::size_t size, Row row) {
  const auto* indices = static_cast<const std::int64_t*>(tensor.data);
  const std::size_t count = tensor.count();
  std::unique_ptr<std::uint64_t[]> entries(new std::uint64_t[count]), sorted(new std::uint64_t[count]);
  for (std::size_t i = 0; i < count; ++i) {
    entries[i] = static_cast<std::uint64_t>(index_from(indices[i], size)) << 32 | row(i);
  }
  const auto bits = static_cast<std::size_t>(std::bit_width(std::max<std::size_t>(size, 1) - 1));
  const std::size_t passes = divided_up(bits, tuning::kSortedBits);
  for (std::size_t pass = 0; pass < passes; ++pass) {
    const std::size_t low = bits * pass / passes, digits = std::size_t{1} << (bits * (pass + 1) / passes - low);
    const auto digit = [&](std::uint64_t entry) { return entry >> (32 + low) & (digits - 1); };
    std::uint32_t starts[(std::size_t{1} << tuning::kSortedBits) + 1];
    std::fill_n(starts, digits + 1, 0);
    for (std::size_t i = 0; i < count; ++i) ++starts[digit(entries[i]) + 1];
    for (std::size_t i = 1; i < digits; ++i) starts[i] += starts[i - 1];
    for (std::size_t i = 0; i < count; ++i) sorted[starts[digit(entries[i])]++] = entries[i];
    std::swap(entries, sorted);
  }
  return entries;
}

// Rows and positions of entries have 32 bits each.
void require_entries(std::size_t number, const char* what) {
  if (number > std::numeric_limits<std::uint32_t>::max()) {
    throw std::invalid_argument("there are " + std::to_string(number) + " " + what + ", and may be at most " +
                                std::to_string(std::numeric_limits<std::uint32_t>::max()) + ".");
  }
}

// Copies rows of `bytes` bytes at `count` indices side by side, and asks for those at the indices that follow, `known` in
// all: they are read in an order that no CPU foresees. Whole cache lines are copied without a call.
void copy_rows(const unsigned char* data, std::size_t size, std::size_t bytes, const std::int64_t* indices,
               std::size_t count, std::size_t known, unsigned char* to) {
  constexpr std::size_t kLine = 64;
  const std::size_t asked = std::min(bytes, tuning::kAheadRowBytes);
  for (std::size_t i = 0; i < count; ++i, to += bytes) {
    if (i + tuning::kAheadRows < known) {
      const unsigned char* next = data + index_from(indices[i + tuning::kAheadRows], size) * bytes;
      for (std::size_t line = 0; line < asked; line += kLine) __builtin_prefetch(next + line);
    }
    const unsigned char* from = data + index_from(indices[i], size) * bytes;
    std::size_t done = 0;
    for (; done + kLine <= bytes; done += kLine) std::memcpy(to + done, from + done, kLine);
    if (done < bytes) std::memcpy(to + done, from + done, bytes - done);
  }
}

}  // namespace

const Signature GatherGradientNode::kSignature = {
    "GatherGradient", {"dy", "indices", "shape", "other", "taken"}, 3, 1, {-1}, {{3, 0}},
    {ort::kTypeUndefined, ort::kTypeInt64, ort::kTypeInt64, ort::kTypeUndefined, ort::kTypeInt64}};

void GatherGradientNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  if (inputs[2].shape.size() != 1) {
    throw std::invalid_argument("input 2 (shape) has shape " + text_of(inputs[2].shape) + ", and must be a list.");
  }
  const std::vector<std::int64_t> shape = inputs.sizes(2);
  const std::size_t axis = axis_of(axis_, shape), size = static_cast<std::size_t>(shape[axis]);
  const Tensor& indices = inputs[1];
  const bool has_other = inputs.has(3) && inputs[3].count() != 0, takes = inputs.has(4);
  std::vector<std::int64_t> gathered(shape.begin(), shape.begin() + static_cast<std::ptrdiff_t>(axis));
  if (takes) {
    inputs.require_shape(4, indices.shape);
    gathered.push_back(inputs[0].shape.size() == shape.size() ? inputs[0].shape[axis] : -1);
  } else {
    gathered.insert(gathered.end(), indices.shape.begin(), indices.shape.end());
  }
  gathered.insert(gathered.end(), shape.begin() + static_cast<std::ptrdiff_t>(axis) + 1, shape.end());
  inputs.require_shape(0, gathered);
  if (has_other) {
    inputs.require_same_type(3, 0);
    inputs.require_shape(3, shape);
  }

  const std::size_t outer = product(shape, 0, axis), width = product(shape, axis + 1, shape.size());
  const std::size_t count = takes ? static_cast<std::size_t>(gathered[axis]) : indices.count();
  auto* table = static_cast<unsigned char*>(call.output(0, shape));
  const auto* other = has_other ? static_cast<const unsigned char*>(inputs[3].data) : nullptr;
  if (outer == 0 || width == 0) {  // no elements, whatever the number of rows
    check_indices(indices, size);
    if (takes) check_indices(inputs[4], count, kTaken);
    return;
  }
  const auto* taken = takes ? static_cast<const std::int64_t*>(inputs[4].data) : nullptr;
  require_entries(size, "rows of the data");
  require_entries(std::max(count, indices.count()), "rows or indices");
  const auto entries =
      takes ? sort_entries(indices, size, [&](std::size_t i) { return index_from(taken[i], count, kTaken); })
            : sort_entries(indices, size, [](std::size_t i) { return i; });
  const auto* rows = static_cast<const unsigned char*>(inputs[0].data);
  const auto kernel = kernels()->row_sums[type];
  for_each_range(call.parallel_for(), outer * size, items_per_task(width), [&](std::size_t first, std::size_t last) {
    while (first < last) {  // a range may span several tables
      const std::size_t o = first / size, begin = first % size, end = std::min(size, begin + (last - first));
      const std::size_t at = o * size * width * size_of(type);
      const RowSumsCall sums = {width, rows + o * count * width * size_of(type), entries.get(), indices.count(),
                                has_other ? other + at : nullptr, table + at};
      kernel(sums, begin, end);
      first += end - begin;
    }
  });
}

const Signature ScatterElementsNode::kSignature = {
    "ScatterElements", {"data", "indices", "updates"}, 3, 1, {0}, {{0, 0}}, {ort::kTypeUndefined, ort::kTypeInt64}};

ScatterElementsNode::ScatterElementsNode(const Attributes& attributes)
    : axis_(attributes.integer("axis", 0)), adds_(attributes.text("reduction", "none") == "add") {}

void ScatterElementsNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  inputs.require_same_type(2, 0);
  inputs.require_same_shape(2, 1);
  const std::vector<std::int64_t>&shape = inputs[0].shape, &given = inputs[1].shape;
  const std::size_t axis = axis_of(axis_, shape), last = shape.size() - 1;
  bool fits = given.size() == shape.size();
  for (std::size_t i = 0; fits && i <= last; ++i) fits = i == axis || given[i] <= shape[i];
  if (!fits) {
    throw std::invalid_argument("input 1 (indices) has shape " + text_of(given) + ", and must fit into that of the data, " +
                                text_of(shape) + ".");
  }
  auto* const to = static_cast<unsigned char*>(call.output(0, shape));
  if (to != inputs[0].data) std::memcpy(to, inputs[0].data, inputs[0].count() * size_of(type));
  if (inputs[1].count() == 0) return;
  const std::size_t rows = product(given, axis, last), length = static_cast<std::size_t>(given[last]);
  const std::size_t stride = product(shape, axis + 1, shape.size()), size = static_cast<std::size_t>(shape[axis]);
  const auto write = [&]<typename T>(T* y, std::size_t first, std::size_t end) {
    const T* updates = static_cast<const T*>(inputs[2].data);
    const auto* indices = static_cast<const std::int64_t*>(inputs[1].data);
    for (std::size_t line = first * rows; line < end * rows; ++line) {  // along the last axis
      std::size_t start = 0, rest = line, inside = 1;  // where it begins in the data
      for (std::size_t i = last + 1; i-- > 0; inside *= static_cast<std::size_t>(shape[i])) {
        if (i == last) continue;
        const auto count = static_cast<std::size_t>(given[i]);
        if (i != axis) start += rest % count * inside;
        rest /= count;
      }
      const std::size_t own = axis == last ? 0 : 1, step = stride, count = length, most = size;
      const std::int64_t* const at = indices + line * length;
      const T* const from = updates + line * length;
      T* const to_line = y + start;
      const auto each = [&](auto change) {
        for (std::size_t j = 0; j < count; ++j) {
          const std::int64_t index = at[j] < 0 ? at[j] + static_cast<std::int64_t>(most) : at[j];
          if (static_cast<std::uint64_t>(index) >= most) index_from(at[j], most);  // throws
          change(to_line[static_cast<std::size_t>(index) * step + j * own], from[j]);
        }
      };
      if (adds_) {
        each([](T& element, T update) { element += update; });
      } else {
        each([](T& element, T update) { element = update; });
      }
    }
  };
  const std::size_t outer = axis == last ? product(given, 0, last) : product(given, 0, axis);
  const std::size_t each = axis == last ? length : checked_product(rows, length);
  for_each_range(call.parallel_for(), outer, items_per_task(each), [&](std::size_t first, std::size_t end) {
    if (type == kFloat) {
      write(reinterpret_cast<float*>(to), first, end);
    } else {
      write(reinterpret_cast<double*>(to), first, end);
    }
  });
}

const Signature GatherConcatNode::kSignature = {
    "GatherConcat", {"data", "indices", "x"}, 3, 1, {-1}, {}, {ort::kTypeUndefined, ort::kTypeInt64}};

void GatherConcatNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  inputs.require_same_type(2, 0);
  const std::vector<std::int64_t>&data = inputs[0].shape, &indices = inputs[1].shape, &x = inputs[2].shape;
  for (const auto& [index, name] : {std::pair(0, "data"), {1, "indices"}, {2, "x"}}) {
    if (inputs[index].shape.size() == 2) continue;
    throw std::invalid_argument("input " + std::to_string(index) + " (" + name + ") has shape " +
                                text_of(inputs[index].shape) + ", and must have two axes.");
  }
  inputs.require_shape(2, {indices[0], x[1]});
  const auto count = static_cast<std::size_t>(indices[0]), each = static_cast<std::size_t>(indices[1]);
  const std::size_t size = static_cast<std::size_t>(data[0]), bytes = static_cast<std::size_t>(data[1]) * size_of(type);
  const std::size_t own = static_cast<std::size_t>(x[1]) * size_of(type), line = own + each * bytes;
  auto* const y = static_cast<unsigned char*>(call.output(0, {indices[0], x[1] + indices[1] * data[1]}));
  if (bytes == 0 || size == 0) check_indices(inputs[1], size);
  const auto* rows = static_cast<const unsigned char*>(inputs[0].data);
  const auto* beside = static_cast<const unsigned char*>(inputs[2].data);
  const auto* at = static_cast<const std::int64_t*>(inputs[1].data);
  for_each_range(call.parallel_for(), count, items_per_task(line / size_of(type)), [&](std::size_t first, std::size_t last) {
    for (std::size_t row = first; row < last; ++row) {
      unsigned char* const to = y + row * line;
      if (own != 0) std::memcpy(to + (before_ ? 0 : each * bytes), beside + row * own, own);
      if (bytes != 0) copy_rows(rows, size, bytes, at + row * each, each, (last - row) * each, to + (before_ ? own : 0));
    }
  });
}

}  // namespace onnxtrain
