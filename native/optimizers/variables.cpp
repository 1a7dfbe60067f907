#include "optimizers/variables.h"

#include <algorithm>

#include "tuning.h"

namespace onnxtrain {

namespace {

static_assert(tuning::kPreparedElements % kStateBlock == 0 && tuning::kTaskElements % kStateBlock == 0);

// Widens elements [begin, begin + count) of a low-precision state to float.
void widen(const Variable& variable, std::size_t state, std::size_t begin, std::size_t count, float* wide) {
  const void* kept = variable.inputs[2 + state];
  if (!variable.blockwise) {
    kernels()->widen_states(count, static_cast<const std::uint16_t*>(kept) + begin, wide);
    return;
  }
  kernels()->decode_states(variable.is_signed[state], count, static_cast<const std::uint8_t*>(kept) + begin,
                           variable.scales[state] + begin / kStateBlock, wide);
}

// The reverse, for requested results.
void narrow(const Variable& variable, std::size_t state, std::size_t begin, std::size_t count, const float* wide) {
  void* kept = variable.outputs[1 + state];
  if (!variable.blockwise) {
    if (kept == nullptr) return;
    kernels()->round_states(variable.draws[state], begin, count, wide, static_cast<std::uint16_t*>(kept) + begin);
    return;
  }
  float* const scales = variable.new_scales[state];
  std::uint8_t unwanted[tuning::kPreparedElements];
  float unwanted_scales[tuning::kPreparedElements / kStateBlock];
  kernels()->encode_states(variable.is_signed[state], variable.draws[state], begin, count, wide,
                           kept == nullptr ? unwanted : static_cast<std::uint8_t*>(kept) + begin,
                           scales == nullptr ? unwanted_scales : scales + begin / kStateBlock);
}

}  // namespace

void run_kernel(ElementwiseKernel kernel, const void* scalars, Arity arity, const Variable& variable,
                std::size_t begin, std::size_t end) {
  alignas(64) unsigned char gradient[tuning::kPreparedElements * sizeof(double)];
  alignas(64) unsigned char unwanted[kMaxOutputs][tuning::kPreparedElements * sizeof(double)];
  alignas(64) float wide[kMaxStates][tuning::kPreparedElements], wide_parameter[tuning::kPreparedElements];

  const bool rounded = variable.draws != nullptr;
  const std::size_t states = rounded ? arity.inputs - 2 : 0;
  const std::size_t others = rounded ? std::min<std::size_t>(arity.outputs, 1) : arity.outputs;  // outputs that are not states
  const bool rounds_parameter = variable.parameter_draw != nullptr;
  bool direct = variable.broadcast == nullptr && !variable.is_prepared() && states == 0 && !rounds_parameter;
  for (std::size_t i = 0; i < arity.outputs; ++i) direct = direct && variable.outputs[i] != nullptr;
  const std::size_t size = size_of(variable.type), step = direct ? end - begin : tuning::kPreparedElements;
  for (; begin < end; begin += step) {
    const std::size_t count = std::min(step, end - begin);
    const void* inputs[kMaxInputs] = {};
    void* outputs[kMaxOutputs] = {};
    for (std::size_t i = rounds_parameter; i < arity.inputs - states; ++i) {
      inputs[i] = static_cast<const unsigned char*>(variable.inputs[i]) + begin * size;
    }
    if (variable.broadcast != nullptr) {
      variable.broadcast->gather(variable.type, variable.inputs[1], begin, count, gradient);
      inputs[1] = gradient;
    }
    if (variable.is_prepared()) {
      const unsigned char* mask = variable.mask == nullptr ? nullptr : variable.mask + begin;
      kernels()->prepare_gradient[variable.type](variable.factor == nullptr ? 1.0 : *variable.factor, count, inputs[1],
                                                 mask, gradient);
      inputs[1] = gradient;
    }
    for (std::size_t i = rounds_parameter; i < others; ++i) {
      void* output = variable.outputs[i];
      outputs[i] = output == nullptr ? unwanted[i] : static_cast<unsigned char*>(output) + begin * size;
    }
    if (rounds_parameter) {
      kernels()->widen_states(count, static_cast<const std::uint16_t*>(variable.inputs[0]) + begin, wide_parameter);
      inputs[0] = outputs[0] = wide_parameter;
    }
    for (std::size_t s = 0; s < states; ++s) {
      widen(variable, s, begin, count, wide[s]);
      inputs[2 + s] = outputs[1 + s] = wide[s];
    }
    kernel(scalars, count, inputs, outputs);
    for (std::size_t s = 0; s + 1 < arity.outputs && s < states; ++s) {  // none if a rule only reduces
      narrow(variable, s, begin, count, wide[s]);
    }
    if (rounds_parameter && arity.outputs > 0 && variable.outputs[0] != nullptr) {
      auto* const parameter = static_cast<std::uint16_t*>(variable.outputs[0]);
      kernels()->round_states(*variable.parameter_draw, begin, count, wide_parameter, parameter + begin);
    }
  }
}

Schedule::Schedule(const std::vector<Variable>& variables) {
  std::size_t in_task = 0;
  for (std::size_t v = 0; v < variables.size(); ++v) {
    for (std::size_t begin = 0; begin < variables[v].count; begin += tuning::kTaskElements) {
      const std::size_t end = std::min(begin + tuning::kTaskElements, variables[v].count);
      if (in_task + (end - begin) > tuning::kTaskElements) {
        task_ends_.push_back(blocks_.size());
        in_task = 0;
      }
      blocks_.push_back({v, begin, end});
      in_task += end - begin;
    }
  }
  if (in_task > 0) task_ends_.push_back(blocks_.size());
}

void Schedule::for_each_block(const ParallelFor& parallel_for, const std::function<void(std::size_t)>& work) const {
  const auto task = [&](std::size_t t) {
    for (std::size_t block = t == 0 ? 0 : task_ends_[t - 1]; block < task_ends_[t]; ++block) work(block);
  };
  if (task_ends_.size() == 1) {
    task(0);
  } else if (task_ends_.size() > 1) {
    parallel_for(task_ends_.size(), task);
  }
}

}  // namespace onnxtrain
