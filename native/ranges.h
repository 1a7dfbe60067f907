// Splits work on many equal items into tasks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>

#include "parallel.h"
#include "sizes.h"
#include "tuning.h"

namespace onnxtrain {

// Items of `size` elements each per task: enough that the cost of scheduling is negligible.
inline std::size_t items_per_task(std::size_t size) {
  return std::max<std::size_t>(1, tuning::kTaskElements / std::max<std::size_t>(1, size));
}

// Calls work(first, last) for ranges that cover [0, count). Independent of the number of threads.
inline void for_each_range(const ParallelFor& parallel_for, std::size_t count, std::size_t items,
                           const std::function<void(std::size_t first, std::size_t last)>& work) {
  const std::size_t tasks = divided_up(count, items);
  if (tasks == 1) {
    work(0, count);
  } else if (tasks > 1) {
    parallel_for(tasks, [&](std::size_t task) { work(task * items, std::min(count, (task + 1) * items)); });
  }
}

// Part `index` of `parts` of [0, count): where it begins.
inline std::size_t part_begin(std::size_t count, std::size_t parts, std::size_t index) { return count * index / parts; }

}  // namespace onnxtrain
