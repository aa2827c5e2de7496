// The rounds of XXH64.
#include "offload/digest.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>

namespace poise::offload {
namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87u;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4Fu;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9u;
constexpr std::uint64_t kPrime4 = 0x85EBCA77C2B2AE63u;
constexpr std::uint64_t kPrime5 = 0x27D4EB2F165667C5u;
static_assert(std::endian::native == std::endian::little, "saves are little endian");

template <class Word>
Word word_at(const unsigned char* p) {
  Word word;
  std::memcpy(&word, p, sizeof word);
  return word;
}

std::uint64_t round_of(std::uint64_t lane, std::uint64_t input) {
  return std::rotl(lane + input * kPrime2, 31) * kPrime1;
}

void stripe(std::array<std::uint64_t, 4>& lanes, const unsigned char* p) {
  for (std::size_t i = 0; i < 4; ++i) {
    lanes[i] = round_of(lanes[i], word_at<std::uint64_t>(p + 8 * i));
  }
}

}  // namespace

void Digest::update(const void* data, std::size_t size) {
  const auto* p = static_cast<const unsigned char*>(data);
  total_ += size;
  if (in_rest_ > 0) {
    const auto taken = std::min(size, rest_.size() - in_rest_);
    std::memcpy(rest_.data() + in_rest_, p, taken);
    in_rest_ += taken;
    p += taken;
    size -= taken;
    if (in_rest_ < rest_.size()) return;
    stripe(lanes_, rest_.data());
    in_rest_ = 0;
  }
  auto lanes = lanes_;  // a copy, so that the loop keeps them in registers
  for (; size >= 32; p += 32, size -= 32) stripe(lanes, p);
  lanes_ = lanes;
  if (size > 0) std::memcpy(rest_.data(), p, size);
  in_rest_ = size;
}

std::uint64_t Digest::value() const {
  std::uint64_t hash = kPrime5;
  if (total_ >= 32) {
    hash = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) +
           std::rotl(lanes_[3], 18);
    for (const auto lane : lanes_) hash = (hash ^ round_of(0, lane)) * kPrime1 + kPrime4;
  }
  hash += total_;
  const unsigned char* p = rest_.data();
  auto left = in_rest_;
  for (; left >= 8; p += 8, left -= 8) {
    hash = std::rotl(hash ^ round_of(0, word_at<std::uint64_t>(p)), 27) * kPrime1 + kPrime4;
  }
  if (left >= 4) {
    hash = std::rotl(hash ^ (word_at<std::uint32_t>(p) * kPrime1), 23) * kPrime2 + kPrime3;
    p += 4;
    left -= 4;
  }
  for (; left > 0; ++p, --left) hash = std::rotl(hash ^ (*p * kPrime5), 11) * kPrime1;
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

std::uint64_t digest_of(const std::string& bytes) {
  Digest digest;
  digest.update(bytes.data(), bytes.size());
  return digest.value();
}

std::string hex(std::uint64_t digest) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(digest));
  return text;
}

}  // namespace poise::offload
