// Trains from C++: runs the steps of a graph written by `onnxtrain export`, on ONNX Runtime, without Python.
//
//   onnxtrain::StepGraph graph("step.onnx", "states.safetensors");
// batch: a map from names to tensors, the target included
//   graph.save("trained.safetensors");        // onnxtrain import-states model.onnx trained.safetensors -o tuned.onnx
//
// States are updated in place where the graph's metadata says that this is safe; every other state has two buffers that
// alternate. A graph exported with --kernels needs onnxtrain's operator library: Options::kernels. A StepGraph must be
// used by one thread at a time.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "onnxtrain/json.hpp"
#include "onnxtrain/ort.hpp"
#include "onnxtrain/tensor.hpp"

namespace onnxtrain {

// Session options.
struct Options {
  int threads = 0;                // intra-op threads; 0: ONNX Runtime's default
  std::filesystem::path kernels;  // path of onnxtrain's operator library, for graphs exported with --kernels
};

// Type and shape of an input or output: ONNX's element type, and sizes with -1 for dynamic axes.
struct Port {
  int type = 0;
  std::vector<std::int64_t> shape;
};

class StepGraph {
 public:
  // Loads a step graph and the initial values of its states. Throws Error.
  StepGraph(const std::filesystem::path& graph, const std::filesystem::path& states, const Options& options = {})
      : StepGraph(graph, read_safetensors(states), options) {}

  StepGraph(const std::filesystem::path& graph, Tensors states, const Options& options = {})
      : api_(ort::table(OrtGetApiBase())), env_(api_), memory_(api_), session_(api_) {
    check(ort::CreateEnv::call(api_, kOnlyErrors, "onnxtrain", env_.out()));
    check(ort::CreateCpuMemoryInfo::call(api_, kDeviceAllocator, kDefaultMemory, memory_.out()));
    open(graph, options);
    read_ports();
    read_description();
    take(std::move(states));
    bindings_[0] = bind(0);
    bindings_[1] = bind(1);
  }

  // Runs one training step on arrays by name (see feeds()) and returns the loss before the update.
  double step(const Tensors& feeds) {
    const ort::IoBinding& binding = bindings_[turn_];
    std::vector<ort::Value> values;
    for (const auto& [name, role] : feeds_) {
      const auto found = feeds.find(name);
      if (found == feeds.end()) throw Error("The step needs the input '" + name + "' (" + role + ").");
      check_fits(name, found->second);
      values.push_back(value_of(found->second));
      check(ort::BindInput::call(api_, binding.get(), name.c_str(), values.back().get()));
    }
    check(ort::RunWithBinding::call(api_, session_.get(), nullptr, binding.get()));
    turn_ = 1 - turn_;
    return loss_value();
  }

  // The same with the learning rate as a number.
  double step(Tensors feeds, float learning_rate) {
    for (const auto& [name, role] : feeds_) {
      if (role == "learning_rate") feeds.insert_or_assign(name, number(inputs_.at(name).type, learning_rate));
    }
    return step(feeds);
  }

  // The inputs of a step: each name with its kind, "batch", "target" or "learning_rate".
  const std::map<std::string, std::string>& feeds() const { return feeds_; }

  // Element type and shape of an input.
  const Port& input(const std::string& name) const { return inputs_.at(name); }

  // The states: each name with its kind, "parameter", "statistic", "optimizer" or "count".
  const std::map<std::string, std::string>& states() const { return roles_; }

  // The current value of a state. The reference is valid until the next step.
  const Tensor& state(const std::string& name) const { return const_cast<StepGraph*>(this)->buffer(name, turn_); }

  // Sets a state to a value of its type and shape.
  void set_state(const std::string& name, const Tensor& value) {
    Tensor& target = buffer(name, turn_);
    if (value.type() != target.type() || value.shape() != target.shape()) {
      throw Error("The state '" + name + "' has the shape " + target.shape_text() + " and a new value of " +
                  value.shape_text() + "; type and shape must stay the same.");
    }
    std::memcpy(target.data(), value.data(), value.bytes());
  }

  // Writes all states as safetensors, to resume from or for `onnxtrain import-states`.
  void save(const std::filesystem::path& path) const {
    std::map<std::string, const Tensor*> tensors;
    for (const auto& [name, buffers] : states_) tensors.emplace(name, &state(name));
    write_safetensors(path, tensors);
  }

 private:
  static constexpr int kOnlyErrors = 3, kDeviceAllocator = 0, kDefaultMemory = 0;
  static constexpr int kVersion = 1;  // version of the metadata

  // The two buffers of a state; the second is empty if the state is updated in place.
  using Buffers = std::array<Tensor, 2>;

  void check(OrtStatus* status) const { ort::check(api_, status); }

  void open(const std::filesystem::path& graph, const Options& options) {
    ort::SessionOptions settings(api_);
    check(ort::CreateSessionOptions::call(api_, settings.out()));
    if (options.threads > 0) check(ort::SetIntraOpNumThreads::call(api_, settings.get(), options.threads));
    // ONNX Runtime's Dropout elimination may remove a mask that the backward pass reads.
    check(ort::AddSessionConfigEntry::call(api_, settings.get(), "optimization.disable_specified_optimizers",
                                           "EliminateDropout"));
    if (!options.kernels.empty()) {
      check(ort::RegisterCustomOpsLibrary_V2::call(api_, settings.get(), options.kernels.c_str()));
    }
    const std::string model = read_file(graph);
    check(ort::CreateSessionFromArray::call(api_, env_.get(), model.data(), model.size(), settings.get(), session_.out()));
  }

  // Reads names, types and shapes of inputs and outputs.
  void read_ports() {
    OrtAllocator* allocator = nullptr;
    check(ort::GetAllocatorWithDefaultOptions::call(api_, &allocator));
    std::size_t count = 0;
    check(ort::SessionGetInputCount::call(api_, session_.get(), &count));
    for (std::size_t index = 0; index < count; ++index) {
      ort::TypeInfo type(api_);
      char* name = nullptr;
      check(ort::SessionGetInputTypeInfo::call(api_, session_.get(), index, type.out()));
      check(ort::SessionGetInputName::call(api_, session_.get(), index, allocator, &name));
      inputs_.emplace(taken(allocator, name), port(type));
    }
    check(ort::SessionGetOutputCount::call(api_, session_.get(), &count));
    for (std::size_t index = 0; index < count; ++index) {
      ort::TypeInfo type(api_);
      char* name = nullptr;
      check(ort::SessionGetOutputTypeInfo::call(api_, session_.get(), index, type.out()));
      check(ort::SessionGetOutputName::call(api_, session_.get(), index, allocator, &name));
      outputs_.emplace(taken(allocator, name), port(type));
    }
  }

  std::string taken(OrtAllocator* allocator, char* text) const {
    std::string result = text == nullptr ? "" : text;
    if (text != nullptr) check(ort::AllocatorFree::call(api_, allocator, text));
    return result;
  }

  Port port(const ort::TypeInfo& type) const {
    const OrtTensorTypeAndShapeInfo* info = nullptr;
    check(ort::CastTypeInfoToTensorInfo::call(api_, type.get(), &info));
    if (info == nullptr) throw Error("The graph has an input or output that is not a tensor, so it is not a step graph.");
    Port result;
    std::size_t rank = 0;
    check(ort::GetTensorElementType::call(api_, info, &result.type));
    check(ort::GetDimensionsCount::call(api_, info, &rank));
    result.shape.resize(rank);
    check(ort::GetDimensions::call(api_, info, result.shape.data(), rank));
    return result;
  }

  json::Value metadata(const char* key) const {
    OrtAllocator* allocator = nullptr;
    check(ort::GetAllocatorWithDefaultOptions::call(api_, &allocator));
    ort::Metadata all(api_);
    check(ort::SessionGetModelMetadata::call(api_, session_.get(), all.out()));
    char* text = nullptr;
    check(ort::LookupCustomMetadata::call(api_, all.get(), allocator, key, &text));
    if (text == nullptr) throw Error(std::string("The model is not a step graph: its metadata has no '") + key + "'.");
    return json::read(taken(allocator, text));
  }

  void read_description() {
    const json::Value description = metadata("onnxtrain.step");
    const json::Value* version = description.find("version");
    if (version == nullptr || version->number > kVersion) {
      throw Error("The step graph has a version later than 1; use the step.hpp of the onnxtrain version that wrote it.");
    }
    for (const auto& [name, role] : description.find("feeds")->members) feeds_.emplace(name, role.text);
    for (const auto& [name, role] : description.find("states")->members) roles_.emplace(name, role.text);
    for (const auto& [name, output] : metadata("onnxtrain.states").members) new_names_.emplace(name, output.text);
    for (const json::Value& name : metadata("onnxtrain.in_place").items) in_place_.insert(name.text);
    const json::Value* loss = description.find("loss");
    if (loss != nullptr && loss->kind == json::Value::Kind::kText) {
      loss_name_ = loss->text;
      loss_ = Tensor(outputs_.at(loss_name_).type, {});
    }
  }

  // Sets the initial values and allocates second buffers where needed.
  void take(Tensors states) {
    for (const auto& [name, role] : roles_) {
      const auto found = states.find(name);
      if (found == states.end()) throw Error("The states have no '" + name + "' (" + role + "), which the graph reads.");
      if (inputs_.count(name) != 0) check_fits(name, found->second);
      Buffers buffers{std::move(found->second), Tensor()};
      if (has_two(name)) buffers[1] = buffers[0].copy();
      states_.emplace(name, std::move(buffers));
    }
  }

  bool has_two(const std::string& name) const { return new_names_.count(name) != 0 && in_place_.count(name) == 0; }

  Tensor& buffer(const std::string& name, int turn) {
    const auto found = states_.find(name);
    if (found == states_.end()) throw Error("There is no state '" + name + "'.");
    return found->second[has_two(name) ? turn : 0];
  }

  // Binds all states and the loss for one of the two alternating steps.
  ort::IoBinding bind(int turn) {
    ort::IoBinding binding(api_);
    check(ort::CreateIoBinding::call(api_, session_.get(), binding.out()));
    for (const auto& [name, role] : roles_) {
      if (inputs_.count(name) == 0) continue;
      const ort::Value value = value_of(buffer(name, turn));
      check(ort::BindInput::call(api_, binding.get(), name.c_str(), value.get()));
    }
    for (const auto& [name, output] : new_names_) {
      const ort::Value value = value_of(buffer(name, 1 - turn));
      check(ort::BindOutput::call(api_, binding.get(), output.c_str(), value.get()));
    }
    if (!loss_name_.empty()) {
      const ort::Value value = value_of(loss_);
      check(ort::BindOutput::call(api_, binding.get(), loss_name_.c_str(), value.get()));
    }
    return binding;
  }

  // Wraps a tensor as a value of the runtime, without a copy.
  ort::Value value_of(const Tensor& tensor) const {
    ort::Value value(api_);
    check(ort::CreateTensorWithData::call(api_, memory_.get(), const_cast<void*>(tensor.data()), tensor.bytes(),
                                          tensor.shape().data(), tensor.shape().size(), tensor.type(), value.out()));
    return value;
  }

  void check_fits(const std::string& name, const Tensor& tensor) const {
    const Port& wanted = inputs_.at(name);
    bool fits = tensor.type() == wanted.type && tensor.shape().size() == wanted.shape.size();
    for (std::size_t axis = 0; fits && axis < wanted.shape.size(); ++axis) {
      fits = wanted.shape[axis] < 0 || wanted.shape[axis] == tensor.shape()[axis];
    }
    if (fits) return;
    std::string shape = "[";
    for (const std::int64_t size : wanted.shape) shape += (shape.size() > 1 ? ", " : "") + (size < 0 ? "any" : std::to_string(size));
    throw Error("'" + name + "' is " + element_type(tensor.type()).name + tensor.shape_text() + ", but the graph needs " +
                element_type(wanted.type).name + shape + "].");
  }

  static Tensor number(int type, double value) {
    return type == element_type_of<double>() ? Tensor::scalar(value) : Tensor::scalar(static_cast<float>(value));
  }

  double loss_value() const {
    if (loss_name_.empty()) return std::nan("");
    return loss_.type() == element_type_of<double>() ? *loss_.as<double>() : static_cast<double>(*loss_.as<float>());
  }

  const OrtApi* api_;
  ort::Env env_;
  ort::MemoryInfo memory_;
  ort::Session session_;
  std::map<std::string, Port> inputs_, outputs_;
  std::map<std::string, std::string> feeds_, roles_, new_names_;
  std::set<std::string> in_place_;
  std::map<std::string, Buffers> states_;
  std::string loss_name_;
  Tensor loss_;
  std::array<ort::IoBinding, 2> bindings_;
  int turn_ = 0;
};

}  // namespace onnxtrain
