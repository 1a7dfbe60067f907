// Matrix multiplications over all steps at once: the gate inputs, and the gradients of inputs and weights.
#pragma once

#include <memory>

#include "matmul/matmul.h"
#include "ranges.h"
#include "recurrent/layout.h"

namespace onnxtrain {
namespace {

template <typename T>
class AllSteps {
 public:
  AllSteps(const Layout<T>& layout, const ParallelFor& parallel_for)
      : call_(layout.call), layout_(layout), parallel_for_(parallel_for) {}

  // The contribution of x and the biases to all gates, as one multiplication for both directions.
  void multiply_inputs() {
    const std::size_t outputs = checked_product(call_.directions, layout_.gates, call_.hidden);
    const Buffer biases(call_.b == nullptr ? 0 : bytes_of<T>(outputs));
    if (call_.b != nullptr) {
      const auto* b = static_cast<const T*>(call_.b);
      const std::size_t size = layout_.gates * call_.hidden, linear = call_.cell == kGruAfter ? call_.hidden : 0;
      for (std::size_t d = 0; d < call_.directions; ++d) {
        for (std::size_t i = 0; i < size; ++i) {
          const T of_x = b[2 * d * size + i], of_state = b[(2 * d + 1) * size + i];
          biases.as<T>()[d * size + i] = i < size - linear ? of_x + of_state : of_x;
        }
      }
    }
    linear(kType, {checked_product(call_.steps, call_.batch), call_.inputs, outputs, true}, call_.x, Stored::kFloat, call_.w,
           {call_.b == nullptr ? nullptr : biases.as<T>()}, call_.gates, parallel_for_);
  }

  // The states before all steps, [D, steps, batch, hidden]: y itself for one direction that starts from zeros.
  void find_states_before() {
    if (call_.directions == 1 && call_.lengths == nullptr && call_.initial_state == nullptr) return;
    before_ = std::make_unique<Buffer>(bytes_of<T>(call_.directions, call_.steps, layout_.state_size));
    if (layout_.state_size == 0) return;
    for (std::size_t direction = 0; direction < call_.directions; ++direction) {
      const bool back = layout_.is_backwards(direction);
      for_each_range(parallel_for_, call_.steps, items_per_task(layout_.state_size), [&](std::size_t first, std::size_t last) {
        for (std::size_t t = first; t < last; ++t) {
          T* to = before_->as<T>() + (direction * call_.steps + t) * layout_.state_size;
          for (std::size_t n = 0; n < call_.batch; ++n, to += call_.hidden) {
            const std::size_t length = call_.lengths == nullptr ? call_.steps : static_cast<std::size_t>(call_.lengths[n]);
            const bool begins = back ? t + 1 >= length : t == 0;
            const T* states = begins ? layout_.of_direction(call_.initial_state, direction)
                                     : layout_.in_time(static_cast<const T*>(call_.y), direction, back ? t + 1 : t - 1);
            copy_or_clear(states == nullptr ? nullptr : states + n * call_.hidden, call_.hidden, to);
          }
        }
      });
    }
  }

  const T* state_before(std::size_t direction, std::size_t number) const {
    if (before_ != nullptr) {
      return before_->as<T>() + (direction * call_.steps + layout_.time(direction, number)) * layout_.state_size;
    }
    return number == 0 ? nullptr : layout_.in_time(static_cast<const T*>(call_.y), 0, layout_.time(0, number - 1));
  }

  // Computes the gradients of the inputs, weights and biases from the gradients of all gates.
  void multiply_gradients(const T* reset_states) {
    const std::size_t rows = call_.steps * call_.batch, hidden = call_.hidden, size = layout_.gates * hidden;
    const std::size_t D = call_.directions, columns = D * size;
    const auto* da = static_cast<const T*>(call_.dgates);
    if (call_.dx != nullptr) {
      linear(kType, {rows, columns, call_.inputs, false}, da, Stored::kFloat, call_.w, {}, call_.dx, parallel_for_);
    }
    const Buffer sums(call_.db == nullptr ? 0 : bytes_of<T>(D, 2, size));
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

 private:
  static constexpr ElementType kType = sizeof(T) == sizeof(float) ? kFloat : kDouble;

  // dR [columns of da, hidden] = daᵀ states, for the gates of one direction; `da` points to step 0.
  void multiply_states(const T* da, std::size_t columns, std::size_t stride, std::size_t direction, const T* states,
                       T* dr, T* sums) {
    std::size_t rows = call_.steps * call_.batch;
    if (states == nullptr) {
      states = before_ == nullptr ? nullptr : before_->as<T>() + direction * call_.steps * layout_.state_size;
    }
    if (states == nullptr && rows > 0) {  // the initial state is zero; the other states are y, shifted
      if (sums != nullptr) weight_gradient(kType, rows, {da, columns, stride}, {da, 0, 0}, dr, sums, parallel_for_);
      sums = nullptr;
      rows -= call_.batch;
      states = static_cast<const T*>(call_.y) + (call_.reversed ? layout_.state_size : 0);
      da += call_.reversed ? 0 : call_.batch * stride;
    }
    weight_gradient(kType, rows, {da, columns, stride}, {states, call_.hidden, call_.hidden}, dr, sums, parallel_for_);
  }

  const Recurrent& call_;
  const Layout<T>& layout_;
  const ParallelFor& parallel_for_;
  std::unique_ptr<Buffer> before_;  // null: y contains the states before all steps but the first
};

}  // namespace
}  // namespace onnxtrain
