#include "recurrent/recurrent.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "cache.h"
#include "matmul/partition.h"
#include "recurrent/all_steps.h"
#include "recurrent/rounds.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Whole cache lines of units, so that no two parts write to the same one; rows of a tile.
constexpr std::size_t kUnit = 16, kRowUnit = 8;

// A part of a step: a range of batch rows and of units.
struct Share {
  std::size_t rows, units;
};

// Buffers of a step for `count` rows from `first` on.
template <typename T>
RecurrentStep<T> rows_of(RecurrentStep<T> step, std::size_t first, std::size_t count) {
  step.batch = count;
  const auto skip = [](std::ptrdiff_t elements, auto&... pointers) {
    ((pointers = pointers == nullptr ? nullptr : pointers + elements), ...);
  };
  const auto row = static_cast<std::ptrdiff_t>(first), states = static_cast<std::ptrdiff_t>(first * step.hidden);
  skip(row * step.gates_row, step.gates, step.dgates, step.later_dgates);
  skip(row * step.linear_row, step.linear, step.dlinear, step.later_dlinear);
  skip(states, step.before, step.cells_before, step.cells, step.first_cells, step.y, step.state, step.dy, step.dstate,
       step.dcells, step.reset, step.reset_states);
  skip(row, step.active, step.begins);
  return step;
}

template <typename T>
class Sequence {
 public:
  Sequence(const Recurrent& call, const ParallelFor& parallel_for)
      : call_(call), parallel_for_(parallel_for), kernels_(kernels_of<T>(*kernels()->recurrent)), layout_(call),
        all_steps_(layout_, parallel_for),
        ones_(multiples(1, checked_product(gate_count(call.cell), call.hidden))), zeros_(call.hidden, T(0)) {
    static const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
    const std::size_t factors = saturating_product(layout_.gates, call.hidden, call.hidden);
    const std::size_t most = std::max<std::size_t>(1, cores / call.directions);
    row_parts_ = std::min(rows_worth_it(factors), most);
    const std::size_t products = saturating_product(call.batch / row_parts_, factors);
    const std::size_t worth_it = std::min(products / tuning::kLeastStepProducts, call.hidden / tuning::kLeastUnits);
    parts_ = std::clamp<std::size_t>(worth_it, 1, most / row_parts_);
    far_ = call.batch > 1 && saturating_product(factors, sizeof(T)) / second_cache() >= tuning::kUncachedWeights;
    for (std::size_t part = 0; part <= parts_; ++part) {
      begins_.push_back(std::min(call.hidden, divided_up(call.hidden, kUnit) * part / parts_ * kUnit));
    }
    if (call.lengths != nullptr && call.batch != 0) {
      active_ = std::make_unique<bool[]>(checked_product(call.steps, call.batch));
      begins_backwards_ = std::make_unique<bool[]>(checked_product(call.steps, call.batch));
      for (std::size_t t = 0; t < call.steps; ++t) {
        for (std::size_t n = 0; n < call.batch; ++n) {
          active_[t * call.batch + n] = t < static_cast<std::size_t>(call.lengths[n]);
          begins_backwards_[t * call.batch + n] = t + 1 == static_cast<std::size_t>(call.lengths[n]);
        }
      }
    }
  }

  void forward() {
    all_steps_.multiply_inputs();
    pack([&](std::size_t direction, std::size_t part, T* panels) { return pack_forward(direction, part, panels); });
    const bool keeps_states = call_.lengths != nullptr;  // y is zero beyond the lengths
    const Buffer states(keeps_states ? bytes_of<T>(call_.directions, 2, layout_.state_size) : 0);
    const Buffer reset(call_.cell == kGru ? bytes_of<T>(call_.directions, layout_.state_size) : 0);
    const std::size_t phases = call_.cell == kGru ? 2 : 1;
    if (keeps_states) copy_or_clear(nullptr, call_.directions * 2 * layout_.state_size, states.as<T>());
    run(checked_product(call_.steps, phases), [&](std::size_t direction, std::size_t round, Share share) {
      const std::size_t number = round / phases, t = layout_.time(direction, number);
      RecurrentStep<T> step = step_of(direction, t, share);
      T* both = states.as<T>() + direction * 2 * layout_.state_size;
      step.before = number == 0    ? layout_.of_direction(call_.initial_state, direction)
                    : keeps_states ? both + number % 2 * layout_.state_size
                                   : layout_.y_of(direction, number - 1);
      step.cells_before = layout_.cells_before(direction, number);
      step.y = layout_.in_time(static_cast<T*>(call_.y), direction, t);
      step.state = keeps_states ? both + (number + 1) % 2 * layout_.state_size : nullptr;
      step.reset = reset.as<T>() + direction * layout_.state_size;
      kernels_.forward[call_.cell](of_share(step, share), static_cast<int>(round % phases));
    });
    for (std::size_t direction = 0; direction < call_.directions; ++direction) {
      const T* last = call_.steps == 0 ? layout_.of_direction(call_.initial_state, direction)
                      : keeps_states
                          ? states.as<T>() + (direction * 2 + call_.steps % 2) * layout_.state_size
                          : layout_.y_of(direction, call_.steps - 1);
      copy_state(last, call_.last_state, direction);
      if (call_.cell == kLstm) copy_state(layout_.cells_before(direction, call_.steps), call_.last_cells, direction);
    }
  }

  void backward() {
    const std::size_t D = call_.directions;
    const bool reads_states = call_.cell == kGru || call_.cell == kGruAfter || call_.dr != nullptr;
    if (reads_states) all_steps_.find_states_before();
    pack([&](std::size_t direction, std::size_t part, T* panels) { return pack_backward(direction, part, panels); });
    const Buffer dstates(bytes_of<T>(D, layout_.state_size));
    const Buffer dcells(call_.cell == kLstm ? bytes_of<T>(D, layout_.state_size) : 0);
    const Buffer reset(call_.cell == kGru ? bytes_of<T>(D, layout_.state_size) : 0);
    const Buffer reset_states(call_.cell == kGru ? bytes_of<T>(D, call_.steps, layout_.state_size) : 0);
    const bool sums_peepholes = call_.dpeepholes != nullptr;
    const Buffer dpeepholes(sums_peepholes ? checked_product(D, std::size_t{3}, call_.hidden, sizeof(double)) : 0);
    copy_or_clear(call_.dlast_state, D * layout_.state_size, dstates.as<T>());
    if (call_.cell == kLstm) copy_or_clear(call_.dlast_cells, D * layout_.state_size, dcells.as<T>());
    if (sums_peepholes) std::memset(dpeepholes.as<void>(), 0, D * 3 * call_.hidden * sizeof(double));
    const std::size_t phases = call_.cell == kGru ? 2 : 1;
    const std::size_t rounds = checked_product(call_.steps, phases) + (call_.steps == 0 ? 0 : 1);
    run(rounds, [&](std::size_t direction, std::size_t round, Share share) {
      const std::size_t taken = round / phases;  // steps done so far
      const bool leaves = taken == call_.steps;
      const std::size_t number = leaves ? 0 : call_.steps - 1 - taken, t = layout_.time(direction, number);
      RecurrentStep<T> step = step_of(direction, t, share);
      step.before = reads_states ? all_steps_.state_before(direction, number) : nullptr;
      step.cells_before = layout_.cells_before(direction, number);
      step.dy = call_.dy == nullptr ? nullptr : layout_.in_time(static_cast<const T*>(call_.dy), direction, t);
      step.dgates = layout_.gates_of(call_.dgates, direction, t);
      step.dlinear = layout_.linear_of(call_.dlinear, direction, t);
      if (taken > 0) {
        const std::size_t later = layout_.time(direction, call_.steps - taken);
        step.later_dgates = layout_.gates_of(call_.dgates, direction, later);
        step.later_dlinear = layout_.linear_of(call_.dlinear, direction, later);
      }
      step.dstate = dstates.as<T>() + direction * layout_.state_size;
      step.dcells = dcells.as<T>() + direction * layout_.state_size;
      step.reset = reset.as<T>() + direction * layout_.state_size;
      step.reset_states = reset_states.as<T>() + (direction * call_.steps + t) * layout_.state_size;
      if (sums_peepholes) step.dpeepholes = dpeepholes.as<double>() + direction * 3 * call_.hidden;
      if (leaves) {
        kernels_.leave[call_.cell](of_share(step, share));
      } else {
        kernels_.backward[call_.cell](of_share(step, share), static_cast<int>(round % phases));
      }
    });
    copy_out(dstates.as<T>(), D * layout_.state_size, call_.dinitial_state);
    if (call_.cell == kLstm) copy_out(dcells.as<T>(), D * layout_.state_size, call_.dinitial_cells);
    if (sums_peepholes) {
      std::copy_n(dpeepholes.as<double>(), D * 3 * call_.hidden, static_cast<T*>(call_.dpeepholes));
    }
    all_steps_.multiply_gradients(reset_states.as<T>());
  }

 private:
  // Number of parts into which the batch rows should be split. A part runs all steps without synchronization and reads
  // nothing written by another core, but reads all recurrent weights at every step; they must fit the cache.
  std::size_t rows_worth_it(std::size_t factors) const {
    const bool near = saturating_product(factors, sizeof(T)) <= share_of_second_cache(tuning::kCachedWeightsShare);
    if (!near || call_.dpeepholes != nullptr) return 1;  // peepholes are summed over all rows, in order
    const std::size_t products = saturating_product(call_.steps, call_.batch, factors);
    return std::max<std::size_t>(1, std::min(products / tuning::kLeastProducts, call_.batch / tuning::kLeastBatchRows));
  }

  RecurrentStep<T> of_share(const RecurrentStep<T>& step, Share share) const {
    const std::size_t first = begin_of(share.rows, row_parts_, call_.batch, kRowUnit);
    return rows_of(step, first, begin_of(share.rows + 1, row_parts_, call_.batch, kRowUnit) - first);
  }

  void copy_state(const T* from, void* to, std::size_t direction) const {
    if (to != nullptr) copy_or_clear(from, layout_.state_size, static_cast<T*>(to) + direction * layout_.state_size);
  }

  // Buffers of a step of a part of the units, in both directions of the computation, with all rows.
  RecurrentStep<T> step_of(std::size_t direction, std::size_t t, Share share) const {
    const std::size_t part = share.units;
    RecurrentStep<T> step = {};
    step.settings = &call_.settings[direction];
    step.batch = call_.batch;
    step.hidden = call_.hidden;
    step.begin = begins_[part];
    step.units = begins_[part + 1] - begins_[part];
    step.active = active_ == nullptr ? nullptr : active_.get() + t * call_.batch;
    step.ones = ones_.data();
    step.zeros = zeros_.data();
    step.scratch = scratch_->as<T>() + ((direction * row_parts_ + share.rows) * parts_ + part) * scratch_size_;
    std::copy_n(factors_[direction * parts_ + part].factors, kMostGates, step.factors);
    step.gates = layout_.gates_of(call_.gates, direction, t);
    step.gates_row = static_cast<std::ptrdiff_t>(layout_.gates_row());
    step.linear = layout_.linear_of(call_.linear, direction, t);
    step.linear_row = static_cast<std::ptrdiff_t>(call_.directions * call_.hidden);
    if (call_.cell == kLstm) {
      step.cells = layout_.in_time(static_cast<T*>(call_.cells), direction, t);
      if (begins_backwards_ != nullptr && layout_.is_backwards(direction)) {
        step.begins = begins_backwards_.get() + t * call_.batch;
        step.first_cells = layout_.of_direction(call_.initial_cells, direction);
      }
    }
    if (call_.peepholes != nullptr) {
      step.peepholes = static_cast<const T*>(call_.peepholes) + direction * 3 * call_.hidden;
    }
    if (call_.b != nullptr && call_.cell == kGruAfter) {
      step.recurrent_bias = static_cast<const T*>(call_.b) + (direction * 6 + 5) * call_.hidden;
    }
    return step;
  }

  // Runs all rounds of both directions.
  template <typename DoPart>
  void run(std::size_t rounds, DoPart do_part) {
    if (rounds == 0 || layout_.state_size == 0) return;
    std::vector<std::unique_ptr<Rounds>> chains;  // by direction and part of the rows
    for (std::size_t chain = 0; chain < call_.directions * row_parts_; ++chain) {
      chains.push_back(std::make_unique<Rounds>(rounds, parts_));
    }
    const auto work = [&](std::size_t worker) {
      const std::size_t chain = worker / parts_, direction = chain / row_parts_, rows = chain % row_parts_;
      chains[chain]->work(worker % parts_, [&](std::size_t round, std::size_t part) {
        do_part(direction, round, Share{rows, part});
      });
    };
    const std::size_t workers = chains.size() * parts_;
    if (workers == 1) {
      work(0);
    } else {
      parallel_for_(workers, work);
    }
  }

  struct Factors {
    PackedFactor<T> factors[kMostGates] = {};
  };

  // Packs the weights of all parts, each with pack_part(direction, part, destination).
  template <typename PackPart>
  void pack(PackPart pack_part) {
    const std::size_t workers = checked_product(call_.directions, parts_);
    std::size_t most_units = 0;
    for (std::size_t part = 0; part < parts_; ++part) most_units = std::max(most_units, begins_[part + 1] - begins_[part]);
    const std::size_t size = rounded_up(
        checked_product(layout_.gates, kernels_.packed_size(call_.hidden, most_units)), std::size_t{64} / sizeof(T));
    scratch_size_ = rounded_up(kernels_.scratch(most_units), std::size_t{64} / sizeof(T));
    panels_ = std::make_unique<Buffer>(bytes_of<T>(workers, size), call_.memory);
    scratch_ = std::make_unique<Buffer>(bytes_of<T>(workers, row_parts_, scratch_size_));
    factors_.resize(workers);
    if (layout_.state_size == 0) return;
    parallel_for_(workers, [&](std::size_t worker) {
      factors_[worker] = pack_part(worker / parts_, worker % parts_, panels_->as<T>() + worker * size);
    });
  }

  const T* recurrence(std::size_t direction) const {
    return static_cast<const T*>(call_.r) + direction * layout_.gates * call_.hidden * call_.hidden;
  }

  // Per gate: columns are rows of R.
  Factors pack_forward(std::size_t direction, std::size_t part, T* panels) const {
    Factors found;
    const std::size_t units = begins_[part + 1] - begins_[part], hidden = call_.hidden;
    const T* end = recurrence(direction) + layout_.gates * hidden * hidden;
    for (std::size_t gate = 0; gate < layout_.gates; ++gate) {
      const T* rows = recurrence(direction) + (gate * hidden + begins_[part]) * hidden;
      kernels_.pack({rows, end, 1, static_cast<std::ptrdiff_t>(hidden), hidden, units, ones_.data(), panels});
      found.factors[gate] = {panels, hidden, units, far_};
      panels += kernels_.packed_size(hidden, units);
    }
    return found;
  }

  // Columns are columns of R; rows are all gates or, in a GRU, the two that read the state itself, then the third.
  Factors pack_backward(std::size_t direction, std::size_t part, T* panels) const {
    Factors found;
    const std::size_t units = begins_[part + 1] - begins_[part], hidden = call_.hidden;
    const T *corner = recurrence(direction) + begins_[part], *end = recurrence(direction) + layout_.gates * hidden * hidden;
    const std::size_t first = layout_.gates == 3 ? 2 : layout_.gates;
    std::size_t gate = 0;
    for (std::size_t number = 0; gate < layout_.gates; ++number) {
      const std::size_t depth = (number == 0 ? first : layout_.gates - first) * hidden;
      kernels_.pack({corner + gate * hidden * hidden, end, static_cast<std::ptrdiff_t>(hidden), 1, depth, units,
                     ones_.data(), panels});
      found.factors[number] = {panels, depth, units, far_};
      panels += kernels_.packed_size(depth, units);
      gate += number == 0 ? first : layout_.gates - first;
    }
    return found;
  }

  const Recurrent& call_;
  const ParallelFor& parallel_for_;
  const RecurrentKernels<T>& kernels_;
  Layout<T> layout_;
  AllSteps<T> all_steps_;
  std::vector<std::ptrdiff_t> ones_;
  std::vector<T> zeros_;
  std::size_t row_parts_ = 1, parts_ = 1, scratch_size_ = 0;  // parts of the rows, and of the units
  bool far_;  // weights exceed the cache
  std::vector<std::size_t> begins_;  // first unit of each part
  // [steps, batch]: step within its length, and last such step. Null without lengths.
  std::unique_ptr<bool[]> active_, begins_backwards_;
  std::unique_ptr<Buffer> panels_, scratch_;
  std::vector<Factors> factors_;
};

// The rows of x [batch, steps, inputs] in step order.
template <typename T>
void turn(const Recurrent& call, T* turned, const ParallelFor& parallel_for) {
  const auto* x = static_cast<const T*>(call.x);
  for_each_range(parallel_for, call.steps, items_per_task(call.batch * call.inputs), [&](std::size_t first, std::size_t last) {
    for (std::size_t t = first; t < last; ++t) {
      for (std::size_t n = 0; n < call.batch; ++n) {
        copy_out(x + (n * call.steps + t) * call.inputs, call.inputs, turned + (t * call.batch + n) * call.inputs);
      }
    }
  });
}

template <typename T>
void multiply_all_steps(const Recurrent& given, bool batch_first, const ParallelFor& parallel_for) {
  Recurrent call = given;
  const bool turns = batch_first && call.dw != nullptr;
  const Buffer turned(turns ? bytes_of<T>(call.steps, call.batch, call.inputs) : 0, turns ? call.memory : nullptr);
  if (turns) {
    turn(call, turned.as<T>(), parallel_for);
    call.x = turned.as<T>();
  }
  const Layout<T> layout(call);
  AllSteps<T> all_steps(layout, parallel_for);
  if (call.dr != nullptr) all_steps.find_states_before();
  all_steps.multiply_gradients(nullptr);
}

}  // namespace

void run_recurrent_products(ElementType type, const Recurrent& call, bool batch_first, const ParallelFor& parallel_for) {
  (type == kFloat ? multiply_all_steps<float> : multiply_all_steps<double>)(call, batch_first, parallel_for);
}

void run_recurrent(ElementType type, const Recurrent& call, const ParallelFor& parallel_for) {
  if (type == kFloat) {
    Sequence<float>(call, parallel_for).forward();
  } else {
    Sequence<double>(call, parallel_for).forward();
  }
}

void run_recurrent_gradient(ElementType type, const Recurrent& call, const ParallelFor& parallel_for) {
  if (type == kFloat) {
    Sequence<float>(call, parallel_for).backward();
  } else {
    Sequence<double>(call, parallel_for).backward();
  }
}

}  // namespace onnxtrain
