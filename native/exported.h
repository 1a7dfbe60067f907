// Marks functions that the library exports; everything else is hidden.
#pragma once

#if defined(_WIN32)
#define ONNXTRAIN_API extern "C" __declspec(dllexport)
#else
#define ONNXTRAIN_API extern "C" __attribute__((visibility("default")))
#endif
