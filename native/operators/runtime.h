// ONNX Runtime's functions as C++ calls that throw on failure.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "attributes.h"
#include "ort_abi.h"
#include "parallel.h"
#include "scratch.h"

namespace onnxtrain {

struct Tensor;

// Calls `work` and turns exceptions into a status that the runtime reports to the user.
template <typename Work>
OrtStatus* status_of(const OrtApi* api, Work work) noexcept {
  try {
    work();
    return nullptr;
  } catch (const std::invalid_argument& error) {
    return ort::CreateStatus::call(api, ort::kStatusInvalidArgument, error.what());
  } catch (const std::exception& error) {
    return ort::CreateStatus::call(api, ort::kStatusFail, error.what());
  }
}

// Records a runtime's version, e.g. "1.31.1": newer ones have cheaper calls.
void use_version(const OrtApi* api, const char* version);

// Throws the runtime's own message if `status` is a failure.
void require(const OrtApi* api, OrtStatus* status);

// A node's attributes, while the runtime creates its kernel.
class Attributes final : public AttributeSource {
 public:
  Attributes(const OrtApi* api, const OrtKernelInfo* info) : api_(api), info_(info) {}

  double number(const char* name, std::optional<double> otherwise = std::nullopt) const override;
  std::string text(const char* name, std::optional<std::string> otherwise = std::nullopt) const override;
  std::int64_t integer(const char* name, std::optional<std::int64_t> otherwise = std::nullopt) const;
  // Empty if the attribute is missing.
  std::vector<std::int64_t> integers(const char* name) const override;
  std::vector<double> numbers(const char* name) const;

  std::size_t input_count() const;
  std::size_t output_count() const;

  // Whether input `index` is an initializer, which stays the same in every call; reads it into `tensor`.
  bool is_constant(std::size_t index, Tensor* tensor) const;
  // Input `index`, which must be an initializer; throws std::invalid_argument for another.
  Tensor constant(std::size_t index, const char* name) const;

  // The runtime's own allocator, so that scratch memory reuses the arena of the tensors. Null if not available.
  std::unique_ptr<const Memory> memory() const;

 private:
  bool has_number(const char* name, float* value) const;
  bool has_text(const char* name, std::string* value) const;
  bool has_integer(const char* name) const;

  const OrtApi* api_;
  const OrtKernelInfo* info_;
};

struct Tensor {
  int type = ort::kTypeUndefined;
  std::vector<std::int64_t> shape;
  void* data = nullptr;

  std::size_t count() const;
};

// One call of a kernel.
class Call {
 public:
  Call(const OrtApi* api, OrtKernelContext* context) : api_(api), context_(context) {}

  std::size_t input_count() const;
  // Returns whether input `index` is present.
  bool has_input(std::size_t index) const;
  // Reads input `index` into `tensor`, reusing its storage.
  void input(std::size_t index, Tensor& tensor) const;
  // The buffer of output `index`, or null if it is not requested. Request small outputs first: a full arena opens a
  // region at least as large as the last one, and one that holds a small buffer has no room for the next large one.
  void* output(std::size_t index, const std::vector<std::int64_t>& shape) const;
  // Runs tasks on the runtime's thread pool.
  ParallelFor parallel_for() const;
  // The stream of the kernel's provider (a cudaStream_t); null on the CPU.
  void* stream() const;

 private:
  const OrtApi* api_;
  OrtKernelContext* context_;
};

}  // namespace onnxtrain
