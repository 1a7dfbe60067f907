#include "transforms/node.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "operators/shapes.h"
#include "ranges.h"
#include "scratch.h"

namespace onnxtrain {
namespace {

GridSampleCall sampling_of(const Attributes& attributes) {
  const std::string padding = attributes.text("padding_mode", "zeros");
  if (padding != "zeros" && padding != "border" && padding != "reflection") {
    throw std::invalid_argument("attribute 'padding_mode' is '" + padding + "': it must be zeros, border or reflection.");
  }
  GridSampleCall call = {};
  call.padding = padding == "zeros" ? Padding::kZeros : padding == "border" ? Padding::kBorder : Padding::kReflection;
  call.align_corners = attributes.integer("align_corners", 0) != 0;
  return call;
}

// Fills in the sizes and buffers of x and grid, which are inputs `at` and the one behind it.
void describe(const Inputs& inputs, std::size_t at, GridSampleCall& call) {
  inputs.require_same_type(at + 1, at);
  const std::vector<std::int64_t>&x = inputs[at].shape, &grid = inputs[at + 1].shape;
  if (x.size() != 4 || grid.size() != 4 || grid[0] != x[0] || grid[3] != 2) {
    throw std::invalid_argument("input " + std::to_string(at) + " (x) has shape " + text_of(x) + " and input " +
                                std::to_string(at + 1) + " (grid) has shape " + text_of(grid) +
                                ": they must be [n, c, h, w] and [n, i, j, 2].");
  }
  call.channels = static_cast<std::size_t>(x[1]);
  call.height = static_cast<std::size_t>(x[2]);
  call.width = static_cast<std::size_t>(x[3]);
  call.points = product(grid, 1, 3);
  if (call.points > 0 && product(x, 2, 4) == 0) {
    throw std::invalid_argument("input " + std::to_string(at) + " (x) has shape " + text_of(x) + ", and no pixels.");
  }
  call.x = inputs[at].data;
  call.grid = inputs[at + 1].data;
}

void sample(const GridSampleCall& sampling, std::size_t images, ElementType type, const GridSampleKernel (&kernel)[kElementTypes],
            const ParallelFor& parallel_for) {
  const std::size_t volume = grid_sample_scratch(sampling);
  BufferPool pool(checked_product(volume, size_of(type)));
  const std::size_t each = checked_product(std::max(sampling.points, sampling.height * sampling.width), sampling.channels);
  for_each_range(parallel_for, images, items_per_task(each), [&](std::size_t first, std::size_t last) {
    pool.lend([&](const Buffer& buffer) { kernel[type](sampling, first, last, buffer.as<char>()); });
  });
}

// Factors of a length: fours, then a two, then odd ones.
std::vector<std::size_t> factors_of(std::size_t length) {
  std::vector<std::size_t> factors;
  for (std::size_t factor = 4; length > 1;) {
    if (length % factor == 0) {
      factors.push_back(factor);
      length /= factor;
    } else {
      factor = factor == 4 ? 2 : factor == 2 ? 3 : factor + 2;
    }
  }
  return factors;
}

constexpr std::int64_t kLongest = std::int64_t{1} << 16;
constexpr std::size_t kLargestFactor = 31;  // whose pass takes as many steps for each element

// The cofactors of `a` [n, n], which is overwritten, times `factor`. Elimination with
// complete pivoting puts the pivots that vanish last. No cofactor is divided by the last one, so that a singular
// matrix has them.
void cofactors_of(std::vector<double>& a, std::size_t n, double factor, std::vector<double>& cofactors) {
  std::vector<std::size_t> rows(n), columns(n);
  for (std::size_t i = 0; i < n; ++i) rows[i] = columns[i] = i;
  std::fill(cofactors.begin(), cofactors.end(), 0.0);
  for (std::size_t k = 0; k < n; ++k) {
    std::size_t row = k, column = k;
    double largest = std::abs(a[k * n + k]);
    for (std::size_t i = k; i < n; ++i) {
      for (std::size_t j = k; j < n; ++j) {
        if (std::abs(a[i * n + j]) > largest) largest = std::abs(a[i * n + j]), row = i, column = j;
      }
    }
    if (k + 1 < n && largest == 0) return;  // two pivots vanish, and all cofactors
    if (row != k) {
      std::swap_ranges(a.begin() + static_cast<std::ptrdiff_t>(row * n), a.begin() + static_cast<std::ptrdiff_t>((row + 1) * n),
                       a.begin() + static_cast<std::ptrdiff_t>(k * n));
      std::swap(rows[row], rows[k]);
      factor = -factor;
    }
    if (column != k) {
      for (std::size_t i = 0; i < n; ++i) std::swap(a[i * n + column], a[i * n + k]);
      std::swap(columns[column], columns[k]);
      factor = -factor;
    }
    for (std::size_t i = k + 1; i < n; ++i) {
      const double ratio = a[i * n + k] /= a[k * n + k];
      for (std::size_t j = k + 1; j < n; ++j) a[i * n + j] -= ratio * a[k * n + j];
    }
  }
  // The adjugate of U, whose last pivot is d: D d inverse(U') where U' is without the last row and column and D its
  // determinant, beside -D inverse(U') u above D.
  const std::size_t m = n - 1;
  double determinant = factor;
  for (std::size_t k = 0; k < m; ++k) determinant *= a[k * n + k];
  std::vector<double> adjugate(n * n);
  for (std::size_t c = 0; c < n; ++c) {
    adjugate[c * n + c] = c < m ? determinant * a[m * n + m] / a[c * n + c] : determinant;
    for (std::size_t i = c; i-- > 0;) {
      double sum = 0;
      for (std::size_t j = i + 1; j <= c; ++j) sum += a[i * n + j] * adjugate[j * n + c];
      adjugate[i * n + c] = -sum / a[i * n + i];
    }
  }
  for (std::size_t i = 0; i < n; ++i) {  // times the inverse of L
    for (std::size_t c = n; c-- > 0;) {
      for (std::size_t k = c + 1; k < n; ++k) adjugate[i * n + c] -= adjugate[i * n + k] * a[k * n + c];
      cofactors[rows[c] * n + columns[i]] = adjugate[i * n + c];
    }
  }
}

template <typename T>
void determinant_gradients(const T* dy, const T* x, std::size_t n, std::size_t first, std::size_t last, T* dx) {
  std::vector<double> matrix(n * n), cofactors(n * n);
  for (std::size_t at = first; at < last; ++at) {
    for (std::size_t i = 0; i < n * n; ++i) matrix[i] = static_cast<double>(x[at * n * n + i]);
    cofactors_of(matrix, n, static_cast<double>(dy[at]), cofactors);
    for (std::size_t i = 0; i < n * n; ++i) dx[at * n * n + i] = static_cast<T>(cofactors[i]);
  }
}

}  // namespace

const Signature GridSampleNode::kSignature = {"GridSample", {"x", "grid"}, 2, 1, {-1}, {}};

GridSampleNode::GridSampleNode(const Attributes& attributes) : attributes_(sampling_of(attributes)) {}

void GridSampleNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  GridSampleCall sampling = attributes_;
  describe(inputs, 0, sampling);
  const std::vector<std::int64_t>&x = inputs[0].shape, &grid = inputs[1].shape, y = {x[0], x[1], grid[1], grid[2]};
  sampling.y = call.output(0, y);
  if (product(y, 0, 4) == 0) return;
  sample(sampling, static_cast<std::size_t>(x[0]), type, kernels()->transforms->grid_sample, call.parallel_for());
}

const Signature GridSampleGradientNode::kSignature = {"GridSampleGradient", {"dy", "x", "grid"}, 3, 2, {1, 2}, {}};

GridSampleGradientNode::GridSampleGradientNode(const Attributes& attributes) : attributes_(sampling_of(attributes)) {}

void GridSampleGradientNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  inputs.require_same_type(1, 0);
  GridSampleCall sampling = attributes_;
  describe(inputs, 1, sampling);
  const std::vector<std::int64_t>&x = inputs[1].shape, &grid = inputs[2].shape;
  inputs.require_shape(0, {x[0], x[1], grid[1], grid[2]});
  sampling.dy = inputs[0].data;
  sampling.dx = call.output(0, x);
  sampling.dgrid = call.output(1, grid);
  sample(sampling, static_cast<std::size_t>(x[0]), type, kernels()->transforms->grid_sample_gradient, call.parallel_for());
}

const Signature FourierNode::kSignature = {"Fourier", {"x"}, 1, 1, {-1}, {}};

FourierNode::FourierNode(const Attributes& attributes)
    : axis_(attributes.integer("axis")),
      length_(attributes.integer("length")),
      bins_(attributes.integer("bins")),
      parts_(attributes.integer("parts")) {
  if (length_ < 1 || length_ > kLongest || bins_ < 1 || bins_ > length_ || parts_ < 1 || parts_ > 2) {
    throw std::invalid_argument("attributes 'length', 'bins' and 'parts' are " + std::to_string(length_) + ", " +
                                std::to_string(bins_) + " and " + std::to_string(parts_) + ": they must be from 1 to " +
                                std::to_string(kLongest) + ", from 1 to the length, and 1 or 2.");
  }
  const double number = static_cast<double>(length_);
  const double turn = 2 * std::numbers::pi / number * (attributes.integer("inverse", 0) != 0 ? 1 : -1);
  scale_ = attributes.integer("divided", 0) != 0 ? 1 / number : 1.0;
  factors_ = factors_of(static_cast<std::size_t>(length_));
  if (length_ > 1 && factors_.back() > kLargestFactor) {
    throw std::invalid_argument("attribute 'length' is " + std::to_string(length_) + ", with the factor " +
                                std::to_string(factors_.back()) + ": its prime factors must be at most " +
                                std::to_string(kLargestFactor) + ".");
  }
  for (std::int64_t i = 0; i < length_; ++i) {
    for (const double part : {std::cos(turn * static_cast<double>(i)), std::sin(turn * static_cast<double>(i))}) {
      double_turns_.push_back(part);
      turns_.push_back(static_cast<float>(part));
    }
  }
}

void FourierNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  std::vector<std::int64_t> shape = inputs[0].shape;
  const std::size_t along = axis_of(axis_, shape);
  if (along + 1 == shape.size() || shape.back() < 1 || shape.back() > 2) {
    throw std::invalid_argument("input 0 (x) has shape " + text_of(shape) + ", and must have a last axis of one or two parts " +
                                "behind axis " + std::to_string(along) + ".");
  }
  FourierCall lines = {};
  lines.length = static_cast<std::size_t>(length_);
  lines.size = static_cast<std::size_t>(shape[along]);
  lines.bins = static_cast<std::size_t>(bins_);
  lines.inner = product(shape, along + 1, shape.size() - 1);
  lines.parts = static_cast<std::size_t>(shape.back());
  lines.bin_parts = static_cast<std::size_t>(parts_);
  lines.factors = factors_.data();
  lines.factor_count = factors_.size();
  lines.scale = scale_;
  lines.turns = type == kFloat ? static_cast<const void*>(turns_.data()) : double_turns_.data();
  lines.x = inputs[0].data;
  const std::size_t count = product(shape, 0, along) * lines.inner;
  shape[along] = bins_;
  shape.back() = parts_;
  lines.y = call.output(0, shape);
  const auto kernel = kernels()->transforms->fourier[type];
  BufferPool pool(fourier_scratch(lines));
  constexpr std::size_t kMostLanes = 16;
  for_each_range(call.parallel_for(), count, rounded_up(items_per_task(lines.length), kMostLanes),
                 [&](std::size_t first, std::size_t last) {
                   pool.lend([&](const Buffer& buffer) { kernel(lines, first, last, buffer.as<char>()); });
                 });
}

const Signature DetGradientNode::kSignature = {"DetGradient", {"dy", "x"}, 2, 1, {1}, {}};

void DetGradientNode::compute(const Call& call) const {
  const Inputs inputs(kSignature, call);
  const ElementType type = inputs.element_type(0);
  inputs.require_same_type(1, 0);
  const std::vector<std::int64_t>& x = inputs[1].shape;
  if (x.size() < 2 || x[x.size() - 1] != x[x.size() - 2]) {
    throw std::invalid_argument("input 1 (x) has shape " + text_of(x) + ", and must have matrices of as many rows as columns.");
  }
  inputs.require_shape(0, {x.begin(), x.end() - 2});
  void* dx = call.output(0, x);
  const std::size_t count = product(x, 0, x.size() - 2), n = static_cast<std::size_t>(x.back());
  if (n == 0) return;
  const std::size_t cost = saturating_product(saturating_product(n, n), n);
  for_each_range(call.parallel_for(), count, items_per_task(cost), [&](std::size_t first, std::size_t last) {
    if (type == kFloat) {
      determinant_gradients(static_cast<const float*>(inputs[0].data), static_cast<const float*>(inputs[1].data), n, first, last,
                            static_cast<float*>(dx));
    } else {
      determinant_gradients(static_cast<const double*>(inputs[0].data), static_cast<const double*>(inputs[1].data), n, first,
                            last, static_cast<double*>(dx));
    }
  });
}

}  // namespace onnxtrain
