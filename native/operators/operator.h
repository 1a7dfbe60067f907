// The shared part of an operator's registration with the runtime.
#pragma once

#include <stdexcept>
#include <string>

#include "operators/runtime.h"

namespace onnxtrain {

// The runtime gives a kernel no access to its function table, so each instance carries it.
template <typename Node>
struct Kernel {
  const OrtApi* api;
  Node node;
};

// Error message of a failed construction, prefixed with the operator's name; OptimizerNode's messages have it already.
inline std::string named(const std::string& name, const std::string& message) {
  return message.compare(0, name.size() + 1, name + ":") == 0 ? message : name + ": " + message;
}

// Runs `work`; prefixes errors with the operator's name.
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

// Description of one operator for one runtime. Shape inference gets nothing else.
struct Operator : OrtCustomOp {
  const OrtApi* api = nullptr;
  int type = ort::kTypeUndefined;  // type of all tensors that the signature leaves open
  int weights = ort::kTypeUndefined;  // type of the second input, if different
};

// Fields common to all operators.
inline void describe(Operator& op, const OrtApi* api) {
  op.api = api;
  op.version = ort::kApiVersion;
  op.GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
  op.GetInputMemoryType = [](const OrtCustomOp*, std::size_t) { return ort::kMemoryDefault; };
  op.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  op.GetEndVersion = [](const OrtCustomOp*) { return 1; };
  // The runtime calls these four without a null check.
  op.GetMayInplace = op.GetAliasMap = [](int**, int**) { return std::size_t{0}; };
  op.ReleaseMayInplace = op.ReleaseAliasMap = [](int*, int*) {};
}

}  // namespace onnxtrain
