// ONNX Runtime's functions as small C++ calls that throw where the runtime reports a failure.
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

// Calls `work` and turns what it throws into a status that the runtime shows to the user.
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

// Tells what to use of a runtime by its version, "1.31.1": what newer ones do with less work.
void use_version(const OrtApi* api, const char* version);

// Throws the runtime's own message where `status` is a failure.
void require(const OrtApi* api, OrtStatus* status);

// A node's attributes, at the time the runtime creates its kernel.
class Attributes final : public AttributeSource {
 public:
  Attributes(const OrtApi* api, const OrtKernelInfo* info) : api_(api), info_(info) {}

  double number(const char* name, std::optional<double> otherwise = std::nullopt) const override;
  std::string text(const char* name, std::optional<std::string> otherwise = std::nullopt) const override;
  std::int64_t integer(const char* name, std::optional<std::int64_t> otherwise = std::nullopt) const;
  // Empty where the attribute is left out.
  std::vector<std::int64_t> integers(const char* name) const;
  std::vector<double> numbers(const char* name) const;

  std::size_t input_count() const;
  std::size_t output_count() const;

  // The runtime's own, from which tensors come: what a node takes for itself lies where tensors have lain, and will lie.
  // Null where it gives none.
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
  // Whether input `index` is there: an optional one may be left out.
  bool has_input(std::size_t index) const;
  // Reads input `index` into `tensor`, whose storage is used again.
  void input(std::size_t index, Tensor& tensor) const;
  // The buffer of output `index`, null where it is not wanted. Ask for small ones first: where the runtime's arena has no
  // room, it opens a region at least as large as the last one, and one with a small buffer in it has no room for the next
  // large one.
  void* output(std::size_t index, const std::vector<std::int64_t>& shape) const;
  // Shares tasks among the threads of the runtime's own pool.
  ParallelFor parallel_for() const;
  // That of the provider that runs the kernel (a cudaStream_t); null for the processor's.
  void* stream() const;

 private:
  const OrtApi* api_;
  OrtKernelContext* context_;
};

}  // namespace onnxtrain
