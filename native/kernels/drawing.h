// A counter-based PRNG: values from (seed, count, index), in integer arithmetic modulo 2^32; ir/prng.py has the
// formula.
#pragma once

#include <cstddef>
#include <cstdint>

namespace onnxtrain {

// The keys k and k' of one call.
struct Draw {
  std::uint32_t key, other;
};

namespace {

inline constexpr std::uint32_t kFirst = 0x7feb352du, kSecond = 0x846ca68bu, kStride = 0x9e3779b1u, kApart = 0x85ebca6bu;

inline std::uint32_t mixed(std::uint32_t h) {
  h = (h ^ h >> 16) * kFirst;
  h = (h ^ h >> 15) * kSecond;
  return h ^ h >> 16;
}

// Initial keys from the two halves of the seed.
inline std::uint32_t start_of(std::uint64_t seed) {
  return mixed(mixed(static_cast<std::uint32_t>(seed)) ^ static_cast<std::uint32_t>(seed >> 32));
}

inline Draw draw_of(std::uint32_t start, std::int64_t count) {
  const std::uint32_t key = mixed(static_cast<std::uint32_t>(count) ^ start);
  return {key, mixed(key ^ kApart)};
}

// 32 random bits for element `index`; the upper ones are the better ones.
inline std::uint32_t drawn(const Draw& draw, std::size_t index) {
  std::uint32_t h = static_cast<std::uint32_t>(index) * kStride + draw.key;
  h = (h ^ h >> 16) * kFirst;
  return (h ^ h >> 15 ^ draw.other) * kSecond;
}

}  // namespace
}  // namespace onnxtrain
