// Entry points of the CUDA library.
#include <string>

#include "cuda/node.h"
#include "exported.h"
#include "operators/domains.h"
#include "optimizers/operator.h"

ONNXTRAIN_API OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  return onnxtrain::add_domains(options, base, [](const OrtApi* api, const onnxtrain::Domains& domains) {
    onnxtrain::add_optimizers<onnxtrain::cuda::OptimizerNode>(api, domains, onnxtrain::cuda::optimizers());
  });
}

// Names of the optimizers in this library, separated by spaces; the others run as standard operators.
ONNXTRAIN_API const char* onnxtrain_cuda_operators() {
  static const auto* const names = [] {
    auto* const text = new std::string;
    for (const auto& optimizer : onnxtrain::cuda::optimizers()) {
      text->append(text->empty() ? "" : " ").append(optimizer.description.name);
    }
    return text;
  }();
  return names->c_str();
}
