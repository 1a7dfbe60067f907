// The entries of ONNX Runtime's C API that this library uses.
//
// ONNX Runtime passes a custom-operator library one table of function pointers. The table only grows, so the index of a
// function never changes; this header lists the indices and signatures. No file of ONNX Runtime is needed to build or
// link.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// Opaque handles.
struct OrtStatus;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtShapeInferContext;
struct OrtTensorTypeAndShapeInfo;
struct OrtValue;
struct OrtAllocator;

// The table itself. It is indexed, never copied, so its length does not matter here.
struct OrtApi {
  void (*functions[1])();
};

struct OrtApiBase {
  const OrtApi* (*GetApi)(std::uint32_t version);  // null if the runtime is older than `version`
  const char* (*GetVersionString)();
};

// Describes one custom operator. The runtime reads the fields that `version` implies.
struct OrtCustomOp {
  std::uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int (*GetInputType)(const OrtCustomOp*, std::size_t index);
  std::size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, std::size_t index);
  std::size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void* kernel, OrtKernelContext*);
  void (*KernelDestroy)(void* kernel);
  int (*GetInputCharacteristic)(const OrtCustomOp*, std::size_t index);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, std::size_t index);
  int (*GetInputMemoryType)(const OrtCustomOp*, std::size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  std::size_t (*GetMayInplace)(int** input_indices, int** output_indices);
  void (*ReleaseMayInplace)(int* input_indices, int* output_indices);
  std::size_t (*GetAliasMap)(int** input_indices, int** output_indices);
  void (*ReleaseAliasMap)(int* input_indices, int* output_indices);
};

}  // extern "C"

static_assert(sizeof(void*) != 8 ||
                  (offsetof(OrtCustomOp, CreateKernel) == 8 && offsetof(OrtCustomOp, GetName) == 16 &&
                   offsetof(OrtCustomOp, GetExecutionProviderType) == 24 && offsetof(OrtCustomOp, GetInputType) == 32 &&
                   offsetof(OrtCustomOp, GetInputTypeCount) == 40 && offsetof(OrtCustomOp, GetOutputType) == 48 &&
                   offsetof(OrtCustomOp, GetOutputTypeCount) == 56 && offsetof(OrtCustomOp, KernelCompute) == 64 &&
                   offsetof(OrtCustomOp, KernelDestroy) == 72 && offsetof(OrtCustomOp, GetInputCharacteristic) == 80 &&
                   offsetof(OrtCustomOp, GetOutputCharacteristic) == 88 &&
                   offsetof(OrtCustomOp, GetInputMemoryType) == 96 &&
                   offsetof(OrtCustomOp, GetVariadicInputMinArity) == 104 &&
                   offsetof(OrtCustomOp, GetVariadicInputHomogeneity) == 112 &&
                   offsetof(OrtCustomOp, GetVariadicOutputMinArity) == 120 &&
                   offsetof(OrtCustomOp, GetVariadicOutputHomogeneity) == 128 &&
                   offsetof(OrtCustomOp, CreateKernelV2) == 136 && offsetof(OrtCustomOp, KernelComputeV2) == 144 &&
                   offsetof(OrtCustomOp, InferOutputShapeFn) == 152 && offsetof(OrtCustomOp, GetStartVersion) == 160 &&
                   offsetof(OrtCustomOp, GetEndVersion) == 168 && offsetof(OrtCustomOp, GetMayInplace) == 176 &&
                   offsetof(OrtCustomOp, ReleaseMayInplace) == 184 && offsetof(OrtCustomOp, GetAliasMap) == 192 &&
                   offsetof(OrtCustomOp, ReleaseAliasMap) == 200 && sizeof(OrtCustomOp) == 208),
              "OrtCustomOp must lie in memory as ONNX Runtime expects it");

namespace onnxtrain::ort {

// The first version in which the runtime asks an operator which outputs may reuse an input's buffer (GetMayInplace). A
// library that requires a newer version than the runtime's does not load.
inline constexpr std::uint32_t kApiVersion = 18;

inline constexpr int kStatusFail = 1;
inline constexpr int kStatusInvalidArgument = 2;

inline constexpr int kTypeUndefined = 0;  // as an operator's input or output type: any
inline constexpr int kTypeFloat = 1;
inline constexpr int kTypeUint8 = 2;
inline constexpr int kTypeUint16 = 4;
inline constexpr int kTypeInt32 = 6;
inline constexpr int kTypeInt64 = 7;
inline constexpr int kTypeBool = 9;
inline constexpr int kTypeFloat16 = 10;
inline constexpr int kTypeDouble = 11;
inline constexpr int kTypeBfloat16 = 16;

inline constexpr int kRequired = 0;
inline constexpr int kOptional = 1;
inline constexpr int kVariadic = 2;
inline constexpr int kMemoryDefault = 0;
inline constexpr int kMemoryOfProcessor = -2;  // an input that a provider with its own memory wants in CPU memory

// One function of the table: `Function<slot, Signature>::call(api, arguments...)`.
template <std::size_t slot, typename Signature>
struct Function;

template <std::size_t slot, typename Result, typename... Arguments>
struct Function<slot, Result(Arguments...)> {
  static Result call(const OrtApi* api, Arguments... arguments) {
    return reinterpret_cast<Result (*)(Arguments...)>(*(&api->functions[0] + slot))(arguments...);
  }
};

using CreateStatus = Function<0, OrtStatus*(int code, const char* message)>;
using GetErrorMessage = Function<2, const char*(const OrtStatus*)>;
using ReleaseStatus = Function<93, void(OrtStatus*)>;

using CreateCustomOpDomain = Function<26, OrtStatus*(const char* domain, OrtCustomOpDomain**)>;
using CustomOpDomain_Add = Function<27, OrtStatus*(OrtCustomOpDomain*, const OrtCustomOp*)>;
using AddCustomOpDomain = Function<28, OrtStatus*(OrtSessionOptions*, OrtCustomOpDomain*)>;

using KernelInfoGetAttribute_float = Function<85, OrtStatus*(const OrtKernelInfo*, const char* name, float*)>;
using KernelInfoGetAttribute_int64 = Function<86, OrtStatus*(const OrtKernelInfo*, const char* name, std::int64_t*)>;
using KernelInfoGetAttribute_string =
    Function<87, OrtStatus*(const OrtKernelInfo*, const char* name, char* text, std::size_t* size)>;
using KernelInfoGetAttributeArray_float =
    Function<162, OrtStatus*(const OrtKernelInfo*, const char* name, float*, std::size_t* size)>;
using KernelInfoGetAttributeArray_int64 =
    Function<163, OrtStatus*(const OrtKernelInfo*, const char* name, std::int64_t*, std::size_t* size)>;
// The value of an input that is an initializer, owned by the runtime; null for others.
using KernelInfoGetConstantInput_tensor =
    Function<249, OrtStatus*(const OrtKernelInfo*, std::size_t index, int* is_constant, const OrtValue**)>;
using KernelInfo_GetInputCount = Function<230, OrtStatus*(const OrtKernelInfo*, std::size_t*)>;
using KernelInfo_GetOutputCount = Function<231, OrtStatus*(const OrtKernelInfo*, std::size_t*)>;

using KernelContext_GetInputCount = Function<88, OrtStatus*(const OrtKernelContext*, std::size_t*)>;
using KernelContext_GetInput = Function<90, OrtStatus*(const OrtKernelContext*, std::size_t, const OrtValue**)>;
using KernelContext_GetOutput =
    Function<91, OrtStatus*(OrtKernelContext*, std::size_t, const std::int64_t* shape, std::size_t rank, OrtValue**)>;
using KernelContext_GetGPUComputeStream = Function<193, OrtStatus*(const OrtKernelContext*, void** stream)>;
using KernelContext_ParallelFor = Function<274, OrtStatus*(const OrtKernelContext*, void (*)(void*, std::size_t),
                                                           std::size_t total, std::size_t batches, void* data)>;

// The allocator of a kernel's provider; the caller owns it.
using KernelInfoGetAllocator = Function<278, OrtStatus*(const OrtKernelInfo*, int memory_type, OrtAllocator**)>;
using ReleaseAllocator = Function<132, void(OrtAllocator*)>;
using AllocatorAlloc = Function<75, OrtStatus*(OrtAllocator*, std::size_t bytes, void**)>;
using AllocatorFree = Function<76, OrtStatus*(OrtAllocator*, void*)>;

using GetTensorMutableData = Function<51, OrtStatus*(OrtValue*, void**)>;
using GetTensorTypeAndShape = Function<65, OrtStatus*(const OrtValue*, OrtTensorTypeAndShapeInfo**)>;
using GetTensorElementType = Function<60, OrtStatus*(const OrtTensorTypeAndShapeInfo*, int*)>;
using GetDimensionsCount = Function<61, OrtStatus*(const OrtTensorTypeAndShapeInfo*, std::size_t*)>;
using GetDimensions = Function<62, OrtStatus*(const OrtTensorTypeAndShapeInfo*, std::int64_t*, std::size_t)>;
using GetSymbolicDimensions = Function<63, OrtStatus*(const OrtTensorTypeAndShapeInfo*, const char**, std::size_t)>;
using ReleaseTensorTypeAndShapeInfo = Function<99, void(OrtTensorTypeAndShapeInfo*)>;
// From version 24 on: the results of the five calls above, without allocations; the shape stays owned by the value.
using GetTensorElementTypeAndShapeDataReference =
    Function<414, OrtStatus*(const OrtValue*, int* type, const std::int64_t** shape, std::size_t* rank)>;
inline constexpr int kVersionOfShapeReferences = 24;  // ONNX Runtime 1.24

using ShapeInferContext_GetInputCount = Function<267, OrtStatus*(const OrtShapeInferContext*, std::size_t*)>;
using ShapeInferContext_GetInputTypeShape =
    Function<268, OrtStatus*(const OrtShapeInferContext*, std::size_t, OrtTensorTypeAndShapeInfo**)>;
using ShapeInferContext_SetOutputTypeShape =
    Function<270, OrtStatus*(const OrtShapeInferContext*, std::size_t, const OrtTensorTypeAndShapeInfo*)>;

}  // namespace onnxtrain::ort
