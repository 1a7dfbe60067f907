// Gradients that broadcast to their parameters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/kernel_table.h"

namespace onnxtrain {

// A gradient of a smaller shape, read as if it had the parameter's shape.
class Broadcast {
 public:
  // Returns whether `from` broadcasts to `to` without growing it.
  static bool fits(const std::vector<std::int64_t>& from, const std::vector<std::int64_t>& to);

  Broadcast(const std::vector<std::int64_t>& from, const std::vector<std::int64_t>& to);

  // Writes elements [begin, begin + count) of the broadcast tensor to `out`.
  void gather(ElementType type, const void* source, std::size_t begin, std::size_t count, void* out) const;

 private:
  struct Dimension {
    std::size_t size, stride;  // stride in elements of the source; 0 where broadcast
  };
  std::vector<Dimension> dimensions_;  // outermost first, merged where contiguous

  template <typename T>
  void gather_as(const T* source, std::size_t begin, std::size_t count, T* out) const;
};

}  // namespace onnxtrain
