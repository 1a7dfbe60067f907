// Cache sizes of the CPU, read once at the first use.
#pragma once

#include <cstddef>

namespace onnxtrain {

// Size of a core's L2 cache in bytes: from the environment variable ONNXTRAIN_SECOND_CACHE, else from the system, else
// 1 MiB. Clamped to [128 KiB, 8 MiB], since virtual machines report implausible sizes.
std::size_t second_cache();

// That many 1024ths of it, in bytes.
inline std::size_t share_of_second_cache(std::size_t share) { return second_cache() / 1024 * share; }

}  // namespace onnxtrain
