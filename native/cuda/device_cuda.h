// Implements device.h with CUDA. Included by it only.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#define ONNXTRAIN_DEVICE __device__
#define ONNXTRAIN_SHARED __shared__

namespace onnxtrain::cuda {

using Stream = cudaStream_t;

inline void require(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + " failed on the CUDA device: " + cudaGetErrorString(error) + ".");
}

// CUDA keeps an error until somebody asks for it, and one that ended the device's work for good: neither is the next
// kernel's.
inline void require_no_earlier_error() {
  require(cudaGetLastError(), "Something that ran before the optimizer's update");
}

struct Block {
  unsigned index;

  // Calls work(thread) for every thread of the block; writes to shared memory are visible to the next step.
  template <typename Work>
  ONNXTRAIN_DEVICE void each_thread(Work work) const {
    work(threadIdx.x);
    __syncthreads();
  }
};

template <typename Kernel>
__global__ void __launch_bounds__(kThreads) run_block(const __grid_constant__ Kernel kernel) {
  kernel(Block{blockIdx.x});
}

template <typename Kernel>
void launch(const Kernel& kernel, unsigned blocks, Stream stream) {
  static_assert(sizeof(Kernel) <= kMostArguments);
  if (blocks == 0) return;
  require_no_earlier_error();
  run_block<Kernel><<<blocks, kThreads, 0, stream>>>(kernel);
  require(cudaGetLastError(), "Starting a kernel");
}

// Device memory, freed in stream order.
class Scratch {
 public:
  Scratch(std::size_t bytes, Stream stream) : stream_(stream) {
    require(cudaMallocAsync(&data_, bytes, stream), "Reserving memory");
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { cudaFreeAsync(data_, stream_); }

  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  Stream stream_;
};

// Makes the device that holds some memory current for the calling thread.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const void* memory) {
    cudaPointerAttributes found = {};
    require(cudaPointerGetAttributes(&found, memory), "Finding the device of a tensor");
    if (found.type != cudaMemoryTypeDevice && found.type != cudaMemoryTypeManaged) {
      throw std::invalid_argument("its tensors are in CPU memory, and must be in the memory of a CUDA device.");
    }
    require(cudaGetDevice(&before_), "Finding the current device");
    if (found.device == before_) return;
    require(cudaSetDevice(found.device), "Choosing the device");
    changed_ = true;
  }
  OnDeviceOf(const OnDeviceOf&) = delete;
  OnDeviceOf& operator=(const OnDeviceOf&) = delete;
  ~OnDeviceOf() {
    if (changed_) cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace onnxtrain::cuda
