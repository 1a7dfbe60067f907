// Marks functions that run on the processor and, where they are compiled for a GPU, there too.
#pragma once

#if defined(__CUDACC__)
#define ONNXTRAIN_ANYWHERE __host__ __device__
#else
#define ONNXTRAIN_ANYWHERE
#endif
