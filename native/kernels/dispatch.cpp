// Selects the instruction set once, at the first use.
#include <cstdlib>
#include <string>

#if defined(ONNXTRAIN_HAS_AMX_BF16) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "attention/bfloat16_table.h"
#include "convolution/bfloat16_table.h"
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
extern const Bfloat16Convolution kBfloat16Convolution_avx512_bf16;
extern const Bfloat16Attention kBfloat16Attention_avx512_bf16;
#endif
#if defined(ONNXTRAIN_HAS_AMX_BF16)
extern const Bfloat16Kernels kBfloat16_amx_bf16;
extern const Bfloat16Convolution kBfloat16Convolution_amx_bf16;
extern const Bfloat16Attention kBfloat16Attention_amx_bf16;
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
  bool tiles = false;  // true if bfloat16 products use AMX
};

// Asks the CPU for AMX, and the system to save its registers, which Linux does on request only.
bool has_tiles() {
#if defined(ONNXTRAIN_HAS_AMX_BF16) && defined(__linux__)
  constexpr unsigned kTile = 1u << 24, kBfloat16 = 1u << 22;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kTile) == 0 || (d & kBfloat16) == 0) return false;
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

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
#if defined(ONNXTRAIN_HAS_AMX_BF16)
  const Candidate amx = {"amx", avx512.table, avx512.supported && has_tiles()};  // AVX-512 with AMX for bfloat16
#else
  const Candidate amx = {"amx", nullptr, false};
#endif
  const Candidate candidates[] = {amx, avx512, avx2, {"baseline", &kKernels_baseline, true}};  // best first

  const char* wanted = std::getenv("ONNXTRAIN_INSTRUCTION_SET");
  const bool any = wanted == nullptr || *wanted == '\0';
  for (const Candidate& candidate : candidates) {
    if (!any && std::string(wanted) != candidate.name) continue;
    if (candidate.table != nullptr && candidate.supported) return {candidate.table, {}, &candidate == candidates};
    if (any) continue;
    return {nullptr, "The environment variable ONNXTRAIN_INSTRUCTION_SET is " + std::string(wanted) +
                         (candidate.table == nullptr ? ", which this library was built without"
                                                     : ", which this CPU does not support") +
                         ": unset it or choose another."};
  }
  return {nullptr, "The environment variable ONNXTRAIN_INSTRUCTION_SET is '" + std::string(wanted) +
                       "': it must be baseline, avx2, avx512 or amx, or unset."};
}

const Choice& choice() {
  static const Choice chosen = choose();
  return chosen;
}

#if defined(ONNXTRAIN_HAS_AVX512_BF16)
// Whether AVX-512 is in use, and the CPU has its extension AVX512-BF16.
bool multiplies_pairs() {
  static const bool has = choice().table == &kKernels_avx512 && __builtin_cpu_supports("avx512bf16");
  return has;
}
#endif

}  // namespace

const KernelTable* kernels() { return choice().table; }

const Bfloat16Kernels& bfloat16_kernels() {
#if defined(ONNXTRAIN_HAS_AMX_BF16)
  if (choice().tiles) return kBfloat16_amx_bf16;
#endif
#if defined(ONNXTRAIN_HAS_AVX512_BF16)
  if (multiplies_pairs()) return kBfloat16_avx512_bf16;
#endif
  return *kernels()->bfloat16;
}

const Bfloat16Convolution& bfloat16_convolution() {
#if defined(ONNXTRAIN_HAS_AMX_BF16)
  if (choice().tiles) return kBfloat16Convolution_amx_bf16;
#endif
#if defined(ONNXTRAIN_HAS_AVX512_BF16)
  if (multiplies_pairs()) return kBfloat16Convolution_avx512_bf16;
#endif
  return *kernels()->bfloat16_convolution;
}

const Bfloat16Attention* bfloat16_attention() {
#if defined(ONNXTRAIN_HAS_AMX_BF16)
  if (choice().tiles) return &kBfloat16Attention_amx_bf16;
#endif
#if defined(ONNXTRAIN_HAS_AVX512_BF16)
  if (multiplies_pairs()) return &kBfloat16Attention_avx512_bf16;
#endif
  return nullptr;
}

const char* kernels_error() { return choice().error.empty() ? nullptr : choice().error.c_str(); }

}  // namespace onnxtrain
