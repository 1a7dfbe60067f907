#include "optimizers/broadcast.h"

#include <algorithm>

namespace onnxtrain {

bool Broadcast::fits(const std::vector<std::int64_t>& from, const std::vector<std::int64_t>& to) {
  if (from.size() > to.size()) return false;
  const std::size_t missing = to.size() - from.size();
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (from[i] != 1 && from[i] != to[missing + i]) return false;
  }
  return true;
}

Broadcast::Broadcast(const std::vector<std::int64_t>& from, const std::vector<std::int64_t>& to) {
  const std::size_t missing = to.size() - from.size();
  std::size_t stride = 1;
  std::vector<Dimension> inner_first;
  for (std::size_t i = to.size(); i-- > 0;) {
    const auto size = static_cast<std::size_t>(to[i]);
    const bool repeated = i < missing || from[i - missing] == 1;
    if (size != 1) {
      const std::size_t step = repeated ? 0 : stride;
      Dimension* inner = inner_first.empty() ? nullptr : &inner_first.back();
      if (inner != nullptr && step == inner->stride * inner->size) {
        inner->size *= size;  // merges: contiguous, or both broadcast
      } else {
        inner_first.push_back({size, step});
      }
    }
    if (!repeated) stride *= size;
  }
  if (inner_first.empty()) inner_first.push_back({1, 0});
  dimensions_.assign(inner_first.rbegin(), inner_first.rend());
}

template <typename T>
void Broadcast::gather_as(const T* source, std::size_t begin, std::size_t count, T* out) const {
  const Dimension inner = dimensions_.back();
  while (count > 0) {
    std::size_t position = begin % inner.size, rest = begin / inner.size, offset = position * inner.stride;
    for (std::size_t d = dimensions_.size() - 1; d-- > 0;) {
      offset += rest % dimensions_[d].size * dimensions_[d].stride;
      rest /= dimensions_[d].size;
    }
    const std::size_t run = std::min(count, inner.size - position);
    if (inner.stride == 0) {
      std::fill_n(out, run, source[offset]);
    } else {
      std::copy_n(source + offset, run, out);  // the innermost stride is 0 or 1
    }
    out += run;
    begin += run;
    count -= run;
  }
}

void Broadcast::gather(ElementType type, const void* source, std::size_t begin, std::size_t count, void* out) const {
  if (type == kFloat) {
    gather_as(static_cast<const float*>(source), begin, count, static_cast<float*>(out));
  } else {
    gather_as(static_cast<const double*>(source), begin, count, static_cast<double*>(out));
  }
}

}  // namespace onnxtrain
