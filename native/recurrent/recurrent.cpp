#include "recurrent/recurrent.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "cache.h"
#include "products/products.h"
#include "ranges.h"
#include "recurrent/rounds.h"
#include "scratch.h"
#include "sizes.h"
#include "tuning.h"

namespace onnxtrain {
namespace {

// Units of a whole cache line, so that no two parts write to one.
constexpr std::size_t kUnit = 16;

template <typename T>
class Sequence {
 public:
  Sequence(const Recurrent& call, const ParallelFor& parallel_for)
      : call_(call), parallel_for_(parallel_for), kernels_(kernels_of<T>(*kernels()->recurrent)),
        gates_(gate_count(call.cell)), state_size_(checked_product(call.batch, call.hidden)),
        ones_(multiples(1, checked_product(gate_count(call.cell), call.hidden))), zeros_(call.hidden, T(0)) {
    static const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
    const std::size_t products = saturating_product(call.batch, gates_, saturating_product(call.hidden, call.hidden));
    const std::size_t most = std::max<std::size_t>(1, cores / call.directions);
    parts_ = std::clamp<std::size_t>(std::min(products / tuning::kLeastStepProducts, call.hidden / tuning::kLeastUnits), 1, most);
    const std::size_t weights = saturating_product(gates_, call.hidden, saturating_product(call.hidden, sizeof(T)));
    far_ = call.batch > 1 && weights / second_cache() >= tuning::kFarFactors;
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
    multiply_inputs();
    pack([&](std::size_t direction, std::size_t part, T* panels) { return pack_forward(direction, part, panels); });
    const bool keeps_states = call_.lengths != nullptr;  // y has zeros beyond the lengths
    const Buffer states(keeps_states ? bytes(call_.directions, 2, state_size_) : 0);
    const Buffer reset(call_.cell == kGru ? bytes(call_.directions, state_size_) : 0);
    const std::size_t phases = call_.cell == kGru ? 2 : 1;
    if (keeps_states) clear(states, checked_product(call_.directions, std::size_t{2}, state_size_));
    run(checked_product(call_.steps, phases), [&](std::size_t direction, std::size_t round, std::size_t part) {
      const std::size_t number = round / phases, t = time(direction, number);
      RecurrentStep<T> step = step_of(direction, t, part);
      T* both = states.as<T>() + direction * 2 * state_size_;
      step.before = number == 0   ? of_direction(call_.initial_state, direction)
                    : keeps_states ? both + number % 2 * state_size_
                                   : in_time(static_cast<const T*>(call_.y), direction, time(direction, number - 1));
      step.cells_before = cells_before(direction, number);
      step.y = in_time(static_cast<T*>(call_.y), direction, t);
      step.state = keeps_states ? both + (number + 1) % 2 * state_size_ : nullptr;
      step.reset = reset.as<T>() + direction * state_size_;
      kernels_.forward[call_.cell](step, static_cast<int>(round % phases));
    });
    for (std::size_t direction = 0; direction < call_.directions; ++direction) {
      const T* last = call_.steps == 0 ? of_direction(call_.initial_state, direction)
                      : keeps_states
                          ? states.as<T>() + (direction * 2 + call_.steps % 2) * state_size_
                          : in_time(static_cast<const T*>(call_.y), direction, time(direction, call_.steps - 1));
      copy_state(last, call_.last_state, direction);
      if (call_.cell == kLstm) copy_state(cells_before(direction, call_.steps), call_.last_cells, direction);
    }
  }

  void backward() {
    const std::size_t D = call_.directions;
    find_states_before();
    pack([&](std::size_t direction, std::size_t part, T* panels) { return pack_backward(direction, part, panels); });
    const Buffer dstates(bytes(D, state_size_)), dcells(call_.cell == kLstm ? bytes(D, state_size_) : 0);
    const Buffer reset(call_.cell == kGru ? bytes(D, state_size_) : 0);
    const Buffer reset_states(call_.cell == kGru ? bytes(D, call_.steps, state_size_) : 0);
    const bool sums_peepholes = call_.dpeepholes != nullptr;
    const Buffer dpeepholes(sums_peepholes ? checked_product(D, std::size_t{3}, call_.hidden, sizeof(double)) : 0);
    copy_or_clear(call_.dlast_state, D * state_size_, dstates.as<T>());
    if (call_.cell == kLstm) copy_or_clear(call_.dlast_cells, D * state_size_, dcells.as<T>());
    if (sums_peepholes) std::memset(dpeepholes.as<void>(), 0, D * 3 * call_.hidden * sizeof(double));
    const std::size_t phases = call_.cell == kGru ? 2 : 1;
    const std::size_t rounds = checked_product(call_.steps, phases) + (call_.steps == 0 ? 0 : 1);
    run(rounds, [&](std::size_t direction, std::size_t round, std::size_t part) {
      const std::size_t taken = round / phases;  // steps that were taken
      const bool leaves = taken == call_.steps;
      const std::size_t number = leaves ? 0 : call_.steps - 1 - taken, t = time(direction, number);
      RecurrentStep<T> step = step_of(direction, t, part);
      step.before = state_before(direction, number);
      step.cells_before = cells_before(direction, number);
      step.dy = call_.dy == nullptr ? nullptr : in_time(static_cast<const T*>(call_.dy), direction, t);
      step.dgates = gates_of(call_.dgates, direction, t);
      step.dlinear = linear_of(call_.dlinear, direction, t);
      if (taken > 0) {
        const std::size_t later = time(direction, call_.steps - taken);
        step.later_dgates = gates_of(call_.dgates, direction, later);
        step.later_dlinear = linear_of(call_.dlinear, direction, later);
      }
      step.dstate = dstates.as<T>() + direction * state_size_;
      step.dcells = dcells.as<T>() + direction * state_size_;
      step.reset = reset.as<T>() + direction * state_size_;
      step.reset_states = reset_states.as<T>() + (direction * call_.steps + t) * state_size_;
      if (sums_peepholes) step.dpeepholes = dpeepholes.as<double>() + direction * 3 * call_.hidden;
      if (leaves) {
        kernels_.leave[call_.cell](step);
      } else {
        kernels_.backward[call_.cell](step, static_cast<int>(round % phases));
      }
    });
    copy_out(dstates.as<T>(), D * state_size_, call_.dinitial_state);
    if (call_.cell == kLstm) copy_out(dcells.as<T>(), D * state_size_, call_.dinitial_cells);
    if (sums_peepholes) {
      std::copy_n(dpeepholes.as<double>(), D * 3 * call_.hidden, static_cast<T*>(call_.dpeepholes));
    }
    multiply_gradients(reset_states.as<T>());
  }

 private:
  static constexpr ElementType kType = sizeof(T) == sizeof(float) ? kFloat : kDouble;

  template <typename... Sizes>
  static std::size_t bytes(Sizes... sizes) {
    return checked_product(static_cast<std::size_t>(sizes)..., sizeof(T));
  }

  static void clear(const Buffer& buffer, std::size_t count) { std::memset(buffer.as<void>(), 0, count * sizeof(T)); }

  static void copy_or_clear(const void* from, std::size_t count, T* to) {
    if (from == nullptr) {
      std::memset(to, 0, count * sizeof(T));
    } else {
      copy_out(static_cast<const T*>(from), count, to);
    }
  }

  static void copy_out(const T* from, std::size_t count, void* to) {
    if (to != nullptr && count > 0) std::memcpy(to, from, count * sizeof(T));
  }

  void copy_state(const T* from, void* to, std::size_t direction) const {
    if (to != nullptr) copy_or_clear(from, state_size_, static_cast<T*>(to) + direction * state_size_);
  }

  bool is_backwards(std::size_t direction) const { return direction == 1 || call_.reversed; }

  // Where a direction's step `number` lies.
  std::size_t time(std::size_t direction, std::size_t number) const {
    return is_backwards(direction) ? call_.steps - 1 - number : number;
  }

  const T* of_direction(const void* states, std::size_t direction) const {
    return states == nullptr ? nullptr : static_cast<const T*>(states) + direction * state_size_;
  }

  template <typename Element>
  Element* in_time(Element* sequence, std::size_t direction, std::size_t t) const {
    return sequence + (t * call_.directions + direction) * state_size_;
  }

  std::size_t gates_row() const { return call_.directions * gates_ * call_.hidden; }

  T* gates_of(void* gates, std::size_t direction, std::size_t t) const {
    return static_cast<T*>(gates) + t * call_.batch * gates_row() + direction * gates_ * call_.hidden;
  }

  T* linear_of(void* linear, std::size_t direction, std::size_t t) const {
    if (linear == nullptr) return nullptr;
    return static_cast<T*>(linear) + (t * call_.batch * call_.directions + direction) * call_.hidden;
  }

  const T* cells_before(std::size_t direction, std::size_t number) const {
    if (call_.cell != kLstm) return nullptr;
    if (number == 0) return of_direction(call_.initial_cells, direction);
    return in_time(static_cast<const T*>(call_.cells), direction, time(direction, number - 1));
  }

  // What a step of a part reads and writes in both directions of the computation.
  RecurrentStep<T> step_of(std::size_t direction, std::size_t t, std::size_t part) const {
    RecurrentStep<T> step = {};
    step.settings = &call_.settings[direction];
    step.batch = call_.batch;
    step.hidden = call_.hidden;
    step.begin = begins_[part];
    step.units = begins_[part + 1] - begins_[part];
    step.active = active_ == nullptr ? nullptr : active_.get() + t * call_.batch;
    step.ones = ones_.data();
    step.zeros = zeros_.data();
    step.scratch = scratch_->as<T>() + (direction * parts_ + part) * scratch_size_;
    std::copy_n(factors_[direction * parts_ + part].factors, kMostGates, step.factors);
    step.gates = gates_of(call_.gates, direction, t);
    step.gates_row = static_cast<std::ptrdiff_t>(gates_row());
    step.linear = linear_of(call_.linear, direction, t);
    step.linear_row = static_cast<std::ptrdiff_t>(call_.directions * call_.hidden);
    if (call_.cell == kLstm) {
      step.cells = in_time(static_cast<T*>(call_.cells), direction, t);
      if (begins_backwards_ != nullptr && is_backwards(direction)) {
        step.begins = begins_backwards_.get() + t * call_.batch;
        step.first_cells = of_direction(call_.initial_cells, direction);
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

  // Does all rounds of both directions.
  template <typename DoPart>
  void run(std::size_t rounds, DoPart do_part) {
    if (rounds == 0 || state_size_ == 0) return;
    std::vector<std::unique_ptr<Rounds>> chains;
    for (std::size_t direction = 0; direction < call_.directions; ++direction) {
      chains.push_back(std::make_unique<Rounds>(rounds, parts_));
    }
    const auto work = [&](std::size_t worker) {
      const std::size_t direction = worker / parts_;
      chains[direction]->work(worker % parts_, [&](std::size_t round, std::size_t part) { do_part(direction, round, part); });
    };
    const std::size_t workers = call_.directions * parts_;
    if (workers == 1) {
      work(0);
    } else {
      parallel_for_(workers, work);
    }
  }

  struct Factors {
    PackedFactor<T> factors[kMostGates] = {};
  };

  // Arranges the factors of all parts, each with pack_part(direction, part, where to).
  template <typename PackPart>
  void pack(PackPart pack_part) {
    const std::size_t workers = checked_product(call_.directions, parts_);
    std::size_t most_units = 0;
    for (std::size_t part = 0; part < parts_; ++part) most_units = std::max(most_units, begins_[part + 1] - begins_[part]);
    const std::size_t size = rounded_up(
        checked_product(gates_, kernels_.packed_size(call_.hidden, most_units)), std::size_t{64} / sizeof(T));
    scratch_size_ = rounded_up(kernels_.scratch(most_units), std::size_t{64} / sizeof(T));
    panels_ = std::make_unique<Buffer>(bytes(workers, size));
    scratch_ = std::make_unique<Buffer>(bytes(workers, scratch_size_));
    factors_.resize(workers);
    if (state_size_ == 0) return;
    parallel_for_(workers, [&](std::size_t worker) {
      factors_[worker] = pack_part(worker / parts_, worker % parts_, panels_->as<T>() + worker * size);
    });
  }

  const T* recurrence(std::size_t direction) const {
    return static_cast<const T*>(call_.r) + direction * gates_ * call_.hidden * call_.hidden;
  }

  // Per gate: columns are rows of R.
  Factors pack_forward(std::size_t direction, std::size_t part, T* panels) const {
    Factors found;
    const std::size_t units = begins_[part + 1] - begins_[part], hidden = call_.hidden;
    const T* end = recurrence(direction) + gates_ * hidden * hidden;
    for (std::size_t gate = 0; gate < gates_; ++gate) {
      const T* rows = recurrence(direction) + (gate * hidden + begins_[part]) * hidden;
      kernels_.pack({rows, end, 1, static_cast<std::ptrdiff_t>(hidden), hidden, units, ones_.data(), panels});
      found.factors[gate] = {panels, hidden, units, far_};
      panels += kernels_.packed_size(hidden, units);
    }
    return found;
  }

  // Columns are columns of R; its rows are all gates or, in a GRU, the two that read the state itself, then the third.
  Factors pack_backward(std::size_t direction, std::size_t part, T* panels) const {
    Factors found;
    const std::size_t units = begins_[part + 1] - begins_[part], hidden = call_.hidden;
    const T *corner = recurrence(direction) + begins_[part], *end = recurrence(direction) + gates_ * hidden * hidden;
    const std::size_t first = gates_ == 3 ? 2 : gates_;
    std::size_t gate = 0;
    for (std::size_t number = 0; gate < gates_; ++number) {
      const std::size_t depth = (number == 0 ? first : gates_ - first) * hidden;
      kernels_.pack({corner + gate * hidden * hidden, end, static_cast<std::ptrdiff_t>(hidden), 1, depth, units,
                     ones_.data(), panels});
      found.factors[number] = {panels, depth, units, far_};
      panels += kernels_.packed_size(depth, units);
      gate += number == 0 ? first : gates_ - first;
    }
    return found;
  }

  // What all steps' gates get from x and the biases, as one product for both directions.
  void multiply_inputs() {
    const std::size_t outputs = checked_product(call_.directions, gates_, call_.hidden);
    const Buffer biases(call_.b == nullptr ? 0 : bytes(outputs));
    if (call_.b != nullptr) {
      const auto* b = static_cast<const T*>(call_.b);
      const std::size_t size = gates_ * call_.hidden, linear = call_.cell == kGruAfter ? call_.hidden : 0;
      for (std::size_t d = 0; d < call_.directions; ++d) {
        for (std::size_t i = 0; i < size; ++i) {
          const T of_x = b[2 * d * size + i], of_state = b[(2 * d + 1) * size + i];
          biases.as<T>()[d * size + i] = i < size - linear ? of_x + of_state : of_x;
        }
      }
    }
    linear(kType, {checked_product(call_.steps, call_.batch), call_.inputs, outputs, true}, call_.x, call_.w,
           call_.b == nullptr ? nullptr : biases.as<T>(), call_.gates, parallel_for_);
  }

  // The states before all steps, [D, steps, batch, hidden]: y itself in one direction from a state of zeros.
  void find_states_before() {
    if (call_.directions == 1 && call_.lengths == nullptr && call_.initial_state == nullptr) return;
    before_ = std::make_unique<Buffer>(bytes(call_.directions, call_.steps, state_size_));
    if (state_size_ == 0) return;
    for (std::size_t direction = 0; direction < call_.directions; ++direction) {
      const bool back = is_backwards(direction);
      const auto* initial = static_cast<const T*>(call_.initial_state);
      for_each_range(parallel_for_, call_.steps, items_per_task(state_size_), [&](std::size_t first, std::size_t last) {
        for (std::size_t t = first; t < last; ++t) {
          T* to = before_->as<T>() + (direction * call_.steps + t) * state_size_;
          for (std::size_t n = 0; n < call_.batch; ++n, to += call_.hidden) {
            const std::size_t length = call_.lengths == nullptr ? call_.steps : static_cast<std::size_t>(call_.lengths[n]);
            const bool begins = back ? t + 1 >= length : t == 0;
            const T* state = begins ? (initial == nullptr ? nullptr : initial + (direction * call_.batch + n) * call_.hidden)
                                    : in_time(static_cast<const T*>(call_.y), direction, back ? t + 1 : t - 1) + n * call_.hidden;
            copy_or_clear(state, call_.hidden, to);
          }
        }
      });
    }
  }

  const T* state_before(std::size_t direction, std::size_t number) const {
    if (before_ != nullptr) {
      return before_->as<T>() + (direction * call_.steps + time(direction, number)) * state_size_;
    }
    return number == 0 ? nullptr : in_time(static_cast<const T*>(call_.y), 0, time(0, number - 1));
  }

  // dR [columns of da, hidden] = daᵀ states, for gates of one direction from `da` on, which is of step 0.
  void multiply_states(const T* da, std::size_t columns, std::size_t stride, std::size_t direction, const T* states,
                       T* dr, T* sums) {
    std::size_t rows = call_.steps * call_.batch;
    if (states == nullptr) {
      states = before_ == nullptr ? nullptr : before_->as<T>() + direction * call_.steps * state_size_;
    }
    if (states == nullptr && rows > 0) {  // the first state of all is zero, and the others are those of y, shifted
      if (sums != nullptr) weight_gradient(kType, rows, {da, columns, stride}, {da, 0, 0}, dr, sums, parallel_for_);
      sums = nullptr;
      rows -= call_.batch;
      states = static_cast<const T*>(call_.y) + (call_.reversed ? state_size_ : 0);
      da += call_.reversed ? 0 : call_.batch * stride;
    }
    weight_gradient(kType, rows, {da, columns, stride}, {states, call_.hidden, call_.hidden}, dr, sums, parallel_for_);
  }

  // The products over all steps.
  void multiply_gradients(const T* reset_states) {
    const std::size_t rows = call_.steps * call_.batch, hidden = call_.hidden, size = gates_ * hidden;
    const std::size_t D = call_.directions, columns = D * size;
    const auto* da = static_cast<const T*>(call_.dgates);
    if (call_.dx != nullptr) {
      linear(kType, {rows, columns, call_.inputs, false}, da, call_.w, nullptr, call_.dx, parallel_for_);
    }
    const Buffer sums(call_.db == nullptr ? 0 : bytes(D, 2, size));
    T *of_x = call_.db == nullptr ? nullptr : sums.as<T>(), *of_states = of_x == nullptr ? nullptr : of_x + columns;
    if (call_.dw != nullptr || of_x != nullptr) {
      const Columns x = {call_.x, call_.dw == nullptr ? 0 : call_.inputs, call_.inputs};
      weight_gradient(kType, rows, {da, columns, columns}, x, call_.dw, of_x, parallel_for_);
    }
    for (std::size_t d = 0; d < D; ++d) {
      const T* first = da + d * size;
      auto* dr = static_cast<T*>(call_.dr) + d * size * hidden;
      T* linear_sums = of_states == nullptr || call_.cell != kGruAfter ? nullptr : of_states + d * hidden;
      const T* linear = call_.dlinear == nullptr ? nullptr : static_cast<const T*>(call_.dlinear) + d * hidden;
      if (call_.dr == nullptr) {
        if (linear_sums != nullptr) {
          weight_gradient(kType, rows, {linear, hidden, D * hidden}, {linear, 0, 0}, nullptr, linear_sums, parallel_for_);
        }
      } else if (call_.cell == kGruAfter) {
        multiply_states(first, 2 * hidden, columns, d, nullptr, dr, nullptr);
        multiply_states(linear, hidden, D * hidden, d, nullptr, dr + 2 * hidden * hidden, linear_sums);
      } else if (call_.cell == kGru) {
        multiply_states(first, 2 * hidden, columns, d, nullptr, dr, nullptr);
        multiply_states(first + 2 * hidden, hidden, columns, d, reset_states + d * rows * hidden,
                        dr + 2 * hidden * hidden, nullptr);
      } else {
        multiply_states(first, size, columns, d, nullptr, dr, nullptr);
      }
    }
    if (call_.db == nullptr) return;
    for (std::size_t d = 0; d < D; ++d) {
      T* db = static_cast<T*>(call_.db) + 2 * d * size;
      for (int half = 0; half < 2; ++half) copy_out(of_x + d * size, size, db + static_cast<std::size_t>(half) * size);
      if (call_.cell == kGruAfter) copy_out(of_states + d * hidden, hidden, db + 2 * size - hidden);
    }
  }

  const Recurrent& call_;
  const ParallelFor& parallel_for_;
  const RecurrentKernels<T>& kernels_;
  std::size_t gates_, state_size_;
  std::vector<std::ptrdiff_t> ones_;
  std::vector<T> zeros_;
  std::size_t parts_ = 1, scratch_size_ = 0;
  bool far_;  // of the factors
  std::vector<std::size_t> begins_;  // of the parts' units
  // [steps, batch]: whether a step is within its length, and whether it is the last that is. Null without lengths.
  std::unique_ptr<bool[]> active_, begins_backwards_;
  std::unique_ptr<Buffer> panels_, scratch_, before_;
  std::vector<Factors> factors_;
};

}  // namespace

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
