// What runs kernels, in the few words that they need: blocks of threads that work together, memory, a stream.
//
// A kernel is a struct that is copied to the device; its operator() is what one block does, written as steps that all
// threads of the block finish before the next step begins. Without a compiler for CUDA the same kernels run on the
// processor, block after block and thread after thread: so that tests can try them where there is no GPU.
#pragma once

#include <cstddef>

namespace onnxtrain::cuda {

// Threads of a block. Not measured: no GPU was at hand.
inline constexpr unsigned kThreads = 256;

// Bytes that a kernel's struct may have; every version of CUDA takes as many.
inline constexpr std::size_t kMostArguments = 4096;

}  // namespace onnxtrain::cuda

#if defined(__CUDACC__)
#include "cuda/device_cuda.h"
#else
#include "cuda/device_processor.h"
#endif
