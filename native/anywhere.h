// Marks functions that run on the CPU and, where compiled for CUDA, on the GPU too.
#pragma once

#if defined(__CUDACC__)
#define ONNXTRAIN_ANYWHERE __host__ __device__
#else
#define ONNXTRAIN_ANYWHERE
#endif
