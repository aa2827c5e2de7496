// The checksums against published values of xxHash, and each other's for every instruction set.
#include "offload/digest.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "kernels/isa.h"

namespace poise::offload {
namespace {

std::string random_bytes(std::size_t size) {
  std::mt19937 random(static_cast<unsigned>(size));
  std::string bytes(size, '\0');
  for (auto& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

std::uint64_t xxh3_of(const std::string& bytes) {
  return kernels::digest(bytes.data(), bytes.size());
}

// Piece by piece, none longer than `longest`.
std::uint64_t in_pieces(Hash hash, const std::string& bytes, std::size_t longest,
                        std::mt19937& random) {
  Digest digest(hash);
  for (std::size_t at = 0; at < bytes.size();) {
    const auto size = std::min<std::size_t>(random() % (longest + 1), bytes.size() - at);
    digest.update(bytes.data() + at, size);
    at += size;
  }
  return digest.value();
}

// A byte sequence of the xxHash project's own checks, with the values it gives for them.
std::string sanity_bytes(std::size_t size) {
  constexpr std::uint64_t kPrime32 = 2654435761u, kPrime64 = 11400714785074694797u;
  std::string bytes;
  for (std::uint64_t generator = kPrime32; bytes.size() < size; generator *= kPrime64) {
    bytes += static_cast<char>(generator >> 56);
  }
  return bytes;
}

TEST(Digest, HasTheValuesOfXxh64) {
  EXPECT_EQ(hex(xxh64_of("")), "ef46db3751d8e999");
  EXPECT_EQ(hex(xxh64_of("a")), "d24ec4f1a98c6e5b");
  EXPECT_EQ(hex(xxh64_of("abc")), "44bc2cf5ad770999");
  EXPECT_EQ(hex(xxh64_of("xxhash")), "32dd38952c4bc720");
  EXPECT_EQ(hex(xxh64_of("Nobody inspects the spammish repetition")), "fbcea83c8a378bf1");
}

TEST(Digest, HasTheValuesOfXxh3OnEveryInstructionSet) {
  for (const auto isa : kernels::available_isas()) {
    const kernels::IsaOverride with(isa);
    SCOPED_TRACE(kernels::name_of(isa));
    EXPECT_EQ(hex(xxh3_of("")), "2d06800538d394c2");
    EXPECT_EQ(hex(xxh3_of(sanity_bytes(1))), "c44bdff4074eecdb");
    EXPECT_EQ(hex(xxh3_of(sanity_bytes(6))), "27b56a84cd2d7325");
    EXPECT_EQ(hex(xxh3_of(sanity_bytes(12))), "a713daf0dfbb77e7");
    EXPECT_EQ(hex(xxh3_of(sanity_bytes(24))), "a3fe70bf9d3510eb");
    EXPECT_EQ(hex(xxh3_of(sanity_bytes(48))), "397da259ecba1f11");
    EXPECT_EQ(hex(xxh3_of(sanity_bytes(80))), "bcdefbbb2c47c90a");
    EXPECT_EQ(hex(xxh3_of(sanity_bytes(195))), "cd94217ee362ec3a");
    EXPECT_EQ(hex(xxh3_of(sanity_bytes(403))), "cdeb804d65c6dea4");
    EXPECT_EQ(hex(xxh3_of(sanity_bytes(512))), "617e49599013cb6b");
    EXPECT_EQ(hex(xxh3_of(sanity_bytes(2048))), "dd59e2c3a5f038e0");
    EXPECT_EQ(hex(xxh3_of(sanity_bytes(2240))), "6e73a90539cf2948");
    EXPECT_EQ(hex(xxh3_of(sanity_bytes(2367))), "cb37aeb9e5d361ed");
  }
}

TEST(Digest, DoesNotDependOnPieces) {
  std::mt19937 random(1);
  for (const auto isa : kernels::available_isas()) {
    const kernels::IsaOverride with(isa);
    for (const std::size_t longest : {70, 3000}) {
      const auto bytes = random_bytes(10000);
      for (int round = 0; round < 20; ++round) {
        EXPECT_EQ(in_pieces(Hash::xxh64, bytes, longest, random), xxh64_of(bytes));
        EXPECT_EQ(in_pieces(Hash::xxh3, bytes, longest, random), xxh3_of(bytes));
      }
    }
  }
}

TEST(Digest, ChangesWithEveryBit) {
  for (const std::size_t size : {5, 67, 300, 1100}) {
    const auto bytes = random_bytes(size);
    for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
      auto other = bytes;
      other[bit / 8] = static_cast<char>(other[bit / 8] ^ (1 << bit % 8));
      EXPECT_NE(xxh64_of(other), xxh64_of(bytes));
      EXPECT_NE(xxh3_of(other), xxh3_of(bytes));
    }
  }
}

TEST(Digest, TellsPartsThatChangedPlaces) {
  const auto bytes = random_bytes(4096);
  for (const std::size_t size : {4, 8, 32, 64, 1024}) {  // of a lane to many stripes
    const auto swapped = bytes.substr(size, size) + bytes.substr(0, size) + bytes.substr(2 * size);
    EXPECT_NE(xxh64_of(swapped), xxh64_of(bytes)) << size;
    EXPECT_NE(xxh3_of(swapped), xxh3_of(bytes)) << size;
  }
}

}  // namespace
}  // namespace poise::offload
