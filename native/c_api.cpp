// The kernels as C functions that update parameters and states in place. The caller is responsible for the pointers;
// `onnxtrain.runtime.kernels` in Python checks them.
//
// Attributes are float32, as ONNX stores them, so operators and these functions give the same bits. A function returns
// null on success, or an error message that is valid until the thread's next call.
#include <atomic>
#include <chrono>
#include <exception>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "exported.h"
#include "optimizers/optimizers.h"
#include "matmul/bfloat16_table.h"
#include "threads.h"

// One parameter with its gradient and states, each `count` contiguous elements of one type.
struct OnnxtrainTensors {
  std::int64_t type;  // 0 float, 1 double
  std::int64_t count;
  void* parameter;
  const void* gradient;
  void* states[2];  // in the operator's order
};

// One attribute of an optimizer: a string if `text` is not null, else a number.
struct OnnxtrainAttribute {
  const char* name;
  const char* text;
  float number;
};

namespace {

using onnxtrain::parallel_for;
using onnxtrain::Variable;

thread_local std::string last_error;

constexpr std::int64_t kMostElements = std::numeric_limits<std::int64_t>::max() / 16;  // 8 bytes each, with their offsets

void require(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(std::string(what) + ".");
}

bool has_buffers(const OnnxtrainTensors& tensors, std::size_t states) {
  for (std::size_t s = 0; s < states; ++s) {
    if (tensors.states[s] == nullptr) return false;
  }
  return tensors.parameter != nullptr && tensors.gradient != nullptr;
}

std::vector<Variable> variables_of(const OnnxtrainTensors* tensors, std::size_t count, std::size_t states) {
  require(count == 0 || tensors != nullptr, "the list of tensors is null");
  std::vector<Variable> variables(count);
  for (std::size_t i = 0; i < count; ++i) {
    require(tensors[i].type == 0 || tensors[i].type == 1, "a type is neither 0 (float) nor 1 (double)");
    require(tensors[i].count >= 0 && tensors[i].count <= kMostElements, "an element count is negative or too large");
    require(tensors[i].count == 0 || has_buffers(tensors[i], states), "a buffer is null");
    Variable& variable = variables[i];
    variable.type = tensors[i].type == 0 ? onnxtrain::kFloat : onnxtrain::kDouble;
    variable.count = static_cast<std::size_t>(tensors[i].count);
    variable.inputs[0] = variable.outputs[0] = tensors[i].parameter;
    variable.inputs[1] = tensors[i].gradient;
    for (std::size_t s = 0; s < states; ++s) variable.inputs[2 + s] = variable.outputs[1 + s] = tensors[i].states[s];
  }
  return variables;
}

class GivenAttributes final : public onnxtrain::AttributeSource {
 public:
  GivenAttributes(const OnnxtrainAttribute* attributes, std::size_t count)
      : attributes_(attributes, attributes + count), read_(count) {
    for (const OnnxtrainAttribute& attribute : attributes_) require(attribute.name != nullptr, "a name is null");
  }

  double number(const char* name, std::optional<double> otherwise) const override {
    const OnnxtrainAttribute* const found = find(name);
    if (found == nullptr) return otherwise ? *otherwise : missing(name);
    if (found->text != nullptr) throw std::invalid_argument(std::string(name) + " is a string: it must be a number.");
    return found->number;
  }

  std::string text(const char* name, std::optional<std::string> otherwise) const override {
    const OnnxtrainAttribute* const found = find(name);
    if (found == nullptr && !otherwise) missing(name);
    if (found == nullptr) return *otherwise;
    if (found->text == nullptr) throw std::invalid_argument(std::string(name) + " is a number: it must be a string.");
    return found->text;
  }

  std::vector<std::int64_t> integers(const char* name) const override {
    const OnnxtrainAttribute* const found = find(name);
    if (found != nullptr && (found->text == nullptr || found->text[0] != '\0')) {
      throw std::invalid_argument(std::string(name) + " is given, but depends on shapes, which these functions lack: "
                                  "leave it out.");
    }
    return {};
  }

  // Rejects attributes that the optimizer did not ask for.
  void require_all_read() const {
    for (std::size_t i = 0; i < attributes_.size(); ++i) {
      if (!read_[i]) throw std::invalid_argument("there is no attribute '" + std::string(attributes_[i].name) + "'.");
    }
  }

 private:
  const OnnxtrainAttribute* find(const std::string& name) const {
    for (std::size_t i = 0; i < attributes_.size(); ++i) {
      if (name != attributes_[i].name) continue;
      read_[i] = true;
      return &attributes_[i];
    }
    return nullptr;
  }

  [[noreturn]] static double missing(const char* name) {
    throw std::invalid_argument(std::string(name) + " is missing.");
  }

  std::vector<OnnxtrainAttribute> attributes_;
  mutable std::vector<bool> read_;
};

template <typename Work>
const char* guarded(int threads, Work work) {
  try {
    if (onnxtrain::kernels() == nullptr) return onnxtrain::kernels_error();
    require(threads >= 1, "threads is less than 1");
    work();
    return nullptr;
  } catch (const std::exception& error) {
    last_error = error.what();
    return last_error.c_str();
  }
}

}  // namespace

// Returns the instruction set in use, or null; `onnxtrain_error` has the message.
ONNXTRAIN_API const char* onnxtrain_instruction_set() {
  const onnxtrain::KernelTable* table = onnxtrain::kernels();
  return table == nullptr ? nullptr : table->instruction_set;
}

// Returns 1 if the instruction set in use has bfloat16 multiplication (without it, bfloat16 is slower than float), else
// 0; on an error 0, with the message in `onnxtrain_error`.
ONNXTRAIN_API int onnxtrain_multiplies_bfloat16() {
  return onnxtrain::kernels() != nullptr && onnxtrain::bfloat16_kernels().by_processor ? 1 : 0;
}

ONNXTRAIN_API const char* onnxtrain_error() { return onnxtrain::kernels_error(); }

// Runs one step of the named optimizer over `count` variables. `R` is the learning rate, `T` the update count. Missing
// attributes have their defaults.
ONNXTRAIN_API const char* onnxtrain_update(const char* optimizer, const OnnxtrainTensors* tensors, std::size_t count,
                                           int threads, double R, std::int64_t T,
                                           const OnnxtrainAttribute* attributes, std::size_t attribute_count) {
  return guarded(threads, [&] {
    require(optimizer != nullptr && (attributes != nullptr || attribute_count == 0), "a name or a list is null");
    const onnxtrain::Optimizer* const found = onnxtrain::find_optimizer(optimizer);
    if (found == nullptr) throw std::invalid_argument("there is no optimizer '" + std::string(optimizer) + "'.");
    const GivenAttributes given(attributes, attribute_count);
    const auto update = found->with(given);
    given.require_all_read();
    update->run(R, T, variables_of(tensors, count, update->states().size()), parallel_for(threads));
  });
}

// Measures the seconds of one pass of plain memory traffic, the lower bound for optimizers: reads and writes `arrays`
// (1 to 3) outputs and reads one input. Each thread makes `passes` passes over its own share. Returns -1 for an invalid
// argument or if no threads can be started.
ONNXTRAIN_API double onnxtrain_stream(const float* input, float* const* outputs, std::size_t arrays, std::size_t count,
                                      int threads, int passes) {
  const onnxtrain::KernelTable* table = onnxtrain::kernels();
  if (table == nullptr || arrays < 1 || arrays > 3 || threads < 1 || passes < 1) return -1.0;
  std::atomic<int> waiting{threads};
  const auto work = [&](std::size_t part) {
    const auto size = static_cast<std::size_t>(threads);
    const std::size_t begin = count / size * part, end = part + 1 == size ? count : count / size * (part + 1);
    float* parts[3] = {};
    for (std::size_t a = 0; a < arrays; ++a) parts[a] = outputs[a] + begin;
    --waiting;
    while (waiting.load() > 0) std::this_thread::yield();  // barrier: all threads start together
    for (int pass = 0; pass < passes; ++pass) table->stream(arrays, end - begin, input + begin, parts);
  };
  std::vector<std::thread> helpers;
  try {
    for (int i = 1; i < threads; ++i) helpers.emplace_back(work, static_cast<std::size_t>(i));
  } catch (const std::exception&) {
    waiting = 0;
    for (std::thread& helper : helpers) helper.join();
    return -1.0;
  }
  while (waiting.load() > 1) std::this_thread::yield();
  const auto start = std::chrono::steady_clock::now();
  work(0);
  for (std::thread& helper : helpers) helper.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / passes;
}
