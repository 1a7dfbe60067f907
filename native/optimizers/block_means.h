// The mean square of each block of a variable, which SSGD with blocks takes as the square of a weight.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "optimizers/rule.h"
#include "optimizers/variables.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Blocks of rows: `rows` successive indices of the first axis, and parts of the axes behind it. All rows are divided
// alike, so that one table tells the block of each element of a row.
class BlockMeans {
 public:
  // With `root`, the roots of the means.
  BlockMeans(const Variable& variable, const AxisSizes& block, bool root, const ParallelFor& parallel_for) {
    check(variable, block);
    rows_ = static_cast<std::size_t>(block.sizes[0]);
    std::vector<std::uint32_t> part = {0};
    for (std::size_t axis = 1; axis < variable.shape.size(); ++axis) {
      const auto size = static_cast<std::size_t>(variable.shape[axis]);
      const auto length = static_cast<std::size_t>(block.sizes[axis]);
      const std::size_t parts = (size + length - 1) / length;
      std::vector<std::uint32_t> finer;
      finer.reserve(part.size() * size);
      for (const std::uint32_t before : part) {
        for (std::size_t i = 0; i < size; ++i) finer.push_back(static_cast<std::uint32_t>(before * parts + i / length));
      }
      part = std::move(finer);
    }
    part_ = std::move(part);
    width_ = part_.size();
    if (variable.count == 0) return;
    parts_ = static_cast<std::size_t>(part_.back()) + 1;
    per_row_.assign(parts_, 0);
    for (const std::uint32_t own : part_) ++per_row_[own];
    const auto height = static_cast<std::size_t>(variable.shape[0]);
    means_.resize((height + rows_ - 1) / rows_ * parts_);
    const std::size_t together = std::max<std::size_t>(1, tuning::kTaskElements / (rows_ * width_));
    const std::size_t bands = (height + rows_ - 1) / rows_, tasks = (bands + together - 1) / together;
    const auto work = [&](std::size_t task) {
      for (std::size_t band = task * together; band < std::min(bands, (task + 1) * together); ++band) {
        measure(variable, band, std::min(height, (band + 1) * rows_), root);
      }
    };
    if (tasks == 1) {
      work(0);
    } else {
      parallel_for(tasks, work);
    }
  }

  // Writes the mean of the block of each element in [begin, end).
  void spread(std::size_t begin, std::size_t end, double* z) const {
    std::size_t row = begin / width_, column = begin % width_;
    while (begin < end) {
      const std::size_t count = std::min(width_ - column, end - begin);
      const double* const own = means_.data() + row / rows_ * parts_;
      const std::uint32_t* const part = part_.data() + column;
      for (std::size_t i = 0; i < count; ++i) z[i] = own[part[i]];
      z += count;
      begin += count;
      column = 0;
      ++row;
    }
  }

 private:
  static void check(const Variable& variable, const AxisSizes& block) {
    if (variable.shape.size() == static_cast<std::size_t>(block.axes)) return;
    std::ostringstream text;
    text << "block has " << block.axes << " sizes, and a variable has " << variable.shape.size()
         << " axes: give one size for each axis.";
    throw std::invalid_argument(text.str());
  }

  void measure(const Variable& variable, std::size_t band, std::size_t last_row, bool root) {
    double* const own = means_.data() + band * parts_;
    const std::size_t first_row = band * rows_;
    std::vector<float> wide(variable.parameter_draw == nullptr ? 0 : width_);
    for (std::size_t row = first_row; row < last_row; ++row) {
      const std::size_t begin = row * width_;
      if (!wide.empty()) {  // X is in bfloat16
        kernels()->widen_states(width_, static_cast<const std::uint16_t*>(variable.inputs[0]) + begin, wide.data());
        add(wide.data(), own);
      } else if (variable.type == kDouble) {
        add(static_cast<const double*>(variable.inputs[0]) + begin, own);
      } else {
        add(static_cast<const float*>(variable.inputs[0]) + begin, own);
      }
    }
    const auto height = static_cast<double>(last_row - first_row);
    for (std::size_t p = 0; p < parts_; ++p) {
      own[p] /= height * static_cast<double>(per_row_[p]);
      if (root) own[p] = std::sqrt(own[p]);
    }
  }

  template <typename T>
  void add(const T* X, double* own) const {
    for (std::size_t i = 0; i < width_; ++i) {
      const auto value = static_cast<double>(X[i]);
      own[part_[i]] += value * value;
    }
  }

  std::size_t rows_ = 1, width_ = 1, parts_ = 0;
  std::vector<std::uint32_t> part_;     // of each element of a row
  std::vector<std::uint32_t> per_row_;  // elements of each part
  std::vector<double> means_;           // of each band of rows and each part
};

}  // namespace
}  // namespace onnxtrain
