// Checksums of the files of saves and of what a manifest says. xxHash (Y. Collet,
// https://xxhash.com, seed 0): against bytes that changed behind our back, not against an
// adversary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/digest.h"

namespace poise::offload {

enum class Hash : std::uint8_t {
  xxh3,
  xxh64,  // of manifests, and of the files of saves before version 3 of the format
};

class Digest {
 public:
  explicit Digest(Hash hash = Hash::xxh3);
  void update(const void* data, std::size_t size);
  std::uint64_t value() const;

 private:
  Hash hash_;
  kernels::DigestState state_;
};

std::uint64_t xxh64_of(const std::string& bytes);
std::string hex(std::uint64_t digest);  // 16 digits

}  // namespace poise::offload
