// The functions of ONNX Runtime's C API that a training step needs.
//
// The API is one table of function pointers that only grows, so the index of a function never changes. This header
// lists the indices and signatures and therefore needs no header of ONNX Runtime, which the Python wheel does not ship.
// The handles are declared exactly as in ONNX Runtime's headers, so this file can be included before or after
// onnxruntime_c_api.h and onnxruntime_cxx_api.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "onnxtrain/tensor.hpp"

struct OrtApi;
struct OrtApiBase;
struct OrtAllocator;
struct OrtEnv;
struct OrtIoBinding;
struct OrtMemoryInfo;
struct OrtModelMetadata;
struct OrtRunOptions;
struct OrtSession;
struct OrtSessionOptions;
struct OrtStatus;
struct OrtTensorTypeAndShapeInfo;
struct OrtTypeInfo;
struct OrtValue;

// Exported by the ONNX Runtime library.
extern "C" const OrtApiBase* OrtGetApiBase(void) noexcept;

namespace onnxtrain::ort {

using Path = std::filesystem::path::value_type;

inline constexpr std::uint32_t kApiVersion = 17;  // ONNX Runtime 1.17 and later

// One function of the API table, by its index.
template <std::size_t slot, typename Signature>
struct Function;

template <std::size_t slot, typename Result, typename... Arguments>
struct Function<slot, Result(Arguments...)> {
  static Result call(const OrtApi* api, Arguments... arguments) {
    const auto* functions = reinterpret_cast<void (*const*)()>(api);
    return reinterpret_cast<Result (*)(Arguments...)>(functions[slot])(arguments...);
  }
};

using GetErrorMessage = Function<2, const char*(const OrtStatus*)>;
using CreateEnv = Function<3, OrtStatus*(int severity, const char* name, OrtEnv**)>;
using CreateSessionFromArray =
    Function<8, OrtStatus*(const OrtEnv*, const void* model, std::size_t, const OrtSessionOptions*, OrtSession**)>;
using CreateSessionOptions = Function<10, OrtStatus*(OrtSessionOptions**)>;
using SetIntraOpNumThreads = Function<24, OrtStatus*(OrtSessionOptions*, int)>;
using SessionGetInputCount = Function<30, OrtStatus*(const OrtSession*, std::size_t*)>;
using SessionGetOutputCount = Function<31, OrtStatus*(const OrtSession*, std::size_t*)>;
using SessionGetInputTypeInfo = Function<33, OrtStatus*(const OrtSession*, std::size_t, OrtTypeInfo**)>;
using SessionGetOutputTypeInfo = Function<34, OrtStatus*(const OrtSession*, std::size_t, OrtTypeInfo**)>;
using SessionGetInputName = Function<36, OrtStatus*(const OrtSession*, std::size_t, OrtAllocator*, char**)>;
using SessionGetOutputName = Function<37, OrtStatus*(const OrtSession*, std::size_t, OrtAllocator*, char**)>;
using CreateTensorWithData = Function<49, OrtStatus*(const OrtMemoryInfo*, void*, std::size_t bytes,
                                                     const std::int64_t* shape, std::size_t rank, int type, OrtValue**)>;
using CastTypeInfoToTensorInfo = Function<55, OrtStatus*(const OrtTypeInfo*, const OrtTensorTypeAndShapeInfo**)>;
using GetTensorElementType = Function<60, OrtStatus*(const OrtTensorTypeAndShapeInfo*, int*)>;
using GetDimensionsCount = Function<61, OrtStatus*(const OrtTensorTypeAndShapeInfo*, std::size_t*)>;
using GetDimensions = Function<62, OrtStatus*(const OrtTensorTypeAndShapeInfo*, std::int64_t*, std::size_t)>;
using CreateCpuMemoryInfo = Function<69, OrtStatus*(int allocator, int kind, OrtMemoryInfo**)>;
using AllocatorFree = Function<76, OrtStatus*(OrtAllocator*, void*)>;
using GetAllocatorWithDefaultOptions = Function<78, OrtStatus*(OrtAllocator**)>;
using ReleaseEnv = Function<92, void(OrtEnv*)>;
using ReleaseStatus = Function<93, void(OrtStatus*)>;
using ReleaseMemoryInfo = Function<94, void(OrtMemoryInfo*)>;
using ReleaseSession = Function<95, void(OrtSession*)>;
using ReleaseValue = Function<96, void(OrtValue*)>;
using ReleaseTypeInfo = Function<98, void(OrtTypeInfo*)>;
using ReleaseSessionOptions = Function<100, void(OrtSessionOptions*)>;
using SessionGetModelMetadata = Function<111, OrtStatus*(const OrtSession*, OrtModelMetadata**)>;
using LookupCustomMetadata =
    Function<116, OrtStatus*(const OrtModelMetadata*, OrtAllocator*, const char* key, char** value)>;
using ReleaseModelMetadata = Function<118, void(OrtModelMetadata*)>;
using AddSessionConfigEntry = Function<130, OrtStatus*(OrtSessionOptions*, const char* key, const char* value)>;
using RunWithBinding = Function<133, OrtStatus*(OrtSession*, const OrtRunOptions*, const OrtIoBinding*)>;
using CreateIoBinding = Function<134, OrtStatus*(OrtSession*, OrtIoBinding**)>;
using ReleaseIoBinding = Function<135, void(OrtIoBinding*)>;
using BindInput = Function<136, OrtStatus*(OrtIoBinding*, const char* name, const OrtValue*)>;
using BindOutput = Function<137, OrtStatus*(OrtIoBinding*, const char* name, const OrtValue*)>;
using RegisterCustomOpsLibrary_V2 = Function<228, OrtStatus*(OrtSessionOptions*, const Path* file)>;

// The API table of the loaded runtime.
inline const OrtApi* table(const OrtApiBase* base) {
  using GetApi = const OrtApi* (*)(std::uint32_t);
  const OrtApi* api = (*reinterpret_cast<const GetApi*>(base))(kApiVersion);
  if (api == nullptr) throw Error("This ONNX Runtime is older than 1.17; use a later one.");
  return api;
}

// Throws the message of a failed status.
inline void check(const OrtApi* api, OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = GetErrorMessage::call(api, status);
  ReleaseStatus::call(api, status);
  throw Error("ONNX Runtime: " + message);
}

// Owns a runtime object and releases it.
template <typename Object, typename Release>
class Owned {
 public:
  Owned() = default;
  explicit Owned(const OrtApi* api) : api_(api) {}
  Owned(Owned&& other) noexcept : api_(other.api_), object_(std::exchange(other.object_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(api_, other.api_);
    std::swap(object_, other.object_);
    return *this;
  }
  ~Owned() {
    if (object_ != nullptr) Release::call(api_, object_);
  }

  Object* get() const { return object_; }
  Object** out() { return &object_; }

 private:
  const OrtApi* api_ = nullptr;
  Object* object_ = nullptr;
};

using Env = Owned<OrtEnv, ReleaseEnv>;
using MemoryInfo = Owned<OrtMemoryInfo, ReleaseMemoryInfo>;
using Session = Owned<OrtSession, ReleaseSession>;
using SessionOptions = Owned<OrtSessionOptions, ReleaseSessionOptions>;
using IoBinding = Owned<OrtIoBinding, ReleaseIoBinding>;
using Metadata = Owned<OrtModelMetadata, ReleaseModelMetadata>;
using TypeInfo = Owned<OrtTypeInfo, ReleaseTypeInfo>;
using Value = Owned<OrtValue, ReleaseValue>;

}  // namespace onnxtrain::ort
