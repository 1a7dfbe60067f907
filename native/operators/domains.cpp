#include "operators/domains.h"

#include <map>
#include <mutex>

#include "optimizers/rule.h"

namespace onnxtrain {
namespace {

void add_to(OrtSessionOptions* options, const OrtApi* api, void (*fill)(const OrtApi*, const Domains&)) {
  static std::mutex mutex;
  static auto* const known = new std::map<const OrtApi*, Domains>;  // never destroyed: sessions may outlive it
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known->find(api);
  if (found == known->end()) {
    Domains domains;
    require(api, ort::CreateCustomOpDomain::call(api, kTrainingDomain, &domains.training));
    require(api, ort::CreateCustomOpDomain::call(api, kOwnDomain, &domains.own));
    fill(api, domains);
    found = known->emplace(api, domains).first;
  }
  require(api, ort::AddCustomOpDomain::call(api, options, found->second.training));
  require(api, ort::AddCustomOpDomain::call(api, options, found->second.own));
}

}  // namespace

OrtStatus* add_domains(OrtSessionOptions* options, const OrtApiBase* base,
                       void (*fill)(const OrtApi* api, const Domains& domains)) {
  const OrtApi* api = base->GetApi(ort::kApiVersion);
  if (api != nullptr) {
    use_version(api, base->GetVersionString());
    return status_of(api, [&] { add_to(options, api, fill); });
  }
  // An older runtime than required: its first table still has CreateStatus.
  const OrtApi* first = base->GetApi(1);
  if (first == nullptr) return nullptr;
  return ort::CreateStatus::call(first, ort::kStatusFail,
                                 "onnxtrain's operators need ONNX Runtime 1.18 or newer: upgrade it.");
}

}  // namespace onnxtrain
