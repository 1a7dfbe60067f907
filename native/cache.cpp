#include "cache.h"

#if !defined(_WIN32)
#include <unistd.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

namespace onnxtrain {
namespace {

constexpr std::size_t kDefault = std::size_t{1} << 20, kLeast = std::size_t{1} << 17, kMost = std::size_t{1} << 23;

// As reported by the C library; 0 if unknown.
std::size_t from_library() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
  const long bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return bytes > 0 ? static_cast<std::size_t>(bytes) : 0;
#else
  return 0;
#endif
}

// As reported by Linux, e.g. "1024K"; 0 if unknown.
std::size_t from_system() {
  for (const char* index : {"1", "2", "3"}) {
    const std::string folder = std::string("/sys/devices/system/cpu/cpu0/cache/index").append(index);
    int level = 0;
    if (!(std::ifstream(folder + "/level") >> level) || level != 2) continue;
    std::size_t size = 0;
    char unit = ' ';
    std::ifstream text(folder + "/size");
    text >> size >> unit;
    return unit == 'K' ? size * 1024 : unit == 'M' ? size * 1024 * 1024 : 0;
  }
  return 0;
}

std::size_t found() {
  const char* wanted = std::getenv("ONNXTRAIN_SECOND_CACHE");
  std::size_t bytes = wanted == nullptr ? 0 : std::strtoull(wanted, nullptr, 10);
  if (bytes == 0) bytes = from_library();
  if (bytes == 0) bytes = from_system();
  if (bytes == 0) bytes = kDefault;
  return std::clamp(bytes, kLeast, kMost);
}

}  // namespace

std::size_t second_cache() {
  static const std::size_t bytes = found();
  return bytes;
}

}  // namespace onnxtrain
