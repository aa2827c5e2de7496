// XXH64, the 64-bit xxHash (Y. Collet, https://xxhash.com, seed 0): as fast as memory, and every
// flipped bit shows. Against bytes that changed behind our back, not against an adversary: the
// checksum of the files of saves and of the blocks of the file store.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace poise::offload {

class Digest {
 public:
  void update(const void* data, std::size_t size);
  std::uint64_t value() const;

 private:
  std::array<std::uint64_t, 4> lanes_ = {0x60EA27EEADC0B5D6u, 0xC2B2AE3D27D4EB4Fu, 0,
                                         0x61C8864E7A143579u};
  std::array<unsigned char, 32> rest_{};
  std::size_t in_rest_ = 0;
  std::uint64_t total_ = 0;
};

std::uint64_t digest_of(const std::string& bytes);
std::string hex(std::uint64_t digest);  // 16 digits

}  // namespace poise::offload
