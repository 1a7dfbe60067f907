// How kernels receive threads.
#pragma once

#include <cstddef>
#include <functional>

namespace onnxtrain {

// Calls task(0) ... task(total - 1) in any order, on any threads.
using ParallelFor = std::function<void(std::size_t total, const std::function<void(std::size_t)>& task)>;

}  // namespace onnxtrain
