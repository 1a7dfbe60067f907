#include "convolution/phases.h"

#include <algorithm>
#include <set>

namespace onnxtrain {
namespace {

// Phases of large strides that no kernel element reaches are skipped; beyond this many phases, most are.
constexpr std::size_t kMostPhases = 4096;

// Positions of x one stride apart, from `start` on: the same kernel elements reach them, so their gradient is a
// correlation of dy with those elements.
Phase phase_of(const Index& start, const Index& size, const Index& stride, const std::vector<Tap>& taps) {
  Phase phase = {{}, {1, 1, 1}, start, stride, {}};
  for (int axis = 0; axis < kAxes; ++axis) {
    phase.size[axis] = (size[axis] - start[axis] + stride[axis] - 1) / stride[axis];
  }
  for (const Tap& tap : taps) {
    Tap turned = {{}, tap.weight};
    bool reaches = true;
    for (int axis = 0; axis < kAxes; ++axis) {
      const std::ptrdiff_t distance = start[axis] - tap.offset[axis];
      reaches = reaches && distance % stride[axis] == 0;
      turned.offset[axis] = distance / stride[axis];
    }
    if (reaches) phase.taps.push_back(turned);
  }
  return phase;
}

}  // namespace

std::vector<Tap> taps_of(const Convolution& c) {
  std::vector<Tap> taps;
  for (std::ptrdiff_t d = 0; d < c.kernel[0]; ++d) {
    for (std::ptrdiff_t h = 0; h < c.kernel[1]; ++h) {
      for (std::ptrdiff_t w = 0; w < c.kernel[2]; ++w) {
        const Index at = {d * c.dilation[0] - c.pad[0], h * c.dilation[1] - c.pad[1],
                          w * c.dilation[2] - c.pad[2]};
        taps.push_back({at, static_cast<std::ptrdiff_t>(taps.size())});
      }
    }
  }
  return taps;
}

std::vector<Phase> phases_of(const Index& size, const Index& stride, const std::vector<Tap>& taps, bool& all) {
  Index starts;
  for (int axis = 0; axis < kAxes; ++axis) starts[axis] = std::min(size[axis], stride[axis]);
  all = static_cast<std::size_t>(product(starts)) <= kMostPhases;
  std::set<Index> found;
  for (std::ptrdiff_t number = 0; all && number < product(starts); ++number) {
    found.insert({number / (starts[1] * starts[2]), number / starts[2] % starts[1], number % starts[2]});
  }
  for (const Tap& tap : taps) {
    Index start;
    for (int axis = 0; axis < kAxes; ++axis) {
      start[axis] = ((tap.offset[axis] % stride[axis]) + stride[axis]) % stride[axis];
    }
    if (start[0] < starts[0] && start[1] < starts[1] && start[2] < starts[2]) found.insert(start);
  }
  std::vector<Phase> phases;
  phases.reserve(found.size());
  for (const Index& start : found) phases.push_back(phase_of(start, size, stride, taps));
  return phases;
}

Grid grid_of(const std::vector<Phase>& phases) {
  Index size = {0, 0, 0};
  std::vector<Tap> taps;
  for (const Phase& phase : phases) {
    for (int axis = 0; axis < kAxes; ++axis) size[axis] = std::max(size[axis], phase.size[axis]);
    taps.insert(taps.end(), phase.taps.begin(), phase.taps.end());
  }
  return Grid(size, phases[0].step, taps);
}

bool is_pointwise(const Convolution& c) {
  for (int axis = 0; axis < kAxes; ++axis) {
    if (c.kernel[axis] != 1 || c.stride[axis] != 1 || c.input[axis] != c.output[axis] || c.pad[axis] != 0) {
      return false;
    }
  }
  return true;
}

}  // namespace onnxtrain
