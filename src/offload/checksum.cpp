// The lanes and how they are joined. A lane adds 32 x 32 bit products, which every instruction set
// multiplies several at a time; keys differ from stripe to stripe and lanes are mixed every few
// stripes, so that order counts.
#include "offload/checksum.h"

#include <array>
#include <bit>
#include <cstring>

#include "poise/error.h"

namespace poise::offload {
namespace {

constexpr int kLanes = 8, kStripes = 16;  // lanes of 8 bytes; stripes between two mixes
constexpr std::int64_t kStripe = kLanes * 8;
constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15u;

// SplitMix64 (Steele et al. 2014).
constexpr std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

constexpr auto make_keys() {
  std::array<std::uint64_t, kLanes * kStripes> keys{};
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = mixed((i + 1) * kGolden);
  return keys;
}
constexpr auto kKeys = make_keys();

}  // namespace

std::uint64_t checksum(const void* data, std::int64_t bytes) {
  POISE_CHECK(bytes % kStripe == 0, bytes);
  const auto* at = static_cast<const char*>(data);
  const char* end = at + bytes;
  std::uint64_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = mixed(static_cast<std::uint64_t>(i));
  for (int stripe = 0; at < end; at += kStripe) {
    const std::uint64_t* keys = kKeys.data() + stripe * kLanes;
    std::uint64_t words[kLanes];
    std::memcpy(words, at, kStripe);
    for (int i = 0; i < kLanes; ++i) {
      const std::uint64_t keyed = words[i] ^ keys[i];
      lanes[i] += (keyed & 0xffffffffu) * (keyed >> 32) + std::rotl(words[i], 23);
    }
    if (++stripe < kStripes) continue;
    stripe = 0;
    for (auto& lane : lanes) lane = (lane ^ (lane >> 47)) * kGolden;
  }
  std::uint64_t sum = mixed(static_cast<std::uint64_t>(bytes));
  for (const auto lane : lanes) sum = mixed(sum ^ lane) + kGolden;
  return sum == 0 ? 1 : sum;
}

}  // namespace poise::offload
