// Selects the instruction set once, at the first use.
#include <cstdlib>
#include <string>

#include "kernels/kernel_table.h"
#include "matmul/bfloat16_table.h"

namespace onnxtrain {

extern const KernelTable kKernels_baseline;
#if defined(ONNXTRAIN_HAS_AVX2)
extern const KernelTable kKernels_avx2;
#endif
#if defined(ONNXTRAIN_HAS_AVX512)
extern const KernelTable kKernels_avx512;
#endif
#if defined(ONNXTRAIN_HAS_AVX512_BF16)
extern const Bfloat16Kernels kBfloat16_avx512_bf16;
#endif

namespace {

struct Candidate {
  const char* name;
  const KernelTable* table;  // null if the compiler does not support the instruction set
  bool supported;            // by this CPU
};

struct Choice {
  const KernelTable* table = nullptr;
  std::string error;
};

Choice choose() {
#if defined(ONNXTRAIN_HAS_AVX2)
  const Candidate avx2 = {"avx2", &kKernels_avx2, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")};
#else
  const Candidate avx2 = {"avx2", nullptr, false};
#endif
#if defined(ONNXTRAIN_HAS_AVX512)
  const Candidate avx512 = {"avx512", &kKernels_avx512,
                            __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw")};
#else
  const Candidate avx512 = {"avx512", nullptr, false};
#endif
  const Candidate candidates[] = {avx512, avx2, {"baseline", &kKernels_baseline, true}};  // best first

  const char* wanted = std::getenv("ONNXTRAIN_INSTRUCTION_SET");
  const bool any = wanted == nullptr || *wanted == '\0';
  for (const Candidate& candidate : candidates) {
    if (!any && std::string(wanted) != candidate.name) continue;
    if (candidate.table != nullptr && candidate.supported) return {candidate.table, {}};
    if (any) continue;
    return {nullptr, "The environment variable ONNXTRAIN_INSTRUCTION_SET is " + std::string(wanted) +
                         (candidate.table == nullptr ? ", which this library was built without"
                                                     : ", which this CPU does not support") +
                         ": unset it or choose another."};
  }
  return {nullptr, "The environment variable ONNXTRAIN_INSTRUCTION_SET is '" + std::string(wanted) +
                       "': it must be baseline, avx2 or avx512, or unset."};
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

}  // namespace

const KernelTable* kernels() { return choice().table; }

const Bfloat16Kernels& bfloat16_kernels() {
#if defined(ONNXTRAIN_HAS_AVX512_BF16)
  static const bool by_processor = kernels() == &kKernels_avx512 && __builtin_cpu_supports("avx512bf16");
  if (by_processor) return kBfloat16_avx512_bf16;
#endif
  return *kernels()->bfloat16;
}

const char* kernels_error() { return choice().error.empty() ? nullptr : choice().error.c_str(); }

}  // namespace onnxtrain
