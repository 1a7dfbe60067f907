// The processor's caches, read once, when the library is first asked for a kernel that depends on them.
#pragma once

#include <cstddef>

namespace onnxtrain {

// Bytes of a core's second cache: what the environment variable ONNXTRAIN_SECOND_CACHE says, else the system; 1 MiB
// where neither does. Between 128 KiB and 8 MiB: virtual machines claim the strangest.
std::size_t second_cache();

// So many 1024ths of it, in bytes.
inline std::size_t share_of_second_cache(std::size_t share) { return second_cache() / 1024 * share; }

}  // namespace onnxtrain
