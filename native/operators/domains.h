// The operator domains of this project, and how a library registers them with the runtime.
#pragma once

#include "operators/runtime.h"

namespace onnxtrain {

// Sessions keep pointers to domains and operators, so both live as long as the process.
struct Domains {
  OrtCustomOpDomain* training = nullptr;  // ai.onnx.preview.training
  OrtCustomOpDomain* own = nullptr;       // onnxtrain
};

// Implements `RegisterCustomOps`. `fill` adds the library's operators, once per runtime in the process.
OrtStatus* add_domains(OrtSessionOptions* options, const OrtApiBase* base,
                       void (*fill)(const OrtApi* api, const Domains& domains));

}  // namespace onnxtrain
