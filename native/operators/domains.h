// The domains of this project's operators, and how a library hands them to the runtime.
#pragma once

#include "operators/runtime.h"

namespace onnxtrain {

// Sessions keep pointers to domains and operators, so both live as long as the process.
struct Domains {
  OrtCustomOpDomain* training = nullptr;  // ai.onnx.preview.training
  OrtCustomOpDomain* own = nullptr;       // onnxtrain
};

// What `RegisterCustomOps` does. `fill` adds the operators of the library, once for each runtime of the process.
OrtStatus* add_domains(OrtSessionOptions* options, const OrtApiBase* base,
                       void (*fill)(const OrtApi* api, const Domains& domains));

}  // namespace onnxtrain
