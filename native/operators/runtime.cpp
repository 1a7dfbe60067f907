#include "operators/runtime.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "operators/shapes.h"

namespace onnxtrain {
namespace {

// The runtime whose values expose their shapes by reference. Null or another runtime if the process has several; values
// of the others are read by the slower calls.
std::atomic<const OrtApi*> shows_shapes{nullptr};

// Returns whether the call succeeded; a failure is an expected answer, not an error.
bool succeeded(const OrtApi* api, OrtStatus* status) {
  if (status == nullptr) return true;
  ort::ReleaseStatus::call(api, status);
  return false;
}

// Reads a value into `tensor`, reusing its storage.
void read(const OrtApi* api, const OrtValue* value, Tensor& tensor) {
  std::size_t rank = 0;
  if (shows_shapes.load(std::memory_order_relaxed) == api) {
    const std::int64_t* shape = nullptr;
    require(api, ort::GetTensorElementTypeAndShapeDataReference::call(api, value, &tensor.type, &shape, &rank));
    tensor.shape.assign(shape, shape + rank);
  } else {
    OrtTensorTypeAndShapeInfo* info = nullptr;
    require(api, ort::GetTensorTypeAndShape::call(api, value, &info));
    OrtStatus* status = ort::GetTensorElementType::call(api, info, &tensor.type);
    if (status == nullptr) status = ort::GetDimensionsCount::call(api, info, &rank);
    tensor.shape.resize(rank);
    if (status == nullptr) status = ort::GetDimensions::call(api, info, tensor.shape.data(), rank);
    ort::ReleaseTensorTypeAndShapeInfo::call(api, info);
    require(api, status);
  }
  // This API version has no getter for constant data; nothing is written through this pointer.
  require(api, ort::GetTensorMutableData::call(api, const_cast<OrtValue*>(value), &tensor.data));
}

class ArenaMemory final : public Memory {
 public:
  ArenaMemory(const OrtApi* api, OrtAllocator* allocator) : api_(api), allocator_(allocator) {}
  ~ArenaMemory() override { ort::ReleaseAllocator::call(api_, allocator_); }
  ArenaMemory(const ArenaMemory&) = delete;
  ArenaMemory& operator=(const ArenaMemory&) = delete;

  void* take(std::size_t bytes) const override {
    void* data = nullptr;
    require(api_, ort::AllocatorAlloc::call(api_, allocator_, bytes, &data));
    return data;
  }
  void give_back(void* data) const override { succeeded(api_, ort::AllocatorFree::call(api_, allocator_, data)); }

 private:
  const OrtApi* api_;
  OrtAllocator* allocator_;
};

}  // namespace

void use_version(const OrtApi* api, const char* version) {
  const bool new_enough =
      std::strncmp(version, "1.", 2) == 0 && std::atoi(version + 2) >= ort::kVersionOfShapeReferences;
  if (new_enough) shows_shapes.store(api, std::memory_order_relaxed);
}

void require(const OrtApi* api, OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = ort::GetErrorMessage::call(api, status);
  ort::ReleaseStatus::call(api, status);
  throw std::runtime_error(message);
}

bool Attributes::has_number(const char* name, float* value) const {
  return succeeded(api_, ort::KernelInfoGetAttribute_float::call(api_, info_, name, value));
}

bool Attributes::has_integer(const char* name) const {
  std::int64_t ignored = 0;
  return succeeded(api_, ort::KernelInfoGetAttribute_int64::call(api_, info_, name, &ignored));
}

bool Attributes::has_text(const char* name, std::string* value) const {
  std::size_t size = 0;
  if (!succeeded(api_, ort::KernelInfoGetAttribute_string::call(api_, info_, name, nullptr, &size))) return false;
  std::string buffer(size, '\0');
  require(api_, ort::KernelInfoGetAttribute_string::call(api_, info_, name, buffer.data(), &size));
  *value = buffer.c_str();
  return true;
}

double Attributes::number(const char* name, std::optional<double> otherwise) const {
  float value = 0.0f;
  if (has_number(name, &value)) return static_cast<double>(value);
  std::string ignored;
  if (has_integer(name) || has_text(name, &ignored)) {
    throw std::invalid_argument(std::string("attribute '") + name + "' must be a float, and is of another type.");
  }
  if (!otherwise) {
    throw std::invalid_argument(std::string("attribute '") + name +
                                "' is missing: it is required and must be a float.");
  }
  return *otherwise;
}

std::string Attributes::text(const char* name, std::optional<std::string> otherwise) const {
  std::string value;
  if (has_text(name, &value)) return value;
  float ignored = 0.0f;
  if (has_integer(name) || has_number(name, &ignored)) {
    throw std::invalid_argument(std::string("attribute '") + name + "' must be a string, and is of another type.");
  }
  if (!otherwise) {
    throw std::invalid_argument(std::string("attribute '") + name +
                                "' is missing: it is required and must be a string.");
  }
  return *otherwise;
}

std::int64_t Attributes::integer(const char* name, std::optional<std::int64_t> otherwise) const {
  std::int64_t value = 0;
  if (succeeded(api_, ort::KernelInfoGetAttribute_int64::call(api_, info_, name, &value))) return value;
  if (!otherwise) {
    throw std::invalid_argument(std::string("attribute '") + name +
                                "' is missing: it is required and must be an integer.");
  }
  return *otherwise;
}

std::vector<std::int64_t> Attributes::integers(const char* name) const {
  std::size_t size = 0;
  if (!succeeded(api_, ort::KernelInfoGetAttributeArray_int64::call(api_, info_, name, nullptr, &size))) return {};
  std::vector<std::int64_t> values(size);
  require(api_, ort::KernelInfoGetAttributeArray_int64::call(api_, info_, name, values.data(), &size));
  return values;
}

std::vector<double> Attributes::numbers(const char* name) const {
  std::size_t size = 0;
  if (!succeeded(api_, ort::KernelInfoGetAttributeArray_float::call(api_, info_, name, nullptr, &size))) return {};
  std::vector<float> values(size);
  require(api_, ort::KernelInfoGetAttributeArray_float::call(api_, info_, name, values.data(), &size));
  return {values.begin(), values.end()};
}

std::size_t Attributes::input_count() const {
  std::size_t count = 0;
  require(api_, ort::KernelInfo_GetInputCount::call(api_, info_, &count));
  return count;
}

std::size_t Attributes::output_count() const {
  std::size_t count = 0;
  require(api_, ort::KernelInfo_GetOutputCount::call(api_, info_, &count));
  return count;
}

bool Attributes::is_constant(std::size_t index, Tensor* tensor) const {
  const OrtValue* value = nullptr;
  int is_constant = 0;
  require(api_, ort::KernelInfoGetConstantInput_tensor::call(api_, info_, index, &is_constant, &value));
  if (is_constant == 0 || value == nullptr) return false;
  read(api_, value, *tensor);
  return true;
}

Tensor Attributes::constant(std::size_t index, const char* name) const {
  Tensor tensor;
  if (is_constant(index, &tensor)) return tensor;
  throw std::invalid_argument("input " + std::to_string(index) + " (" + name +
                              ") is computed: it must be an initializer of the model.");
}

std::size_t Tensor::count() const { return product(shape, 0, shape.size()); }

std::size_t Call::input_count() const {
  std::size_t count = 0;
  require(api_, ort::KernelContext_GetInputCount::call(api_, context_, &count));
  return count;
}

bool Call::has_input(std::size_t index) const {
  const OrtValue* value = nullptr;
  require(api_, ort::KernelContext_GetInput::call(api_, context_, index, &value));
  return value != nullptr;
}

void Call::input(std::size_t index, Tensor& tensor) const {
  const OrtValue* value = nullptr;
  require(api_, ort::KernelContext_GetInput::call(api_, context_, index, &value));
  if (value == nullptr) {
    throw std::invalid_argument("input " + std::to_string(index) +
                                " is missing: no input of this operator is optional.");
  }
  read(api_, value, tensor);
}

void* Call::output(std::size_t index, const std::vector<std::int64_t>& shape) const {
  OrtValue* value = nullptr;
  require(api_, ort::KernelContext_GetOutput::call(api_, context_, index, shape.data(), shape.size(), &value));
  if (value == nullptr) return nullptr;
  void* data = nullptr;
  require(api_, ort::GetTensorMutableData::call(api_, value, &data));
  return data;
}

void* Call::stream() const {
  void* stream = nullptr;
  require(api_, ort::KernelContext_GetGPUComputeStream::call(api_, context_, &stream));
  return stream;
}

std::unique_ptr<const Memory> Attributes::memory() const {
  OrtAllocator* allocator = nullptr;
  if (!succeeded(api_, ort::KernelInfoGetAllocator::call(api_, info_, ort::kMemoryDefault, &allocator))) return nullptr;
  return std::make_unique<ArenaMemory>(api_, allocator);
}

ParallelFor Call::parallel_for() const {
  return [api = api_, context = context_](std::size_t total, const std::function<void(std::size_t)>& task) {
    const auto run = [](void* data, std::size_t index) {
      (*static_cast<const std::function<void(std::size_t)>*>(data))(index);
    };
    auto* data = const_cast<std::function<void(std::size_t)>*>(&task);
    // One batch per task: threads pick tasks dynamically; 0 would split them evenly up front, and all threads would
    // wait for the slowest.
    require(api, ort::KernelContext_ParallelFor::call(api, context, run, total, total, data));
  };
}

}  // namespace onnxtrain
