// Size arithmetic, and lists of sizes as text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "checked.h"

namespace onnxtrain {

inline std::size_t divided_up(std::size_t count, std::size_t by) { return count / by + (count % by != 0 ? 1 : 0); }
inline std::size_t rounded_up(std::size_t count, std::size_t to) { return checked_product(divided_up(count, to), to); }

// 0, of, 2 of, ...: read by kernels as offsets.
inline std::vector<std::ptrdiff_t> multiples(std::size_t of, std::size_t count) {
  checked_product(static_cast<std::ptrdiff_t>(of), static_cast<std::ptrdiff_t>(count));  // the largest one and one beyond
  std::vector<std::ptrdiff_t> result(count);
  for (std::size_t i = 0; i < count; ++i) result[i] = static_cast<std::ptrdiff_t>(i * of);
  return result;
}

// "[2, 3]": a shape, or another list, as shown in messages.
inline std::string text_of(const std::vector<std::int64_t>& list) {
  std::string text = "[";
  for (std::size_t i = 0; i < list.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(list[i]);
  return text + "]";
}

}  // namespace onnxtrain
