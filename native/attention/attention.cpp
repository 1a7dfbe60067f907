#include "attention/attention.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <stdexcept>
#include <string>

#include "attention/bfloat16_table.h"
#include "cache.h"
#include "ranges.h"
#include "scratch.h"
#include "sizes.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Limit on queries and keys per head. A head of size 0 takes no memory, so there may be any number of them.
constexpr std::size_t kMostPositions = std::size_t{1} << 27;

// Throws std::invalid_argument if there are more, or if the bytes that a head needs overflow 64 bits.
void require_addressable(const AttentionShape& s) {
  if (std::max(s.keys, s.queries) > kMostPositions) {
    throw std::invalid_argument("there are " + std::to_string(s.queries) + " queries and " + std::to_string(s.keys) +
                                " keys, and this kernel takes up to " + std::to_string(kMostPositions) + ".");
  }
  constexpr std::size_t kPadding = 2 * tuning::kMostScoreRows, kBuffers = 8;  // upper bounds on padding and number of buffers
  const std::size_t rows = checked_sum(std::max(s.keys, s.queries), kPadding);
  const std::size_t width = checked_sum(s.size, s.value_size, kPadding);
  checked_product(rows, width, kBuffers * sizeof(double));
  checked_product(checked_sum(s.heads, kPadding), width, rows, sizeof(double));
}

// A call with its block size and offset table filled in.
struct Planned {
  AttentionCall call;
  AttentionKernels kernel;
  std::vector<std::ptrdiff_t> ones, rows, value_rows, output_rows, score_rows;
  std::vector<KeyRange> ranges;

  Planned(ElementType type, const AttentionCall& call_, const ParallelFor& parallel_for)
      : call(call_), kernel(kernels()->attention[type]) {
    const AttentionShape& s = call.shape;
    require_addressable(s);
    const bool rounds = call.in_bfloat16 && std::min(s.queries, s.keys) >= tuning::kBfloat16Positions;
    if (const Bfloat16Attention* rounding = rounds ? bfloat16_attention() : nullptr) {
      kernel.scratch = rounding->scratch;
      kernel.attend = rounding->attend;
      kernel.gradient = rounding->gradient;
    }
    const std::size_t stride = kernel.score_stride(s.keys);
    const std::size_t fitting =
        share_of_second_cache(tuning::kScoreShare) / std::max<std::size_t>(1, stride * size_of(type));
    call.block = std::min(std::clamp(fitting, tuning::kLeastScoreRows, tuning::kMostScoreRows), s.queries);
    const std::size_t longest = std::max(s.keys, call.block);
    ones = multiples(1, std::max({s.size, s.value_size, longest}));
    rows = multiples(s.line(), longest);
    value_rows = multiples(s.value_line(), longest);
    output_rows = multiples(s.output_line(), longest);
    score_rows = multiples(stride, call.block);
    call.ones = ones.data();
    call.rows = rows.data();
    call.value_rows = value_rows.data();
    call.output_rows = output_rows.data();
    call.score_rows = score_rows.data();
    find_ranges(type, parallel_for);
    if (hides_by_query()) {
      call.block = std::min(call.block, std::max(tuning::kMaskedScoreRows, s.keys / tuning::kKeysPerMaskedRow));
    }
  }

 private:
  // Reads a mask once, so that the heads need not: all of its rows, unless it is more than a mask.
  void find_ranges(ElementType type, const ParallelFor& parallel_for) {
    const AttentionShape& s = call.shape;
    if (call.bias == nullptr || call.bias_stride[3] != 1) return;
    const std::size_t sizes[3] = {s.batch, s.heads, s.queries};
    std::size_t count = 1;
    for (std::size_t axis = 3; axis-- > 0;) {
      call.range_stride[axis] = call.bias_stride[axis] == 0 ? 0 : static_cast<std::ptrdiff_t>(count);
      if (call.bias_stride[axis] != 0) count = checked_product(count, sizes[axis]);
    }
    ranges.resize(count);
    std::atomic<bool> all = true;
    const auto* bias = static_cast<const char*>(call.bias);
    for_each_range(parallel_for, count, items_per_task(s.keys), [&](std::size_t first, std::size_t last) {
      if (!all) return;
      const std::size_t bytes = s.keys * size_of(type);
      if (!kernel.find_ranges(bias + first * bytes, last - first, s.keys, ranges.data() + first)) all = false;
    });
    if (all) call.ranges = ranges.data();
  }

  // Returns whether the queries of the first head see different keys, as with a causal mask, unlike with padding.
  bool hides_by_query() const {
    if (call.ranges == nullptr || call.range_stride[2] == 0) return false;
    const auto differ = [](KeyRange a, KeyRange b) { return a.begin != b.begin || a.end != b.end; };
    const KeyRange* end = call.ranges + call.shape.queries;
    return std::adjacent_find(call.ranges, end, differ) != end;
  }
};

void fill(ElementType type, void* data, std::size_t count, double value) {
  if (data == nullptr) return;
  if (type == kFloat) {
    std::fill_n(static_cast<float*>(data), count, static_cast<float>(value));
  } else {
    std::fill_n(static_cast<double*>(data), count, value);
  }
}

// Elements of the bias, whose broadcast axes have a stride of 0.
std::size_t bias_size(const AttentionCall& call) {
  const AttentionShape& s = call.shape;
  const std::size_t sizes[4] = {s.batch, s.heads, s.queries, s.keys};
  std::size_t size = 1;
  for (std::size_t axis = 0; axis < 4; ++axis) size *= call.bias_stride[axis] == 0 ? 1 : sizes[axis];
  return size;
}

// A kernel for heads, one by one or in groups, with the scratch memory of a call of it.
struct Work {
  void (*kernel)(const AttentionCall&, std::size_t, void*);
  std::size_t lanes, count, scratch, items;

  Work(const Planned& planned, bool gradient) {
    const AttentionShape& s = planned.call.shape;
    const AttentionKernels& kernels = planned.kernel;
    const bool together = kernels.is_short(s);
    kernel = !gradient ? kernels.attend_lanes : together ? kernels.gradient_lanes : kernels.gradient;
    lanes = together ? kernels.lanes : 1;
    count = divided_up(s.batch * s.heads, lanes);
    scratch = (together ? kernels.lane_scratch : kernels.scratch)(planned.call, gradient);
    items = items_per_task(saturating_product(lanes, s.queries, s.keys));
  }

  void run(const AttentionCall& call, const ParallelFor& parallel_for) const {
    BufferPool pool(scratch);
    for_each_range(parallel_for, count, items, [&](std::size_t first, std::size_t last) {
      pool.lend([&](const Buffer& buffer) {
        for (std::size_t item = first; item < last; ++item) kernel(call, item, buffer.as<void>());
      });
    });
  }
};

// The gradient of a bias that several heads share: consecutive heads add to a sum of their own, and these are added up.
template <typename T>
void add_up_bias(const Work& work, AttentionCall call, std::size_t size, const ParallelFor& parallel_for) {
  const std::size_t fitting = std::clamp<std::size_t>(tuning::kBiasElements / size, 1, tuning::kBiasParts);
  const std::size_t parts = std::min(work.count, fitting);
  const Buffer sums(checked_product(parts, size, sizeof(T)));
  BufferPool pool(work.scratch);
  parallel_for(parts, [&](std::size_t part) {
    AttentionCall own = call;
    own.dbias = sums.as<T>() + part * size;
    std::fill_n(sums.as<T>() + part * size, size, T(0));
    pool.lend([&](const Buffer& buffer) {
      for (std::size_t item = part * work.count / parts; item < (part + 1) * work.count / parts; ++item) {
        work.kernel(own, item, buffer.as<void>());
      }
    });
  });
  for_each_range(parallel_for, size, items_per_task(parts), [&](std::size_t first, std::size_t last) {
    T* to = static_cast<T*>(call.dbias);
    for (std::size_t part = 0; part < parts; ++part) {
      const T* from = sums.as<T>() + part * size;
      for (std::size_t i = first; i < last; ++i) to[i] = part == 0 ? from[i] : to[i] + from[i];
    }
  });
}

}  // namespace

void set_bias_strides(const std::vector<std::int64_t>& shape, AttentionCall& call) {
  const AttentionShape& s = call.shape;
  const std::size_t full[4] = {s.batch, s.heads, s.queries, s.keys};
  std::ptrdiff_t stride = 1;
  std::fill_n(call.bias_stride, 4, std::ptrdiff_t{0});
  for (std::size_t back = 1; back <= std::min<std::size_t>(4, shape.size()); ++back) {
    const auto size = static_cast<std::size_t>(shape[shape.size() - back]);
    if (size == full[4 - back] && size != 1) call.bias_stride[4 - back] = stride;
    stride *= static_cast<std::ptrdiff_t>(size);
  }
}

void attend(ElementType type, AttentionCall call, const ParallelFor& parallel_for) {
  const AttentionShape& s = call.shape;
  const std::size_t heads = checked_product(s.batch, s.heads);
  if (heads == 0 || s.queries == 0) return;
  if (s.keys == 0) {
    fill(type, call.y, checked_product(heads, s.queries, s.value_size), 0.0);
    fill(type, call.log_sum, checked_product(heads, s.queries), -std::numeric_limits<double>::infinity());
    return;
  }
  const Planned planned(type, call, parallel_for);
  if (planned.kernel.is_short(s)) return Work(planned, false).run(planned.call, parallel_for);
  BufferPool pool(planned.kernel.scratch(planned.call, false));
  const std::size_t wanted = heads >= tuning::kAttentionTasks ? 1 : divided_up(tuning::kAttentionTasks, heads);
  const std::size_t parts = std::clamp<std::size_t>(s.queries / tuning::kLeastQueries, 1, wanted);
  const std::size_t items = parts > 1 ? 1 : items_per_task(saturating_product(s.queries, s.keys));
  for_each_range(parallel_for, heads * parts, items, [&](std::size_t first, std::size_t last) {
    pool.lend([&](const Buffer& buffer) {
      for (std::size_t item = first; item < last; ++item) {
        const std::size_t part = item % parts;
        planned.kernel.attend(planned.call, item / parts, part * s.queries / parts, (part + 1) * s.queries / parts,
                              buffer.as<void>());
      }
    });
  });
}

void attention_gradient(ElementType type, AttentionCall call, const ParallelFor& parallel_for) {
  const AttentionShape& s = call.shape;
  const std::size_t heads = checked_product(s.batch, s.heads);
  if (heads == 0 || s.keys == 0 || s.queries == 0) {
    fill(type, call.dq, checked_product(heads, s.queries, s.size), 0.0);
    fill(type, call.dk, checked_product(heads, s.keys, s.size), 0.0);
    fill(type, call.dv, checked_product(heads, s.keys, s.value_size), 0.0);
    fill(type, call.dbias, bias_size(call), 0.0);
    return;
  }
  const Planned planned(type, call, parallel_for);
  const Work work(planned, true);
  if (call.dbias == nullptr) return work.run(planned.call, parallel_for);
  const std::size_t size = bias_size(call);
  if ((s.batch == 1 || call.bias_stride[0] != 0) &&
      (s.heads == 1 || call.bias_stride[1] != 0)) {  // each head has a bias of its own
    fill(type, call.dbias, size, 0.0);
    return work.run(planned.call, parallel_for);
  }
  if (work.lanes == 1 && call.bias_stride[1] != 0) {  // each of an example's heads has
    fill(type, call.dbias, size, 0.0);
    BufferPool pool(work.scratch);
    parallel_for(s.heads, [&](std::size_t head) {
      pool.lend([&](const Buffer& buffer) {
        for (std::size_t b = 0; b < s.batch; ++b) work.kernel(planned.call, b * s.heads + head, buffer.as<void>());
      });
    });
    return;
  }
  (type == kFloat ? add_up_bias<float> : add_up_bias<double>)(work, planned.call, size, parallel_for);
}

}  // namespace onnxtrain
