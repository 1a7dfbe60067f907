// How an operator is described to the runtime, as far as all of them are alike.
#pragma once

#include <stdexcept>
#include <string>

#include "operators/runtime.h"

namespace onnxtrain {

// The runtime gives a kernel no way back to its table of functions, so an instance carries it.
template <typename Node>
struct Kernel {
  const OrtApi* api;
  Node node;
};

// The message of a failed construction names the operator; OptimizerNode's own messages do so already.
inline std::string named(const std::string& name, const std::string& message) {
  return message.compare(0, name.size() + 1, name + ":") == 0 ? message : name + ": " + message;
}

// Runs `work`; a refusal gets the operator's name in front.
template <typename Work>
OrtStatus* named_status_of(const OrtApi* api, const std::string& name, Work work) {
  return status_of(api, [&] {
    try {
      work();
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(named(name, error.what()));
    }
  });
}

// The description of one operator for one runtime. Shape inference is handed nothing but this.
struct Operator : OrtCustomOp {
  const OrtApi* api = nullptr;
  int type = ort::kTypeUndefined;  // that of all tensors whose type the signature leaves open
  int weights = ort::kTypeUndefined;  // type of the second input, where it is another
};

// What all operators say alike.
inline void describe(Operator& op, const OrtApi* api) {
  op.api = api;
  op.version = ort::kApiVersion;
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  op.GetInputMemoryType = [](const OrtCustomOp*, std::size_t) { return ort::kMemoryDefault; };
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
  // The runtime calls these four without looking whether they are there.
  op.GetMayInplace = op.GetAliasMap = [](int**, int**) { return std::size_t{0}; };
  op.ReleaseMayInplace = op.ReleaseAliasMap = [](int*, int*) {};
}

}  // namespace onnxtrain
