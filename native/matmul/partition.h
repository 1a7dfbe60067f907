// Splits a matrix multiplication into parts for threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <thread>
#include <utility>

#include "cache.h"
#include "sizes.h"
#include "tuning.h"

namespace onnxtrain {

// Splits rows and columns into equal parts such that all cores finish together: few parts, since each packs its own
// operands, but the same number per core.
struct Cut {
  std::size_t rows = 1, columns = 1;  // number of parts

  // `column_bytes`: bytes of a column in one block of the depth; the columns of a part fit the L2 cache.
  Cut(std::size_t row_count, std::size_t column_count, std::size_t depth, std::size_t column_bytes, bool copied_rows) {
    static const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
    const std::size_t products = saturating_product(row_count, column_count, depth);
    const std::size_t threads = std::clamp<std::size_t>(products / tuning::kLeastProducts, 1, cores);
    const auto limits = [threads](std::size_t count, std::size_t most, std::size_t least) {
      const std::size_t fewest = std::max<std::size_t>(1, divided_up(count, most));
      return std::pair(fewest, std::max(fewest, std::min(fewest + threads, count / least)));
    };
    const std::size_t most_columns_of_part = share_of_second_cache(tuning::kColumnsShare) / column_bytes;
    const auto [fewest_rows, most_rows] = limits(row_count, row_count + 1, tuning::kLeastRows);
    const auto [fewest_columns, most_columns] = limits(column_count, most_columns_of_part, tuning::kLeastColumns);
    std::size_t soonest = std::numeric_limits<std::size_t>::max();
    for (std::size_t r = fewest_rows; r <= most_rows; ++r) {
      const std::size_t enough = std::clamp(divided_up(threads, r), fewest_columns, most_columns);
      const std::size_t rounds = divided_up(r * fewest_columns, threads);  // parts per core
      const std::size_t even = std::clamp(rounds * threads / r, fewest_columns, most_columns);
      for (const std::size_t c : {fewest_columns, enough, even}) {
        const std::size_t height = divided_up(row_count, r), width = divided_up(column_count, c);
        const std::size_t arranging =
            tuning::kPackingCost * width + (copied_rows ? tuning::kPackingCost : tuning::kReadingCost) * height;
        const std::size_t part = saturating_sum(saturating_product(height, width), arranging);
        const std::size_t time = saturating_product(divided_up(r * c, threads), part);
        if (time < soonest) {
          soonest = time;
          rows = r;
          columns = c;
        }
      }
    }
  }

  // Splits each part into as many, until the results of a part are at most `most` elements.
  void shrink(std::size_t row_count, std::size_t column_count, std::size_t most) {
    const std::size_t row_parts = rows, column_parts = columns;
    for (;;) {
      const std::size_t height = divided_up(row_count, rows), width = divided_up(column_count, columns);
      if (saturating_product(height, width) <= most) return;
      if (height > width) {
        rows += row_parts;
      } else {
        columns += column_parts;
      }
    }
  }
};

// Rows that are multiplied by all panels before the next ones, each of that many bytes in a block of the depth.
inline std::size_t strip_rows(std::size_t row_bytes) {
  return std::max(tuning::kLeastStripRows, share_of_second_cache(tuning::kStripShare) / row_bytes);
}

// First unit of part `part` of `parts`.
inline std::size_t begin_of(std::size_t part, std::size_t parts, std::size_t count, std::size_t unit) {
  return std::min(count, part * divided_up(count, unit) / parts * unit);
}

}  // namespace onnxtrain
