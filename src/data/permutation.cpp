// The swap-or-not network: a permutation of [0, n) for any n, read at any position, nothing stored.
#include <bit>

#include "poise/data.h"

namespace poise::data {
namespace {

constexpr std::int64_t kLargest = std::int64_t{1} << 62;

// The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// splitmix64: one stream of 64-bit words per start value.
struct Stream {
  std::uint64_t state;
  std::uint64_t next() { return mix(state += 0x9e3779b97f4a7c15ull); }
};

// A word scaled to [0, n): the high half of the product (Lemire 2019); its bias is below n / 2^64.
std::uint64_t scale(std::uint64_t word, std::uint64_t n) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::uint64_t>((static_cast<Wide>(word) * n) >> 64);
}

}  // namespace

Permutation::Permutation(std::int64_t n, std::uint64_t seed, std::uint64_t epoch) {
  if (n < 0 || n > kLargest) {
    fail("data", "a permutation of ", n, " elements; give 0 to 2^62");
  }
  n_ = static_cast<std::uint64_t>(n);
  // Two mixes: (seed, epoch) and (seed + 1, epoch - 1) must not meet.
  Stream words{mix(mix(seed + 0x9e3779b97f4a7c15ull) + epoch)};
  const int bits = n > 1 ? std::bit_width(n_ - 1) : 0;
  rounds_.resize(n > 1 ? static_cast<std::size_t>(24 + 4 * bits) : 0);
  for (Round& round : rounds_) {
    round.offset = scale(words.next(), n_);
    round.key = words.next();
  }
}

std::int64_t Permutation::operator()(std::int64_t position) const {
  if (position < 0 || static_cast<std::uint64_t>(position) >= n_) {
    fail("data", "position ", position, " of a permutation of ", n_, " elements; give 0 to ",
         static_cast<std::int64_t>(n_) - 1);
  }
  auto x = static_cast<std::uint64_t>(position);
  for (const Round& round : rounds_) {
    const std::uint64_t partner = round.offset >= x ? round.offset - x : round.offset + n_ - x;
    // Both of a pair look at the same one, so they swap or stay together.
    const std::uint64_t speaker = x > partner ? x : partner;
    if (mix(speaker ^ round.key) & 1) x = partner;
  }
  return static_cast<std::int64_t>(x);
}

}  // namespace poise::data
