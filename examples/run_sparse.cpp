// Runs a compiled sparse model from C++, with the operator library and no Python.
//
//   onnxtrain sparsify pruned.onnx -o fast.onnx
//   ln -sf "$(python -c "import glob, onnxruntime as o; print(*glob.glob(o.__path__[0] + '/capi/libonnxruntime.so.*'))")" libonnxruntime.so.1
//   g++ -std=c++17 -O2 -Iinclude examples/run_sparse.cpp -o run_sparse libonnxruntime.so.1 -Wl,-rpath,'$ORIGIN'
//   ./run_sparse fast.onnx x 8 512 libonnxtrain_kernels.so < x.bin > y.bin
//
// The arguments are the model, its input with two sizes, and the library (`onnxtrain.custom_ops_library()`, or that of
// the wheel onnxtrain-ops); without a library the same file runs at dense speed. Standard input and output are float32.

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <vector>

#include "onnxtrain/ort.hpp"

namespace ort = onnxtrain::ort;

using Run = ort::Function<9, OrtStatus*(OrtSession*, const OrtRunOptions*, const char* const* inputs,
                                        const OrtValue* const*, std::size_t, const char* const* outputs, std::size_t,
                                        OrtValue**)>;
using GetTensorMutableData = ort::Function<51, OrtStatus*(OrtValue*, void**)>;
using GetTensorTypeAndShape = ort::Function<65, OrtStatus*(const OrtValue*, OrtTensorTypeAndShapeInfo**)>;
using GetTensorShapeElementCount = ort::Function<64, OrtStatus*(const OrtTensorTypeAndShapeInfo*, std::size_t*)>;
using ReleaseTensorTypeAndShapeInfo = ort::Function<99, void(OrtTensorTypeAndShapeInfo*)>;

int main(int count, char** arguments) {
  if (count < 5) {
    std::fprintf(stderr, "usage: run_sparse MODEL INPUT ROWS COLUMNS [OPERATORS]\n");
    return 2;
  }
  try {
    const OrtApi* api = ort::table(OrtGetApiBase());
    ort::Env env(api);
    ort::check(api, ort::CreateEnv::call(api, 2, "run_sparse", env.out()));
    ort::SessionOptions options(api);
    ort::check(api, ort::CreateSessionOptions::call(api, options.out()));
    ort::check(api, ort::SetIntraOpNumThreads::call(api, options.get(), 1));
    if (count > 5) {
      const std::filesystem::path library = arguments[5];
      ort::check(api, ort::RegisterCustomOpsLibrary_V2::call(api, options.get(), library.c_str()));
    }
    std::ifstream file(arguments[1], std::ios::binary);
    const std::vector<char> model{std::istreambuf_iterator<char>(file), {}};
    ort::Session session(api);
    ort::check(api, ort::CreateSessionFromArray::call(api, env.get(), model.data(), model.size(), options.get(),
                                                      session.out()));

    const std::int64_t shape[2] = {std::atoll(arguments[3]), std::atoll(arguments[4])};
    std::vector<float> x(static_cast<std::size_t>(shape[0] * shape[1]));
    if (std::fread(x.data(), sizeof(float), x.size(), stdin) != x.size()) throw std::runtime_error("the input is short");
    ort::MemoryInfo memory(api);
    ort::check(api, ort::CreateCpuMemoryInfo::call(api, 0, 0, memory.out()));
    ort::Value input(api), output(api);
    ort::check(api, ort::CreateTensorWithData::call(api, memory.get(), x.data(), x.size() * sizeof(float), shape, 2, 1,
                                                    input.out()));
    OrtAllocator* allocator = nullptr;
    ort::check(api, ort::GetAllocatorWithDefaultOptions::call(api, &allocator));
    char* name = nullptr;
    ort::check(api, ort::SessionGetOutputName::call(api, session.get(), 0, allocator, &name));
    const OrtValue* inputs[] = {input.get()};
    const char* names[] = {arguments[2]};
    ort::check(api, Run::call(api, session.get(), nullptr, names, inputs, 1, &name, 1, output.out()));
    ort::check(api, ort::AllocatorFree::call(api, allocator, name));

    OrtTensorTypeAndShapeInfo* info = nullptr;
    std::size_t size = 0;
    void* y = nullptr;
    ort::check(api, GetTensorTypeAndShape::call(api, output.get(), &info));
    ort::check(api, GetTensorShapeElementCount::call(api, info, &size));
    ReleaseTensorTypeAndShapeInfo::call(api, info);
    ort::check(api, GetTensorMutableData::call(api, output.get(), &y));
    std::fwrite(y, sizeof(float), size, stdout);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
