// The lanes and how they are joined.
#include "offload/checksum.h"

#include <bit>
#include <cstring>

#include "poise/error.h"

namespace poise::offload {
namespace {

// Odd constants with well-mixed bits: the fractions of the golden ratio and of the root of 2.
constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u, kRoot = 0x6a09e667f3bcc909u;
constexpr std::int64_t kStripe = 32;

std::uint64_t added(std::uint64_t lane, std::uint64_t word) {
  return std::rotl(lane + word * kRoot, 31) * kGolden;
}

}  // namespace

std::uint64_t checksum(const void* data, std::int64_t bytes) {
  POISE_CHECK(bytes % kStripe == 0, bytes);
  const auto* at = static_cast<const char*>(data);
  const char* end = at + bytes;
  std::uint64_t lanes[4] = {kGolden, kRoot, ~kGolden, ~kRoot};
  for (; at < end; at += kStripe) {
    std::uint64_t words[4];
    std::memcpy(words, at, kStripe);
    for (int i = 0; i < 4; ++i) lanes[i] = added(lanes[i], words[i]);
  }
  std::uint64_t sum = static_cast<std::uint64_t>(bytes);
  for (const auto lane : lanes) sum = added(sum, lane ^ (lane >> 29));
  sum ^= sum >> 32;
  return sum == 0 ? 1 : sum;
}

}  // namespace poise::offload
